"""Inspection: a look into a data directory without opening it, where nothing is locked, changed or recovered.

Everything comes as plain data a person can read and JSON can hold; bodies are never shown, only their sizes. A
directory in use can be looked into as well: what its owner writes or removes meanwhile may be missing.
`event_words` puts an event into words.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec
import numpy as np

from dmq.errors import RecordCorrupt, UnknownTopic
from dmq.model import TopicConfig
from dmq.records import layout
from dmq.records.view import RecordView
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index.block_file import DerivedDamaged
from dmq.storage.index.queue_index import ENTRY_BYTES, ENTRY_DTYPE, Entries, Run, valid
from dmq.storage.index.queue_index import FOLDER as QUEUES
from dmq.storage.journal import journal as journals
from dmq.storage.journal.journal import Journal, Segment
from dmq.storage.journal.scanner import Scanner
from dmq.storage.journal.unit import HEADER_BYTES, SNAPSHOT, Unit, is_intact, read_header
from dmq.storage.read.reader import row_of
from dmq.storage.state.derived import Checkpoint, event_of, folder_name, message_id_of, read_checkpoint, read_positions
from dmq.storage.state.events import (
    Archived,
    DelaysDone,
    EpochStarted,
    Event,
    KeyPut,
    LimitPut,
    Outcome,
    PositionDropped,
    PositionSet,
    Settled,
    SnapshotTaken,
    SubscriptionPut,
    TopicDropped,
    TopicPut,
    TransactionEnded,
    TransactionGroup,
    TransactionsEnded,
    TransactionsJoined,
    unpack_offsets,
)
from dmq.storage.state.producers import ProducerTable
from dmq.storage.state.state import State, Topic, queue_key

__all__ = [
    "checkpoint_facts",
    "config_words",
    "entry_files",
    "event_words",
    "inspect_queue",
    "inspect_records",
    "inspect_units",
    "open_journal",
    "restored_state",
    "segment_named",
    "unit_facts",
]


_OUTCOMES: Final = frozenset(map(int, Outcome))


def event_words(event: Event) -> str:
    """What an event says, in words."""
    match event:
        case TopicPut(topic_id, name, config):
            return f"topic {name} (id {topic_id}) was created or changed: {config_words(config)}"
        case TopicDropped(topic_id):
            return f"topic {topic_id} was deleted"
        case Settled(group, topic_id, queue, start, count, outcome):
            some = "some of " if event.bitmap else ""
            who = f" by {event.member}" if event.member else ""
            why = f": {event.error}" if event.error else ""
            what = Outcome(outcome).name.lower() if outcome in _OUTCOMES else f"outcome {outcome}"
            where = f"{some}{start}-{start + count - 1} of queue {queue} of topic {topic_id}"
            return f"group {group} settled {where} as {what}{who}, attempt {event.attempt}{why}"
        case PositionSet(group, topic_id, queue, offset):
            return f"group {group} was put at {offset} in queue {queue} of topic {topic_id}"
        case PositionDropped(group, topic_id):
            return f"group {group} was forgotten" + ("" if topic_id is None else f" in topic {topic_id}")
        case DelaysDone(offsets, reason):
            done = unpack_offsets(offsets).tolist()
            return f"{len(done)} delayed ({reason}), at " + ", ".join(map(str, done[:8])) + ", …" * (len(done) > 8)
        case TransactionEnded(message_id, outcome):
            return f"transaction {message_id.hex()} ended: {outcome}"
        case TransactionGroup(producer_id, group):
            return f"transactions of producer {producer_id:016x} belong to producer group {group}"
        case TransactionsEnded(message_ids, outcome):
            count = len(message_ids) // 16
            return f"{count} transactions ended ({outcome}), the first {message_ids[:16].hex()}"
        case TransactionsJoined(pairs):
            one, first = pairs[:16].hex(), pairs[16:32].hex()
            return f"{len(pairs) // 32} half messages joined transactions, {one} that of {first}"
        case SubscriptionPut(group, topic_id, tags, version):
            order = "ordered" if event.is_ordered else "unordered"
            return f"group {group} consumes topic {topic_id} with tags {tags or '*'}, {order}, version {version}"
        case LimitPut(topic_id, app, messages, size):
            whose = f"topic {topic_id}" if topic_id else f"app {app}"
            if messages is None and size is None:
                return f"{whose} has no limit any more"
            amounts = [f"{n} {unit}" for n, unit in ((messages, "messages"), (size, "bytes")) if n is not None]
            rest = "become dead letters" if event.policy else "are refused"
            return f"{whose} takes {' and '.join(amounts)} a second, others {rest}"
        case KeyPut(namespace, key, value, expires_at_ms):
            if value is None:
                return f"key {key} of {namespace} is gone"
            until = f" until {expires_at_ms} ms" if expires_at_ms else ""
            return f"key {key} of {namespace} holds {len(value)} bytes{until}"
        case EpochStarted(epoch, leader):
            return f"epoch {epoch} began" + (f", led by replica {leader:016x}" if leader else "")
        case SnapshotTaken(part, parts, state):
            return f"snapshot of the state, part {part + 1} of {parts}, {len(state)} bytes"
        case Archived(offset):
            return f"the archive has everything below {offset}"


def config_words(config: TopicConfig) -> str:
    """A topic's settings that are not the default, and how many queues it has."""
    set_fields: dict[str, Any] = msgspec.to_builtins(config)
    return ", ".join(f"{name} {value}" for name, value in {"queues": config.queues, **set_fields}.items())


