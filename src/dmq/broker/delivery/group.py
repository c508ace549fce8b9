"""The consumer group: who consumes a topic together, by which subscription, and whose turn it is.

Pure code; one `Group` per topic and group. The cursors belong to the caller, who tells them what the group says about
its members (gone, away, back). Credit is not a counter of its own: it is what a member asked for less what is out with
it, so whatever ends a lease returns credit, and nothing can be returned twice.

In a broadcast group every member gets every message, so each has cursors of its own. A member is known by its client
id; the name its positions are kept under is made of group and client id, and begins with a percent sign, which no group
of a user can. Cursors that no member uses expire, or they would pile up with every client that ever came.

A client whose process is stopped looks like one that is busy: its kernel goes on taking what is sent. So when a lease
of a member runs out, its client is doubted: it is asked for a heartbeat, and anything that comes from it within
`PATIENCE_MS` clears it. One that says nothing is silent until it speaks.

A tag filter is "a || b", as RocketMQ writes it. The broker compares 2-byte hashes out of the index and may let a
stranger through; the client compares the tags themselves (R-07).

What always holds:

- all members that get messages agree on the subscription that holds; one that joins with another is refused by name of
  the conflict, unless its version is higher: then its subscription holds, and the members that disagree are superseded;
- the version that holds never falls, also when the group is empty or the broker starts anew, so that an old deployment
  that comes back while the new one is away cannot pass over messages the new one wants;
- members with credit take turns; a member gets nothing pushed while it is away, superseded, before its backlog may
  begin, or while as many messages or bytes are out with it as it asked for;
- a member with nothing out comes before those that have something: an idle one does not wait behind one that has asked
  for much;
- a member gets nothing, pushed or pulled, while all clients it consumes through are doubted or silent;
- positions of a broadcast member are dropped only after the member was away at every look of the whole expiry time,
  which begins anew after a restart of the broker.

Selection: which queue of a topic is served next.

Pure code. Queues that may have something are marked; the caller picks one, proposes from its cursor, and unmarks it
when there was nothing. Whatever may give a queue something again (messages became visible, something was settled, a
lease or a delay is over, the position was set) marks it, so an idle queue costs nothing.

What always holds: only marked queues are picked; a marked queue is picked within as many picks as there are queues, or,
in a priority topic, within ten times as many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from dmq.broker.delivery.lease import Holder
from dmq.errors import InvalidRequest, SubscriptionConflict, SubscriptionSuperseded
from dmq.model import parse_broadcast_name
from dmq.records.hashes import tag_hash

if TYPE_CHECKING:
    from dmq.storage.queries import Queries
    from dmq.storage.state.events import SubscriptionPut

__all__ = [
    "RETRY_QUEUES",
    "BroadcastCursors",
    "Due",
    "Group",
    "Inheritance",
    "Joined",
    "Member",
    "MemberState",
    "Pulse",
    "QueueSelection",
    "Subscription",
    "Voice",
    "group_of",
    "hashes_of",
    "kept_subscription",
    "must_keep",
    "normalised",
    "with_retries",
]

_LOOK_MS: Final = 60_000
PATIENCE_MS: Final = 1000  # twice as long as a client that nobody reads for takes to look at its connection


def group_of(name: str) -> str:
    """The group that a name of positions belongs to: what dead letters are of, and what requests call it."""
    alone = parse_broadcast_name(name)
    return name if alone is None else alone[0]


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


class Subscription(msgspec.Struct, frozen=True):
    """What all members of a group agree on.

    Attributes:
        filter: the tag expression, as normalised by the caller; empty means everything.
        version: a higher one replaces the others.
        strategy: by which the members divide the queues among themselves; empty if the broker shares out messages.
    """

    filter: str = ""
    version: int = 0
    is_ordered: bool = False
    is_broadcast: bool = False
    strategy: str = ""

    def agrees(self, other: Subscription) -> bool:
        """Whether both may be members of one group, whatever their versions."""
        return (self.filter, self.is_ordered, self.is_broadcast, self.strategy) == (
            other.filter,
            other.is_ordered,
            other.is_broadcast,
            other.strategy,
        )

    def describe(self) -> str:
        """In words, for an error message."""
        words = ["ordered" if self.is_ordered else "unordered"]
        if self.is_broadcast:
            words.append("broadcast")
        if self.strategy:
            words.append(f"strategy {self.strategy!r}")
        tags = f"tags {self.filter!r}" if self.filter else "all tags"
        return f"{tags}, {', '.join(words)}, version {self.version}"


class Voice(Protocol):
    """Where one hears of a client: a connection."""

    @property
    def heard(self) -> int:
        """Another number whenever something has come from it."""
        ...

    def ask(self) -> None:
        """Ask for a sign of life; a client that lives answers by itself, whatever its handlers do."""
        ...


class Pulse:
    """The signs of life of one client.

    Parameters:
        on_change: called when the client is silent from now on, and when it has spoken again.

    Attributes:
        members: those that consume through the client.
        doubted_until_ms: by when it is to say something; None if it is not doubted.
        is_silent: it said nothing by then, and has said nothing since.
    """

    __slots__ = ("_heard", "_heard_ms", "_on_change", "_voice", "doubted_until_ms", "is_silent", "members")

    def __init__(self, voice: Voice, on_change: Callable[[bool], None] = lambda was_silent: None) -> None:
        self._voice = voice
        self._on_change = on_change
        self._heard = 0  # as it was when the doubt began
        self._heard_ms = -PATIENCE_MS  # when it cleared itself the last time
        self.members: list[Member] = []
        self.doubted_until_ms: int | None = None
        self.is_silent = False

    @property
    def is_quiet(self) -> bool:
        """Whether it is doubted or silent."""
        return self.doubted_until_ms is not None

    def is_fresh(self, now_ms: int) -> bool:
        """Whether it has just shown that it lives."""
        return self.doubted_until_ms is None and now_ms - self._heard_ms < PATIENCE_MS

    def doubt(self, now_ms: int) -> int:
        """Ask for a sign of life, unless that is under way; returns by when it must have come."""
        if self.doubted_until_ms is None:
            self._heard = self._voice.heard
            self.doubted_until_ms = now_ms + PATIENCE_MS
            self._feel()
            self._voice.ask()
        return self.doubted_until_ms

    def look(self, now_ms: int) -> None:
        """Look whether a client that is doubted or silent has spoken, or whether its time to do so is over."""
        if self.doubted_until_ms is None:
            return
        was_silent = self.is_silent
        if self._voice.heard != self._heard:
            self._heard_ms, self.doubted_until_ms, self.is_silent = now_ms, None, False
        elif was_silent or now_ms < self.doubted_until_ms:
            return
        else:
            self.is_silent = True
        self._feel()
        self._on_change(was_silent)

    def _feel(self) -> None:
        for member in self.members:
            member.feel()


class MemberState(Enum):
    """Where a member stands."""

    ACTIVE = "active"
    AWAY = "away"  # its connection broke; it may come back within its grace time
    SILENT = "silent"  # it let a lease run out without a sign of life, and gets nothing until it speaks
    SUPERSEDED = "superseded"  # a higher version replaced its subscription: it may settle what it has, no more


class Member(Holder):
    """One consumer of a group.

    Parameters:
        name: its client id.
        subscription: what it joined with.
        prefetch: how many messages may be out with it at once.
        prefetch_bytes: how many bytes; one more batch may go out while it is below.
    """

    __slots__ = (
        "away_until_ms",
        "backlog_at_ms",
        "is_quiet",
        "is_superseded",
        "prefetch",
        "prefetch_bytes",
        "pullers",
        "pulses",
        "subscription",
    )

    def __init__(self, name: str, subscription: Subscription, prefetch: int, prefetch_bytes: int) -> None:
        super().__init__(name)
        self.subscription = subscription
        self.prefetch = prefetch
        self.prefetch_bytes = prefetch_bytes
        self.away_until_ms: int | None = None
        self.backlog_at_ms: int | None = None  # not before the acknowledgement of its subscription is on its way
        self.is_superseded = False
        self.is_quiet = False  # all clients it consumes through are doubted or silent
        self.pullers = 0  # clients that pull as this member
        self.pulses: list[Pulse] = []  # of the clients it consumes through

    @property
    def state(self) -> MemberState:
        if self.is_superseded:
            return MemberState.SUPERSEDED
        if self.away_until_ms is not None:
            return MemberState.AWAY
        return MemberState.SILENT if self.is_silent else MemberState.ACTIVE

    @property
    def may_pull(self) -> bool:
        """Whether anything may be handed to it on its own request."""
        return self.away_until_ms is None and not self.is_superseded and not self.is_quiet

    def attach(self, pulse: Pulse) -> None:
        """It consumes through this client, too."""
        self.pulses.append(pulse)
        pulse.members.append(self)
        self.feel()

    def detach(self, pulse: Pulse) -> None:
        """It consumes through this client no more. If that was the only one, what was known of it stays."""
        if pulse in self.pulses:
            self.pulses.remove(pulse)
            pulse.members.remove(self)
            if self.pulses:
                self.feel()

    def feel(self) -> None:
        """See what the pulses of its clients say."""
        self.is_quiet = all(pulse.is_quiet for pulse in self.pulses)
        self.is_silent = all(pulse.is_silent for pulse in self.pulses)

    def credit(self, now_ms: int) -> int:
        """How many messages may be pushed to it now."""
        if self.away_until_ms is not None or self.is_superseded or self.is_quiet:  # as `may_pull`
            return 0
        if self.backlog_at_ms is None or now_ms < self.backlog_at_ms or self.bytes_out >= self.prefetch_bytes:
            return 0
        credit = self.prefetch - self.messages_out
        return credit if credit > 0 else 0


def kept_subscription(queries: Queries, group: str, topic_id: int) -> Subscription | None:
    """What held in a group before the broker was started, if it had a version."""
    kept = queries.subscription(group, topic_id)
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


class Inheritance:
    """Who gets an ordered queue after another member of the shard led it, whose leases are gone with it.

    Someone may still work on what that one handed out. It comes back with SUBSCRIBE, names its lease, and goes on at
    once; others get the queue when it had time for that, so that two do not work on one queue. A queue of which the
    group had settled everything when the leader changed is free at once, and so is every queue of a group that began
    since.

    Parameters:
        until_ms: others may have any queue from then on.
    """

    def __init__(self, until_ms: int) -> None:
        self.until_ms = until_ms
        self._free: set[int] = set()
        self._heirs: dict[int, str] = {}

    def release(self, queue: int) -> None:
        """Nothing of the queue can be in anybody's hands."""
        self._free.add(queue)

    def claim(self, queue: int, member: str) -> None:
        """A member says that it has a lease of the queue; the first one is believed."""
        self._heirs.setdefault(queue, member)

    def lets(self, queue: int, member: str) -> bool:
        """Whether a member may have the queue before the time is over."""
        return queue in self._free or self._heirs.get(queue) == member


