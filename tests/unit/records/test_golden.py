"""The bytes of records, computed by hand from the layout."""

from __future__ import annotations

import re
from pathlib import Path

from dmq.model import Message, MessageId
from dmq.records import RecordView, Stamp, encode_batch, layout, moved_record, stamp_few, tag_hash
from dmq.records.attributes import Attributes
from dmq.records.builder import build_record, record_head
from tests.unit.records.samples import SENT_AT_MS, slow_crc32c

MESSAGE = Message(
    b"hello", key="k-1", tag="paid", business_id="b7", ordered=True, priority=6, properties={"a": "b"}
)  # fmt: skip

TAIL = bytes.fromhex(
    "06 6f7264657273"  # topic: orders
    "04 73686f70"  # app: shop
    "02 6237"  # business id: b7
    "0013"  # attributes: 19 bytes
    "02 0004 70616964"  # tag: paid
    "80 0003 01 61 62"  # property: a = b
    "01 0003 6b2d31"  # key: k-1
)
TAG_HASH = (slow_crc32c(b"paid") & 0xFFFF).to_bytes(2, "big")
HEAD = bytes.fromhex("d301 02") + TAG_HASH + bytes.fromhex("06")  # magic, ordered, tag, priority
SENT = bytes.fromhex("0000018bcfe56800")


def crc(head: bytes, sent: bytes, tail: bytes, body: bytes) -> bytes:
    others = slow_crc32c(head + sent + tail)
    return others.to_bytes(4, "big") + slow_crc32c(body).to_bytes(4, "big")


def record(stamped: bytes, times: bytes) -> bytes:
    return (
        bytes.fromhex("0000006c")  # length: 108
        + HEAD
        + stamped  # journal offset, queue, queue offset, client, server
        + SENT
        + times  # receive, store
        + crc(HEAD, SENT, TAIL, b"hello")
        + bytes.fromhex("00000005 68656c6c6f")  # body: hello
        + TAIL
    )


UNSTAMPED = record(bytes(29), bytes(8))
STAMPED = record(
    bytes.fromhex(
        "0000000100000000"  # journal offset: 4 GiB
        "03"  # queue: 3
        "000000000000002a"  # queue offset: 42
        "0a000001 d431"  # client: 10.0.0.1:54321
        "c0a80002 1a85"  # server: 192.168.0.2:6789
    ),
    bytes.fromhex("00000002 00000005"),  # received 2 ms and stored 5 ms after sending
)


def test_a_record_as_the_client_writes_it_has_the_bytes_of_the_layout() -> None:
    """J-04."""
    encoded = encode_batch("orders", "shop", [MESSAGE], sent_at_ms=SENT_AT_MS)
    assert bytes(encoded.data).hex() == UNSTAMPED.hex()
    assert encoded.lengths.tolist() == [108]


def test_a_stamped_record_has_the_bytes_of_the_layout() -> None:
    """J-04."""
    data = encode_batch("orders", "shop", [MESSAGE], sent_at_ms=SENT_AT_MS).data
    client, server = bytes.fromhex("0a000001d431"), bytes.fromhex("c0a800021a85")
    stamp_few(data, [0], [1 << 32], Stamp(3, 42, client, server, SENT_AT_MS + 2, SENT_AT_MS + 5))
    assert bytes(data).hex() == STAMPED.hex()


def test_a_view_reads_the_bytes_of_the_layout_back() -> None:
    """J-04."""
    view = RecordView(STAMPED)
    view.verify()
    assert (view.length, view.flags, view.tag_hash, view.priority) == (108, 2, tag_hash("paid"), 6)
    assert (view.journal_offset, view.queue, view.queue_offset) == (1 << 32, 3, 42)
    assert (view.client.hex(), view.server.hex()) == ("0a000001d431", "c0a800021a85")
    assert (view.send_time_ms, view.receive_time_ms - SENT_AT_MS, view.store_time_ms - SENT_AT_MS) == (SENT_AT_MS, 2, 5)
    assert (view.topic, view.app, view.business_id, view.body) == ("orders", "shop", "b7", b"hello")
    assert (view.key, view.tag, view.properties, view.ordered) == ("k-1", "paid", {"a": "b"}, True)


def test_a_moved_record_has_the_bytes_of_the_layout() -> None:
    """J-04."""
    moved = moved_record(
        RecordView(STAMPED),
        "later",
        sent_at_ms=SENT_AT_MS + 256,
        message_id=MessageId(1, 2),
        says=Attributes(attempt=3, reason="no"),
    )
    attributes = bytes.fromhex(
        "04 0010 0000000000000001 0000000000000002"  # message id
        "05 0006 6f7264657273"  # original topic: orders
        "06 0001 03"  # original queue
        "07 0008 0000018bcfe56800"  # original send time
        "0f 0008 000000000000002a"  # original queue offset
        "10 0008 0000000100000000"  # original journal offset
        "0b 0004 00000003"  # attempt
        "0e 0002 6e6f"  # reason: no
        "02 0004 70616964"  # what it had before, in its order
        "80 0003 01 61 62"
        "01 0003 6b2d31"
    )
    tail = bytes.fromhex("05 6c61746572 04 73686f70 02 6237") + len(attributes).to_bytes(2, "big") + attributes
    head = bytes.fromhex("d301 0a") + TAG_HASH + bytes.fromhex("06")
    sent = bytes.fromhex("0000018bcfe56900")
    expected = (
        (67 + 5 + len(tail)).to_bytes(4, "big")
        + head
        + bytes(29)
        + sent
        + bytes(8)
        + crc(head, sent, tail, b"hello")
        + bytes.fromhex("00000005 68656c6c6f")
        + tail
    )
    assert moved.hex() == expected.hex()


def test_the_smallest_record_takes_72_bytes() -> None:
    """J-04."""
    assert layout.RECORD_BYTES_MIN == 63 + 4 + 1 + 1 + 1 + 2
    head = record_head(layout.SYSTEM, 0, 0)
    smallest = build_record(head, sent_at_ms=0, body=b"", body_crc=0, names=bytes(3), attributes=b"")
    assert len(smallest) == layout.RECORD_BYTES_MIN


def test_the_worked_example_in_the_reference_is_the_golden_record() -> None:
    page = Path(__file__).parents[3] / "docs" / "reference" / "record-format.md"
    block = re.search(r"```hex\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    octets = "".join(line.partition("#")[0] for line in block[1].splitlines())
    assert bytes.fromhex(octets).hex() == STAMPED.hex()
