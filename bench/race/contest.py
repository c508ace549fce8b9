"""One row, measured: all trees and the floor in the same rounds."""

from __future__ import annotations

import contextlib
import os
import pickle
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from bench.race.bar import Outcome
from bench.race.racer import Racer, Task, Tree
from bench.race.rows import Answer, Line, Row, percentile_of, rate_of
from dmq.testing.benchmark.baselines import Echo
from dmq.testing.benchmark.bodies import BODY_NAMES, made_bodies

__all__ = ["Contest", "Result"]

_SHORT_COUNTS = ("count", "seconds")


class Result(NamedTuple):
    """What a tree did in every round: the row twice, and what stands beside it."""

    own: list[Answer]
    again: list[Answer]
    base: list[Answer]

    def outcome(self, line: Line) -> Outcome:
        """The ratios of a line."""
        first = [line.ratio(own, base) for own, base in zip(self.own, self.base, strict=True)]
        if not self.again:
            return Outcome(first, ())
        second = [line.ratio(own, base) for own, base in zip(self.again, self.base, strict=True)]
        pairs = list(zip(first, second, strict=True))
        return Outcome([(one + other) / 2 for one, other in pairs], [one / other for one, other in pairs if other])

    def by_cpu(self) -> float | None:
        """The CPU time a message of what stands beside it, as a share of ours; None if it is not known."""
        if self.base is self.own or not all("client" in answer for answer in self.base):
            return None
        shares = [_cpu(base) / _cpu(own) for own, base in zip(self.own, self.base, strict=True) if base is not own]
        return statistics.median(shares) if shares else None

    def to(self, other: Result) -> dict[str, float]:
        """This tree's figures as shares of another's in the same rounds; medians."""
        theirs = other.figures()
        return {
            name: statistics.median(mine / beside for mine, beside in zip(values, theirs[name], strict=True) if beside)
            for name, values in self.figures().items()
            if name in theirs and any(theirs[name])
        }

    def figures(self) -> dict[str, list[float]]:
        """Rates, CPU and percentiles of every round, both times."""
        found: dict[str, list[float]] = {}
        for answer in (*self.own, *self.again):
            for name, value in _figures(answer).items():
                found.setdefault(name, []).append(value)
        return found

    def base_figures(self) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for answer in self.base:
            for name, value in _figures(answer).items():
                found.setdefault(name, []).append(value)
        return found


def _cpu(answer: Answer) -> float:
    return float((answer["client"] + answer["broker"]) / answer["count"])


def _figures(answer: Answer) -> dict[str, float]:
    found: dict[str, float] = {}
    if "seconds" in answer and "samples" not in answer:
        found["per_second"] = rate_of(answer)
    for side in ("client", "broker"):
        if side in answer:
            found[f"{side}_us"] = answer[side] / answer["count"] * 1e6
    if "batch" in answer:
        found["batch"] = answer["batch"]
    for name, samples in answer.get("samples", {}).items():
        for label, share in (("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
            found[f"{name}_{label}_us"] = percentile_of(samples, share)
    for part, size in answer.get("parts", {}).items():
        found[f"{part}_bytes"] = size / answer["count"]
    return found


class Contest:
    """The trees, the first of which has the floor; bodies are written when first needed."""

    def __init__(self, trees: list[Tree], folder: Path, rounds: int, scale: float, seed: int) -> None:
        self._trees = trees
        self._folder = folder
        self._rounds = rounds
        self._scale = scale
        self._seed = seed

    def run(self, row: Row, backlog_gb: float = 0.0) -> dict[str, Result]:
        """Measure one row; results by the names of trees."""
        cpus = sorted(os.sched_getaffinity(0))[-row.cpus :] if row.cpus else []
        results = {tree.name: Result([], [], []) for tree in self._trees}
        rounds = row.rounds or self._rounds
        with contextlib.ExitStack() as stack:
            echo_port = self._echo_port(row, cpus, stack)
            own, floor, beside = (self._sized(task, echo_port) for task in (row.own, row.floor, row.beside))
            racers = {tree.name: stack.enter_context(Racer(tree, self._folder, cpus)) for tree in self._trees}
            ground = stack.enter_context(Racer(self._trees[0], self._folder, cpus, is_floor=True)) if floor else None
            assert own is not None
            for racer in racers.values() if backlog_gb else ():
                racer.run(Task("backlog", {"bodies": self._bodies("random-1024", 10_000), "gigabytes": backlog_gb}))
            for number in range(rounds + (row.rounds is None)):
                is_warm = number > 0 or row.rounds is not None
                is_twice = row.rounds is None
                order = list(results) if number % 2 else list(reversed(results))
                below = ground.run(floor) if ground is not None and floor is not None else None
                for name in order:
                    first = racers[name].run(own)
                    base = racers[name].run(beside) if beside is not None else below or first
                    again = racers[name].run(own) if is_twice else None
                    if is_warm:
                        results[name].own.append(first)
                        results[name].base.append(base)
                        if again is not None:
                            results[name].again.append(again)
        return results

    @staticmethod
    def _echo_port(row: Row, cpus: list[int], stack: contextlib.ExitStack) -> int:
        if row.own.name != "lone":
            return 0
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus or before)
        try:
            return stack.enter_context(Echo.running()).port
        finally:
            os.sched_setaffinity(0, before)

    def _sized(self, task: Task | None, echo_port: int) -> Task | None:
        """As short as asked for, with its bodies in a file."""
        if task is None:
            return None
        options: dict[str, Any] = dict(task.options)
        for name in _SHORT_COUNTS:
            if name in options:
                options[name] = max(1, round(options[name] * self._scale))
        if "queues" in options and self._scale < 1:
            options["queues"] = max(1, round(options["queues"] * self._scale))
        if "bodies" in options:
            options["bodies"] = self._bodies(options["bodies"], options["count"])
        if task.name == "lone":
            options["port"] = echo_port
        return Task(task.name, options)

    def _bodies(self, kind: str, count: int) -> str:
        """The name of a file with so many bodies."""
        path = self._folder / f"{kind}-{count}"
        if not path.exists():
            wanted, size = kind.split("-")
            (body,) = (name for name in BODY_NAMES if name == wanted)
            path.write_bytes(pickle.dumps(made_bodies(body, count, int(size), self._seed)))
        return path.name
