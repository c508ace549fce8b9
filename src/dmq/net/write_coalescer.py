"""The outbox: connections that have something to send in this turn of the event loop.

What always holds: whatever is sent in one turn on one connection goes out with one call; what is sent while the outbox
is held goes out when it is released, and costs no turn of its own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

__all__ = ["Outbox"]

log = logging.getLogger(__name__)


class Sending(Protocol):
    """A connection with something to send."""

    def flush(self) -> None: ...


class Outbox:
    """See the module; one for all connections of a server."""

    __slots__ = ("_is_held", "_is_planned", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[Sending] = []
        self._is_planned = False
        self._is_held = False

    def add(self, connection: Sending) -> None:
        """The connection is flushed at the end of this turn."""
        self._waiting.append(connection)
        if not (self._is_planned or self._is_held):
            self._is_planned = True
            asyncio.get_running_loop().call_soon(self._flush_planned)

    def hold(self) -> None:
        """Much is about to be sent; `release` follows in the same turn."""
        self._is_held = True

    def release(self) -> None:
        """Send what has gathered."""
        self._is_held = False
        self._flush()

    def _flush_planned(self) -> None:
        self._is_planned = False
        self._flush()

    def _flush(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                try:
                    connection.flush()
                except Exception:  # one transport that fails must not keep the others' answers
                    log.exception("sending failed")
