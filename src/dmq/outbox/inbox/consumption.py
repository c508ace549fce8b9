"""A message's consumption: what the inbox knows of it, and what a handler's end means. Pure code.

What always holds: a result is SUCCESS or ROLLBACK, or the message counts as not consumed; the same message has the same
send id however often it comes: the one its outbox gave it, or, if it came from no outbox, its message id.

Messages that were prepared in a user's own session, until its transaction ends (T-11).

What always holds: a transaction does not commit with a message whose result was not said; what was said goes to the
sender after the commit, and is forgotten with a rollback.

Turns: messages of one sequence go one at a time through a process, others beside them.

What always holds: there is a lock for a name only while somebody has it or waits for it, so there are never more locks
than threads or tasks.

Gaps in a strict sequence: what becomes of a message that came before the one it follows (T-09). Pure code.

What always holds: a message that waits goes back to the broker and comes again, so that messages of other business ids
go on; what is done about a gap that never closes is a matter of policy alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from dmq.client.consumer.handler import Reject, Retry
from dmq.client.consumer.message import ReceivedMessage
from dmq.errors import InvalidMessage, InvalidRequest, InvalidSettings
from dmq.model import Message
from dmq.outbox.alerts import Alert, AlertKind, OnAlert
from dmq.outbox.inbox.recorder import Earlier, Gap, Row
from dmq.outbox.sender.envelope import Result, pack_result, result_topic, unpack
from dmq.outbox.states import BusinessState

__all__ = [
    "GAP_POLICIES",
    "LOOK_SECONDS",
    "REASON_CHARS_MAX",
    "AioTurns",
    "Consumption",
    "GapPolicy",
    "Prepared",
    "Rollback",
    "Turns",
    "check_active",
    "consumption_of",
    "cut",
    "judge_gap",
    "result_message",
    "settled",
]

REASON_CHARS_MAX: Final = 4096


class Rollback(Exception):
    """Raised by a handler: the business refuses the message. What it did is undone, and the sender is told.

    Parameters:
        reason: in the business's own words, for the sender.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "refused")
        self.reason = cut(reason)


def cut(reason: str) -> str:
    """A reason as every database takes it."""
    return reason.replace("\0", "\u2400")[:REASON_CHARS_MAX]


class Consumption(msgspec.Struct, frozen=True):
    """One message on its way through the inbox."""

    row: Row
    result_to: str  # whom to tell; empty: nobody waits for a result
    attempt: int

    @property
    def is_strict(self) -> bool:
        return self.row.sequence is not None and self.row.business_id is not None

    @property
    def turn(self) -> tuple[str, str, str]:
        """What messages of one sequence have in common."""
        return self.row.group, self.row.topic, self.row.business_id or ""


def consumption_of(message: ReceivedMessage, consumer_id: str, now_ms: int) -> Consumption:
    """What the inbox needs to know of a message.

    Raises:
        InvalidMessage: it has neither a send id nor an id.
    """
    envelope = unpack(message)
    if envelope is not None:
        send_id, result_to, sequence = envelope.send_id, envelope.result_to, envelope.sequence
    elif message.id is not None:
        send_id, result_to, sequence = str(message.id), "", None
    else:
        raise InvalidMessage("the message has no id: the broker is too old for an inbox; upgrade it")
    row = Row(
        send_id, message.group, message.topic, message.business_id,
        sequence=sequence, consumer_id=consumer_id, at_ms=now_ms,
    )  # fmt: skip
    return Consumption(row, result_to, message.attempt)


def settled(state: Any) -> None:
    """Take what a handler returned: nothing more to do for SUCCESS.

    Raises:
        Rollback: the business refuses the message.
        Retry: it says UNKNOWN, or nothing.
        InvalidRequest: that is not a result.
    """
    if state is BusinessState.SUCCESS:
        return
    if state is BusinessState.ROLLBACK:
        raise Rollback
    if state is None or state is BusinessState.UNKNOWN:
        raise Retry("the result is UNKNOWN: nothing was kept; return BusinessState.SUCCESS or BusinessState.ROLLBACK")
    raise InvalidRequest(f"a handler returns BusinessState.SUCCESS or BusinessState.ROLLBACK, not {state!r}")