class Group:
    """One consumer group at one topic.

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
        self._idle: deque[Member] = deque()  # those with nothing out: they come first
        self._in_idle: set[Member] = set()
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
        member.is_superseded = member.is_quiet = member.is_silent = False
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
        """Its connection broke; it stays a member for the grace time. None if it is not a member."""
        member = self.members.get(client_id)
        if member is not None:
            member.away_until_ms = now_ms + grace_ms
            self._waiting.discard(member)
        return member

    def leave(self, client_id: str) -> Member | None:
        """It closed its subscription. None if it is not a member."""
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
        if self.members.get(member.name) is not member:
            return
        if member not in self._in_turn:
            self._in_turn.add(member)
            self._turns.append(member)
        if not member.messages_out and member not in self._in_idle:
            self._in_idle.add(member)
            self._idle.append(member)

    def next_taker(self, now_ms: int) -> Member | None:
        """Whose turn it is to get something pushed. A member without credit is out of the turns until `wake`."""
        idle, turns = self._idle, self._turns
        while idle:
            member = idle.popleft()
            self._in_idle.discard(member)
            if self.members.get(member.name) is member and not member.messages_out and member.credit(now_ms) > 0:
                return member
        while turns:
            member = turns.popleft()
            if self.members.get(member.name) is member and member.credit(now_ms) > 0:
                turns.append(member)
                return member
            self._in_turn.discard(member)
        return None

    @property
    def idle(self) -> int:
        """About how many members wait with nothing out, but for the one whose turn it is."""
        return len(self._idle)

    def keep_turn(self, member: Member) -> None:
        """There was nothing for the member whose turn it was: the next message is for it."""
        if not member.messages_out and member not in self._in_idle:
            self._in_idle.add(member)
            self._idle.appendleft(member)
        elif self._turns and self._turns[-1] is member:
            self._turns.rotate(1)


_TAGS_MAX = 256


def normalised(expression: str) -> str:
    """The same filter in its one spelling; empty where everything passes."""
    tags = sorted({tag.strip() for tag in expression.split("||")} - {""})
    if len(tags) > _TAGS_MAX:
        raise InvalidRequest(f"a filter has at most {_TAGS_MAX} tags, not {len(tags)}: filter in the consumer instead")
    return "" if "*" in tags else " || ".join(tags)


def hashes_of(expression: str) -> list[int] | None:
    """The hashes a normalised filter lets through; None where everything passes."""
    return [tag_hash(tag) for tag in expression.split(" || ")] if expression else None


# In a priority topic every so many picks one goes round, so that no queue starves.
_IN_TURN_EVERY: Final = 10
RETRY_QUEUES: Final = 256  # a queue of the retry topic is marked as its number and this
_OWN_QUEUES: Final = (1 << RETRY_QUEUES) - 1


def with_retries(queues: int) -> int:
    """A bit for each of these queues, and for each queue of the retry topic that goes with one of them."""
    return queues | queues << RETRY_QUEUES


class QueueSelection:
    """The marked queues of one topic and group.

    Parameters:
        by_priority: the queue is the priority: the highest first, every tenth pick in turn.
    """

    def __init__(self, *, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._marked = 0  # bit per queue
        self._last = -1  # the queue picked last in turn
        self._picks = 0

    def mark(self, queue: int) -> None:
        """The queue may have something to hand out."""
        self._marked |= 1 << queue

    def unmark(self, queue: int) -> None:
        """The queue that was picked has nothing to hand out for now."""
        self._marked &= ~(1 << queue)
        self._picks -= 1  # a pick that gave nothing does not bring the next turn nearer

    def drained(self, queue: int) -> None:
        """The queue that was picked gave what it had."""
        self._marked &= ~(1 << queue)

    @property
    def has_any(self) -> bool:
        """Whether any queue may have something to hand out."""
        return self._marked != 0

    def marked(self) -> Iterator[int]:
        """The queues that may have something to hand out."""
        left = self._marked
        while left:
            queue = (left & -left).bit_length() - 1
            left ^= 1 << queue
            yield queue

    def is_marked(self, queue: int) -> bool:
        return bool(self._marked >> queue & 1)

    def pick(self, allowed: int = -1) -> int | None:
        """The queue to serve next.

        Parameters:
            allowed: a bit for each queue that may be picked; all by default.
        """
        marked = self._marked & allowed
        if not marked:
            return None
        self._picks += 1
        if self._by_priority and self._picks % _IN_TURN_EVERY:
            own, again = marked & _OWN_QUEUES, marked >> RETRY_QUEUES
            # Of one priority those that failed come first: they have waited longer.
            return (own if own.bit_length() > again.bit_length() else marked).bit_length() - 1
        after = marked >> (self._last + 1)
        if after:
            self._last += (after & -after).bit_length()
        else:
            self._last = (marked & -marked).bit_length() - 1
        return self._last

    def __len__(self) -> int:
        return self._marked.bit_count()
