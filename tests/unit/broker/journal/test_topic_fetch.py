"""One topic of many: the same rows as from the whole journal, and most of the journal is not even read."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest

from dmq.broker.journal import unit_fetch
from dmq.broker.journal.disk import DiskReads
from dmq.broker.journal.unit_fetch import GAP_BYTES, TopicFetch, UnitFetch, plan_of
from dmq.errors import Damaged
from dmq.model import Message, TopicConfig
from dmq.pipeline.decode.rows import MESSAGE_COLUMNS, message_batch
from dmq.pipeline.decode.units import decode_units
from dmq.protocol.read import Fetch
from dmq.settings import StoreSettings
from dmq.storage.journal.unit import HEADER_BYTES
from dmq.storage.read.reader import QueueEntries
from dmq.storage.store import MessageStore
from dmq.testing import FakeClock, MemoryFiles
from tests.unit.pipeline.journals import batch_of, journal, units_of

T = TypeVar("T")

TOPICS = ("orders", "mails", "clicks", "bills")
SIZE = 100_000
TOPIC_ID_AT = 27  # the last byte of it in a row of a batch table
SETTINGS = StoreSettings(segment_bytes=1 << 20, unit_bytes_max=1 << 18, body_bytes_max=1 << 16)
# batches of a unit, messages of a batch, bytes of a message
KINDS = {
    "large units": ((1,), (20, 30), 4000),
    "small units": ((1,), (1, 2), 600),
    "mixed units": ((1, 2, 5), (1, 3, 40), 600),
}


class CountedReads(DiskReads):
    """Knows how much of the journal it has read."""

    looked = 0

    async def ask(self, question: Callable[[], T]) -> T:
        answer = await super().ask(question)
        self._count(answer)
        return answer

    async def ask_many(self, questions: Sequence[Callable[[], T]]) -> list[T]:
        answers = await super().ask_many(questions)
        for answer in answers:
            self._count(answer)
        return answers

    def _count(self, answer: Any) -> None:
        if type(answer) is tuple:
            self.looked += len(answer[0])


def filled(seed: int, kind: str, *, queues: int = 2, files: MemoryFiles | None = None) -> MessageStore:
    """Batches of four topics in units of one kind; some entries of the index are in files, some in memory."""
    rng = random.Random(seed)
    batches_of, counts, size = KINDS[kind]
    store = MessageStore(files or MemoryFiles(), SETTINGS, FakeClock())
    for topic in TOPICS:
        store.create_topic(topic, TopicConfig(queues=queues))
    sequence = 0
    for number in range(120):
        batches = []
        for _ in range(rng.choice(batches_of)):
            made = [Message(rng.randbytes(rng.randrange(size))) for _ in range(rng.choice(counts))]
            where: dict[str, Any] = {"topic": rng.choice(TOPICS), "queue": rng.randrange(queues)}
            batches.append(batch_of(made, first_sequence=sequence, **where))
            sequence += len(made)
        store.append(batches)
        if number % 50 == 40:
            store.checkpoint()
    store.flush()
    return store


async def all_of(fetch: TopicFetch, asked: Fetch, stop: int, size: int = SIZE) -> list[UnitFetch]:
    found = [await fetch.fetch(asked, size)]
    while found[-1].end < stop:
        found.append(await fetch.fetch(Fetch(found[-1].end, end=asked.end, topic_ids=asked.topic_ids), size))
        assert found[-1].end > found[-2].end
    return found


def fetched(store: MessageStore, asked: Fetch, size: int = SIZE) -> tuple[list[UnitFetch], int]:
    """All answers from there on, and how many bytes of the journal were read for them."""

    async def run() -> tuple[list[UnitFetch], int]:
        reads = CountedReads(store.queries)
        try:
            stop = min(asked.end or store.queries.visible, store.queries.visible)
            return await all_of(TopicFetch(store.queries, reads), asked, stop, size), reads.looked
        finally:
            reads.close()

    return asyncio.run(run())


def rows_of(body: Any, topic_ids: set[int]) -> list[dict[str, Any]]:
    rows = decode_units(body, wanted=topic_ids, columns=frozenset(MESSAGE_COLUMNS))
    found: list[dict[str, Any]] = message_batch(rows).to_pylist()
    return found


def body_of(found: Sequence[UnitFetch]) -> bytes:
    return b"".join(piece for part in found for piece in part.pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_the_rows_are_those_of_the_whole_journal(kind: str, seed: int) -> None:
    store = filled(seed, kind)
    whole = journal(store)
    for names in (TOPICS[:1], TOPICS[1:3], TOPICS):
        wanted = {store.queries.topic(name).id for name in names}
        found, _ = fetched(store, Fetch(store.queries.start, topic_ids=[*wanted]))
        assert rows_of(body_of(found), wanted) == rows_of(whole, wanted) != []
        assert max(sum(map(len, part.pieces)) for part in found) < 2 * SIZE


def test_of_large_units_those_of_other_topics_are_not_read() -> None:
    store = filled(1, "large units")
    orders = store.queries.topic("orders").id
    found, looked = fetched(store, Fetch(store.queries.start, topic_ids=[orders]))
    extent = store.queries.visible - store.queries.start
    assert looked < 0.5 * extent
    assert len(body_of(found)) > 0.15 * extent
    _, of_all = fetched(store, Fetch(store.queries.start, topic_ids=[store.queries.topic(name).id for name in TOPICS]))
    assert of_all >= extent - 1000, "one after the other, where nearly all is wanted"


@pytest.mark.parametrize("kind", KINDS)
def test_a_range_has_the_messages_that_begin_in_it_wherever_it_is_cut(kind: str) -> None:
    store, rng = filled(3, kind), random.Random(3)
    orders = store.queries.topic("orders").id
    every = rows_of(journal(store), {orders})
    for _ in range(8):
        first, last = sorted(rng.randrange(store.queries.start, store.queries.visible) for _ in range(2))
        found, _ = fetched(store, Fetch(first, end=last, topic_ids=[orders]))
        assert found[-1].end >= last
        rows = [row for row in rows_of(body_of(found), {orders}) if first <= row["journal_offset"] < last]
        assert rows == [row for row in every if first <= row["journal_offset"] < last]
        assert all(part.start <= following.start == part.end for part, following in itertools.pairwise(found))


def test_a_reader_that_another_one_overtakes_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_fetch, "PLANS_MAX", 1)
    store = filled(4, "large units")
    orders, mails = (store.queries.topic(name).id for name in ("orders", "mails"))

    async def run() -> tuple[bytes, bytes]:
        reads = DiskReads(store.queries)
        fetch = TopicFetch(store.queries, reads)
        ends, bodies = [store.queries.start] * 2, [b""] * 2
        while min(ends) < store.queries.visible:
            for number, topic_id in enumerate((orders, mails)):
                if ends[number] < store.queries.visible:
                    found = await fetch.fetch(Fetch(ends[number], topic_ids=[topic_id]), SIZE)
                    ends[number] = found.end
                    bodies[number] += body_of([found])
        reads.close()
        return bodies[0], bodies[1]

    for topic_id, body in zip((orders, mails), asyncio.run(run()), strict=True):
        assert rows_of(body, {topic_id}) == rows_of(journal(store), {topic_id})


def test_a_topic_of_very_many_queues_and_one_that_is_gone_are_read_from_the_whole_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unit_fetch, "QUEUES_MAX", 3)
    store = filled(5, "large units", queues=8)
    orders = store.queries.topic("orders").id
    extent = store.queries.visible - store.queries.start
    before = rows_of(journal(store), {orders})
    found, looked = fetched(store, Fetch(store.queries.start, topic_ids=[orders]))
    assert (rows_of(body_of(found), {orders}), looked >= extent) == (before, True)
    monkeypatch.undo()
    store.delete_topic("orders")
    found, _ = fetched(store, Fetch(store.queries.start, topic_ids=[orders]))
    assert rows_of(body_of(found), {orders}) == before, "until retention takes them"


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_turned_bit_hides_no_message_of_the_topic_and_is_no_matter_elsewhere(is_ours: bool) -> None:
    files = MemoryFiles()
    store = filled(6, "large units", files=files)
    orders = store.queries.topic("orders").id
    every = rows_of(journal(store), {orders})
    units = [*units_of(journal(store))]
    chosen = [unit for unit in units if len(unit.rows) == 1 and unit.rows[0].topic_id != 0]
    unit = next(unit for unit in chosen if (unit.rows[0].topic_id == orders) is is_ours)
    segment = next(path for path in files.paths() if path.startswith("journal/"))
    at = files.read_file(segment).index(bytes(unit.buffer))
    files.flip_bit(segment, at + HEADER_BYTES + 4 * unit.header.records + TOPIC_ID_AT)
    found, _ = fetched(store, Fetch(store.queries.start, topic_ids=[orders]))
    if is_ours:
        with pytest.raises(Damaged):
            rows_of(body_of(found), {orders})
    else:
        assert rows_of(body_of(found), {orders}) == every


def entries(first: int, offsets: Sequence[int], *, is_last: bool, length: int = 100) -> QueueEntries:
    return QueueEntries(first, np.array(offsets, np.int64), np.full(len(offsets), length, np.int64), is_last)


def test_a_plan_reaches_as_far_as_the_entries_of_every_queue() -> None:
    far = 10 * GAP_BYTES
    plan = plan_of(
        {1: entries(50, [1000, 1100, far], is_last=False), 2: entries(7, [900, 1300, 2 * far], is_last=True)},
        950,
        5 * far,
        asked=10,
    )
    assert plan.end == far + 1
    assert dict(plan.following) == {1: 53, 2: 9}
    assert plan.spans(950, 5 * far, 1 << 30) == [(1000, 1300), (far, far)]
    assert plan.spans(1200, 5 * far, 1 << 30) == [(1200, 1300), (far, far)]
    assert plan.spans(950, far, 1 << 30) == [(1000, 1300)], "a span that begins behind the end is not wanted"
    assert plan.spans(950, 5 * far, 1) == [(1000, 1300)]
    assert not plan.is_dense
    nothing = plan_of({}, 950, 5 * far, asked=10)
    assert (nothing.end, nothing.spans(950, 5 * far, 1)) == (5 * far, [])