class _Transaction(Protocol):
    @property
    def is_active(self) -> bool: ...


def check_active(transaction: _Transaction) -> None:
    """Refuse a handler that ended the transaction it was given.

    Raises:
        InvalidRequest: it committed or rolled back.
    """
    if not transaction.is_active:
        raise InvalidRequest(
            "the handler ended the session's transaction: leave commit and rollback to the inbox, and return ROLLBACK "
            "to undo what was done"
        )


def result_message(row: Row, result_to: str, earlier: Earlier) -> tuple[str, Message]:
    """The topic and the message that tell the sender what its message came to."""
    result = Result(
        send_id=row.send_id,
        topic=row.topic,
        group=row.group,
        state=earlier.state,
        consumer_id=earlier.consumer_id,
        at_ms=earlier.at_ms,
        reason=earlier.reason,
    )
    return result_topic(row.topic), pack_result(result, result_to)


Answer = Callable[[Consumption, Earlier], object]
_KEY: Final = "dmq.prepared"  # in `Session.info`


class Prepared:
    """What a session has of ours.

    Parameters:
        answer: tells a sender; called right after a commit.
    """

    def __init__(self, session: Session, answer: Answer) -> None:
        self.open: tuple[Consumption, Any] | None = None  # with its savepoint
        self._answer = answer
        self._said: list[tuple[Consumption, Earlier]] = []
        event.listen(session, "before_commit", self._before_commit)
        event.listen(session, "after_commit", self._after_commit)
        event.listen(session, "after_soft_rollback", self._after_rollback)

    @classmethod
    def of(cls, session: Session, answer: Answer) -> Prepared:
        """That of a session, made when first asked for."""
        found: Prepared | None = session.info.get(_KEY)
        if found is None:
            found = session.info[_KEY] = cls(session, answer)
        return found

    def begin(self, taken: Consumption, savepoint: Any) -> None:
        """A message was prepared."""
        self.open = (taken, savepoint)

    def check_closed(self) -> None:
        """Raises InvalidRequest while a message waits for its result."""
        if self.open is not None:
            raise InvalidRequest("a message is prepared in this session: say consumed() of it, then prepare the next")

    def take(self, send_id: str) -> tuple[Consumption, Any]:
        """The message whose result is said, and its savepoint.

        Raises:
            InvalidRequest: it was not prepared here.
        """
        if self.open is None or self.open[0].row.send_id != send_id:
            raise InvalidRequest("the message was not prepared in this session: call prepare() first")
        found, self.open = self.open, None
        return found

    def said(self, taken: Consumption, earlier: Earlier) -> None:
        """What it came to, if the transaction commits."""
        self._said.append((taken, earlier))

    # --- the session's events ---------------------------------------------------------------------------------------

    def _before_commit(self, session: Session) -> None:
        # The business's own savepoints end here, too; ours is the innermost only when all of them have.
        if self.open is not None and session.get_nested_transaction() in (None, _plain(self.open[1])):
            raise InvalidRequest("the result of a prepared message is UNKNOWN: say consumed() before the commit")

    def _after_commit(self, session: Session) -> None:
        if session.get_nested_transaction() is None:
            said, self._said = self._said, []
            for taken, earlier in said:
                self._answer(taken, earlier)

    def _after_rollback(self, session: Session, ended: SessionTransaction) -> None:
        if not ended.nested:
            self.open, self._said = None, []


def _plain(savepoint: Any) -> SessionTransaction:
    """The transaction behind one of asyncio."""
    plain: SessionTransaction = getattr(savepoint, "sync_transaction", savepoint)
    return plain


