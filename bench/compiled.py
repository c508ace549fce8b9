"""What the compiled loops save: `python -m bench.compiled [--json FILE]`, in microseconds of CPU a message.

Each compiled function stands beside its plain twin, turn by turn in one process, over the same bytes: distinct bodies
of 200 bytes, each message with a key and a tag.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import _dmq_speed as speed
import numpy as np

from bench.records import make_messages
from dmq.records import batch_rules, encode_batch
from dmq.records.check import are_right_plain

ROUNDS = 15
COUNTS = (1, 8, 500, 2000)


class Twins(NamedTuple):
    """Two ways to do the same."""

    plain: Callable[[], object]
    compiled: Callable[[], object]


def twins(count: int) -> dict[str, Twins]:
    encoded = encode_batch("orders", "shop", make_messages(count, "random"), sent_at_ms=1)
    data, lengths = bytes(encoded.data), encoded.lengths
    sizes = lengths if count >= 16 else tuple(lengths.tolist())
    rules, with_crc = batch_rules("orders"), batch_rules("orders", check_crc=True)
    return {
        "check": Twins(lambda: are_right_plain(data, sizes, rules), lambda: speed.are_right(data, sizes, rules)),
        "check with CRC": Twins(
            lambda: are_right_plain(data, sizes, with_crc), lambda: speed.are_right(data, sizes, with_crc)
        ),
    }


def measure(count: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved rounds, in µs a message."""
    repeats = max(1, 4000 // count)
    found: dict[str, dict[str, float]] = {}
    for name, ways in twins(count).items():
        taken: dict[str, list[float]] = {"plain": [], "compiled": []}
        for turn in range(ROUNDS + 1):
            for way, run in zip(taken, ways, strict=True):
                before = time.thread_time()
                for _ in range(repeats):
                    run()
                if turn:  # the first turn warms up
                    taken[way].append((time.thread_time() - before) / repeats / count * 1e6)
        found[name] = {way: statistics.median(times) for way, times in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    figures = {count: measure(count) for count in COUNTS}
    print("µs of CPU a message, plain > compiled")
    print(f"{'messages a batch':24}" + "".join(f"{count:>18}" for count in COUNTS))
    for name in figures[COUNTS[0]]:
        cells = [f"{figures[count][name]['plain']:.3f} > {figures[count][name]['compiled']:.3f}" for count in COUNTS]
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))
    if options.json:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.platform()}
        options.json.write_text(json.dumps({**machine, "rounds": ROUNDS, "us_per_message": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
