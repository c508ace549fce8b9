"""The sender of a plan: each batch once, whatever breaks.

A named producer sends, with a producer id that follows from the plan. Before the first batch of a queue the broker is
asked how far that producer has come there, which it remembers for good, and what is stored is passed over. Of a queue
one batch is under way at a time: one that overtook another would make that one look like an old one. A batch that was
not answered is sent again with the same bounds, and recognised.

What always holds: when `send_plan` returns, every message of the plan is stored once in the target topic, and flushed;
when it raises, or is killed, another call goes on where it came to.

The rows of a plan as batches for a broker: the same bounds in every run.

What always holds: how rows are divided into batches depends on nothing but the rows from there on and the plan, so a
run that goes on behind a batch makes the same batches as the one before it would have. The n-th row of a queue, counted
from 0, has sequence `queue << 48 | n`, so no number is given twice.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from crc32c import crc32c

from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import Router
from dmq.client.connection.session import make_hello
from dmq.client.connection.url import OneBroker
from dmq.client.producer.numbered_sender import LaneBatch, LaneSender
from dmq.client.producer.routes import Route
from dmq.clock import SystemClock
from dmq.errors import ArchiveConflict, DMQError, MessageTooLarge, SequenceConflict, StaleRoute, TimedOut, UnknownTopic
from dmq.model import Durability, Message, place_of, place_queue, place_shard
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.decode.journal_reader import server_url
from dmq.pipeline.replay.plan import Plan, Target
from dmq.protocol import Command, decode_response
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.batch import pack_batch
from dmq.protocol.frame import Buffer
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply, ProducerStates
from dmq.records import Compressor, EncodedBatch
from dmq.records.layout import ORDERED
from dmq.records.replay import ReplayTarget
from dmq.token_bucket import TokenBucket

__all__ = [
    "Parcel",
    "ReplayProgress",
    "SendOptions",
    "Sent",
    "check_sent",
    "find_target",
    "open_router",
    "parcels",
    "send_plan",
    "send_queues",
    "stored_rows",
]

APP: Final = "dmq-replay"

WORKERS_MAX: Final = 8
ANSWER_SECONDS: Final = 30.0
PATIENCE_SECONDS: Final = 300.0
_FLAGS: Final = ProduceFlag.NAMED | ProduceFlag.REPLAYED


class ReplayProgress(NamedTuple):
    """How far it is: messages that are stored, those of earlier runs included, of how many."""

    stored: int
    total: int


class Sent(NamedTuple):
    """What a run did: messages it sent, and those that it found stored."""

    sent: int
    found: int


def open_router(broker: str) -> Router:
    """A way to the broker, or to all shards of its cluster; it may be away for half a minute at the beginning."""
    settings = PoolSettings(make_hello(APP, None), SystemClock(), timeout=ANSWER_SECONDS)
    router = Router(OneBroker.at(server_url(broker), ANSWER_SECONDS), settings)
    router.open()
    return router


def find_target(router: Router, topic: str) -> Target:
    """The topic to send to.

    Raises:
        UnknownTopic: it does not exist.
    """
    if not router.is_single:
        return _find_in_cluster(router, topic)
    frame = router.pool_for(topic).request(Command.TOPIC_DESCRIBE, TopicDescribe(topic), answer_seconds=ANSWER_SECONDS)
    try:
        info = decode_response(frame).info
    except UnknownTopic as error:
        raise UnknownTopic(f"there is no topic {topic!r} to replay into: create it first", topic=topic) from error
    return Target(topic, info.topic_id, info.config.queues, info.config.priority)


def _find_in_cluster(router: Router, topic: str) -> Target:
    route = router.learn(topic, ANSWER_SECONDS)
    places = Route.of_slots(route).all_places
    if route.is_priority:  # which are the queues of each shard: those of one will do
        places = [place for place in places if place_shard(place) == place_shard(places[0])]
    if not places:
        raise StaleRoute(f"no shard takes messages of topic {topic!r} now: open one, or add one to the topic")
    return Target(topic, route.incarnation, len(places), route.is_priority, places=tuple(places))


def stored_rows(router: Router, plan: Plan) -> dict[int, int]:
    """How many rows of each queue the broker has, from the first on.

    Raises:
        UnknownTopic: the topic is gone, or was made anew since the plan was.
    """
    target = find_target(router, plan.topic)
    if target.topic_id != plan.topic_id or (not plan.places and target.queues <= max(plan.counts)):
        raise UnknownTopic(
            f"topic {plan.topic!r} was made anew since replay {plan.replay_id} was planned: replay into it under "
            "another id",
            topic=plan.topic,
        )
    rows = dict.fromkeys(plan.counts, 0)
    queues = {plan.place(queue): queue for queue in plan.counts}
    for shard in dict.fromkeys(map(place_shard, queues)):
        frame = router.pool_for(plan.topic, place_of(0, shard)).request(
            Command.PRODUCER_STATES, ProducerStates(plan.topic, [plan.producer_id]), answer_seconds=ANSWER_SECONDS
        )
        for state in decode_response(frame).producers:
            for found in state.queues:
                queue = queues[place_of(found.queue, shard)]
                rows[queue] = found.next_sequence - first_sequence(queue, 0)
    return rows


class SendOptions(NamedTuple):
    """How to send: `rate` is messages a second at most, `on_progress` is called now and then, by any thread."""

    rate: float | None = None
    now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    on_progress: Callable[[ReplayProgress], None] = lambda _: None


def send_plan(router: Router, rows: Folder, plan: Plan, options: SendOptions) -> Sent:
    """Send what is not stored yet.

    Parameters:
        rows: the folder of the plan's rows.

    Raises:
        DMQError: it cannot go on; what is stored stays, and another call goes on from there.
    """
    stored = stored_rows(router, plan)
    found = sum(stored.values())
    sent = send_queues(router, rows, plan, stored, options=options)
    check_sent(router, plan)
    return Sent(sent, found)


def check_sent(router: Router, plan: Plan) -> None:
    """See that the broker has all of it.

    Raises:
        ArchiveConflict: it does not.
    """
    after = stored_rows(router, plan)
    if after != plan.counts:
        raise ArchiveConflict(
            f"the broker has {sum(after.values())} of the {plan.total} messages of replay {plan.replay_id} although "
            "all were sent: see whether its data was set back, then run the replay again"
        )


def send_queues(
    router: Router,
    rows: Folder,
    plan: Plan,
    stored: Mapping[int, int],
    *,
    options: SendOptions,
) -> int:
    """Send what some queues miss; returns how many messages that were.

    Parameters:
        stored: by queue, how many rows of it are stored; other queues are not looked at.

    Raises:
        DMQError: as `send_plan`.
    """
    found = sum(stored.values())
    bucket = None if options.rate is None else TokenBucket(options.rate, time.monotonic(), burst=0)
    run = _Run(plan, found, bucket, options.on_progress)
    queues = [queue for queue, count in stored.items() if count < plan.counts[queue]]
    if queues:
        with ThreadPoolExecutor(min(WORKERS_MAX, len(queues)), "dmq-replay") as pool:
            try:
                limit = router.home.connection().limits.body_bytes_max
                futures = []
                for queue in queues:
                    now_ms = options.now_ms()
                    batches = parcels(rows, plan, queue, stored[queue], sent_at_ms=now_ms, body_bytes_max=limit)
                    futures.append(pool.submit(_send_queue, router, plan, batches, run=run))
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                run.stop.set()
                pool.shutdown(cancel_futures=True)
    return run.stored - found


class _Run:
    """What the threads of one call share: how fast they may go together, whether they may at all, and what is stored.

    Parameters:
        stored: messages that were stored before.
        bucket: the rate; None is none.
    """

    def __init__(
        self, plan: Plan, stored: int, bucket: TokenBucket | None, on_progress: Callable[[ReplayProgress], None]
    ) -> None:
        self._plan = plan
        self._bucket = bucket
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self.stored = stored
        self.stop = threading.Event()

    def wait(self, count: int) -> bool:
        """Wait until `count` messages may be sent; they are counted as sent. False if none is to be sent any more."""
        seconds = 0.0
        if self._bucket is not None:
            with self._lock:
                seconds = self._bucket.missing(0, time.monotonic())
                self._bucket.spend(count)
        return not self.stop.wait(seconds)

    def add(self, batch: LaneBatch, reply: ProduceReply) -> None:
        """A batch is stored."""
        with self._lock:
            self.stored += batch.header.count
            progress = ReplayProgress(self.stored, self._plan.total)
        self._on_progress(progress)


def _send_queue(router: Router, plan: Plan, batches: Iterator[Parcel], run: _Run) -> None:
    """Send the batches of one queue, each until it is stored."""
    sender = LaneSender(router, PATIENCE_SECONDS, on_stored=run.add, on_late=_late, stop=run.stop)
    try:
        for parcel in batches:
            if not run.wait(parcel.rows):
                return
            header = Produce(
                topic=plan.topic,
                queue=place_queue(plan.place(parcel.queue)),
                count=parcel.rows,
                keys=parcel.keys,
                producer_id=plan.producer_id,
                producer_epoch=0,
                first_sequence=parcel.first_sequence,
                durability=Durability.FLUSHED,
                flags=int(_FLAGS),
            )
            sender.send(header, parcel.body, place_shard(plan.place(parcel.queue)))
        sender.drain()
    except SequenceConflict as error:
        raise ArchiveConflict(
            f"replay {plan.replay_id} is being sent by somebody else, who is further: let one run do it"
        ) from error


def _late(batch: LaneBatch) -> DMQError:
    return batch.last_error or TimedOut(
        f"{batch.header.count} messages for topic {batch.header.topic!r} were not stored within {PATIENCE_SECONDS:g} s"
    )


_QUEUE_SHIFT: Final = 48
_ROW_BYTES: Final = 64  # what a row counts beside its body


class Parcel(NamedTuple):
    """One batch, ready to be sent."""

    queue: int
    first: int  # row of its queue
    rows: int
    keys: int
    body: list[Buffer]

    @property
    def first_sequence(self) -> int:
        return first_sequence(self.queue, self.first)


def first_sequence(queue: int, row: int) -> int:
    """The sequence of a row of a queue."""
    return queue << _QUEUE_SHIFT | row


class _Row(NamedTuple):
    """One message, as the columns of a plan's files have it."""

    message_id: str
    key: str | None
    business_id: str | None
    tag: str | None
    app: str
    priority: int
    flags: int
    sent_at_us: int
    headers: list[dict[str, Any]] | None
    body: bytes


