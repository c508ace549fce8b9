"""Readers of journals for blocking programs, Spark's executors and the archive: of one broker's, and of a cluster's.

The broker hands out whole units, as they are on its disk; the caller decodes them (`dmq.pipeline.decode.units`).
Reading moves no group and takes nothing away, so every request may be repeated. Of a cluster there is one
`JournalReader` for each shard, found by asking any of its brokers. Brokers of earlier versions do not know LOCATE:
`OlderBroker` makes its answer out of OFFSETS and PEEK, two requests for each point.

What always holds: `units` gives every unit that starts in its range, once, in order; while one answer is worked on the
next is on its way, and no more than that. A broker that restarts, and a shard that has no leader for a while, is waited
for, as long as the timeout says. Units of a shard come from a follower if one answers, and are the same bytes. Shards
are known by their numbers; a lone broker is shard 0. A location is of one incarnation of the topic, and of offsets that
there were when it was asked for.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

from dmq.client.admin.calls import When, parse_point
from dmq.client.connection.pool import Pool, PoolSettings
from dmq.client.connection.router import Router
from dmq.client.connection.session import make_hello
from dmq.client.connection.url import OneBroker, parse_url
from dmq.clock import Clock, SystemClock
from dmq.errors import Damaged, DMQError, NotConnected, OffsetGone, TimedOut, UnknownCommand, UnknownTopic
from dmq.protocol import Command, Frame, Header, decode_response, unpack_records
from dmq.protocol.admin import TopicInfo, TopicList
from dmq.protocol.cluster.route import Route, RouteReply
from dmq.protocol.consume import Point, PointKind
from dmq.protocol.read import (
    Archived,
    ArchivedReply,
    Fetch,
    Locate,
    Location,
    Offsets,
    OffsetsReply,
    Peek,
    PeekReply,
    QueueLocations,
    QueueOffsets,
    TopicLocations,
    TopicPoints,
)
from dmq.records import ANY_QUEUE
from dmq.records.layout import JOURNAL_OFFSET_AT, U64
from dmq.storage.journal.unit import HEADER_BYTES

__all__ = [
    "FETCH_BYTES",
    "LONE",
    "PATIENCE",
    "ClusterReader",
    "Fetched",
    "JournalReader",
    "Patience",
    "Peeked",
    "server_url",
    "shard_reader",
    "shard_servers",
    "unit_starts",
]

FETCH_BYTES: Final = 4 << 20
TIMEOUT: Final = 60.0
LOCATED_TOPICS: Final = 1000  # in one request
ANSWER_SECONDS: Final = 60.0  # that a broker may take for an answer
FOLLOWER_SECONDS: Final = 5.0  # that a follower may take, before the leader is asked instead
_LENGTH: Final = struct.Struct(">4s20xI")  # of a unit: its magic, and its length at byte 24


class Patience(NamedTuple):
    """How long a broker is waited for.

    `timeout`: seconds that it may be away, and that one question may take with all its repetitions; `answer_seconds`:
    that one answer may take; `retries`: how often a question that got no answer in the timeout has that time again.
    """

    timeout: float = TIMEOUT
    answer_seconds: float = ANSWER_SECONDS
    retries: int = 0

    @property
    def whole_seconds(self) -> float:
        """The timeout, and once more for each of the retries."""
        return self.timeout * (1 + self.retries)

    def ask(self, pool: Pool, command: Command, header: Header) -> Frame:
        """Ask a question that may be asked twice.

        Raises:
            NotConnected: nobody was there in time.
            TimedOut: nobody answered in time.
        """
        left = self.retries
        deadline = time.monotonic() + self.timeout
        while True:
            seconds = max(0.001, deadline - time.monotonic())
            try:
                return pool.request(command, header, timeout=seconds, answer_seconds=self.answer_seconds)
            except (NotConnected, TimedOut) as error:
                if isinstance(error, TimedOut) and time.monotonic() < deadline:
                    continue
                if not left or pool.closed_by is not None:
                    raise
                left -= 1
                deadline = time.monotonic() + self.timeout


PATIENCE: Final = Patience()


class Fetched(NamedTuple):
    """Units from journal offset `start` to `end`; the journal has `first` up to `visible`.

    They are verbatim, unless only what concerns some topics was asked for.
    """

    start: int
    end: int
    first: int
    visible: int
    journal_id: int
    body: memoryview


class Peeked(NamedTuple):
    """Records of one queue, one after another; read on at `end_offset`. `ids` and `origins` are runs, as in `Span`.

    `topic_id` is the incarnation of the topic; 0 if the broker does not say.
    """

    first_offset: int
    end_offset: int
    lengths: list[int]
    ids: list[tuple[int, int, int]]
    origins: list[tuple[int, int, bytes]]
    body: memoryview
    topic_id: int

    def check_incarnation(self, topic: str, topic_id: int) -> None:
        """Check that the records are of one incarnation of their topic.

        Raises:
            OffsetGone: they are of a later one.
        """
        if self.topic_id not in (0, topic_id):
            raise OffsetGone(f"topic {topic!r} was deleted and created again while it was read")


def server_url(servers: str) -> str:
    """A URL for the addresses of brokers, which may be one already: `host:port,host2:port2`."""
    return servers if "://" in servers else f"dmq://{servers}"


class JournalReader:
    """One connection to a broker. A context manager; used by one thread.

    Parameters:
        servers: `host:port`, several separated by commas, or a URL; of one broker, or the members of one shard.
        app: the name under which the broker sees us.
        timeout: seconds that a broker may be away, and that one question may take with all its repetitions; or all
            that there is to say of it.

    Raises:
        NotConnected: nobody answered within the timeout.
        InvalidSettings: the addresses make no sense.
    """

    def __init__(
        self,
        servers: str,
        app: str = "dmq-spark",
        timeout: float | Patience = TIMEOUT,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._patience = timeout if isinstance(timeout, Patience) else Patience(timeout)
        self._router = Router(
            OneBroker(parse_url(server_url(servers))),
            PoolSettings(
                make_hello(app, None), clock or SystemClock(), timeout=self._patience.timeout, is_routed=False
            ),
        )
        self._router.open()
        self._ahead = ThreadPoolExecutor(1, "dmq-ahead")
        self._app = app
        self._clock = clock or SystemClock()
        self._followers = self._find_followers()

    def _find_followers(self) -> Router | None:
        """A connection to a member that does not lead the shard, which has other things to do than to be read."""
        connection = self._router.home.current()
        info = None if connection is None else connection.reply.shard
        others = [] if info is None else [address for address in info.members if address != info.leader]
        if info is None or not info.is_leader or not others:
            return None
        random.shuffle(others)
        followers = Router(
            OneBroker(parse_url(server_url(",".join(others)))),
            PoolSettings(make_hello(self._app, None), self._clock, reconnect=False, any_member=True),
        )
        try:
            followers.open()
        except DMQError:
            return None
        return followers

    def _ask(self, command: Command, header: Header) -> Frame:
        return self._patience.ask(self._router.home, command, header)

    def archived(self, journal_id: int = 0, offset: int = 0) -> ArchivedReply:
        """How far the journal is archived; given an offset, record first that it is archived so far.

        Raises:
            OffsetGone: the journal has no such offset.
            InvalidRequest: the broker has another journal.
        """
        reply: ArchivedReply = decode_response(self._ask(Command.ARCHIVED, Archived(journal_id, offset)))
        return reply

    def _ask_any(self, asked: Fetch) -> Frame:
        """Ask a follower, if there is one; the leader for what that one does not have, or does not answer in time."""
        if self._followers is not None and not asked.wait_ms:
            try:
                frame = self._followers.home.request(
                    Command.FETCH, asked, timeout=FOLLOWER_SECONDS, answer_seconds=FOLLOWER_SECONDS
                )
                # No more than that: the follower has all that it knows of, and the leader may have more.
                if not frame.status and decode_response(frame).end > asked.journal_offset:
                    return frame
            except DMQError:
                # It is stopped or gone, or leads now and has too much to do: the leader is asked from now on.
                self._followers.close()
                self._followers = None
        return self._ask(Command.FETCH, asked)

    def topics(self, *, system: bool = False) -> list[TopicInfo]:
        """All topics by name, with id (`topic_id`) and `config.queues`; ours, too, with `system`."""
        found: list[TopicInfo] = []
        more = True
        while more:
            after = found[-1].topic if found else ""
            reply = decode_response(self._ask(Command.TOPIC_LIST, TopicList("", after, system=system)))
            found += reply.topics
            more = reply.more and bool(reply.topics)
        return found

    def offsets(self, topic: str, at: When | None = None) -> OffsetsReply:
        """What each queue of a topic keeps, where a point lies in each, and what the journal keeps.

        Raises:
            UnknownTopic: there is none of that name.
        """
        point = Point() if at is None else parse_point(at)
        reply: OffsetsReply = decode_response(self._ask(Command.OFFSETS, Offsets(topic, ANY_QUEUE, point)))
        return reply

    def locate(self, topics: Sequence[TopicPoints]) -> list[TopicLocations]:
        """Where points of queues lie in the journal; a topic that does not exist has id 0 and no queues.

        That is one request, unless there are very many queues, or the broker is of an earlier version.
        """
        found: list[TopicLocations] = []
        try:
            while len(found) < len(topics):
                asked = Locate([*topics[len(found) : len(found) + LOCATED_TOPICS]])
                found += decode_response(self._ask(Command.LOCATE, asked)).topics
        except UnknownCommand:
            return [OlderBroker(self).locate(asked) for asked in topics]
        return found

    def peek(self, topic: str, queue: int, offset: int, max_messages: int, max_bytes: int = FETCH_BYTES) -> Peeked:
        """Records of one queue from an offset on, without the others that stand between them in the journal.

        Raises:
            OffsetGone: retention took it, or there is none yet.
            Damaged: it cannot be read; `detail["next"]` is the first behind it that can.
        """
        asked = Peek(
            topic, queue, Point(PointKind.OFFSET, offset), max_messages, max_bytes=max_bytes, with_origins=True
        )
        frame = self._ask(Command.PEEK, asked)
        reply: PeekReply = decode_response(frame)
        spans, topic_id = reply.spans, reply.topic_id
        if not spans:
            return Peeked(offset, offset, [], [], origins=[], body=memoryview(b""), topic_id=topic_id)
        span = spans[0]
        lengths, body = unpack_records(frame.body, span.count)
        sizes = [*map(int, lengths)]
        return Peeked(
            span.first_offset,
            span.end_offset,
            sizes,
            span.ids,
            origins=span.origins,
            body=memoryview(body),
            topic_id=topic_id,
        )

    def fetch(
        self,
        journal_offset: int,
        max_bytes: int = FETCH_BYTES,
        *,
        wait: float = 0.0,
        end: int = 0,
        topic_ids: Sequence[int] = (),
    ) -> Fetched:
        """Whole units from the one on that holds an offset; at least one if there is any.

        Parameters:
            wait: seconds to wait for one to become visible.
            end: those that start there or later are not wanted; 0 means no end.
            topic_ids: only what concerns these topics is wanted; there may be nothing of it from `start` to `end`. A
                broker that does not know how to leave something out sends all of it.

        Raises:
            OffsetGone: the journal does not have that offset (any more); `detail` has `first` and `next`.
            Damaged: the unit there cannot be read; `detail` has its `start` and `end`.
        """
        asked = Fetch(journal_offset, max_bytes, round(wait * 1000), end=end, topic_ids=[*topic_ids])
        frame = self._ask_any(asked)
        reply = decode_response(frame)
        body = memoryview(frame.body)
        return Fetched(reply.start, reply.end, reply.first, reply.visible, journal_id=reply.journal_id, body=body)

    def fetch_checked(self, doubtful: Fetched, topic_ids: Sequence[int] = ()) -> Fetched:
        """The same range once more, since some of it is damaged, from the leader, which mends it first where it can.

        Raises:
            OffsetGone: retention was quicker.
        """
        at, bodies = doubtful.start, [memoryview(b"")]
        while at < doubtful.end:
            asked = Fetch(at, doubtful.end - at, end=doubtful.end, topic_ids=[*topic_ids], is_checked=True)
            frame = self._ask(Command.FETCH, asked)
            reply = decode_response(frame)
            if reply.end <= at or reply.journal_id != doubtful.journal_id:
                return doubtful
            bodies.append(memoryview(frame.body))
            at = reply.end
        return doubtful._replace(end=at, body=memoryview(b"".join(bodies)))

    def units(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = FETCH_BYTES,
        with_first: bool = False,
        topic_ids: Sequence[int] = (),
    ) -> Iterator[Fetched]:
        """The units that start in the journal's range [start, end), some at a time.

        Parameters:
            max_bytes: how much to fetch at a time, more or less.
            with_first: also the unit that starts before the range and reaches into it.
            topic_ids: only what concerns these topics is wanted. Then there may be units of outside the range, too.

        Raises:
            OffsetGone: the journal does not have all of it (any more).
            Damaged: as `fetch`.
        """
        if start >= end:
            return

        def ask(at: int) -> Future[Fetched]:
            size = max_bytes if topic_ids else min(max_bytes, end - at)
            return self._ahead.submit(self.fetch, at, size, end=end, topic_ids=topic_ids)

        asked, ahead = start, ask(start)
        while True:
            fetched = ahead.result()
            if fetched.end <= asked:
                raise OffsetGone(
                    f"the journal ends at {fetched.visible}, before {end}: the broker lost what was not on its disk",
                    first=fetched.first,
                    next=fetched.visible,
                )
            asked = fetched.end
            is_last = asked >= end
            if not is_last:
                ahead = ask(asked)
            within = fetched if topic_ids else _within(fetched, 0 if with_first else start, end)
            if within.body or topic_ids:
                yield within
            if is_last:
                return

    def close(self) -> None:
        self._router.close()
        if self._followers is not None:
            self._followers.close()
        self._ahead.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unit_starts(body: Any, base: int) -> Iterator[tuple[int, int]]:
    """Where each unit of a body starts and ends in the journal, by the lengths they claim."""
    at, size = 0, len(body)
    while at + HEADER_BYTES <= size:
        _, length = _LENGTH.unpack_from(body, at)
        if not HEADER_BYTES <= length <= size - at:
            return  # the decoder says what is wrong with it
        yield base + at, base + at + length
        at += length


def _within(fetched: Fetched, start: int, end: int) -> Fetched:
    """Without the units that start outside of a range."""
    if fetched.start >= start and fetched.end <= end:
        return fetched
    first, last = fetched.end, fetched.end
    for unit, _ in unit_starts(fetched.body, fetched.start):
        if unit >= end:
            last = min(last, unit)
            break
        if unit >= start:
            first = min(first, unit)
    first = min(first, last)
    body = fetched.body[first - fetched.start : last - fetched.start]
    return fetched._replace(start=first, end=last, body=body)


_TRIES: Final = 5


class _Peeked(Protocol):
    @property
    def lengths(self) -> list[int]: ...

    @property
    def body(self) -> memoryview: ...

    def check_incarnation(self, topic: str, topic_id: int) -> None: ...


class _Reader(Protocol):
    def offsets(self, topic: str, at: When | None = None) -> OffsetsReply: ...

    def peek(self, topic: str, queue: int, offset: int, max_messages: int, max_bytes: int = ...) -> _Peeked: ...


class OlderBroker:
    """A broker that is asked the long way."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader

    def locate(self, asked: TopicPoints) -> TopicLocations:
        """The locations of one topic.

        Raises:
            OffsetGone: offsets went as fast as they were asked for.
        """
        for left in reversed(range(_TRIES)):
            try:
                return self._locate(asked)
            except OffsetGone:  # retention went on, or the topic was created again
                if not left:
                    raise
            except UnknownTopic:
                break
        return TopicLocations(asked.topic)

    def _locate(self, asked: TopicPoints) -> TopicLocations:
        reply = self._reader.offsets(asked.topic)
        own = {row.queue: row.points for row in asked.queues}
        times: dict[Point, OffsetsReply] = {}
        rows = []
        for row in reply.queues:
            offsets = [self._offset(asked.topic, row, point, times) for point in own.get(row.queue, asked.points)]
            found = [self._location(asked.topic, row, offset, reply) for offset in offsets]
            rows.append(QueueLocations(row.queue, row.first_offset, row.next_offset, found))
        return TopicLocations(asked.topic, reply.topic_id, rows)

    def _offset(self, topic: str, row: QueueOffsets, point: Point, times: dict[Point, OffsetsReply]) -> int:
        known = {PointKind.EARLIEST: row.first_offset, PointKind.LATEST: row.next_offset, PointKind.OFFSET: point.value}
        offset = known.get(point.kind)
        if offset is None:
            if point not in times:
                times[point] = self._reader.offsets(topic, point)
            offset = next((queue.at for queue in times[point].queues if queue.queue == row.queue), row.next_offset)
        return min(max(offset, row.first_offset), row.next_offset)

    def _location(self, topic: str, row: QueueOffsets, offset: int, reply: OffsetsReply) -> Location:
        start, start_bytes = reply.visible_journal_offset, 0
        before, before_bytes = 0, 0
        if offset < row.next_offset:
            start, start_bytes = self._record(topic, row.queue, offset, reply.topic_id)
        if offset > row.first_offset:
            before, before_bytes = self._record(topic, row.queue, offset - 1, reply.topic_id)
        return Location(offset, start, start_bytes, before, before_bytes=before_bytes)

    def _record(self, topic: str, queue: int, offset: int, topic_id: int) -> tuple[int, int]:
        """Where a message stands in the journal, and its size; of a damaged one, the range that is."""
        try:
            peeked = self._reader.peek(topic, queue, offset, 1, max_bytes=1)
            peeked.check_incarnation(topic, topic_id)
        except Damaged as error:
            start, end = error.detail.get("start"), error.detail.get("end")
            if start is None or end is None:
                raise
            return start, end - start
        return U64.unpack_from(peeked.body, JOURNAL_OFFSET_AT)[0], peeked.lengths[0]


