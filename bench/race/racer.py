"""A process that runs the loads of one tree, seen from the race."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from dmq.testing.processes import read_line

__all__ = ["Racer", "Task", "Tree"]

ROOT: Final = Path(__file__).resolve().parents[2]
_ANSWER_SECONDS_MAX: Final = 1800.0


class Tree(NamedTuple):
    """A checkout with an environment of its own, and whether its extension is left alone."""

    name: str
    python: str
    is_pure: bool = False

    def environ(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DMQ_")}
        return {**kept, "DMQ_PURE": "1"} if self.is_pure else kept


class Task(NamedTuple):
    """A load by its name in `bench.race.load`, and what it is given."""

    name: str
    options: dict[str, Any]

    def given(self, **more: Any) -> Task:
        return Task(self.name, {**self.options, **more})


class Racer:
    """The process; with `cpus`, it and all that it starts run there only.

    Raises:
        RuntimeError: it did not start, or a task failed.
    """

    def __init__(self, tree: Tree, folder: Path, cpus: Collection[int] = (), is_floor: bool = False) -> None:
        self._name = tree.name
        # From our root, so that `bench` is ours; `dmq` is that of the interpreter's environment.
        self._process = subprocess.Popen(
            [tree.python, "-m", "bench.race.load", str(folder), *(["floor"] if is_floor else [])],
            cwd=ROOT,
            env=tree.environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
        )
        try:
            self.version = str(self._hear()["dmq"])
        except BaseException:
            self.close()
            raise

    def run(self, task: Task) -> dict[str, Any]:
        """What the load took."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"task": task.name, **task.options}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._hear()
        if "error" in answer:
            raise RuntimeError(f"{self._name}, {task.name}: {answer['error']}")
        return answer

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + _ANSWER_SECONDS_MAX)
        if line is None:
            raise RuntimeError(f"the loads of {self._name} ended; what they said stands above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let it end its broker and itself."""
        try:
            self._process.communicate(timeout=30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
