"""A process of DMQ that another one starts, and starts again when it dies.

What always holds: it listens on the port that it had before. One that cannot go on (its disk is damaged, say) ends none
of the others: it is tried again, after longer and longer. On Linux it ends with the process that started it, however
that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import typer

from dmq.errors import DMQError

__all__ = ["ChildProcess", "pause_after", "stop_children", "stop_event", "watch_children"]

_READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 15.0
_LATER_SECONDS: Final = 3.0  # for those that end after the others: nobody needs them any more
# A process that ends by itself so soon after its start, so often in a row, will not do better at once.
_SOON_SECONDS: Final = 10.0
_DEATHS_MAX: Final = 5
_AGAIN_SECONDS: Final = 1.0
_AGAIN_MAX_SECONDS: Final = 30.0
_LINE: Final = re.compile(r"dmq://(\S+):(\d+)")
_PR_SET_PDEATHSIG: Final = 1
_SERVICE_NAMES: Final = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def pause_after(ends: int) -> float:
    """Seconds until a process is started again that ended by itself, so often in a row as soon as it was started."""
    doubled = min(max(0, ends - _DEATHS_MAX), 10)
    return min(_AGAIN_SECONDS * (1 << doubled), _AGAIN_MAX_SECONDS)


class ChildProcess:
    """A process that is started again when it dies.

    Parameters:
        command: of `dmq`, with its arguments, for a port.
        log: the file that it logs to; None: where this process does.
        port: that it is to listen on; 0 until it has taken one.
    """

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], log: Path | None, port: int) -> None:
        self.name = name
        self.program = [sys.executable, "-m", "dmq.cli"]
        self.pause_after = pause_after
        self._command = command
        self._log = log
        self.port = port
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._began = 0.0
        self._ends = 0  # by itself, soon after the start, in a row
        self._again_at: float | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def clear_log(self) -> None:
        """Forget what an earlier run logged."""
        if self._log is not None:
            self._log.unlink(missing_ok=True)

    def start(self) -> None:
        """Start it; `wait_ready` waits for it."""
        parent, prctl = os.getpid(), _prctl()

        def begin() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # which died before that
                os._exit(1)

        # A service manager hears from this process alone.
        environ = {name: value for name, value in os.environ.items() if name not in _SERVICE_NAMES}
        with contextlib.ExitStack() as stack:
            log = None if self._log is None else stack.enter_context(self._log.open("ab"))
            self._process = subprocess.Popen(
                [*self.program, *self._command(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                start_new_session=True,  # Ctrl-C is for us, and we end it in order
                preexec_fn=begin,  # no other thread runs
            )
        self._began = time.monotonic()

    def wait_ready(self) -> None:
        """Wait until it listens.

        Raises:
            DMQError: it does not; with the last that it logged.
        """
        from dmq.testing.processes import read_line

        assert self._process is not None
        assert self._process.stdout is not None
        line = read_line(self._process.stdout, time.monotonic() + _READY_SECONDS)
        found = None if line is None else _LINE.search(line)
        if found is None:
            raise DMQError(f"{self.name} did not start: {self.last_words()}")
        self.address, self.port = f"{found[1]}:{found[2]}", int(found[2])

    def last_words(self) -> str:
        """The last line that it logged."""
        if self._log is None:
            return "its last lines in this log say why"
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return f"{lines[-1].removeprefix('dmq: ')} (more in {self._log})" if lines else f"see {self._log}"

    def look(self) -> str:
        """Start it again if it has died; what to tell of that."""
        process, now = self._process, time.monotonic()
        assert process is not None
        if self._again_at is not None:
            if now < self._again_at:
                return ""
            self._again_at = None
            self.start()  # its port is known: nobody has to hear it say so again
            return f"{self.name} runs again, with pid {self.pid}"
        code = process.poll()
        if code is None:
            return ""
        process.communicate()
        # A kill says nothing of what the process can do.
        self._ends = self._ends + 1 if code >= 0 and now - self._began < _SOON_SECONDS else 0
        pause = self.pause_after(self._ends)
        self._again_at = now + pause
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        if self._ends <= _DEATHS_MAX:
            return f"{self.name} (pid {process.pid}) {how}: it is started again"
        return (
            f"{self.name} (pid {process.pid}) {how} as soon as it was started, {self._ends} times in a row: "
            f"{self.last_words()}; it is started again in {pause:g} s"
        )

    def ask_to_stop(self) -> None:
        """Have it finish, and end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def stop(self, deadline: float) -> None:
        """Wait for its end; at a moment of `time.monotonic` it is killed."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def stop_event() -> threading.Event:
    """Is set by SIGTERM, SIGHUP or Ctrl-C."""
    stop = threading.Event()
    for number in _SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    return stop


def watch_children(children: Sequence[ChildProcess]) -> None:
    """Start those again that have died, and say so."""
    for child in children:
        if told := child.look():
            typer.echo(told, err=True)


def stop_children(*groups: Sequence[ChildProcess], seconds: float = STOP_SECONDS) -> None:
    """Have all end, one group after the other, and kill what takes longer; more signals change nothing.

    Parameters:
        seconds: for the first group; the others have less.
    """
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    for group in groups:
        deadline = time.monotonic() + seconds
        for child in group:
            child.ask_to_stop()
        for child in group:
            child.stop(deadline)
        seconds = min(seconds, _LATER_SECONDS)


def _prctl() -> Callable[[int, int], object]:
    """What tells the kernel how a process ends with its parent; elsewhere than on Linux it does nothing."""
    if not sys.platform.startswith("linux"):
        return lambda option, argument: None
    found: Callable[[int, int], object] = ctypes.CDLL(None, use_errno=True).prctl
    return found
