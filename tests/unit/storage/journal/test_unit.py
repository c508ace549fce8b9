"""Units, byte for byte: a header and a batch row computed by hand, and two paths that agree. (J-03, J-08)"""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import RecordCorrupt
from dmq.model import Message
from dmq.records import RecordView, encode_batch
from dmq.records.layout import IPV6
from dmq.storage.journal.unit import (
    DUE,
    FEW,
    HEADER_BYTES,
    NAMED,
    NO_ADDRESS,
    ROW_BYTES,
    SNAPSHOT,
    Part,
    Row,
    Unit,
    is_intact,
    parse_unit,
    read_header,
)
from dmq.storage.journal.unit_draft import UnitBuilder, event_part
from dmq.storage.state.events import Archived, Event, TopicDropped
from tests.unit.records.samples import slow_crc32c

SENT_AT_MS = 1_700_000_000_000
SERVER = bytes((10, 0, 0, 9, 0x25, 0x8B))
V4 = bytes(10) + b"\xff\xff" + bytes((192, 168, 1, 2))
V6 = bytes(range(16))


def part(
    count: int,
    *,
    first: int = 0,
    keys: bool = True,
    dues: bool = False,
    address: bytes = V4,
    topic_id: int = 16,
    as_arrays: bool = True,
) -> Part:
    messages = [
        Message(bytes([i % 256]) * (i % 40), key=f"k{i}" if keys else None, tag="t" * (i % 3)) for i in range(count)
    ]
    encoded = encode_batch("orders", "app", messages, sent_at_ms=SENT_AT_MS)
    flags = (DUE if dues else 0) | NAMED
    row = Row(0xABCD, 3, 1000 + first, count, topic_id, 2, flags, 0, first, address, 4711)
    due_times = [SENT_AT_MS + i for i in range(count)] if dues else []
    columns = (encoded.lengths, encoded.hash_index, encoded.hashes)
    lengths, index, hashes = columns if as_arrays else tuple(column.tolist() for column in columns)
    return Part(row, bytes(encoded.data), lengths, SENT_AT_MS + 5, index, hashes, due_times)


def built(parts: list[Part], start: int = 5_000_000_000, flags: int = 0) -> Unit:
    builder = UnitBuilder(0x1122334455667788, SERVER, epoch=7)
    return builder.build(parts, start=start, stored_at_ms=SENT_AT_MS + 9, flushed_through=4_999_999_000, flags=flags)


def columns(unit: Unit) -> list[list[int]]:
    every = (unit.offsets, unit.lengths, unit.hash_index, unit.hashes, unit.dues, unit.tags)
    return [[int(value) for value in column] for column in every]


def test_the_header_is_as_drawn() -> None:
    unit = built([part(1, dues=True)], flags=SNAPSHOT)
    raw = bytes(unit.buffer)
    record = len(raw) - (72 + 4 + 64 + 12 + 8)
    expected = (
        b"DMQU"
        + struct.pack(">I", slow_crc32c(raw[8:]))
        + bytes.fromhex("0001000100000007")  # version, flags, epoch
        + bytes.fromhex("000000012a05f200")  # start, 5,000,000,000
        + struct.pack(">I", len(raw))
        + bytes.fromhex("0000000100000001000000010000000100000000")  # records, batches, hashes, dues, zero
        + bytes.fromhex("0000018bcfe56809")  # store time
        + bytes.fromhex("000000012a05ee18")  # flushed through 4,999,999,000
        + bytes.fromhex("1122334455667788")  # journal id
    )
    assert len(expected) == 72
    assert raw[:72] == expected
    assert raw[72:76] == struct.pack(">I", record)


