"""The spool: a producer's batches on its own disk, until a broker has acknowledged them (D-19).

It is a small `MessageStore` with one queue. A record of it is one batch, as it goes to a broker
(`dmq.client.spool.parcel`).

What always holds:
- A batch leaves for a broker only after it was flushed here, with its queue and its bounds, so that a restart sends
  again exactly what went out before, which is what a broker needs to recognise it.
- The producer's id is the journal's, and a batch's first number is its offset in the spool times 4,096: numbers go on
  over restarts by themselves, and none is ever given to two messages.
- A batch that is refused by the disk left no trace.

Batches a spool had accepted and every broker refused for good: kept aside, until somebody decides.

They lie in the folder `refused` of the spool, each in a file of its own:

    u8     version, 1
    u32    length of the note
    bytes  note         `Refusal`, in MessagePack
    bytes  parcel       as the spool had it, see `dmq.client.spool.parcel`

What always holds: a batch is here, flushed, before the spool forgets it, under the number it had there, so that one
which is set aside twice is here once; nothing here is dropped or sent by itself; no more than `bytes_max` is kept.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from dmq.client.producer.accumulator import BATCH_MESSAGES_MAX
from dmq.client.spool.parcel import Head, Kept, pack_parcel, unpack_parcel
from dmq.clock import Clock, SystemClock
from dmq.errors import (
    Damaged,
    DirectoryInUse,
    DMQError,
    InvalidSettings,
    LimitReached,
    RecordCorrupt,
    StorageError,
    StoreClosed,
    WrongFormat,
)
from dmq.event_log import EventLog
from dmq.model import SPOOL_TOPIC, SYSTEM_PREFIX, Durability, Message, TopicConfig, place_queue
from dmq.offset_runs import offset_runs
from dmq.protocol import Buffer, Command, decode_response
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply
from dmq.records import ANY_QUEUE, EncodeOptions, encode_batch
from dmq.settings import StoreSettings
from dmq.storage.files import Files, OsFiles
from dmq.storage.group_commit import GroupCommit
from dmq.storage.journal.unit_draft import Batch, Placement
from dmq.storage.state.events import Settled
from dmq.storage.store import MessageStore

if TYPE_CHECKING:
    from dmq.client.connection.connection import Connection

__all__ = ["BYTES_MAX", "RefusedFolder", "Spool", "send_refused"]

log = EventLog(__name__)

BYTES_MAX: Final = 1 << 30
BYTES_MIN: Final = 256 << 10
_GROUP: Final = "broker"
_SEGMENT_BYTES: Final = 16 << 20
_WAITING_BYTES_MAX: Final = 1 << 50  # the producer's window bounds it
_RECORD_BYTES_MAX: Final = 1 << 30
_ENCODE_OPTIONS: Final = EncodeOptions(body_bytes_max=_RECORD_BYTES_MAX, raw_bytes_max=_RECORD_BYTES_MAX)

OnKept = Callable[[int, DMQError | None], None]


class Spool:
    """A spool in a directory. Thread-safe; `on_settled` and `on_proven` are called by its own thread.

    Parameters:
        files: the directory.
        bytes_max: from the oldest batch that is not settled to the newest.

    Raises:
        DirectoryInUse: another producer has it.
        WrongFormat, Damaged, StorageError: it cannot be used.
        InvalidSettings: `bytes_max` is too small.
    """

    def __init__(self, files: Files, bytes_max: int = BYTES_MAX, clock: Clock | None = None) -> None:
        if bytes_max < BYTES_MIN:
            raise InvalidSettings(f"spool_bytes_max is at least {BYTES_MIN} bytes, not {bytes_max}")
        self.bytes_max: Final = bytes_max
        self.directory: Final = files.describe("")
        self._refused = RefusedFolder(files, bytes_max)
        self.refused = 0
        """Batches that were set aside since it was opened."""
        self.on_refused: Callable[[DMQError], None] = lambda _: None
        self._clock = clock or SystemClock()
        try:
            self._store = MessageStore(files, _settings(bytes_max), self._clock)
        except DirectoryInUse as error:
            pid = error.detail.get("pid", "unknown")
            raise DirectoryInUse(
                f"the spool {self.directory} is in use by another producer (pid {pid}): a spool belongs to one "
                "producer; use that one, or name another directory",
                **error.detail,
            ) from error
        try:
            self._topic_id = self._prepare()
        except BaseException:
            self._store.close()
            raise
        self.producer_id: Final = self._store.queries.journal_id
        self.on_settled: Callable[[], None] = lambda: None
        self.on_proven: Callable[[Sequence[int]], None] = lambda _: None
        self._lock = threading.Lock()  # guards `_acked`
        self._acked: list[int] = []
        self._unproven: deque[tuple[int, Sequence[int]]] = deque()  # where a settling was written, and of what
        self.floor = 0
        """All batches below are settled."""
        self._end = self._wanted_from = 0  # in the journal
        self._measure()
        self.next: Final = self._store.queries.bounds(SPOOL_TOPIC, 0)[1]
        """The number of the first batch that is added from now on."""
        self._commit = GroupCommit(self._store, waiting_bytes_max=_WAITING_BYTES_MAX)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], bytes_max: int = BYTES_MAX, clock: Clock | None = None) -> Spool:
        """The spool in a directory, which is made if it does not exist. Raises as the class does."""
        return cls(OsFiles(directory), bytes_max, clock)

    def _prepare(self) -> int:
        store = self._store
        if store.queries.damage:
            raise Damaged(
                f"the spool {self.directory} is damaged, so its numbers cannot be trusted to be new: restore it from "
                "before, or move it away and name another; `dmq journal inspect` shows what it holds",
                damage=store.queries.damage,
            )
        names = [topic.name for topic in store.queries.topics()]
        if SPOOL_TOPIC not in names:
            if any(not name.startswith(SYSTEM_PREFIX) for name in names):
                raise WrongFormat(f"{self.directory} holds a broker's data and is not a spool: name another directory")
            store.create_topic(SPOOL_TOPIC, TopicConfig(queues=1), system=True)
        if store.queries.position(_GROUP, SPOOL_TOPIC, 0) is None:
            # Without it, retention would not know that somebody wants what is here.
            store.set_position(_GROUP, SPOOL_TOPIC, 0, 0)
            store.flush()
        return store.queries.topic(SPOOL_TOPIC).id

    # --- topics -----------------------------------------------------------------------------------------------------

    def topics(self) -> dict[str, TopicConfig]:
        """What was last known of the topics, so that queues can be chosen before a broker is there."""
        return {
            topic.name: topic.config
            for topic in self._store.queries.topics()
            if not topic.name.startswith(SYSTEM_PREFIX)
        }

    def remember(self, topic: str, config: TopicConfig) -> None:
        """Keep what a broker says of a topic."""
        try:
            self._commit.call(lambda: self._remember(topic, config))
        except StoreClosed:
            pass  # the next producer asks for it

    def _remember(self, topic: str, config: TopicConfig) -> None:
        known = self.topics().get(topic)
        if known != config:
            if known is not None:
                self._store.delete_topic(topic)
            self._store.create_topic(topic, config)

    # --- in ---------------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes from the oldest batch that is not settled to the end."""
        return self._end - self._wanted_from

    def append(self, head: Head, body: Sequence[Buffer], on_kept: OnKept) -> None:
        """Add a batch; `on_kept` is called in order with its number once it is flushed, or with the error.

        Raises:
            StoreClosed: the spool is closed.
        """
        record = encode_batch(
            SPOOL_TOPIC,
            "dmq",
            (Message(pack_parcel(head, body)),),
            sent_at_ms=self._clock.now_ms(),
            options=_ENCODE_OPTIONS,
        )
        batch = Batch(topic=SPOOL_TOPIC, queue=0, data=record.data, lengths=record.lengths)
        self._commit.submit(batch, on_done=lambda done: self._added(done, on_kept))

    def _added(self, done: Future[Placement], on_kept: OnKept) -> None:
        error = done.exception()
        if error is None:
            place = done.result()
            if self._wanted_from == self._end:
                self._wanted_from = place.unit_start
            self._end = place.unit_end
            on_kept(place.first_offset, None)
            self._tell_proven()
        else:
            on_kept(-1, error if isinstance(error, DMQError) else StorageError(f"the spool failed: {error!r}"))

    # --- out --------------------------------------------------------------------------------------------------------

    def first_sequence(self, offset: int) -> int:
        """The number of a batch's first message."""
        return offset * BATCH_MESSAGES_MAX

    def read(self, start: int, stop: int, bytes_max: int) -> tuple[list[Kept], int]:
        """Batches that are not settled, oldest first, at least one if there is any; and where to read on.

        Raises:
            StorageError: it cannot be read.
        """
        return self._commit.call(lambda: self._read(start, stop, bytes_max)).result()

    def _read(self, start: int, stop: int, bytes_max: int) -> tuple[list[Kept], int]:
        position = self._store.queries.position(_GROUP, SPOOL_TOPIC, 0)
        assert position is not None
        while start < stop and position.is_settled(start):
            start += 1
        if start >= stop:
            return [], stop
        found = self._store.queries.read(SPOOL_TOPIC, 0, start, min(1000, stop - start), max_bytes=bytes_max)
        kept = [
            unpack_parcel(offset, record.raw_body)
            for offset, record in zip(found.offsets.tolist(), found.records(), strict=True)
            if not position.is_settled(offset)
        ]
        return kept, found.next_offset

    def set_aside(self, kept: Kept, error: DMQError, done: Callable[[DMQError | None], None]) -> None:
        """Keep a batch apart that no broker takes. That does not settle it: the caller does, when it is done.

        Parameters:
            done: called by the spool's thread, with the error if it could not be kept apart.
        """

        def put() -> None:
            failure: DMQError | None = None
            try:
                self._refused.add(kept, error, self._clock.now_ms())
                self.refused += 1
            except DMQError as problem:
                failure = problem
            done(failure)

        try:
            self._commit.call(put)
        except StoreClosed as closed:
            done(closed)

    def settle(self, offset: int) -> None:
        """A broker has a batch: forget it. `on_proven` follows once that would survive a power cut."""
        with self._lock:
            self._acked.append(offset)
            is_first = len(self._acked) == 1
        if is_first:
            self.settle_again()

    def settle_again(self) -> None:
        """Write what is settled, if a full disk kept that from being written."""
        if self._acked:
            try:
                self._commit.call(self._settle)
            except StoreClosed:
                pass  # it is sent again after the next start, and recognised

    def _settle(self) -> None:
        with self._lock:
            acked, self._acked = sorted(self._acked), []
        if not acked:
            return
        now_ms = self._clock.now_ms()
        events = [
            Settled(_GROUP, self._topic_id, 0, start, count=stop - start, settled_at_ms=now_ms)
            for start, stop in offset_runs(acked)
        ]
        try:
            placed = self._store.append(events, Durability.STORED, atomic=True)
        except StorageError as error:
            with self._lock:
                self._acked += acked
            log.warning("the spool cannot be written", once_for=self.directory, spool=self.directory, error=error)
            return
        self._unproven.append((placed[-1].unit_end, acked))
        self._measure()
        self.on_settled()

    def _measure(self) -> None:
        queries = self._store.queries
        position = queries.position(_GROUP, SPOOL_TOPIC, 0)
        assert position is not None
        following = queries.bounds(SPOOL_TOPIC, 0)[1]
        self.floor = position.floor
        wanted = queries.journal_offset(SPOOL_TOPIC, 0, self.floor) if self.floor < following else None
        self._end = queries.end
        self._wanted_from = self._end if wanted is None else wanted

    def flush(self) -> None:
        """Have all settling proven.

        Raises:
            StorageError: the disk refused.
        """
        self._commit.call(self._flush).result()

    def _flush(self) -> None:
        if self._store.queries.flushed < self._store.queries.end:
            self._store.flush()
        self._tell_proven()

    def _tell_proven(self) -> None:
        """Tell of what was settled in units that are flushed by now."""
        while self._unproven and self._unproven[0][0] <= self._store.queries.flushed:
            self.on_proven(self._unproven.popleft()[1])

    def close(self) -> None:
        """Write what is waiting, and leave. What is not settled stays for the next producer."""
        self._commit.close()
        self._store.close()


