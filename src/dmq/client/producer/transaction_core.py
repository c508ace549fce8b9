"""Transactions of a producer, without waiting for anything: preparing, ending, and answering checks (R-09).

A half message is a message of a stream of its own. Ends gather while one request is under way, so many transactions
that end at once share a request and, at the broker, a unit.

What always holds: an end is sent again until it is answered, which is harmless, since the broker answers the second
as the first; ends of one transaction go into one request; at most one request is under way, and no more wait than
transactions are open.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from inspect import isawaitable
from typing import Any, Final, TypeAlias, TypedDict, Unpack

from dmq.client.admin.reports import StoredMessage
from dmq.client.connection.link import Link, Links
from dmq.client.connection.route_book import ANY
from dmq.client.connection.url import Address
from dmq.client.producer.accumulator import MESSAGE_BYTES, Draft, LaneKey, SendBatch
from dmq.client.producer.core import Core
from dmq.client.producer.encoder import encode_body
from dmq.client.producer.message import check_message, expiry
from dmq.client.producer.outcome import Outcome
from dmq.client.producer.routes import Route, choose_queue
from dmq.clock import Clock
from dmq.errors import DMQError, InvalidMessage, InvalidSettings, OutOfRetries
from dmq.event_log import EventLog
from dmq.model import Body, Durability, Message, MessageId, check_name, place_of, place_shard
from dmq.offset_runs import offset_runs
from dmq.protocol import Command, Frame, decode_response
from dmq.protocol.produce import (
    TransactionCheck,
    TransactionEnd,
    TransactionEndReply,
    TransactionJoin,
    TransactionOutcome,
    TransactionSpan,
)
from dmq.protocol.status import ErrorHeader, error_from_status
from dmq.records import Attributes, RecordView, encode_attributes

__all__ = ["Check", "End", "HalfOptions", "Spans", "Transactions", "check_options", "roll_back_late", "spans_of"]

log = EventLog(__name__)

Check: TypeAlias = Callable[[StoredMessage], Any]
Spans: TypeAlias = list[tuple[int, int]]  # first sequence, count

ENDS_MAX: Final = 5000  # in one request
GIVE_UP_SECONDS: Final = 120.0
_AGAIN_SECONDS: Final = 0.1
_OUTCOMES: Final = {"commit": TransactionOutcome.COMMIT, "rollback": TransactionOutcome.ROLLBACK}


def check_options(group: str | None, check: Check | None) -> None:
    """Refuse what makes no sense.

    Raises:
        InvalidSettings: a check without a group, or one that cannot be called.
        InvalidName: the group cannot be called that.
    """
    if group is not None:
        check_name(group, "producer group")
    if check is not None and group is None:
        raise InvalidSettings("check= answers for a producer group: give group= as well")
    if check is not None and not callable(check):
        raise InvalidSettings(f"check is a function of a message, not {check!r}")


def spans_of(halves: Sequence[tuple[SendBatch, int]]) -> Spans:
    """The numbers of half messages, neighbours together."""
    sequences = sorted(batch.first_sequence + index for batch, index in halves)
    return [(start, stop - start) for start, stop in offset_runs(sequences)]


class HalfOptions(TypedDict, total=False):
    """Options of a message of a transaction, as of `Producer.send`."""

    key: str | None
    tag: str | None
    business_id: str | None
    ordered: bool
    priority: int
    ttl: float | None
    properties: Mapping[str, str] | None


class End(Outcome):
    """What becomes of the end of one transaction."""

    def __init__(self, topic: str, producer_id: int, spans: Spans, outcome: TransactionOutcome, at: float) -> None:
        super().__init__(topic)
        self.producer_id = producer_id
        self.queue = -1  # of the half messages, which says where they are
        self.link: Link | None = None  # over which the broker asked for it
        self.spans = spans
        self.outcome = outcome
        self.epoch = 0
        self.asked_at = at

    def has(self, sequence: int) -> bool:
        return any(first <= sequence < first + count for first, count in self.spans)


class Transactions:
    """The transactions of one producer.

    Parameters:
        group: the producer group.
        check: what answers for half messages of the group; None leaves that to other producers of it.
    """

    def __init__(self, core: Core, links: Links, clock: Clock, group: str, check: Check | None) -> None:
        self._core = core
        self._links = links
        self._clock = clock
        self.group: Final = group
        self.check: Final = check
        self._lock = threading.Lock()
        self._joined: dict[Address, Link] = {}  # over which checks may come
        self._waiting: list[End] = []
        self._is_under_way = False
        self._under_way: list[End] = []
        self._closed_by: DMQError | None = None

    def unsettled(self) -> list[End]:
        """Ends that are on their way."""
        with self._lock:
            return [*self._under_way, *self._waiting]

    # --- preparing --------------------------------------------------------------------------------------------------

    def draft(
        self,
        route: Route,
        topic: str,
        body: Body,
        *,
        first: tuple[SendBatch, int] | None = None,
        **options: Unpack[HalfOptions],
    ) -> Draft:
        """A half message out of the arguments of `Producer.transaction`.

        Parameters:
            first: the first one of its transaction, which is stored, if this is a further one.
            options: of `Message`, beside its body, and its `ttl`.

        Raises:
            InvalidMessage, MessageTooLarge: it cannot be sent.
        """
        ttl = options.pop("ttl", None)
        message = Message(encode_body(body), **options)  # type: ignore[misc]  # which mypy does not narrow
        check_message(topic, message, self._core.sender.body_bytes_max)
        place = choose_queue(route, message)  # refuses what could not be placed at the commit
        place = ANY if route.places is None else _beside(route.places, topic, place, first)
        lane = self._core.lane(LaneKey(topic, place, Durability.FLUSHED, False, group=self.group, is_half=True))
        extra = expiry(ttl, self._clock.now_ms())
        if first is not None:
            extra += encode_attributes(Attributes(transaction=first[0].first_sequence + first[1]))
        return Draft(lane, message, len(message.body) + MESSAGE_BYTES, extra=extra)

    # --- ending -----------------------------------------------------------------------------------------------------

    def end(self, halves: Sequence[tuple[SendBatch, int]], outcome: TransactionOutcome) -> End:
        """End half messages that are stored, all of one producer."""
        batch = halves[0][0]
        end = End(batch.topic, batch.producer_id, spans_of(halves), outcome, at=self._clock.monotonic())
        end.queue = batch.queue
        self._put(end)
        return end

    def end_later(self, halves: Sequence[tuple[SendBatch, int]], outcome: TransactionOutcome) -> End:
        """End half messages once all of them are stored; if one cannot be, that is the end's error."""
        end = End(halves[0][0].topic, 0, [], outcome, at=self._clock.monotonic())
        left = len(halves)

        def stored() -> None:
            nonlocal left
            with self._lock:
                left -= 1
                if left:
                    return
            error = next((batch.error for batch, _ in halves if batch.error is not None), None)
            if error is not None:
                self._tell(end, error)
                return
            first = halves[0][0]
            end.producer_id, end.queue, end.spans = first.producer_id, first.queue, spans_of(halves)
            self._put(end)

        for batch, _ in halves:
            if not batch.add_callback(stored):
                stored()
        return end

    def _put(self, end: End) -> None:
        with self._lock:
            closed_by = self._closed_by
            if closed_by is None:
                self._waiting.append(end)
        if closed_by is not None:
            self._tell(end, closed_by)
        else:
            self.pump()

    def pump(self) -> None:
        """Send what has gathered, unless something is under way."""
        with self._lock:
            if self._is_under_way:
                return
            head = next((end for end in self._waiting if self._link_of(end) is not None), None)
            if head is None:
                return
            link = self._link_of(head)
            assert link is not None
            together = self._under_way = self._take(head, link)
            self._is_under_way = True
        first, *others = [span for end in together for span in end.spans]
        header = TransactionEnd(
            together[0].producer_id,
            together[0].epoch,
            *first,
            together[0].outcome,
            others=[TransactionSpan(*span) for span in others],
        )
        try:
            link.submit(
                Command.TRANSACTION_END,
                header,
                on_answer=lambda answer: self._answered(together, answer),
                attended=True,
            )
        except DMQError as error:
            self._answered(together, error)

    def _link_of(self, end: End) -> Link | None:
        """The link to the broker that has the half messages of an end; None while there is none."""
        return end.link or self._links.link_for(end.topic, end.queue)

    def _take(self, head: End, link: Link) -> list[End]:
        """Those that can share a request with one that waits, itself with them."""
        together: list[End] = []
        rest: list[End] = []
        count = 0
        for end in self._waiting:
            is_alike = (end.producer_id, end.epoch, end.outcome) == (head.producer_id, head.epoch, head.outcome)
            if is_alike and self._link_of(end) is link and (not together or count + len(end.spans) <= ENDS_MAX):
                together.append(end)
                count += len(end.spans)
            else:
                rest.append(end)
        self._waiting = rest
        return together

    def _answered(self, together: list[End], answer: Frame | DMQError) -> None:
        refused: dict[int, DMQError] = {}
        failed: DMQError | None = None
        again = False
        if isinstance(answer, DMQError):
            again = True  # the connection broke: the same on the next one
        else:
            try:
                reply: TransactionEndReply = decode_response(answer)
                refused = {r.sequence: error_from_status(r.status, ErrorHeader(r.message, {})) for r in reply.refused}
            except DMQError as error:
                again, failed = error.retriable, error
        if again:
            self._put_back(together)
            return
        with self._lock:
            self._is_under_way, self._under_way = False, []
        for end in together:
            self._tell(end, failed or next((e for at, e in refused.items() if end.has(at)), None))
        self.pump()

    def _put_back(self, together: list[End]) -> None:
        now = self._clock.monotonic()
        late = [end for end in together if now - end.asked_at > GIVE_UP_SECONDS]
        for end in together:
            end.link = None
        with self._lock:
            self._waiting = [end for end in together if end not in late] + self._waiting
            self._is_under_way, self._under_way = False, []
        for end in late:
            self._tell(end, OutOfRetries("the end of a transaction was never answered; a check will end it"))
        self._links.call_later(_AGAIN_SECONDS, self.pump)

    def _tell(self, end: End, error: DMQError | None) -> None:
        end.end(None, error)
        for callback in end.take_callbacks():
            self._links.notify(callback)

    # --- checks -----------------------------------------------------------------------------------------------------

    def connected(self, link: Link) -> None:
        """A connection is in use: what waits goes out, and the broker learns that it can ask here."""
        if self.check is not None:
            self._joined[link.address] = link
            try:
                link.submit(Command.TRANSACTION_JOIN, TransactionJoin(self.group), on_answer=_joined, attended=True)
            except DMQError as error:
                log.warning("a producer group was not joined", once_for=self.group, group=self.group, error=error)
        self.pump()

    def pushed(self, link: Link, header: TransactionCheck, body: bytes | memoryview) -> None:
        """A broker asks what became of a half message."""
        if header.group == self.group and self.check is not None:
            self._links.notify(self._ask, link, header, bytes(body))

    def _ask(self, link: Link, header: TransactionCheck, record: bytes) -> Awaitable[None] | None:
        assert self.check is not None
        message_id = MessageId.from_bytes(header.message_id)
        try:
            decision = self.check(StoredMessage.of(RecordView(record), message_id, header.topic))
        except Exception:
            log.exception("the check of a transaction raised", once_for=(), id=message_id)
            return None
        if isawaitable(decision):
            return self._await(decision, link, header, message_id)
        self._decided(decision, link, header, message_id)
        return None

    async def _await(
        self, decision: Awaitable[Any], link: Link, header: TransactionCheck, message_id: MessageId
    ) -> None:
        try:
            decided = await decision
        except Exception:
            log.exception("the check of a transaction raised", once_for=(), id=message_id)
        else:
            self._decided(decided, link, header, message_id)

    def _decided(self, decision: object, link: Link, header: TransactionCheck, message_id: MessageId) -> None:
        if decision is None:
            return  # not known: the broker asks again
        outcome = _OUTCOMES.get(decision) if isinstance(decision, str) else None
        if outcome is None:
            log.error(
                "check returned something else than 'commit', 'rollback' or None", once_for=(), id=str(message_id)
            )
            return
        end = End(header.topic, message_id.producer_id, [(message_id.sequence, 1)], outcome, at=self._clock.monotonic())
        end.epoch, end.link, end.queue = header.producer_epoch, link, place_of(0, link.shard)
        self._put(end)

    def close(self, error: DMQError) -> None:
        """No more: what waits fails, and checks go to others."""
        for link in self._joined.values() if self._closed_by is None else ():
            try:
                link.submit(
                    Command.TRANSACTION_JOIN, TransactionJoin(self.group, True), on_answer=_joined, attended=False
                )
            except DMQError:
                pass  # with the connection goes the membership
        with self._lock:
            self._closed_by = self._closed_by or error
            waiting, self._waiting = self._waiting, []
        for end in waiting:
            self._tell(end, error)