def parcels(rows: Folder, plan: Plan, queue: int, start: int, sent_at_ms: int, body_bytes_max: int) -> Iterator[Parcel]:
    """The batches of a queue from a row on.

    Parameters:
        rows: the plan's folder of rows.
        start: 0, or behind a batch of an earlier run.
        sent_at_ms: the records' send time.
        body_bytes_max: the largest body that the broker takes.

    Raises:
        InvalidMessage, MessageTooLarge: a message does not fit the topic or the broker.
    """
    making = _Making(plan, queue, sent_at_ms, body_bytes_max)
    first = start
    waiting: list[_Row] = []
    size = 0
    for row in _rows(rows, plan.file(queue), start):
        row_size = len(row.body) + _ROW_BYTES
        if waiting and (len(waiting) == plan.batch_rows or size + row_size > plan.batch_bytes):
            yield making.parcel(first, waiting)
            first, waiting, size = first + len(waiting), [], 0
        waiting.append(row)
        size += row_size
    if waiting:
        yield making.parcel(first, waiting)


def _rows(folder: Folder, name: str, start: int) -> Iterator[_Row]:
    with pq.ParquetFile(f"{folder.path}/{name}", filesystem=folder.files) as file:
        at = 0
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            if at + count > start:
                table: pa.Table = file.read_row_group(group).slice(max(0, start - at))
                sent_at = table.schema.get_field_index("sent_at")
                table = table.set_column(sent_at, "sent_at", table["sent_at"].cast(pa.int64()))
                yield from map(_Row._make, zip(*(column.to_pylist() for column in table.columns), strict=True))
            at += count


