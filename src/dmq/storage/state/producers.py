"""Idempotent producers: a batch that is sent again gets the first one's place instead of a second copy.

Pure code. Remembered per producer: its epoch, and per queue the last five batches, not counting those that are written
but not applied yet. Sequences belong to the producer (they are half of the message id), so within one queue they rise,
with gaps where other queues got theirs.

What always holds: `look` changes nothing; a batch is remembered only after its unit was written. Anonymous producers
are forgotten when unused for long, or when there are too many, the longest unused first; named ones are kept, and their
numbers go on from one epoch to the next: an epoch only says which instance may write.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Final

import msgspec

from dmq.errors import SequenceConflict, StaleEpoch

__all__ = ["REMEMBERED", "Place", "ProducerTable"]

REMEMBERED: Final = 5


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a batch went."""

    first_sequence: int
    count: int
    first_queue_offset: int
    unit_start: int
    unit_end: int


class _Producer:
    __slots__ = ("epoch", "named", "queues", "used_at_ms")

    def __init__(self, epoch: int, named: bool, used_at_ms: int) -> None:
        self.epoch = epoch
        self.named = named
        self.used_at_ms = used_at_ms
        self.queues: dict[int, tuple[Place, ...]] = {}  # tuples, so that a dump need not copy them


Dumped = list[tuple[int, int, bool, int, list[tuple[int, tuple[Place, ...]]]]]


class ProducerTable:
    """What is remembered of every producer, in the order of last use."""

    def __init__(self, producers_max: int, expiry_ms: int) -> None:
        self._producers: OrderedDict[int, _Producer] = OrderedDict()
        self._producers_max = producers_max
        self._expiry_ms = expiry_ms
        self._newest = -1  # where the newest unit starts that anything is remembered of
        self.applied = 0  # journal offset: units below are applied to the state

    def __len__(self) -> int:
        return len(self._producers)

    def epoch_of(self, producer_id: int) -> int | None:
        """The newest epoch a producer has written with; None if it is not remembered."""
        producer = self._producers.get(producer_id)
        return None if producer is None else producer.epoch

    def last_places(self, producer_id: int) -> dict[int, Place]:
        """Where a producer's last batch went in each queue, by the queue's key."""
        producer = self._producers.get(producer_id)
        return {} if producer is None else {key: places[-1] for key, places in producer.queues.items()}

    def look(self, producer_id: int, epoch: int, queue_key: int, first_sequence: int, count: int) -> Place | None:
        """The place of the batch if it was stored before, None if it is new.

        Raises:
            StaleEpoch: a newer instance of the producer has written since.
            SequenceConflict: the numbers were used for other messages.
        """
        producer = self._producers.get(producer_id)
        if producer is None:
            return None
        if epoch != producer.epoch:
            if epoch < producer.epoch:
                raise StaleEpoch(
                    f"producer {producer_id:016x} was replaced: epoch {producer.epoch} has written, this is {epoch}; "
                    "create a new producer",
                    producer_id=producer_id,
                    epoch=producer.epoch,
                )
            if not producer.named:
                return None
        places = producer.queues.get(queue_key)
        if not places or first_sequence >= places[-1].first_sequence + places[-1].count:
            return None
        for place in places:
            if place.first_sequence == first_sequence and place.count == count:
                return place
        raise SequenceConflict(
            f"producer {producer_id:016x} sent sequences {first_sequence}-{first_sequence + count - 1}, which overlap "
            "others it sent before or are too old to recognise; a batch must be sent again with the same bounds",
            producer_id=producer_id,
            first_sequence=first_sequence,
            count=count,
        )

    def last_sequence(self, producer_id: int, epoch: int, queue_key: int) -> int | None:
        """The number of a producer's last message in a queue; None if it is not known, or of an epoch that is over."""
        producer = self._producers.get(producer_id)
        if producer is None or (epoch != producer.epoch and not producer.named):
            return None
        places = producer.queues.get(queue_key)
        return places[-1].first_sequence + places[-1].count - 1 if places else None

    def remember(
        self, producer_id: int, epoch: int, named: bool, queue_key: int, place: Place, used_at_ms: int
    ) -> None:
        """Keep the place of a batch that was written."""
        producer = self._producers.get(producer_id)
        if producer is None or (epoch > producer.epoch and not producer.named):
            producer = self._producers[producer_id] = _Producer(epoch, named, used_at_ms)
        elif epoch < producer.epoch:
            return
        producer.epoch = epoch
        producer.used_at_ms = used_at_ms
        producer.named = producer.named or named
        places = producer.queues.get(queue_key, ())
        # Those that are written and not applied come on top: they may be cut, and then the others are the last ones.
        while len(places) > REMEMBERED and places[REMEMBERED].unit_end <= self.applied:
            places = places[1:]
        producer.queues[queue_key] = (*places, place)
        if place.unit_start > self._newest:
            self._newest = place.unit_start
        self._producers.move_to_end(producer_id)
        if len(self._producers) > self._producers_max:
            self._evict()

    def _evict(self) -> None:
        victim = next((pid for pid, producer in self._producers.items() if not producer.named), None)
        if victim is not None:
            del self._producers[victim]

    def expire(self, now_ms: int) -> None:
        """Forget anonymous producers unused for longer than the expiry."""
        oldest = now_ms - self._expiry_ms
        unused = itertools.takewhile(lambda item: item[1].used_at_ms < oldest, self._producers.items())
        for pid in [pid for pid, producer in unused if not producer.named]:
            del self._producers[pid]

    def drop_topic(self, topic_id: int) -> None:
        for pid, producer in list(self._producers.items()):
            for key in [key for key in producer.queues if key >> 8 == topic_id]:
                del producer.queues[key]
            if not producer.queues:  # nor does a snapshot have it
                del self._producers[pid]

    def dump(self, before: int) -> Dumped:
        """Everything that units below the journal offset `before` say, as plain data."""
        if before > self._newest:  # the usual case, and the loop waits for it
            return [
                (pid, producer.epoch, producer.named, producer.used_at_ms, list(producer.queues.items()))
                for pid, producer in self._producers.items()
                if producer.queues
            ]
        dumped: Dumped = []
        for pid, producer in self._producers.items():
            queues = [
                (key, kept)
                for key, places in producer.queues.items()
                if (kept := tuple(place for place in places if place.unit_start < before))
            ]
            if queues:
                dumped.append((pid, producer.epoch, producer.named, producer.used_at_ms, queues))
        return dumped

    def load(self, dumped: Dumped) -> None:
        self._producers = OrderedDict()
        for pid, epoch, named, used_at_ms, queues in dumped:
            producer = self._producers[pid] = _Producer(epoch, named, used_at_ms)
            producer.queues = {key: places[-REMEMBERED:] for key, places in queues}
            for _, places in queues:
                self._newest = max(self._newest, places[-1].unit_start)
