"""The release unit: records that leave the schedule or the half messages for their topics, as the items of one unit.

What always holds: each record goes to the queue its sender would choose (its business id's if it is ordered, its
priority's in a topic with priorities, any otherwise), in the order the caller gives; one whose topic is gone becomes a
dead letter, under the name of its group or of the app that sent it, also when there is a new topic of that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from dmq.broker.catalog.catalog import Catalog
from dmq.errors import InvalidName
from dmq.event_log import EventLog
from dmq.model import DRAIN_GROUP, MessageId, TopicConfig, check_name, dead_letter_topic_name
from dmq.records import ANY_QUEUE, RecordView, business_hash, id_hash, key_hash, moved_record
from dmq.records.attributes import Attributes
from dmq.records.copy import release_record
from dmq.records.hashes import id_hashes
from dmq.records.layout import FLAGS_AT, ORDERED
from dmq.records.move import STORED_DAMAGED, DeadReason, moved_many
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.queries import Queries
from dmq.storage.read.record_group import Gathered
from dmq.storage.state.events import Event
from dmq.storage.state.state import Topic

__all__ = ["ReleaseUnit", "target_queue", "topic_since"]

log = EventLog(__name__)

_NOBODY: Final = "dmq"


class _Column:
    """Records on their way into one batch, their ranks, and the hashes of their ids and keys, 0 where there is none."""

    __slots__ = ("ids", "keys", "ranks", "records")

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.records: list[bytes] = []
        self.ids: list[int] = []
        self.keys: list[int] = []

    def add(self, rank: int, record: bytes, message_id: MessageId, key: str | None) -> None:
        self.ranks.append(rank)
        self.records.append(record)
        self.ids.append(id_hash(message_id))
        self.keys.append(0 if key is None else key_hash(key))

    def add_all(self, ranks: list[int], records: list[bytes], ids: list[int], keys: list[int]) -> None:
        self.ranks += ranks
        self.records += records
        self.ids += ids
        self.keys += keys

    def batch(self, topic: str, queue: int) -> Batch:
        """All of them, by rank."""
        ranks, records = np.array(self.ranks, np.int64), self.records
        ids, keys = np.array(self.ids, np.uint64), np.array(self.keys, np.uint64)
        if np.any(ranks[1:] < ranks[:-1]):
            order = np.argsort(ranks, kind="stable")
            ids, keys = ids[order], keys[order]
            records = [records[index] for index in order.tolist()]
        keyed = np.flatnonzero(keys)
        owners = np.concatenate([np.arange(len(records)), keyed])
        order = np.argsort(owners, kind="stable")
        return Batch(
            topic=topic,
            queue=queue,
            data=b"".join(records),
            lengths=np.fromiter(map(len, records), np.uint32, len(records)),
            hash_index=owners[order].astype(np.uint32),
            hashes=np.concatenate([ids, keys[keyed]])[order],
            moved=True,
        )


def target_queue(topic: Topic, record: RecordView, wanted: int = ANY_QUEUE) -> int:
    """The queue a record must go to; -1 if any will do."""
    queues = topic.config.queues
    if wanted != ANY_QUEUE and wanted < queues:
        return wanted
    if topic.config.priority:
        return min(record.priority, queues - 1)
    if record.flags & ORDERED and record.business_id:
        return business_hash(record.business_id) % queues
    return -1


def topic_since(queries: Queries, name: str, offset: int) -> Topic | None:
    """The topic that a message at this journal offset was sent to, unless it was deleted since.

    A topic of the same name that was made later is another one.
    """
    topic = queries.find_topic(name)
    return topic if topic is not None and topic.created_at <= offset else None


class ReleaseUnit:
    """The items of one unit in the making.

    Parameters:
        sent_at_ms: the copies' send time.
        reason: what a dead letter says.
        code: the same as a number.
    """

    def __init__(
        self,
        queries: Queries,
        catalog: Catalog,
        sent_at_ms: int,
        reason: str,
        code: DeadReason = DeadReason.REJECTED,
    ) -> None:
        self._queries = queries
        self._catalog = catalog
        self._sent_at_ms = sent_at_ms
        self._reason = reason
        self._code = code
        self._batches: dict[tuple[str, int], _Column] = {}
        self._letters: dict[str, _Column] = {}
        self.moved = 0
        self.dead = 0

    def add(self, part: Gathered, order: Mapping[int, int]) -> None:
        """Records of one producer; `order` gives their rank by their journal offset."""
        part = self._without_corrupt(part, order)
        if not len(part.offsets):
            return
        ranks = list(map(order.__getitem__, part.offsets.tolist()))
        if part.is_moved:
            data, ends = bytes(part.buffer), (part.starts + part.lengths).tolist()
            for index, (start, end) in enumerate(zip(part.starts.tolist(), ends, strict=True)):
                if not self._add_retry(data[start:end], ranks[index]):
                    self._add_moved(part.record(index), ranks[index])
            return
        name = part.record(0).topic
        topic = self._topic(name)
        # A topic of the same name that was made later is another one.
        since = len(ranks) if topic is None else int(np.searchsorted(part.offsets, topic.created_at))
        for index in range(since):
            self.add_dead(part.record(index), part.message_id(index), ranks[index])
        if topic is None or since == len(ranks):
            return
        if since:
            part, ranks = part.without(range(since)), ranks[since:]
        records = moved_many(
            part.buffer,
            part.starts,
            part.lengths,
            part.row.producer_id,
            sequences=part.sequences,
            sent_at_ms=self._sent_at_ms,
        )
        hashes = id_hashes(part.row.producer_id, part.sequences).tolist()
        keys = part.hashes.tolist()
        self.moved += len(records)
        if not topic.config.priority and not _any_ordered(part):
            self._batch(name, -1).add_all(ranks, records, hashes, keys)
            return
        for index, (rank, record, hashed, key) in enumerate(zip(ranks, records, hashes, keys, strict=True)):
            self._batch(name, target_queue(topic, part.record(index))).add_all([rank], [record], [hashed], [key])

    def _without_corrupt(self, part: Gathered, order: Mapping[int, int]) -> Gathered:
        """Those that can be read; the others become dead letters."""
        if not part.corrupt:
            return part
        bad = [index for index, offset in enumerate(part.offsets.tolist()) if offset in part.corrupt]
        for index in bad:
            offset = int(part.offsets[index])
            self.add_dead(part.record(index), part.message_id(index), order[offset], corrupt=part.corrupt[offset])
        return part.without(bad) if bad else part

    def _add_retry(self, raw: bytes, rank: int) -> bool:
        """A record that names where it goes, as all retries do; False if it does not, or that is gone."""
        found = release_record(raw, self._sent_at_ms)
        if found is None:
            return False
        name = found.topic.decode()
        topic = self._topic(name)
        if topic is None or found.queue >= topic.config.queues:
            return False
        key = None if found.key is None else found.key.decode()
        self._batch(name, found.queue).add(rank, found.record, MessageId.from_bytes(found.message_id), key)
        self.moved += 1
        return True

    def _add_moved(self, record: RecordView, rank: int) -> None:
        """A record that carries its id, and its target if that is not the topic it had first."""
        said = record.attributes
        assert said.message_id is not None
        name = said.target_topic or said.original_topic or record.topic
        if said.target_topic is None:
            topic = topic_since(self._queries, name, said.original_journal_offset or 0)
        else:
            topic = self._topic(name)
        if topic is None:
            self.add_dead(record, said.message_id, rank)
            return
        copy = moved_record(
            record,
            name,
            sent_at_ms=self._sent_at_ms,
            is_placed=False,
            says=Attributes(
                attempt=said.attempt, group=None if said.target_topic is None else said.group, reason=said.reason
            ),
        )
        queue = target_queue(topic, record, ANY_QUEUE if said.target_queue is None else said.target_queue)
        self._batch(name, queue).add(rank, copy, said.message_id, said.key)
        self.moved += 1

    def add_dead(
        self, record: RecordView, message_id: MessageId, rank: int, group: str = "", *, corrupt: str = ""
    ) -> None:
        """A record that has nowhere else to go, or the stand-in of one that is `corrupt`."""
        said = record.attributes
        reason, code = (f"{STORED_DAMAGED}: {corrupt}", DeadReason.CORRUPT) if corrupt else (self._reason, self._code)
        owner = group or said.group or record.app
        try:
            check_name(owner, "group")
        except InvalidName:
            owner = _NOBODY
        copy = moved_record(
            record,
            dead_letter_topic_name(owner),
            sent_at_ms=self._sent_at_ms,
            message_id=message_id,
            is_placed=False,
            says=Attributes(
                attempt=said.attempt if record.moved else None,
                group=owner,
                reason=reason,
                reason_code=code,
                first_error=reason,
            ),
        )
        letters = self._letters.setdefault(dead_letter_topic_name(owner), _Column())
        letters.add(rank, copy, message_id, said.key)
        self.dead += 1
        log.warning("a message became a dead letter", once_for=code, id=str(message_id), reason=reason)

    def _topic(self, name: str) -> Topic | None:
        return self._queries.find_topic(name)

    def _batch(self, name: str, queue: int) -> _Column:
        return self._batches.setdefault((name, queue), _Column())

    async def items(self) -> list[Batch | Event]:
        """The batches, once the topics of dead letters are there."""
        items: list[Batch | Event] = []
        for (name, queue), column in self._batches.items():
            if queue < 0:
                queue = self._catalog.choose_queue(self._queries.topic(name))
            items.append(column.batch(name, queue))
        for name, column in self._letters.items():
            await self._catalog.see_to_topic(name, TopicConfig(queues=1, carry_for=DRAIN_GROUP))
            items.append(column.batch(name, 0))
        return items


def _any_ordered(part: Gathered) -> bool:
    flags = np.frombuffer(part.buffer, np.uint8)[part.starts + FLAGS_AT]
    return bool((flags & ORDERED).any())