_FLAGS: Final = {
    layout.COMPRESSED: "compressed",
    layout.ORDERED: "ordered",
    layout.SYSTEM: "system",
    layout.MOVED: "moved",
    layout.IPV6: "ipv6",
    layout.BLOCK: "block",
    layout.REPLAYED: "replayed",
}
_QUEUE_FILE: Final = re.compile(r"(\d{20})\.queue")
_SEGMENT: Final = re.compile(r"0*(\d{1,20})(\.journal)?")
Facts = dict[str, Any]


# --- the journal ------------------------------------------------------------------------------------------------------


def open_journal(files: Files, pool: FilePool) -> Journal:
    """The journal of a directory, for reading only.

    Raises:
        RecordCorrupt: there is no readable journal in it.
        ForeignFile, WrongFormat: as when opening it.
    """
    segments = journals.list_segments(files)
    for segment in segments:
        file = pool.get(segment.path)
        header = read_header(file.read(0, HEADER_BYTES))
        if header is not None and is_intact(header, file.read(0, min(header.length, segment.size))):
            return Journal(files, pool, header.journal_id, segments)
    raise RecordCorrupt(
        f"{files.describe(journals.FOLDER)} holds no readable segment: name a DMQ data directory, the one with "
        "journal/ in it; if this is one, restore it from a replica or a backup"
    )


def segment_named(journal: Journal, name: str) -> Segment:
    """The segment of a name: its file name, or the offset it starts at.

    Raises:
        RecordCorrupt: there is none.
    """
    match = _SEGMENT.fullmatch(name.rpartition("/")[2])
    for segment in journal.segments:
        if match is not None and segment.start == int(match[1]):
            return segment
    there = ", ".join(segment.path.rpartition("/")[2] for segment in journal.segments[:20])
    raise RecordCorrupt(f"there is no segment {name}: the journal has {there}")


def inspect_units(
    journal: Journal, start: int | None = None, end: int | None = None
) -> Iterator[Unit | tuple[int, int]]:
    """The units from the one that holds `start` up to `end`; a pair of offsets for each range that is none."""
    scanner = Scanner(journal)
    limit = journal.end if end is None else end
    at = journal.start
    if start is not None:
        segment = journal.segment_at(start)
        at = start if segment is None else segment.start
    while at < limit:
        unit = scanner.unit_at(at)
        if unit is None:
            following = scanner.next_valid(at + 1)
            stop = journal.end if following is None else following.start
        else:
            stop = unit.end
        if start is None or stop > start:
            yield unit or (at, stop)
        at = stop


def unit_facts(unit: Unit) -> Facts:
    """What a unit's header says."""
    header = unit.header
    return {
        "offset": header.start,
        "bytes": header.length,
        "epoch": header.epoch,
        "records": header.records,
        "batches": header.batches,
        "stored_at_ms": header.stored_at_ms,
        "flushed_through": header.flushed_through,
        "snapshot": bool(header.flags & SNAPSHOT),
    }


def inspect_records(unit: Unit) -> Iterator[Facts]:
    """The records of a unit; one that cannot be decoded says so in its place."""
    for index in range(unit.header.records):
        offset = int(unit.offsets[index])
        try:
            yield _record_facts(unit, index, offset)
        except RecordCorrupt as error:
            yield {"offset": offset, "bytes": int(unit.lengths[index]), "damaged": str(error)}


def _record_facts(unit: Unit, index: int, offset: int) -> Facts:
    row, within = row_of(unit, index)
    if row.topic_id == 0:
        event = event_of(unit, index)
        words = event_words(event)
        return {"offset": offset, "bytes": int(unit.lengths[index]), "event": type(event).__name__, "words": words}
    record = RecordView(unit.buffer, offset - unit.start)
    address = ipaddress.IPv6Address(row.address)
    return {
        "offset": offset,
        "bytes": record.length,
        "topic": record.topic,
        "topic_id": row.topic_id,
        "queue": record.queue,
        "queue_offset": record.queue_offset,
        "id": str(message_id_of(unit, row, index, within)),
        "key": record.key,
        "tag": record.tag,
        "app": record.app,
        "business_id": record.business_id,
        "priority": record.priority,
        "flags": [name for bit, name in _FLAGS.items() if record.flags & bit],
        "sent_at_ms": record.send_time_ms,
        "received_at_ms": record.receive_time_ms,
        "stored_at_ms": record.store_time_ms,
        "client": f"{address.ipv4_mapped or address}:{row.port}" if any(row.address) else None,
        "stored_body_bytes": record.parts()[4],
        "body_bytes": record.body_size,
        "attribute_bytes": len(record.attribute_bytes),
    }