T = TypeVar("T")

LONE = 0  # the shard that a broker by itself is
ASKED_AT_ONCE: Final = 16  # shards


class ClusterReader:
    """Connections to all shards, each made when it is first used. A context manager; used by one thread.

    Parameters:
        servers, app, timeout: as of `JournalReader`; the servers may be members of any shard.
        is_patient: whether the first connection is waited for; else it is an error at once if nobody answers.

    Raises:
        NotConnected: nobody answered within the timeout.
        InvalidSettings: the addresses make no sense.
    """

    def __init__(
        self,
        servers: str,
        app: str = "dmq-spark",
        timeout: float | Patience = TIMEOUT,
        *,
        is_patient: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._app = app
        self._patience = timeout if isinstance(timeout, Patience) else Patience(timeout)
        self._timeout = self._patience.timeout
        self._clock = clock or SystemClock()
        first = self._timeout if is_patient else None
        self._guide: Router | None = Router(
            OneBroker.at(server_url(servers), first),
            PoolSettings(make_hello(app, None), self._clock, timeout=first, any_member=True),
        )
        self._guide.open()
        self._readers: dict[int, JournalReader] = {}
        if self._guide.home.connection().reply.shard is None:
            self._guide.close()
            self._guide = None
        self._shards: Mapping[int, str] = {LONE: servers}
        self.refresh()

    def refresh(self) -> None:
        """Ask which shards there are now."""
        if self._guide is None:
            return
        reply: RouteReply = decode_response(
            self._guide.home.request(Command.ROUTE, Route(), timeout=self._timeout, answer_seconds=self._timeout)
        )
        # A member that nobody hears of now may be the one that comes back: what was known of a shard stays.
        found = {shard.number: ",".join(shard.members) for shard in reply.shards if shard.members}
        self._shards = {**(self._shards if LONE not in self._shards else {}), **found}

    @property
    def shards(self) -> Mapping[int, str]:
        """Where the members of each shard are, by its number, as `JournalReader` takes it."""
        return self._shards

    def of(self, shard: int) -> JournalReader:
        """The reader of a shard's journal.

        Raises:
            OffsetGone: there is no such shard.
            NotConnected: it has no leader, and got none within the timeout.
        """
        reader = self._readers.get(shard)
        if reader is None:
            where = self._shards.get(shard)
            if where is None:
                there = ", ".join(map(str, sorted(self._shards)))
                raise OffsetGone(f"shard {shard} is not in the cluster: there are {there}", shard=shard)
            reader = self._readers[shard] = JournalReader(where, self._app, self._patience, clock=self._clock)
        return reader

    def ask_all(self, ask: Callable[[int, JournalReader], T]) -> dict[int, T]:
        """The answers of all shards to a question, by their numbers; all are asked at once.

        Parameters:
            ask: called with a shard's number and its reader, perhaps in another thread.
        """
        shards = sorted(self._shards)
        if len(shards) == 1:
            return {shard: ask(shard, self.of(shard)) for shard in shards}
        with ThreadPoolExecutor(min(len(shards), ASKED_AT_ONCE), "dmq-shard") as threads:
            return dict(zip(shards, threads.map(lambda shard: ask(shard, self.of(shard)), shards), strict=True))

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        if self._guide is not None:
            self._guide.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def shard_servers(
    servers: str, app: str, timeout: float | Patience = TIMEOUT, *, is_patient: bool = True
) -> Mapping[int, str]:
    """Where the members of each shard are, by its number; of a lone broker, where it is."""
    with ClusterReader(servers, app, timeout, is_patient=is_patient) as reader:
        return reader.shards


def shard_reader(
    servers: str, shard: int, app: str = "dmq-spark", timeout: float | Patience = TIMEOUT
) -> JournalReader:
    """A reader of one shard of a cluster, known by any of its brokers; errors as of `ClusterReader`."""
    if shard == LONE:
        return JournalReader(servers, app, timeout)
    where = shard_servers(servers, app, timeout).get(shard)
    if where is None:
        raise OffsetGone(f"shard {shard} is not in the cluster any more", shard=shard)
    return JournalReader(where, app, timeout)
