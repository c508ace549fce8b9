"""Servers that start at once: each is forked from a process that has loaded everything, and is a process of its own.

Loading takes a broker longer than all else it does at its start, and a test that kills it fifty times would do little
but wait. `python -m tests.fault.broker.nursery` reads the arguments of `dmq` from stdin, a line of JSON for each
process, and writes its pid, what it says, and its exit code to stdout.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dmq.testing.processes import free_port, read_line
from tests.clock_offset import VARIABLE, install_clock_offset

__all__ = ["ForkedBroker", "ForkedProcess", "code_of"]

PATIENCE_S = 60.0
LOADED = ("dmq.cli.process.broker", "dmq.broker.server", "dmq.broker.wire.commands", "uvloop", "pydantic.type_adapter")


def code_of(tree: Path | None) -> dict[str, str]:
    """The variables with which a process runs the code of another checkout; none for this one."""
    return {} if tree is None else {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}


class ForkedProcess:
    """One server on a port of its own; killed and started again as often as one likes.

    Parameters:
        arguments: of `dmq`.
        log: what it logs goes there; to our stderr if left out.
        clock: a file by which its wall clock can be set; see `tests.clock_offset`.
        tree: another checkout, whose code it runs.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        port: int,
        log: Path | None = None,
        *,
        clock: Path | None = None,
        tree: Path | None = None,
    ) -> None:
        self._arguments = [*arguments]
        self._clock = {} if clock is None else {VARIABLE: str(clock)}
        self._tree = tree
        self.port = port
        self._log = log
        self.url = f"dmq://127.0.0.1:{self.port}"
        self.pid = 0
        self._nursery: subprocess.Popen[bytes] | None = None

    def load(self) -> None:
        """Begin to load what every start needs."""
        if self._nursery is None:
            with contextlib.ExitStack() as opened:
                log = None if self._log is None else opened.enter_context(self._log.open("ab"))
                self._nursery = subprocess.Popen(
                    [sys.executable, "-m", "tests.fault.broker.nursery"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **self._clock, **code_of(self._tree)},
                    cwd=self._tree,
                )

    def move(self, tree: Path | None) -> None:
        """From the next start on, run the code of another checkout; None is this one."""
        assert not self.pid
        if tree != self._tree:
            if self._nursery is not None:
                self._nursery.communicate(timeout=PATIENCE_S)
            self._nursery, self._tree = None, tree

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.load()
        assert self._nursery is not None
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(json.dumps(self._arguments).encode() + b"\n")
        self._nursery.stdin.flush()
        self.pid = int(self._line())
        assert "listening" in self._line()

    def _line(self) -> str:
        assert self._nursery is not None
        assert self._nursery.stdout is not None
        line = read_line(self._nursery.stdout, time.monotonic() + PATIENCE_S)
        assert line is not None, "the broker did not start, or did not end"
        return line

    def kill(self) -> None:
        """End it with kill -9."""
        assert self._end(signal.SIGKILL) == -signal.SIGKILL

    def stop(self) -> int:
        """Ask it to stop, and wait; its exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        os.kill(self.pid, number)
        return self.reap()

    def reap(self) -> int:
        """Somebody has ended it: its exit code."""
        self.pid = 0
        return int(self._line())

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._nursery is None:
            return
        try:
            if self.pid:
                os.kill(self.pid, signal.SIGCONT)
                self.stop()
        finally:
            self._nursery.communicate(timeout=PATIENCE_S)


class ForkedBroker(ForkedProcess):
    """One broker on a directory of its own.

    Parameters:
        settings: of the broker, each as "broker.grace_seconds=1".
    """

    def __init__(self, folder: Path, settings: Sequence[str] = ()) -> None:
        self.folder = folder
        port = free_port()
        ports = ("--port", str(port), "--metrics-port", "0", "--telnet-port", "none")
        pairs = [argument for setting in settings for argument in ("--set", setting)]
        super().__init__(["broker", "--data", str(folder), *ports, "--log-level", "error", *pairs], port)


def main() -> None:
    for module in LOADED:
        with contextlib.suppress(ImportError):  # not all of them need be installed
            importlib.import_module(module)
    from dmq import cli

    install_clock_offset()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            print(os.getpid(), flush=True)
            try:
                cli.main(json.loads(line))
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(int(end.code or 0))
        print(_wait(pid), flush=True)


def _wait(pid: int) -> int:
    """Wait for a broker's end; its exit code. It ends with the process that asked for it, also if that was killed."""
    asker = select.poll()
    asker.register(sys.stdin, select.POLLHUP)
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if any(event & select.POLLHUP for _, event in asker.poll(5)):
            os.kill(pid, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main()