def test_events_have_the_bytes_of_system_records() -> None:
    """J-04."""
    events: list[Event] = [TopicDropped(7), Archived(1 << 40), TopicDropped(8)]
    tail = bytes.fromhex("06 254556454e54 00 00 0000")  # topic %EVENT, no app, no business id, no attributes
    head, sent = bytes.fromhex("d301 04 0000 00"), bytes.fromhex("0000018bcfe56800")
    expected = []
    for body in ("9202 07", "920a cf0000010000000000", "9202 08"):
        raw = bytes.fromhex(body)
        expected.append(
            struct.pack(">I", 67 + len(raw) + len(tail))
            + head
            + bytes(29)
            + sent
            + bytes(8)
            + struct.pack(">II", slow_crc32c(head + sent + tail), slow_crc32c(raw))
            + struct.pack(">I", len(raw))
            + raw
            + tail
        )
    made = event_part(events, SENT_AT_MS)
    assert bytes(made.data) == b"".join(expected)
    assert [*made.lengths] == [*map(len, expected)]
    assert bytes(event_part(events[:1], SENT_AT_MS).data) == expected[0]


def test_a_batch_row_is_as_drawn() -> None:
    raw = bytes(built([part(1)]).buffer)
    expected = bytes.fromhex(
        "000000000000abcd"  # producer id
        "00000003"  # its epoch
        "00000000000003e8"  # first sequence, 1000
        "00000001"  # records
        "00000010"  # topic id
        "02"  # queue
        "02"  # NAMED
        "0000"
        "0000000000000000"  # queue offset
        "00000000000000000000ffffc0a80102"  # 192.168.1.2
        "1267"  # port 4711
        "000000000000"
    )
    assert len(expected) == 64
    assert raw[76:140] == expected


def test_hashes_and_due_times_follow_the_table_and_records_come_last() -> None:
    one = part(2, dues=True)
    raw = bytes(built([one]).buffer)
    at = 72 + 4 * 2 + 64
    assert raw[at : at + 8] == bytes.fromhex("0000000000000001")
    assert struct.unpack_from(">2Q", raw, at + 8) == tuple(int(value) for value in one.hashes)
    assert struct.unpack_from(">2Q", raw, at + 24) == tuple(one.dues)
    first = RecordView(raw, at + 40)
    second = RecordView(raw, at + 40 + first.length)
    assert (first.journal_offset, first.queue_offset, first.queue) == (5_000_000_000 + at + 40, 0, 2)
    assert (second.queue_offset, second.key) == (1, "k1")
    assert (first.client, first.server) == (V4[12:] + bytes.fromhex("1267"), SERVER)
    assert (first.receive_time_ms, first.store_time_ms) == (SENT_AT_MS + 5, SENT_AT_MS + 9)
    first.verify()
    second.verify()