class _Making:
    """Rows into batches, for one queue."""

    def __init__(self, plan: Plan, queue: int, sent_at_ms: int, body_bytes_max: int) -> None:
        self._topic = plan.topic
        self._queue = queue
        self._body_bytes_max = body_bytes_max
        self._target = ReplayTarget(plan.topic, plan.replay_id, sent_at_ms)
        self._compressor = Compressor("auto")

    def parcel(self, first: int, rows: list[_Row]) -> Parcel:
        bodies = [row.body for row in rows]
        packed = self._compressor.compress_many(self._topic, bodies, body_bytes_max=self._body_bytes_max)
        records: list[bytes] = []
        hash_index: list[int] = []
        hashes: list[int] = []
        for index, row in enumerate(rows):
            codec, body = (0, row.body) if packed is None else packed[index]
            if len(body) > self._body_bytes_max:
                raise MessageTooLarge(
                    f"message {row.message_id} has {len(body)} bytes; the broker takes {self._body_bytes_max}: raise "
                    "store.body_bytes_max there, or leave the message out",
                    size=len(body),
                    limit=self._body_bytes_max,
                )
            if row.key is not None:
                raw = row.key.encode()
                hash_index.append(index)
                hashes.append(crc32c(raw) << 32 | zlib.crc32(raw) or 1)
            records.append(self._record(row, codec, body))
        batch = EncodedBatch(
            bytearray().join(records),
            np.fromiter(map(len, records), np.uint32, len(records)),
            np.array(hash_index, np.uint32),
            np.array(hashes, np.uint64),
            count=len(records),
        )
        return Parcel(self._queue, first, len(rows), len(hashes), body=pack_batch(batch))

    def _record(self, row: _Row, codec: int, body: bytes) -> bytes:
        return self._target.record(
            (int(row.message_id, 32) >> 2).to_bytes(16, "big"),  # base 32, with two bits to spare at the end
            Message(
                body,
                key=row.key,
                tag=row.tag,
                business_id=row.business_id,
                ordered=bool(row.flags & ORDERED),
                priority=row.priority,
                properties={one["key"]: one["value"].decode() for one in row.headers} if row.headers else None,
            ),
            app=row.app,
            first_sent_at_ms=row.sent_at_us // 1000,
            codec=codec,
            raw_size=len(row.body) if codec else 0,
        )
