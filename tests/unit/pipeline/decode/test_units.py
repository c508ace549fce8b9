"""Columns out of a journal: the same as record by record, whatever is in it."""

from __future__ import annotations

import ipaddress
import random
import struct
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.errors import Damaged
from dmq.model import Message, MessageId
from dmq.pipeline.decode.journal_reader import Peeked
from dmq.pipeline.decode.rows import COPY_COLUMNS, MESSAGE_COLUMNS, copy_batch, keys, message_batch
from dmq.pipeline.decode.units import decode_peeked, decode_units
from dmq.pipeline.tables import COPY, MESSAGE, SCHEMAS
from dmq.records import Attributes, Compressor, DeadReason, RecordView, encode_attributes, moved_record
from dmq.records.attributes import entry, property_entries
from dmq.records.builder import build_record, record_head
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.state.events import Settled, SnapshotTaken, decode_event
from dmq.storage.store import MessageStore
from tests.unit.pipeline.journals import batch_of, journal, new_store, plain_row, records_of
from tests.unit.records.samples import SENT_AT_MS, batches, noise

ALL = frozenset((*MESSAGE_COLUMNS, *COPY_COLUMNS))
IPV4 = bytes(10) + b"\xff\xff\x0a\x00\x00\x07"
IPV6 = bytes.fromhex("20010db8000000000000000000000001")


def check_fields(body: bytes) -> None:
    """Every column of every record, and every event, against the plain decoder."""
    rows = decode_units(body, columns=ALL)
    messages: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    events: list[tuple[int, int, bytes]] = []
    for unit, row, index, within, record in records_of(body):
        if row.topic_id == 0:
            events.append((record.journal_offset, unit.header.stored_at_ms, record.raw_body))
        else:
            plain = plain_row(unit, row, index, within, record)
            (copies if plain["topic"].startswith("%") else messages).append(plain)
    batch = message_batch(rows)
    batch.validate(full=True)
    assert batch.schema == SCHEMAS[MESSAGE]
    assert batch.to_pylist() == [{name: plain[name] for name in MESSAGE_COLUMNS} for plain in messages]
    batch = copy_batch(rows)
    batch.validate(full=True)
    assert batch.schema == SCHEMAS[COPY]
    assert batch.to_pylist() == [{name: plain[name] for name in COPY_COLUMNS} for plain in copies]
    assert [(event.journal_offset, event.stored_at_ms, bytes(event.body)) for event in rows.events] == events


def move_all(store: MessageStore, topic: str, **how: Any) -> None:
    """Copy every message of `orders` to another topic."""
    moved: list[bytes] = []
    says = Attributes(**how)
    for _, row, _, within, record in [*records_of(journal(store))]:
        if record.topic == "orders":
            message_id = MessageId(row.producer_id, row.first_sequence + within)
            moved.append(moved_record(record, topic, sent_at_ms=SENT_AT_MS + 9, message_id=message_id, says=says))
    if moved:
        store.append([Batch(topic=topic, queue=0, data=b"".join(moved), lengths=[*map(len, moved)], moved=True)])


@given(st.lists(batches.filter(bool), min_size=1, max_size=5), st.booleans(), st.integers(0, 2**64 - 1000))
@settings(max_examples=120, deadline=None)
def test_every_field_is_what_the_plain_decoder_finds(parts: list[list[Message]], together: bool, producer: int) -> None:
    store = new_store("orders", "paid")
    items = [
        batch_of(
            messages,
            topic=("orders", "paid")[number % 2],
            queue=number % 3,
            producer_id=max(producer, 1),
            first_sequence=1000 * number,
            compressor=Compressor("lz4" if number % 2 else "none"),
            address=(IPV4, IPV6)[number % 2],
            port=5000 + number,
        )
        for number, messages in enumerate(parts)
    ]
    for part in [items] if together else [[item] for item in items]:
        store.append(part)
    store.set_position("billing", "orders", 0, 1)
    move_all(store, "paid")
    check_fields(journal(store))


def test_a_batch_of_equal_records_and_one_of_every_size() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(noise(200, i), key=f"order-{i:06}", tag="created") for i in range(500)])])
    rng = random.Random(3)
    mixed = [
        Message(
            noise(rng.randrange(900), i) if rng.randrange(3) else b"",
            key=rng.choice([None, "", "ключ", f"k{i}"]),
            tag=rng.choice([None, "", "späť"]),
            business_id=rng.choice([None, "", "商店"]),
            properties=rng.choice([None, {}, {"a": ""}, {"ä": "1", "b": "zwei"}]),
        )
        for i in range(300)
    ]
    store.append([batch_of(mixed, first_sequence=500, queue=1)])
    check_fields(journal(store))