class Turns:
    """For threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._locks: dict[Hashable, tuple[threading.Lock, int]] = {}

    @contextlib.contextmanager
    def of(self, name: Hashable) -> Iterator[None]:
        """Wait for the turn of a name, and have it for the block."""
        with self._mutex:
            lock, users = self._locks.get(name, (threading.Lock(), 0))
            self._locks[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._mutex:
                users = self._locks[name][1] - 1
                if users:
                    self._locks[name] = (lock, users)
                else:
                    del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)


class AioTurns:
    """For tasks of one event loop."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def of(self, name: Hashable) -> AsyncIterator[None]:
        """Wait for the turn of a name, and have it for the block."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._locks[name][1] - 1
            if users:
                self._locks[name] = (lock, users)
            else:
                del self._locks[name]

    def __len__(self) -> int:
        return len(self._locks)


GAP_POLICIES: Final = ("wait", "skip", "dead-letter")
LOOK_SECONDS: Final = 0.02  # how often a consumer that is patient looks whether a gap is closed
_PAUSE_SECONDS: Final = 1.0
_PAUSE_SECONDS_MAX: Final = 30.0


class GapPolicy(NamedTuple):
    """What becomes of a gap.

    Attributes:
        policy: after `seconds`, "dead-letter" gives the waiting message up, "skip" consumes it without the one that is
            missing, "wait" goes on waiting.
        seconds: how long a gap may be open, from when it was first noticed.
        patience: how long a handler's thread waits at first, since the message before is often in the hands of a
            neighbour.
    """

    policy: str = "wait"
    seconds: float = 300.0
    patience: float = 0.2

    def check(self) -> GapPolicy:
        """Itself.

        Raises:
            InvalidSettings: a value makes no sense.
        """
        if self.policy not in GAP_POLICIES:
            raise InvalidSettings(f"gap policy {self.policy!r} is unknown: use {', '.join(GAP_POLICIES)}")
        if not self.seconds >= 0 or not self.patience >= 0:
            raise InvalidSettings("the seconds of a gap policy are not below 0")
        return self

    def is_passed_over(self, gap: Gap, now_ms: int) -> bool:
        """Whether the message behind it is consumed nevertheless."""
        return self.policy == "skip" and _waited(gap, now_ms) >= self.seconds

    def judge(self, sequence: int, last: int, waited_seconds: float, attempt: int) -> Any:
        """What to do: None to consume the message in spite of the gap, or what to raise."""
        text = f"number {sequence} waits for number {last + 1}"
        if self.policy != "wait" and waited_seconds >= self.seconds:
            if self.policy == "skip":
                return None
            return Reject(f"{text}, which did not come in {self.seconds:g} seconds")
        pause = min(_PAUSE_SECONDS_MAX, _PAUSE_SECONDS * 2.0 ** min(attempt - 1, 10))
        if self.policy != "wait":
            pause = min(pause, max(_PAUSE_SECONDS, self.seconds - waited_seconds))
        return Retry(text, after=pause)


def _waited(gap: Gap, now_ms: int) -> float:
    """Seconds for which a gap has been open."""
    return 0.0 if gap.waiting_since_ms is None else max(0.0, (now_ms - gap.waiting_since_ms) / 1000)


def judge_gap(policy: GapPolicy, taken: Consumption, gap: Gap, now_ms: int, alert: OnAlert) -> None:
    """A gap stays open: returns if the message is to be consumed nevertheless.

    Raises:
        Retry, Reject: what is to become of the message instead.
    """
    row = taken.row
    waited = _waited(gap, now_ms)
    verdict = policy.judge(row.sequence or 0, gap.last, waited, taken.attempt)
    if verdict is None or isinstance(verdict, Reject):
        what = "is consumed without it" if verdict is None else "becomes a dead letter"
        alert(
            Alert(
                kind=AlertKind.GAP,
                send_id=row.send_id,
                topic=row.topic,
                business_id=row.business_id,
                group=row.group,
                attempts=taken.attempt,
                reason=f"number {gap.last + 1} did not come in {waited:.0f} seconds: number {row.sequence} {what}",
            )
        )
    if verdict is not None:
        raise verdict from None