# --- what is derived --------------------------------------------------------------------------------------------------


def restored_state(checkpoint: Checkpoint) -> State:
    """The state a checkpoint holds."""
    state = State(ProducerTable(1 << 40, 1))
    state.restore(checkpoint.state)
    return state


def _needed_checkpoint(files: Files, pool: FilePool) -> Checkpoint:
    checkpoint = read_checkpoint(files, pool)
    if checkpoint is None:
        raise DerivedDamaged(
            f"{files.describe('')} has no checkpoint, so no index either: the next start builds it from the journal"
        )
    return checkpoint


def checkpoint_facts(files: Files, pool: FilePool) -> Facts:
    """What the checkpoint in force says, and the state it holds.

    Raises:
        DerivedDamaged: there is none, or it cannot be read.
    """
    checkpoint = _needed_checkpoint(files, pool)
    state = restored_state(checkpoint)
    state.positions.load(read_positions(pool, checkpoint.positions))
    return {
        "sequence": checkpoint.sequence,
        "journal_id": f"{checkpoint.journal_id:016x}",
        "journal_start": checkpoint.journal_start,
        "offset": checkpoint.offset,
        "epoch": checkpoint.epoch,
        "stored_at_ms": checkpoint.stored_at_ms,
        "archived": state.archived,
        "producers": len(state.producers),
        "transactions": len(state.transactions),
        "damage": [list(pair) for pair in checkpoint.damage],
        "files": {
            "positions": checkpoint.positions,
            "runs": checkpoint.runs,
            "index": checkpoint.index,
            "wheel": [run.path for run in checkpoint.wheel],
        },
        "delays_done_not_yet_removed": len(checkpoint.wheel_done) // 8,
        "topics": [_topic_facts(topic, state) for topic in sorted(state.topics_by_id.values(), key=lambda t: t.id)],
        "positions": [
            {"group": group, "topic_id": topic, "queue": queue, "floor": floor, "settled_above": ranges}
            for group, rows in state.positions.dump()
            for topic, queue, floor, ranges in rows
        ],
    }


def _topic_facts(topic: Topic, state: State) -> Facts:
    keys = [queue_key(topic.id, queue) for queue in range(topic.config.queues)]
    queues = [[key & 255, state.first.get(key, 0), state.next[key]] for key in keys if key in state.next]
    return {"id": topic.id, "name": topic.name, "config": config_words(topic.config), "queues_first_next": queues}


def entry_files(
    files: Files, pool: FilePool, checkpoint: Checkpoint, folder: str, key: int
) -> Iterator[tuple[str, int, Entries]]:
    """(path, first queue offset, entries) of everything on disk that indexes a queue, in order.

    Raises:
        DerivedDamaged: a file is missing, or a run's table cannot be read.
    """
    filed = dict(checkpoint.filed).get(key, 0)
    where = f"{QUEUES}/{folder}/{key & 255}"
    for name in files.listdir(where) if filed else ():
        match = _QUEUE_FILE.fullmatch(name)
        if match is not None and int(match[1]) < filed:
            first, path = int(match[1]), f"{where}/{name}"
            try:
                raw = pool.get(path).read(0, (filed - first) * ENTRY_BYTES)
            except FileNotFoundError:
                raise DerivedDamaged(f"{path} is missing") from None
            yield path, first, np.frombuffer(raw[: len(raw) // ENTRY_BYTES * ENTRY_BYTES], ENTRY_DTYPE)
    for path in checkpoint.runs:
        run = Run(pool, path)
        row = run.row(key)
        if row is not None:
            yield path, row[0], run.read(row[2], row[1])


def _entry_state(is_right: bool, is_kept: bool, length: int) -> str:
    if not is_right:
        return "wrong"
    if not is_kept:
        return "gone"  # by retention, with its segment
    return "ok" if length else "lost"  # its unit was damaged when the index was built


def inspect_queue(files: Files, pool: FilePool, name: str, start: int = 0) -> Iterator[Facts]:
    """The index entries on disk of a queue, named like orders/0, from a queue offset on.

    Raises:
        UnknownTopic: there is no such queue.
        DerivedDamaged: the checkpoint cannot be read.
    """
    checkpoint = _needed_checkpoint(files, pool)
    state = restored_state(checkpoint)
    topics = state.topics
    wanted, _, queue = name.rpartition("/")
    topic = topics.get(wanted)
    if topic is None or not queue.isdecimal() or int(queue) >= topic.config.queues:
        there = ", ".join(sorted(topics))
        raise UnknownTopic(f"there is no queue {name!r}: name one like orders/0; the topics are {there}")
    key = queue_key(topic.id, int(queue))
    for path, first, entries in entry_files(files, pool, checkpoint, folder_name(topic), key=key):
        good = valid(key, first, entries)
        for at in range(max(0, start - first), len(entries)):
            offset, length, tag, _ = entries[at].item()
            yield {
                "queue_offset": first + at,
                "journal_offset": offset,
                "bytes": length,
                "tag_hash": tag,
                "file": path,
                "state": _entry_state(bool(good[at]), first + at >= state.first.get(key, 0), length),
            }
