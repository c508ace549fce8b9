"""The part of a producer that both clients share: from a call's arguments to a message in its lane.

What always holds: a message that was taken is in exactly one batch; a producer that is closed takes none; what a user
chose is checked when the producer is made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from dmq.client.arguments import check_seconds, check_whole
from dmq.client.connection.link import Links
from dmq.client.producer.accumulator import MESSAGE_BYTES, Accumulator, Draft, Lane, LaneKey, SendBatch
from dmq.client.producer.encoder import BatchEncoder, encode_body
from dmq.client.producer.future import Repeated, Sent, UnknownOutcomes
from dmq.client.producer.message import (
    TEXT_MAX,
    SendOptions,
    check_message,
    due_ms,
    expiry,
    parse_durability,
    with_bytes,
)
from dmq.client.producer.retry_policy import RetryPolicy
from dmq.client.producer.routes import Route, Routes, choose_queue
from dmq.client.producer.sender import Sender
from dmq.clock import Clock
from dmq.compiled import choose, find
from dmq.errors import Busy, InvalidMessage, InvalidSettings
from dmq.model import DEFAULT_PRIORITY, Durability, DurabilityName, Message, check_name
from dmq.records import Compressor, is_plain
from dmq.records.encoder import PlainColumns, plain_columns

__all__ = ["Core", "Draft", "OnFull", "ProducerOptions", "Spooling", "listed", "simple_size"]

OnFull: TypeAlias = Literal["block", "raise"] | Callable[[str, Message], Any]

WINDOW_MESSAGES: Final = 1_000_000
# Of one batch of `send_many`. A call is cut into some, so that the broker works on one while the next is made. But what
# a batch costs as such, on both sides, is that of some hundred messages: smaller ones cost more than overlapping gains.
MANY_BYTES: Final = 1 << 20
SPOOLED_BYTES: Final = 256 << 10  # the same with a spool, which may be no larger than that
MANY_MESSAGES: Final = 2048
MANY_MESSAGES_MIN: Final = 1000
WHOLE_MESSAGES: Final = 2 * MANY_MESSAGES_MIN  # fewer than these go together
MANY_PARTS: Final = 4
_ANY_TOPIC: Final = Route(1, False, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """What a user chose for a producer.

    Raises:
        InvalidSettings: a choice makes no sense.
    """

    timeout: float | None = 5.0
    retries: int = 3
    window_bytes: int = 32 << 20
    window_messages: int = WINDOW_MESSAGES
    on_full: OnFull = "block"
    compression: str = "auto"
    resend_after: Sequence[float] = (30.0, 60.0, 90.0)
    straight: bool = True

    def __post_init__(self) -> None:
        if self.timeout is not None:
            check_seconds("timeout", self.timeout, above=True)
        check_whole("retries", self.retries, 0, 1 << 31)
        check_whole("window_bytes", self.window_bytes, 1, 1 << 62)
        check_whole("window_messages", self.window_messages, 1, 1 << 62)
        if not callable(self.on_full) and self.on_full not in ("block", "raise"):
            raise InvalidSettings(f"on_full is 'block', 'raise' or a function, not {self.on_full!r}")
        if self.compression not in ("auto", "none", "lz4", "zstd"):
            raise InvalidSettings(f"compression is auto, none, lz4 or zstd, not {self.compression!r}")
        if not _rises(self.resend_after):
            raise InvalidSettings(f"resend_after is a list of rising times in seconds, not {self.resend_after!r}")

    def make_encoder(self, app: str, clock: Clock) -> BatchEncoder:
        """The encoder of a producer that sends under the name of an app.

        Raises:
            InvalidName: the app cannot be called that.
        """
        check_name(app, "app")
        compressor = None if self.compression == "none" else Compressor(self.compression)  # type: ignore[arg-type]
        return BatchEncoder(app, clock, compressor)

    def make_policy(self) -> RetryPolicy:
        return RetryPolicy(self.retries, self.resend_after)


def _rises(times: Any) -> bool:
    """Whether these are times in seconds, each after the one before."""
    if not isinstance(times, list | tuple) or not all(isinstance(time, int | float) for time in times):
        return False
    return all(later > sooner for sooner, later in zip((0.0, *times), times, strict=False))


class Spooling(Protocol):
    """What a producer asks of a sender that keeps batches on the disk before they go to a broker."""

    def remember(self, topic: str) -> None:
        """Keep what is known of a topic for the next start."""
        ...

    def wait_kept(self, batch: SendBatch, deadline: float) -> None:
        """Wait until the batch is on the disk, at most until a moment of `time.monotonic`."""
        ...

    def give_up(self, batch: SendBatch, timeout: float) -> None:
        """The time of a synchronous send is over: end it well if the batch is on the disk, else raise."""
        ...

    def wait_drained(self, deadline: float, *, while_connected: bool = False) -> bool:
        """Wait until a broker has acknowledged everything that is on the disk; whether it has."""
        ...

    def lost(self) -> None:
        """A link broke."""
        ...

    def leave(self) -> None:
        """Let the disk go."""
        ...


class Core:
    """One producer, without waiting for anything.

    Parameters:
        sender: takes batches from its accumulator to a broker.
        spooling: the same sender if it has a spool.
    """

    def __init__(
        self,
        options: ProducerOptions,
        sender: Sender,
        routes: Routes,
        links: Links,
        clock: Clock,
        spooling: Spooling | None = None,
    ) -> None:
        self.options: Final = options
        self.sender: Final = sender
        self.accumulator: Final = sender.accumulator
        self.routes: Final = routes
        self.clock: Final = clock
        self.spooling: Final = spooling
        self.lock: Final = sender.lock
        self.outcomes: Final = UnknownOutcomes(options.window_bytes)
        self._links = links
        self._gatherer = self.accumulator.gatherer = _make_gatherer(sender)
        self.begin_lone: Callable[..., SendBatch | None] | None = None
        """Sends a message of `send_async` that has nothing before it at once; None where that takes the general way."""
        self._plain: dict[tuple[str, str], Lane] = {}  # lanes of messages that ask for nothing special
        self._last: tuple[str, str, Lane | None] = ("", "", None)  # the one that `gather` took last

    @classmethod
    def make(cls, app: str, options: ProducerOptions, routes: Routes, links: Links, clock: Clock) -> Core:
        """The core of a producer without a spool.

        Raises:
            InvalidName: the app cannot be called that.
        """
        accumulator = Accumulator(options.window_bytes, options.window_messages)
        encoder, policy = options.make_encoder(app, clock), options.make_policy()
        sender = Sender(accumulator, encoder, policy, routes=routes, links=links, clock=clock)
        return cls(options, sender, routes, links, clock=clock)

    def check_open(self) -> None:
        """Refuse to work once closed.

        Raises:
            NotConnected: the producer, or its client, was closed.
        """
        error = self.sender.closed_by
        if error is not None:
            raise type(error)(error.message, **error.detail)

    def draft(self, route: Route, message: Message, options: SendOptions) -> Draft:
        """A message that is checked and knows its lane.

        Raises:
            InvalidMessage, MessageTooLarge: it cannot be sent.
        """
        topic, durability = options.topic, options.durability
        if type(message.body) is not bytes:
            message = with_bytes(message)
        check_message(topic, message, self.sender.body_bytes_max)
        size = len(message.body) + MESSAGE_BYTES
        if (
            not message.ordered and not route.is_priority and not options.consumed_by and options.ttl is None
            and not options.delay and not options.deliver_at
        ):  # fmt: skip
            lane = self._plain.get((topic, durability))
            if lane is None:
                lane = self._plain[topic, durability] = self._lane(route, message, options, is_delayed=False)
            return Draft(lane, message, size, 0, extra=b"")
        now_ms = self.clock.now_ms()
        extra, due = expiry(options.ttl, now_ms), due_ms(options.delay, options.deliver_at, now_ms)
        return Draft(self._lane(route, message, options, is_delayed=bool(due)), message, size, due, extra=extra)

    def plain_draft(self, topic: str, message: Message, durability: DurabilityName) -> Draft | None:
        """`draft` for a message with a body and at most a key that needs nothing special; None for others."""
        if not (
            message.tag is None and message.business_id is None and message.priority == DEFAULT_PRIORITY
            and message.properties is None
        ):  # fmt: skip
            return None
        lane, route = self._plain.get((topic, durability)), self.routes.get(topic)
        if lane is None or route is None or route.is_priority or not self.is_simple(message.body, message.key):
            return None
        return Draft(lane, message, len(message.body) + MESSAGE_BYTES, is_plain=True)

    def check(self, options: SendOptions, message: Message | None, messages: Sequence[Message] = ()) -> None:
        """Refuse what no topic takes, before its topic is asked for: a broker may create one that is.

        Parameters:
            message: of a `send`.
            messages: of a `send_many`; as many as one batch takes are looked at.

        Raises:
            InvalidMessage, MessageTooLarge: it cannot be sent.
        """
        if message is None:
            next(self.many(_ANY_TOPIC, messages, options), None)
            return
        _level(options)
        now_ms = self.clock.now_ms()
        expiry(options.ttl, now_ms)
        due_ms(options.delay, options.deliver_at, now_ms)
        message = message if type(message.body) is bytes else with_bytes(message)
        check_message(options.topic, message, self.sender.body_bytes_max)

    def _lane(self, route: Route, message: Message, options: SendOptions, *, is_delayed: bool) -> Lane:
        level = _level(options)
        if message.ordered and route.places is not None:
            route = self.sender.division(options.topic, route)
        queue = choose_queue(route, message)
        version = route.slots_version if queue >= 0 else 0
        return self.lane(
            LaneKey(
                options.topic, queue, level, is_delayed=is_delayed, group=options.consumed_by, slots_version=version
            )
        )

    def plain_lane(self, topic: str, durability: DurabilityName) -> Lane | None:
        """The lane of messages that ask for nothing special; None for a topic that was not sent to before."""
        return self._plain.get((topic, durability))

    def is_simple(self, body: object, key: str | None) -> bool:
        """Whether a message is what is sent most: bytes and at most a key. If not, `draft` decides."""
        return simple_size(body, key, self.sender.body_bytes_max, TEXT_MAX) >= 0

    def gather(
        self,
        topic: str,
        durability: DurabilityName,
        body: Any,
        key: str | None,
        on_delivery: Callable[..., Any] | None = None,
    ) -> tuple[SendBatch, int] | None:
        """Put a message of `send_async` into its lane, and send what is ready to go there: its batch and its place.

        None if it is not as simple as `is_simple` asks for, or the window is full: then `draft` and `put` decide.
        """
        if self._gatherer is not None and (put := self._gatherer.take(topic, durability, body, key)) is not None:
            batch, index = put
            if on_delivery is not None and not batch.add_callback(partial(batch.tell, index, on_delivery)):
                batch.tell(index, on_delivery)
            return batch, index
        sender, is_worth_a_look, (last_topic, last_durability, lane) = self.sender, False, self._last
        if topic is not last_topic or durability is not last_durability:
            lane = self._plain.get((topic, durability))
            if lane is None:
                return None
            self._last = (topic, durability, lane)
        # As `is_simple`, without the call: a flood of sends comes through here.
        size = simple_size(body, key, sender.body_bytes_max, TEXT_MAX) + MESSAGE_BYTES
        if lane is None or size < MESSAGE_BYTES:
            return None
        if self.begin_lone is not None and lane.gathering is None and not lane.under_way:
            batch = self.begin_lone(topic, Message(body, key), durability, on_delivery)
            if batch is not None:
                return batch, 0
        with sender.lock:
            batch = lane.gathering
            if batch is not None and batch.room >= size and sender.closed_by is None:
                # No call among these, so that Ctrl-C finds all of them done, or none.
                batch.pairs += (body, key)
                batch.room -= size
                index = batch.count
                batch.count = index + 1
            else:
                batch = None if sender.closed_by is not None else self.accumulator.append_plain(lane, body, key, size)
                if batch is None:
                    return None
                batch.is_attended, batch.deadline = True, None
                index, is_worth_a_look = batch.count - 1, batch.is_worth_a_look
                self.accumulator.reserve(batch)
                if self._gatherer is not None and batch.room:
                    self._gatherer.open(topic, durability, batch, sender.body_bytes_max)
        if on_delivery is not None and not batch.add_callback(partial(batch.tell, index, on_delivery)):
            batch.tell(index, on_delivery)
        if is_worth_a_look:
            sender.pump(lane)
        return batch, index

    def join(
        self, topic: str, message: Message, durability: DurabilityName, deadline: float | None, *, is_held: bool = False
    ) -> tuple[SendBatch, int] | None:
        """Put a message of `send` into its lane, where many gather: its batch and its place; None if they are few.

        Nobody has to read for it. Of many threads that take turns in reading, the next one would have to wait for the
        interpreter's lock behind all those whose answers the last one read.

        None also if it is not plain (`draft` decides then), if the window is full, or no broker connected (`put` does).

        Parameters:
            is_held: the caller sends what is ready to go; else it is sent here.
        """
        lane, sender = self._plain.get((topic, durability)), self.sender
        if (
            lane is None or not lane.is_crowded or not (lane.under_way or lane.is_held or is_held)
            or not (message.tag is None and message.business_id is None and message.properties is None)
            or message.priority != DEFAULT_PRIORITY or not self.is_simple(message.body, message.key)
            or self._links.link_for(topic) is None
        ):  # fmt: skip
            return None
        with sender.lock:
            if sender.closed_by is not None:
                return None
            batch = self.accumulator.append_plain(lane, message.body, message.key, len(message.body) + MESSAGE_BYTES)
            if batch is None:
                return None
            if batch.count == 1:
                batch.deadline = deadline
            elif batch.deadline is not None:
                batch.deadline = None if deadline is None else max(batch.deadline, deadline)
            batch.is_attended, index = True, batch.count - 1
        if batch.is_worth_a_look and not is_held:
            sender.pump(lane)
        return batch, index

    def lane(self, key: LaneKey) -> Lane:
        with self.lock:
            return self.accumulator.lane(key)

    def put(self, draft: Draft, *, attended: bool, deadline: float | None) -> tuple[SendBatch, int] | None:
        """Put a message into its lane: its batch and its place there; None if the window is full.

        While no broker is connected, a message that somebody waits for has a batch of its own: it can be taken back
        when its time is over, and its sender be told that it was not sent.
        """
        key = draft.lane.key
        is_alone = not attended and self._links.link_for(key.topic, key.queue) is None
        with self.lock:
            if self.sender.closed_by is not None or not self.accumulator.has_room(draft.size, 1):
                return None
            if is_alone:
                self.accumulator.seal(draft.lane)
            batch = self.accumulator.append(draft)
            if is_alone:
                self.accumulator.seal(draft.lane)
            if attended:
                batch.is_attended, batch.deadline = True, None
            elif not batch.is_attended and deadline is not None:
                batch.deadline = max(batch.deadline or 0.0, deadline)
            return batch, batch.count - 1

    def full(self, topic: str, message: Message) -> Busy:
        """The window is full and nobody waits: tell the user's function if there is one; the error to fail with."""
        if callable(self.options.on_full):
            self.options.on_full(topic, message)
        return Busy(self.accumulator.why_full())

    def watched(self, sent: Sent) -> tuple[SendBatch, int]:
        """A message of `send_async` that a repeat must find if it ends unknown: its batch and its place there."""
        batch, index, message, name, is_object = sent
        if is_object and name is None:
            batch.add_callback(lambda: self.outcomes.keep(message, batch, index) if batch.is_unknown else None)
        return batch, index

    def repeats(self, topic: str, messages: Sequence[Message]) -> tuple[list[tuple[Repeated, list[int]]], list[int]]:
        """What of a `send_many` was sent before and may be stored, as parts of it; and the indexes of the rest."""
        parts: dict[SendBatch, tuple[Repeated, list[int]]] = {}
        fresh = []
        for at, message in enumerate(messages):
            found = self.outcomes.take(topic, message)
            if found is None:
                fresh.append(at)
                continue
            repeated, indexes = parts.setdefault(found[0], (Repeated(found[0], []), []))
            repeated.indexes.append(found[1])
            indexes.append(at)
        return [*parts.values()], fresh

    def many_failed(
        self, parts: Sequence[tuple[SendBatch | Repeated, Sequence[int]]], messages: Sequence[Message]
    ) -> None:
        """A `send_many` failed: remember its messages that are or may be stored, since it gave no receipts."""
        for part, indexes in parts:
            batch = part.batch if isinstance(part, Repeated) else part
            if batch.error is None or batch.is_unknown:
                ranks = part.indexes if isinstance(part, Repeated) else range(len(indexes))
                for rank, at in zip(ranks, indexes, strict=True):
                    self.outcomes.keep(messages[at], batch, rank)

    def many(
        self, route: Route, messages: Sequence[Message], options: SendOptions
    ) -> Iterator[tuple[SendBatch, Sequence[int]]]:
        """Batches of `send_many`, each encoded when it is asked for, with the indexes of its messages.

        Raises:
            InvalidMessage, MessageTooLarge: a message cannot be sent; `detail["index"]` says which.
        """
        level = _level(options)
        due = due_ms(options.delay, options.deliver_at, self.clock.now_ms())
        whole: list[tuple[int, Sequence[int]]] = [(-1, range(len(messages)))]
        columns: PlainColumns | None = None
        try:
            if len(messages) < WHOLE_MESSAGES and not route.is_priority:
                columns = plain_columns(messages)  # what makes one batch is looked at once
            plain = columns is not None or is_plain(messages)
            if not plain and route.places is not None:
                route = self.sender.division(options.topic, route)
            parts = whole if plain and not route.is_priority else _by_queue(route, messages)
        except AttributeError:
            raise _no_message(messages) from None
        for queue, indexes in parts:
            key = LaneKey(options.topic, queue, level, is_delayed=bool(due), group=options.consumed_by)
            lane = self.lane(key._replace(slots_version=route.slots_version) if queue >= 0 else key)
            if queue < 0 and not due and not options.consumed_by:
                self._plain.setdefault((options.topic, options.durability), lane)
            start = 0
            count = max(1, min(MANY_PARTS, len(indexes) // MANY_MESSAGES_MIN))
            limit = min(MANY_MESSAGES, -(-len(indexes) // count))
            while start < len(indexes):
                batch = SendBatch(lane)
                batch.is_kept = True
                if columns is not None and columns[2] <= self.many_bytes():
                    stop = self.fill_columns(batch, columns)
                else:
                    stop = self._fill(batch, messages, indexes[start : start + limit], plain=plain) + start
                part = indexes[start:stop]
                if due:
                    batch.dues = [due] * batch.count
                try:
                    self.sender.encode(batch)
                except InvalidMessage as error:
                    raise _with_index(error, part) from error
                yield batch, part
                start = stop

    def _fill(self, batch: SendBatch, messages: Sequence[Message], indexes: Sequence[int], plain: bool) -> int:
        """Put messages into a batch, as many as go into one; how many these are."""
        part = (
            messages[indexes.start : indexes.stop]
            if isinstance(indexes, range)
            else [messages[index] for index in indexes]
        )
        columns = plain_columns(part, are_plain=True) if plain else None
        if columns is not None and columns[2] <= self.many_bytes():  # as most are
            return self.fill_columns(batch, columns)
        bodies = [message.body for message in part]
        if {*map(type, bodies)} != {bytes}:
            bodies = [*map(encode_body, bodies)]
            part = [msgspec.structs.replace(message, body=body) for message, body in zip(part, bodies, strict=True)]
        count, total = _cut([*map(len, bodies)], self.many_bytes())
        if count < len(part):
            part, bodies = part[:count], bodies[:count]
        batch.is_plain = plain or is_plain(part)
        if batch.is_plain:
            batch.bodies, batch.keys = bodies, [message.key for message in part]
        else:
            batch.messages = [*part]
        batch.count = count
        batch.bytes = total + MESSAGE_BYTES * count
        return count

    @staticmethod
    def fill_columns(batch: SendBatch, columns: PlainColumns) -> int:
        """Put plain messages into a batch that has room for all; how many these are."""
        batch.bodies, batch.keys, total = columns
        batch.count = len(batch.bodies)
        batch.bytes = total + MESSAGE_BYTES * batch.count
        return batch.count

    def many_bytes(self) -> int:
        """How large the bodies of one batch of `send_many` may be together: within window and frames, with room."""
        most = MANY_BYTES if self.spooling is None else SPOOLED_BYTES
        return min(most, self.options.window_bytes, self.sender.frame_bytes_max // 4)


def simple_size_plain(body: object, key: object, body_bytes_max: int, key_max: int) -> int:
    """How large a body is; -1 if it is larger than that or not bytes, or the key is neither None nor short ASCII."""
    if type(body) is not bytes or len(body) > body_bytes_max:
        return -1
    if key is not None and (type(key) is not str or len(key) > key_max or not key.isascii()):
        return -1
    return len(body)


simple_size: Final = choose(simple_size_plain, "simple_size")
_Gatherer: Final = find("Gatherer")


def _make_gatherer(sender: Sender) -> Any:
    """What puts plain messages into a batch by compiled code; None where there is none."""
    return None if _Gatherer is None else _Gatherer(sender.lock.locked, TEXT_MAX, MESSAGE_BYTES)


def _cut(sizes: list[int], limit: int) -> tuple[int, int]:
    """How many bodies of these sizes make one batch of `send_many`, and how large they are together."""
    total = sum(sizes)
    if total <= limit:
        return len(sizes), total
    sums = [*accumulate(sizes)]
    count = max(1, bisect_right(sums, limit))
    return count, sums[count - 1]


def listed(messages: Any) -> Sequence[Message]:
    """What `send_many` was given, as something that has a length.

    Raises:
        InvalidMessage: it is not a list of messages.
    """
    if isinstance(messages, list | tuple):
        return messages
    if not isinstance(messages, Iterable) or isinstance(messages, str | bytes | Message):
        raise InvalidMessage(f"send_many takes a list of messages, as in [dmq.Message(b'body')], not {messages!r:.80}")
    return messages if isinstance(messages, Sequence) else [*messages]


def _no_message(given: Sequence[object]) -> InvalidMessage:
    """The error for a list in which something is not a message."""
    index, wrong = next((at, one) for at, one in enumerate(given) if not isinstance(one, Message))
    kind = type(wrong).__name__
    return InvalidMessage(
        f"message {index} is of type {kind}: send_many takes messages, as in dmq.Message(b'body')", index=index
    )


def _level(options: SendOptions) -> Durability:
    """The durability that was asked for.

    Raises:
        InvalidMessage: there is none of that name, or `consumed_by` does not go with it.
    """
    level = parse_durability(options.durability)
    if (level == Durability.CONSUMED) != bool(options.consumed_by):
        raise InvalidMessage(
            "durability='consumed' needs consumed_by: the group whose ack is waited for"
            if not options.consumed_by
            else "consumed_by goes with durability='consumed' only"
        )
    return level


def _by_queue(route: Route, messages: Sequence[Message]) -> list[tuple[int, Sequence[int]]]:
    """Which messages go where: one entry for any queue in the usual case, else one for each queue."""
    is_ordered = {message.ordered for message in messages}
    if not route.is_priority and not any(is_ordered):
        return [(-1, range(len(messages)))]
    queues: dict[int, list[int]] = {}
    for index, message in enumerate(messages):
        try:
            queues.setdefault(choose_queue(route, message), []).append(index)
        except InvalidMessage as error:
            raise InvalidMessage(f"message {index}: {error.message}", index=index) from None
    return [*queues.items()]


def _with_index(error: InvalidMessage, part: Sequence[int]) -> InvalidMessage:
    """The error with the index the message had in the user's list."""
    index = error.detail.get("index")
    if not isinstance(index, int) or part[index] == index:
        return error
    message = error.message.replace(f"message {index}:", f"message {part[index]}:", 1)
    return type(error)(message, **{**error.detail, "index": part[index]})
