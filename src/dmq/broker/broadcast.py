"""Broadcast: every member of the group gets every message, so each has cursors of its own.

Pure code. A member is known by its client id; the name its positions are kept under is made of group and client id, and
begins with a percent sign, which no group of a user can. Cursors that nobody uses expire, or they would pile up with
every client that ever came; what the caller is told to drop it drops with a `PositionDropped` event.

What always holds: a name is dropped only after its member was away, without a break, for the whole expiry time. The
times are not durable: after a restart of the broker the expiry time begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["BroadcastGroup", "broadcast_name", "parse_broadcast_name"]

_PREFIX = "%BROADCAST%"


def broadcast_name(group: str, client_id: str) -> str:
    """What a member's positions are kept under."""
    return f"{_PREFIX}{group}%{client_id}"


def parse_broadcast_name(name: str) -> tuple[str, str] | None:
    """Group and client id of such a name; None if it is another kind of name."""
    if not name.startswith(_PREFIX):
        return None
    group, percent, client_id = name[len(_PREFIX) :].partition("%")
    return (group, client_id) if percent else None


class BroadcastGroup:
    """Which members of a broadcast group are kept.

    Parameters:
        group: its name.
        expiry_ms: how long a member's cursors are kept while it is away.
        known: names that have positions, as found at the start.
    """

    def __init__(self, group: str, expiry_ms: int, known: Iterable[str] = (), now_ms: int = 0) -> None:
        self.group = group
        self._expiry_ms = expiry_ms
        self._away_since_ms: dict[str, int] = {}  # by client id, longest away first
        for name in known:
            found = parse_broadcast_name(name)
            if found is not None and found[0] == group:
                self._away_since_ms[found[1]] = now_ms

    def join(self, client_id: str) -> str:
        """The member is there; returns the name of its cursors."""
        self._away_since_ms.pop(client_id, None)
        return broadcast_name(self.group, client_id)

    def leave(self, client_id: str, now_ms: int) -> None:
        """The member is away."""
        self._away_since_ms.pop(client_id, None)
        self._away_since_ms[client_id] = now_ms

    def expire(self, now_ms: int) -> list[str]:
        """Names whose cursors and positions are to be dropped."""
        over = [c for c, since in self._away_since_ms.items() if since + self._expiry_ms <= now_ms]
        for client_id in over:
            del self._away_since_ms[client_id]
        return [broadcast_name(self.group, client_id) for client_id in over]

    def next_deadline(self) -> int | None:
        """When to call `expire` next."""
        since = next(iter(self._away_since_ms.values()), None)
        return None if since is None else since + self._expiry_ms
