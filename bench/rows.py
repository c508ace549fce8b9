"""What the rows of `bench.store` share: what a row is, the folder and the sizes, and two measurements side by side."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.large import Sizes, filled
from bench.loads import Spread
from dmq.model import Durability

__all__ = ["SEED", "STORED", "Bench", "Pair", "Row", "paired", "timed", "verdict"]

SEED = 7
STORED = Durability.STORED


class Row(NamedTuple):
    """One line of the result."""

    what: str
    bar: str
    reached: str
    verdict: str
    figures: dict[str, Any]


def verdict(median_holds: bool, spread_holds: bool | None = None) -> str:
    """`ok` if the median holds the bar, `spread` if only the better end of the spread does, `MISS` otherwise."""
    if median_holds:
        return "ok"
    return "spread" if spread_holds else "MISS"


class Bench:
    """What all rows share: the folder, the sizes, how often."""

    def __init__(self, folder: Path, sizes: Sizes, rounds: int) -> None:
        self.folder = folder
        self.sizes = sizes
        self.rounds = rounds
        self._large: Path | None = None

    def empty(self, name: str) -> Path:
        path = self.folder / name
        shutil.rmtree(path, ignore_errors=True)
        return path

    def large(self) -> Path:
        """The store of 10 GB, made when first asked for."""
        if self._large is None:
            self._large = filled(self.folder / "large", self.sizes.large_bytes, self.sizes, SEED)
        return self._large


class Pair(NamedTuple):
    wall: Spread
    cpu: Spread


def paired(rounds: int, base: Callable[[], tuple[float, float]], other: Callable[[], tuple[float, float]]) -> Pair:
    """How fast `other` is, as a share of `base`: by wall and by CPU time, over interleaved pairs."""
    walls, cpus = [], []
    for turn in range(rounds + 1):
        # The second one finds a busier disk, so they take turns at that.
        pair = (base(), other()) if turn % 2 else (other(), base())[::-1]
        if turn:
            walls.append(pair[0][0] / pair[1][0])
            cpus.append(pair[0][1] / pair[1][1])
    return Pair(Spread(walls), Spread(cpus))


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    began, cpu = time.perf_counter(), time.thread_time()
    run()
    return time.perf_counter() - began, time.thread_time() - cpu
