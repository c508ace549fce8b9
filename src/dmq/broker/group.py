"""The group: who consumes a topic together, by which subscription, and whose turn it is.

Pure code; one per (topic, group). The cursors belong to the caller: what the group says about members (gone, away,
back) the caller tells the cursors.

What always holds:

- all members that get messages agree on the subscription that holds; one that joins with another is refused by name of
  the conflict, unless its version is higher: then its subscription holds, and the members that disagree are superseded;
- the version that holds never falls, also when the group is empty or the broker starts anew, so that an old deployment
  that comes back while the new one is away cannot pass over messages the new one wants;
- members with credit take turns.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from dmq.broker.member import Member, Subscription
from dmq.errors import SubscriptionConflict, SubscriptionSuperseded

if TYPE_CHECKING:
    from dmq.storage.events import SubscriptionPut
    from dmq.storage.store import MessageStore

__all__ = ["Due", "Group", "Joined", "kept_subscription", "must_keep"]


def kept_subscription(store: MessageStore, group: str, topic_id: int) -> Subscription | None:
    """What held in a group before the broker was started, if it had a version."""
    kept = store.subscription(group, topic_id)
    return None if kept is None else Subscription(kept.filter, kept.version, kept.is_ordered)


def must_keep(kept: SubscriptionPut | None, held: Subscription | None) -> bool:
    """Whether what holds is to be written down. Without a version there is nothing that a restart could undo."""
    if held is None or not held.version or held.is_broadcast:
        return False
    return kept is None or (kept.filter, kept.version, kept.is_ordered) != (
        held.filter,
        held.version,
        held.is_ordered,
    )


class Joined(NamedTuple):
    """What joining did."""

    member: Member
    is_resumed: bool  # it was a member before: its leases are its own again
    superseded: list[Member]  # to be told, and to get nothing more


class Due(NamedTuple):
    """What the passing of time did."""

    gone: list[Member]  # their grace time is over
    started: list[Member]  # their backlog may begin


class Group:
    """See the module.

    Parameters:
        name: the group's name.
        topic: what it consumes, for messages.
        subscription: what held before, if that is known.
    """

    def __init__(self, name: str, topic: str, subscription: Subscription | None = None) -> None:
        self.name = name
        self.topic = topic
        self.subscription = subscription
        self.members: dict[str, Member] = {}
        self._turns: deque[Member] = deque()  # members that may have credit
        self._in_turn: set[Member] = set()
        self._waiting: set[Member] = set()  # members whose backlog begins at a later time

    # --- coming and going -------------------------------------------------------------------------------------------

    def join(self, client_id: str, subscription: Subscription, prefetch: int, prefetch_bytes: int) -> Joined:
        """Let a member in, or back in. It gets nothing pushed before `subscribed`.

        Raises:
            SubscriptionConflict: the group's members agreed on something else.
            SubscriptionSuperseded: a higher version has replaced what it asks for.
        """
        superseded = self._agree(client_id, subscription)
        member = self.members.get(client_id)
        is_resumed = member is not None
        if member is None:
            member = self.members[client_id] = Member(client_id, subscription, prefetch, prefetch_bytes)
        member.subscription = subscription
        member.prefetch, member.prefetch_bytes = prefetch, prefetch_bytes
        member.away_until_ms = member.backlog_at_ms = None
        member.is_superseded = False
        return Joined(member, is_resumed, superseded)

    def _agree(self, client_id: str, wanted: Subscription) -> list[Member]:
        held = self.subscription
        if held is None or held.agrees(wanted):
            version = wanted.version if held is None else max(held.version, wanted.version)
            self.subscription = msgspec.structs.replace(wanted, version=version)
            return []
        if wanted.version < held.version:
            raise SubscriptionSuperseded(
                f"group {self.name!r} consumes {self.topic!r} with {held.describe()}, "
                f"which replaced {wanted.describe()}; deploy {client_id!r} anew, or give it a higher version",
                group=self.name,
                topic=self.topic,
                version=held.version,
            )
        others = [member for member in self.members.values() if not member.is_superseded and member.name != client_id]
        if others and wanted.version == held.version:
            raise SubscriptionConflict(
                f"{client_id!r} wants {wanted.describe()}, but group {self.name!r} consumes {self.topic!r} with "
                f"{held.describe()} (member {others[0].name!r}): use another group, or a version above {held.version} "
                "to replace it",
                group=self.name,
                topic=self.topic,
                version=held.version,
                member=others[0].name,
            )
        self.subscription = wanted
        for member in others:
            member.is_superseded = True
        return others

    def subscribed(self, member: Member, now_ms: int, offline_delay_ms: int) -> None:
        """The member's subscription was acknowledged: its backlog begins after the delay (D-12)."""
        member.backlog_at_ms = now_ms + offline_delay_ms
        if offline_delay_ms > 0:
            self._waiting.add(member)
        else:
            self.wake(member)

    def disconnect(self, client_id: str, now_ms: int, grace_ms: int) -> Member | None:
        """Its connection broke; it stays a member for the grace time. None if it is no member."""
        member = self.members.get(client_id)
        if member is not None:
            member.away_until_ms = now_ms + grace_ms
            self._waiting.discard(member)
        return member

    def leave(self, client_id: str) -> Member | None:
        """It closed its subscription. None if it is no member."""
        member = self.members.pop(client_id, None)
        if member is not None:
            self._waiting.discard(member)
            member.backlog_at_ms = None
        return member

    # --- time -------------------------------------------------------------------------------------------------------

    def due(self, now_ms: int) -> Due:
        """What happens by now. Called when `next_deadline` has come."""
        gone = [m for m in self.members.values() if m.away_until_ms is not None and m.away_until_ms <= now_ms]
        for member in gone:
            self.leave(member.name)
        started = [m for m in self._waiting if m.backlog_at_ms is not None and m.backlog_at_ms <= now_ms]
        for member in started:
            self._waiting.discard(member)
            self.wake(member)
        return Due(gone, started)

    def next_deadline(self) -> int | None:
        """When to call `due` next."""
        times = [m.away_until_ms for m in self.members.values() if m.away_until_ms is not None]
        times += [m.backlog_at_ms for m in self._waiting if m.backlog_at_ms is not None]
        return min(times, default=None)

    # --- turns ------------------------------------------------------------------------------------------------------

    def wake(self, member: Member) -> None:
        """The member may have credit again: something of it was settled, or it asked for more."""
        if member not in self._in_turn and self.members.get(member.name) is member:
            self._in_turn.add(member)
            self._turns.append(member)

    def next_taker(self, now_ms: int) -> Member | None:
        """Whose turn it is to get something pushed. A member without credit is out of the turns until `wake`."""
        turns = self._turns
        while turns:
            member = turns.popleft()
            if self.members.get(member.name) is member and member.credit(now_ms) > 0:
                turns.append(member)
                return member
            self._in_turn.discard(member)
        return None
