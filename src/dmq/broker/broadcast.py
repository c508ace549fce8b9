"""Broadcast: every member of the group gets every message, so each has cursors of its own.

Pure code. A member is known by its client id; the name its positions are kept under is made of group and client id, and
begins with a percent sign, which no group of a user can. Cursors that nobody uses expire, or they would pile up with
every client that ever came; what the caller is told to drop it drops with a `PositionDropped` event.

What always holds: a name is dropped only after its member was away at every look of the whole expiry time. The times
are not durable: after a restart of the broker the expiry time begins anew.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

__all__ = ["BroadcastCursors", "broadcast_name", "parse_broadcast_name"]

_PREFIX: Final = "%BROADCAST%"
_LOOK_MS: Final = 60_000


def broadcast_name(group: str, client_id: str) -> str:
    """What a member's positions are kept under."""
    return f"{_PREFIX}{group}%{client_id}"


def parse_broadcast_name(name: str) -> tuple[str, str] | None:
    """Group and client id of such a name; None if it is another kind of name."""
    if not name.startswith(_PREFIX):
        return None
    group, percent, client_id = name[len(_PREFIX) :].partition("%")
    return (group, client_id) if percent else None


class BroadcastCursors:
    """Which members' cursors are kept.

    Parameters:
        expiry_ms: how long they are kept while the member is away.
    """

    def __init__(self, expiry_ms: int) -> None:
        self._expiry_ms = expiry_ms
        self._away_since_ms: dict[str, int] = {}
        self.next_look_ms = 0

    def look(self, known: Iterable[str], used: Container[str], now_ms: int) -> list[str]:
        """Look who is away; call it when `next_look_ms` has come.

        Parameters:
            known: names that have positions, of any kind.
            used: names whose members are there.

        Returns the names whose cursors and positions are to be dropped.
        """
        self.next_look_ms = now_ms + min(_LOOK_MS, self._expiry_ms)
        before = self._away_since_ms
        away = {name for name in known if parse_broadcast_name(name) is not None and name not in used}
        self._away_since_ms = {name: before.get(name, now_ms) for name in away}
        over = [name for name, since in self._away_since_ms.items() if since + self._expiry_ms <= now_ms]
        for name in over:
            del self._away_since_ms[name]
        return sorted(over)