def _settings(bytes_max: int) -> StoreSettings:
    """Small segments that go as soon as they are settled, and never before, however full the disk is."""
    segment_bytes = min(_SEGMENT_BYTES, bytes_max // 4)
    unit_bytes_max = min(8 << 20, segment_bytes)
    return StoreSettings(
        segment_bytes=segment_bytes,
        unit_bytes_max=unit_bytes_max,
        body_bytes_max=unit_bytes_max // 2,
        checkpoint_bytes=segment_bytes,
        retention_hours=None,
        retention_bytes=1,
        keep_unconsumed=True,
        disk_clean=1.0,
        disk_refuse=1.0,
        ballast_bytes=0,
        files_open_max=32,
        read_cache_bytes=4 << 20,
    )


FOLDER: Final = "refused"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct(">BI")
_NAME: Final = re.compile(r"(\d{20})\.batch")


class Refusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a batch is here. Stored: fields may be added at the end."""

    code: str
    message: str
    at_ms: int


class RefusedBatch(NamedTuple):
    """A batch that was set aside."""

    number: int
    refusal: Refusal
    kept: Kept


_decoder = msgspec.msgpack.Decoder(Refusal)


class RefusedFolder:
    """The folder of one spool. Its owner calls it from one thread at a time.

    Parameters:
        files: the spool's directory.
        bytes_max: how much is kept at most.
    """

    def __init__(self, files: Files, bytes_max: int) -> None:
        self._files = files
        self._bytes_max = bytes_max

    def numbers(self) -> list[int]:
        """All batches, the oldest first."""
        return [int(found[1]) for name in self._files.listdir(FOLDER) if (found := _NAME.fullmatch(name))]

    def add(self, kept: Kept, error: DMQError, at_ms: int) -> None:
        """Set a batch aside; it would survive a power cut when this returns.

        Raises:
            LimitReached: as much is kept as may be.
            StorageError: the disk refused.
        """
        note = msgspec.msgpack.encode(Refusal(error.code, error.message, at_ms))
        data = _PREFIX.pack(_VERSION, len(note)) + note + pack_parcel(kept.head, kept.body)
        used = sum(self._files.size(_path(number)) for number in self.numbers() if number != kept.offset)
        if used + len(data) > self._bytes_max:
            raise LimitReached(
                f"{self._files.describe(FOLDER)} has {used} bytes of refused batches, which is all that is kept: send "
                "them again or drop them with `dmq spool`"
            )
        self._files.mkdir(FOLDER)
        path = _path(kept.offset)
        file = self._files.open(f"{path}.new", create=True, write=True)
        try:
            file.truncate(0)
            file.write(0, (data,))
            file.sync()
        finally:
            file.close()
        self._files.rename(f"{path}.new", path)
        self._files.sync_dir(FOLDER)
        self._files.sync_dir("")

    def read(self, number: int) -> RefusedBatch:
        """One of them.

        Raises:
            FileNotFoundError: there is none of that number.
            WrongFormat, RecordCorrupt: it cannot be read.
        """
        file = self._files.open(_path(number))
        try:
            raw = file.read(0, file.size())
        finally:
            file.close()
        try:
            version, length = _PREFIX.unpack_from(raw)
            if version != _VERSION:
                raise WrongFormat(f"{self._files.describe(_path(number))} is of another version of DMQ ({version})")
            parcel_at = _PREFIX.size + length
            refusal = _decoder.decode(raw[_PREFIX.size : parcel_at])
        except (struct.error, msgspec.MsgspecError) as error:
            raise RecordCorrupt(f"{self._files.describe(_path(number))} cannot be read: {error}") from error
        return RefusedBatch(number, refusal, unpack_parcel(number, raw[parcel_at:]))

    def __iter__(self) -> Iterator[RefusedBatch]:
        for number in self.numbers():
            yield self.read(number)

    def drop(self, number: int) -> None:
        """Forget one."""
        self._files.unlink(_path(number))
        self._files.sync_dir(FOLDER)


def send_refused(connection: Connection, batch: RefusedBatch, timeout: float) -> ProduceReply:
    """Send a batch after all. Its messages get new ids: others of the spool have overtaken the numbers they had.

    Raises:
        DMQError: it is refused again, or no answer came.
    """
    head = batch.kept.head
    header = Produce(
        head.topic,
        place_queue(head.queue) if head.is_pinned else ANY_QUEUE,
        head.count,
        head.keys,
        producer_id=secrets.randbits(64) or 1,
        producer_epoch=0,
        first_sequence=0,
        durability=Durability(head.durability),
        flags=(ProduceFlag.DUES if head.is_delayed else 0) | (ProduceFlag.EXPIRING if head.is_expiring else 0),
    )
    reply: ProduceReply = decode_response(connection.request(Command.PRODUCE, header, batch.kept.body, timeout=timeout))
    return reply


def _path(number: int) -> str:
    return f"{FOLDER}/{number:020d}.batch"