def _beside(places: Sequence[int], topic: str, place: int, first: tuple[SendBatch, int] | None) -> int:
    """Where a half message goes in a cluster: all of one transaction are in one shard, which ends them together.

    Parameters:
        place: that it is bound to, if it is ordered; else less than 0.
        first: the first message of its transaction, if this is a further one.

    Raises:
        InvalidMessage: it cannot be in the shard of the first one.
    """
    if first is None:
        return max(place, ANY)
    shard, sequence = first[0].shard, first[0].first_sequence
    if place >= 0:
        if place_shard(place) == shard:
            return place
        raise InvalidMessage(
            f"an ordered message of this business id belongs to shard {place_shard(place)}, and its transaction was "
            f"begun in shard {shard}: begin it with that message, or send it in a transaction of its own"
        )
    own = [one for one in places if place_shard(one) == shard]
    if not own:
        raise InvalidMessage(
            f"topic {topic!r} takes no messages in shard {shard}, where the transaction was begun, and all messages of "
            "one are in one shard: put the topic there with `dmq topic place`, or use a transaction of its own"
        )
    return own[sequence % len(own)]


def _joined(answer: Frame | DMQError) -> None:
    if isinstance(answer, Frame) and answer.status:
        log.warning("a producer group was not joined", status=answer.status)


def roll_back_late(transactions: Transactions, batch: SendBatch, index: int) -> None:
    """Nobody waits for a half message any more: should it be stored after all, it is rolled back."""

    def stored() -> None:
        if batch.error is None:
            transactions.end([(batch, index)], TransactionOutcome.ROLLBACK)

    if not batch.add_callback(stored):
        stored()