def test_compressed_bodies_come_out_as_they_were_sent_beside_plain_ones() -> None:
    store = new_store("orders")
    bodies = [b"abc" * size if size % 2 else noise(size, size) for size in range(1, 200)]
    store.append([batch_of([Message(body) for body in bodies], compressor=Compressor("zstd"))])
    store.append([batch_of([Message(b"abc" * 500)] * 3, first_sequence=500, compressor=Compressor("lz4"))])
    body = journal(store)
    check_fields(body)
    batch = message_batch(decode_units(body, columns=("body",)), ("body",))
    assert batch.column("body").to_pylist() == [*bodies, *[b"abc" * 500] * 3]


def test_a_moved_record_keeps_the_id_and_the_send_time_it_had_first() -> None:
    store = new_store("orders", "%RETRY%billing", "%DLQ%")
    store.append([batch_of([Message(b"x", key="k", properties={"p": "q"}) for _ in range(40)], producer_id=77)])
    retried = {"group": "billing", "attempt": 2, "reason": "kaputt", "target_topic": "orders", "due_at_ms": SENT_AT_MS}
    move_all(store, "%RETRY%billing", **retried)
    move_all(store, "%DLQ%", group="billing", attempt=16, reason="no", reason_code=DeadReason.REJECTED)
    body = journal(store)
    check_fields(body)
    copies = copy_batch(decode_units(body, columns=COPY_COLUMNS))
    assert copies.num_rows == 80
    first, last = copies.slice(0, 1).to_pylist()[0], copies.slice(79, 1).to_pylist()[0]
    assert (first["message_id"], first["origin_topic"], first["attempt"]) == (str(MessageId(77, 0)), "orders", 2)
    assert (last["message_id"], last["reason"], last["error"]) == (str(MessageId(77, 39)), "REJECTED", "no")


def test_attempts_before_a_dead_letter_was_resent_count_as_the_consumer_sees_them() -> None:
    store = new_store("orders", "%RETRY%billing", "%DLQ%")
    store.append([batch_of([Message(b"x")], producer_id=77)])
    move_all(store, "%RETRY%billing", group="billing", attempts_before=3)
    move_all(store, "%RETRY%billing", group="billing", attempts_before=3, attempt=2)
    move_all(store, "%DLQ%", group="billing", attempts_before=3, attempt=6, reason_code=DeadReason.REJECTED)
    body = journal(store)
    check_fields(body)
    copies = copy_batch(decode_units(body, columns=COPY_COLUMNS), ("attempt",))
    assert copies.column("attempt").to_pylist() == [3, 5, 6]


def test_records_that_the_broker_gathered_have_the_address_of_an_ipv6_client() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(b"a"), Message(b"b")], producer_id=77, address=IPV6, port=5000)])
    records = [(unit, row, record) for unit, row, _, _, record in records_of(journal(store)) if row.topic_id]
    unit, row, _ = records[0]
    raw = [bytes(record.buffer[record.start : record.start + record.length]) for _, _, record in records]
    origins = [(2, unit.header.stored_at_ms, row.address + (5000).to_bytes(2, "big"))]
    peeked = Peeked(0, 2, [*map(len, raw)], [(2, 77, 0)], origins, memoryview(b"".join(raw)), topic_id=0)
    columns = ("client", "message_id", "stored_at", "body")
    rows = decode_peeked(peeked, row.topic_id, row.queue, frozenset(columns))
    expected = message_batch(decode_units(journal(store), columns=columns), columns)
    assert message_batch(rows, columns).to_pydict() == expected.to_pydict()
    assert expected.column("client").to_pylist() == [f"[{ipaddress.IPv6Address(row.address)}]:5000"] * 2


def test_only_wanted_topics_are_given_and_events_always() -> None:
    store = new_store("orders", "paid")
    for number in range(4):
        topic = ("orders", "paid")[number % 2]
        store.append([batch_of([Message(b"%d" % number)] * 3, topic=topic, first_sequence=number * 3)])
    body = journal(store)
    paid = store.queries.topic("paid").id
    rows = decode_units(body, wanted=[paid], columns=("topic", "body"))
    assert message_batch(rows, ("topic", "body")).to_pydict() == {
        "topic": ["paid"] * 6,
        "body": [b"1"] * 3 + [b"3"] * 3,
    }
    by_function = decode_units(body, wanted=lambda ids: ids == paid, columns=("body",))
    assert by_function.starts.tolist() == rows.starts.tolist()
    assert len(decode_units(body, wanted=(), columns=())) == 0
    assert [type(decode_event(event.body)).__name__ for event in rows.events][-1] == "TopicPut"
    assert len(decode_units(b"", columns=("body",))) == 0


def test_what_a_group_settled_is_among_the_events() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(b"x")] * 3)])
    settled = Settled("billing", store.queries.topic("orders").id, 0, 0, 3, member="m-1", settled_at_ms=7)
    store.append([settled])
    rows = decode_units(journal(store), columns=())
    assert decode_event(rows.events[-1].body) == settled
    snapshots = [event for event in rows.events if event.is_snapshot]
    assert snapshots
    assert all(isinstance(decode_event(event.body), SnapshotTaken) for event in snapshots)