parts = st.lists(
    st.builds(
        part,
        st.integers(1, 40),
        first=st.integers(0, 1 << 40),
        keys=st.booleans(),
        dues=st.booleans(),
        address=st.sampled_from((V4, V6, NO_ADDRESS)),
        as_arrays=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


@given(parts)
def test_what_was_built_is_parsed_again(given_parts: list[Part]) -> None:
    unit = built(given_parts)
    header = read_header(unit.buffer)
    assert header == unit.header
    assert is_intact(header, unit.buffer)
    twin = parse_unit(header, bytes(unit.buffer))
    assert columns(twin) == columns(unit)
    assert twin.rows == unit.rows == [p.row for p in given_parts]
    at = 0
    for given_part in given_parts:
        for within in range(given_part.row.records):
            record = RecordView(bytes(twin.record(at)))
            record.verify()
            assert record.queue_offset == given_part.row.first_queue_offset + within
            assert record.journal_offset == int(unit.offsets[at])
            assert record.tag_hash == int(unit.tags[at])
            at += 1


@pytest.mark.parametrize("hashes", [[], [5], [5, 2**64 - 1], [1, 2, 3]])
def test_a_record_alone_may_have_any_number_of_hashes(hashes: list[int]) -> None:
    """One that was moved has its id's beside its key's."""
    lone = part(1)._replace(hashes=hashes, hash_index=[0] * len(hashes))
    unit = built([lone])
    header = read_header(unit.buffer)
    assert header == unit.header
    assert is_intact(header, unit.buffer)
    twin = parse_unit(header, bytes(unit.buffer))
    assert columns(twin) == columns(unit)
    assert twin.hashes == hashes
    RecordView(bytes(twin.record(0))).verify()


@pytest.mark.parametrize("count", [1, FEW - 1, FEW, 200])
@pytest.mark.parametrize("spare", [-1, 0, 1, 500])
@pytest.mark.parametrize("dues", [False, True])
def test_a_unit_made_where_its_records_were_received_is_the_same(count: int, spare: int, dues: bool) -> None:
    """`spare`: how much more room there is before the records than the tables take."""
    given_part = part(count, dues=dues)
    expected = built([given_part])
    tables = expected.header.length - len(given_part.data)
    others = tables - HEADER_BYTES - ROW_BYTES - 4 * count  # which a request has before the records as well
    sent = bytes(expected.buffer[tables - others : tables]) + bytes(given_part.data)
    room = memoryview(bytearray(b"?" * (tables - others + spare) + sent))
    received = given_part._replace(data=room[tables + spare :].toreadonly(), room=room)
    built([received])  # as if it could not be written
    unit = built([received])
    assert bytes(unit.buffer) == bytes(expected.buffer)
    assert unit.header == expected.header
    assert columns(unit) == columns(expected)
    is_in_place = isinstance(unit.buffer, memoryview)
    assert is_in_place == (spare >= 0 and count >= FEW)
    assert not is_in_place or room[tables + spare :] == unit.buffer[tables:]


@given(st.integers(FEW - 3, FEW + 3), st.integers(1, 4), st.booleans())
def test_few_and_many_records_are_laid_out_alike(count: int, batches: int, dues: bool) -> None:
    """The plain path and the numpy path meet at `FEW`: one record more changes the path, and nothing else."""
    rows = [part(1, first=i, dues=dues) for i in range(count - batches + 1)] + [part(1, first=50)] * (batches - 1)
    unit = built(rows)
    assert isinstance(unit.offsets, np.ndarray) == (len(rows) >= FEW)
    at = 72 + (4 + 64 + 12) * len(rows) + 8 * len(unit.dues)
    for index, given_part in enumerate(rows):
        alone = built([given_part], start=unit.start + at - (72 + 4 + 64 + 12 + 8 * len(given_part.dues)))
        assert bytes(unit.record(index)) == bytes(alone.record(0))
        at += len(given_part.data)
    assert at == unit.header.length


def test_a_record_of_an_ipv6_client_is_marked_and_has_no_address() -> None:
    record = RecordView(bytes(built([part(1, address=V6)]).record(0)))
    assert record.client == bytes(6)
    assert record.flags & IPV6
    record.verify()


@given(st.integers(0, 8 * 400 - 1))
def test_a_flipped_bit_anywhere_is_seen(bit: int) -> None:
    unit = built([part(3)])
    raw = bytearray(unit.buffer)
    raw[bit // 8 % len(raw)] ^= 1 << bit % 8
    header = read_header(raw)
    assert header is None or header.journal_id != unit.header.journal_id or not is_intact(header, raw)


def test_tables_that_contradict_each_other_are_refused() -> None:
    unit = built([part(2)])
    raw = bytearray(unit.buffer)
    raw[72:76] = struct.pack(">I", int(unit.lengths[0]) + 1)
    with pytest.raises(RecordCorrupt):
        parse_unit(unit.header, raw)


def test_what_is_too_short_or_begins_otherwise_is_no_header() -> None:
    raw = bytes(built([part(1)]).buffer)
    assert read_header(raw[:71]) is None
    assert read_header(b"x" + raw) is None
    assert read_header(b"x" + raw, 1) is not None
