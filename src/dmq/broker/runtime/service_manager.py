"""The service manager that started the broker, such as systemd: it is told when the broker is ready and when it stops,
and hears from the event loop as long as that turns.

What always holds: without a manager nothing is sent; one that is gone does not disturb the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping
from typing import Final

__all__ = ["ServiceManager"]


class ServiceManager:
    """Speaks systemd's notification protocol (sd_notify): one datagram for each word.

    Parameters:
        environ: `NOTIFY_SOCKET` says where; `WATCHDOG_USEC` how often a sign of life is expected, `WATCHDOG_PID` of
            which process.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        # A name that begins with @ stands in no file system.
        self._address: Final = f"\0{path[1:]}" if path.startswith("@") else path
        usec = environ.get("WATCHDOG_USEC", "")
        is_meant = environ.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        self.ping_seconds: Final = int(usec) / 2_000_000 if path and is_meant and usec.isdecimal() else 0.0
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """The broker takes messages; from now on the loop gives signs of life."""
        self.tell("READY=1")
        self._ping()

    def stopping(self) -> None:
        """The broker finishes what is under way."""
        if self._timer is not None:
            self._timer.cancel()
        self.tell("STOPPING=1")

    def _ping(self) -> None:
        if self.ping_seconds:
            self.tell("WATCHDOG=1")
            self._timer = asyncio.get_running_loop().call_later(self.ping_seconds, self._ping)

    def tell(self, word: str) -> None:
        """Send a word of the protocol."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            line.sendto(word.encode(), self._address)