def test_a_unit_that_fails_its_checksum_is_named_and_nothing_of_it_believed() -> None:
    store = new_store("orders")
    (placed,) = store.append([batch_of([Message(b"hello")])])
    spoilt = bytearray(journal(store))
    spoilt[placed.unit_start + 90 - store.queries.start] ^= 1
    with pytest.raises(Damaged) as caught:
        decode_units(spoilt, columns=("body",))
    first = placed.unit_start - store.queries.start
    assert caught.value.detail == {
        "start": placed.unit_start,
        "end": placed.unit_end,
        "first_byte": first,
        "last_byte": first + placed.unit_end - placed.unit_start,
    }
    with pytest.raises(Damaged):
        decode_units(journal(store)[:-1], columns=("body",))
    with pytest.raises(Damaged):
        decode_units(b"no unit" * 100, columns=("body",))


def spoilt_batch(attributes: bytes, count: int = 1, flags: int = 0, first_sequence: int = 0) -> Batch:
    """Records with attributes that no client of ours writes."""
    names = b"\x06orders\x04shop\x00"
    record = build_record(
        record_head(flags, 0, 4),
        sent_at_ms=1,
        body=b"body",
        body_crc=crc32c(b"body"),
        names=names,
        attributes=attributes,
    )
    data = record * count
    lengths = [len(record)] * count
    return Batch(topic="orders", queue=0, data=data, lengths=lengths, producer_id=9, first_sequence=first_sequence)


@pytest.mark.parametrize("count", [1, 100])
def test_a_record_that_a_client_spoilt_gives_what_can_be_read_of_it(count: int) -> None:
    for attributes, key, tag in (
        (entry(1, b"good") + b"\x02\xff\xff", b"good", None),
        (entry(1, b"good") + entry(1, b"again") + entry(2, b"t"), b"good", "t"),
        (entry(2, b"\xff\xfe") + entry(1, b"\xff"), b"\xff", "\ufffd\ufffd"),
        (b"\x01", None, None),
        (entry(0x80, b"") + entry(0x80, b"\x05ab") + entry(0x80, b"\x00x") + property_entries({"a": "b"}), None, None),
    ):
        store = new_store("orders")
        store.append([spoilt_batch(attributes, count)])
        rows = decode_units(journal(store), columns=("key", "tag", "headers"))
        assert keys(rows).to_pylist() == [key] * count
        batch = message_batch(rows, ("tag", "headers"))
        batch.validate(full=True)
        assert batch.column("tag").to_pylist() == [tag] * count
        expected = [{"key": "a", "value": b"b"}] if attributes.endswith(b"b") else None
        assert batch.column("headers").to_pylist() == [expected] * count


def test_a_body_that_cannot_be_expanded_is_null() -> None:
    store = new_store("orders")
    bad = encode_attributes(Attributes(codec=1, raw_size=500))
    store.append([spoilt_batch(bad, 2, flags=1), spoilt_batch(b"", 1, flags=1, first_sequence=2)])
    store.append([batch_of([Message(b"fine")])])
    batch = message_batch(decode_units(journal(store), columns=("body", "body_crc")), ("body", "body_crc"))
    assert batch.column("body").to_pylist() == [None, None, None, b"fine"]
    assert batch.column("body_crc").to_pylist()[:3] == [None, None, None]


def test_a_time_that_no_calendar_has_becomes_the_last_one_it_has() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(b"x")], sent_at_ms=2**63)])
    (row,) = message_batch(decode_units(journal(store), columns=MESSAGE_COLUMNS)).to_pylist()
    assert row["sent_at"].year == row["received_at"].year == 9999


def test_a_record_whose_sizes_do_not_add_up_is_all_body_and_in_nobodys_way() -> None:
    store = new_store("orders")
    (placed,) = store.append([batch_of([Message(b"hello", key="k")] * 3)])
    rows = decode_units(journal(store), columns=("key",))
    buffer = bytearray(rows.buffer)
    start = int(rows.starts[1])
    struct.pack_into(">I", buffer, start + 63, 60)
    rows.buffer = memoryview(buffer)
    assert placed.count == 3
    assert keys(rows).to_pylist() == [b"k", None, b"k"]
    starts, ends = rows.stored_bodies()
    assert (ends - starts).tolist() == [5, int(rows.ends[1]) - start - 67 - 5, 5]


def test_selected_rows_are_those_rows() -> None:
    store = new_store("orders")
    store.append([batch_of([Message(b"%d" % i, key=f"k{i}") for i in range(50)])])
    rows = decode_units(journal(store), columns=MESSAGE_COLUMNS)
    all_rows = message_batch(rows).to_pylist()
    assert message_batch(rows.select(slice(10, 13))).to_pylist() == all_rows[10:13]
    mask = np.arange(50) % 7 == 0
    assert message_batch(rows.select(mask)).to_pylist() == all_rows[::7]
    assert RecordView(rows.buffer, int(rows.starts[3])).key == "k3"
