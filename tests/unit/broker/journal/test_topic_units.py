"""Units without what does not concern some topics decode to the same rows as all units."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dmq.broker.journal.unit_fetch import units_of
from dmq.errors import Damaged
from dmq.model import Message
from dmq.pipeline.decode.rows import MESSAGE_COLUMNS, message_batch
from dmq.pipeline.decode.units import decode_units
from dmq.records import Compressor
from dmq.storage.journal.unit import CUT, HEADER_BYTES, read_header
from dmq.storage.store import MessageStore
from tests.unit.pipeline.journals import batch_of, journal, new_store

TOPICS = ("orders", "mails", "clicks", "bills")


def rows_of(body: Any, topic_ids: set[int]) -> list[dict[str, Any]]:
    rows = decode_units(body, wanted=topic_ids, columns=frozenset(MESSAGE_COLUMNS))
    found: list[dict[str, Any]] = message_batch(rows).to_pylist()
    return found


def messages(rng: random.Random, count: int, size: int) -> list[Message]:
    return [
        Message(rng.randbytes(rng.randrange(size)) or b"", key=f"k-{number}" if number % 3 else None, tag="t")
        for number in range(count)
    ]


def mixed_store(seed: int) -> tuple[MessageStore, dict[str, int]]:
    """Units of one batch, and units of several topics, some of whose bodies stand in blocks."""
    rng = random.Random(seed)
    store = new_store(*TOPICS)
    sequence = 0
    for _ in range(60):
        batches = []
        for _ in range(rng.choice([1, 1, 2, 5])):
            count = rng.choice([1, 1, 3, 40])
            compressor = Compressor("lz4") if rng.random() < 0.3 else None
            made = messages(rng, count, 300) if compressor is None else [Message(b"alike " * 50)] * count
            batches.append(
                batch_of(
                    made,
                    topic=rng.choice(TOPICS),
                    producer_id=rng.randrange(5, 9),
                    first_sequence=sequence,
                    compressor=compressor,
                )
            )
            sequence += count
        store.append(batches)
    return store, {name: store.queries.topic(name).id for name in TOPICS}


@pytest.mark.parametrize("seed", range(4))
def test_the_rows_of_some_topics_are_the_same_and_the_bytes_are_fewer(seed: int) -> None:
    store, ids = mixed_store(seed)
    body = journal(store)
    for names in (("orders",), ("mails", "bills"), TOPICS):
        wanted = {ids[name] for name in names}
        part = units_of(body, wanted)
        assert rows_of(part, wanted) == rows_of(body, wanted) != []
        assert len(part) < (0.6 if len(names) == 1 else 0.9 if len(names) == 2 else 1.01) * len(body)


def test_a_unit_of_which_little_is_wanted_is_cut_and_others_stay_verbatim() -> None:
    store = new_store(*TOPICS)
    start = store.queries.end
    store.append([batch_of([Message(b"x" * 50)]), batch_of([Message(b"y" * 5000)], topic="mails")])
    body = journal(store)[start - store.queries.start :]
    orders, mails = (store.queries.topic(name).id for name in ("orders", "mails"))
    cut = units_of(body, {orders})
    header = read_header(cut)
    assert header is not None
    assert (header.start, header.flags & CUT, header.batches, header.length) == (start, CUT, 1, len(cut))
    assert len(cut) < 500
    assert rows_of(cut, {orders}) == rows_of(body, {orders})
    assert units_of(body, {mails}) is body, "more than half of it is wanted"
    assert units_of(body, {orders, mails}) is body
    assert units_of(body, {99}) == b""


def test_a_turned_bit_hides_nothing() -> None:
    store = new_store(*TOPICS)
    start = store.queries.end
    store.append([batch_of([Message(b"x" * 50)])])
    body = bytearray(journal(store)[start - store.queries.start :])
    topic_at = HEADER_BYTES + 4 + 24 + 3
    body[topic_at] ^= 1  # now it claims to be of another topic
    part = units_of(bytes(body), {store.queries.topic("orders").id})
    assert part == body
    with pytest.raises(Damaged):
        rows_of(part, {store.queries.topic("orders").id})


def test_a_cut_unit_whose_bits_turned_on_the_way_is_noticed() -> None:
    store = new_store(*TOPICS)
    start = store.queries.end
    store.append([batch_of([Message(b"x" * 50)]), batch_of([Message(b"y" * 5000)], topic="mails")])
    wanted = {store.queries.topic("orders").id}
    cut = units_of(journal(store)[start - store.queries.start :], wanted)
    for at in range(0, len(cut), 7):
        spoilt = bytearray(cut)
        spoilt[at] ^= 4
        with pytest.raises(Damaged):
            rows_of(spoilt, wanted)
