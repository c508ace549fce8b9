"""Records of messages that come back from the archive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dmq.errors import InvalidMessage
from dmq.model import Message, MessageId
from dmq.records import RecordView, encode_batch, id_hash, key_hash, moved_record
from dmq.records.attributes import Attributes, encode_attributes
from dmq.records.builder import build_record, name_bytes, record_head
from dmq.records.layout import MOVED, REPLAYED
from dmq.records.replay import ReplayTarget, ids_of_replayed, merged_hashes

ID = MessageId(0xFFFF_0000_FFFF_0000, 12)


def replayed(message_id: MessageId = ID, body: bytes = b"body", **more: Any) -> bytes:
    target = ReplayTarget("again", "replay-1", 5000)
    coding = {name: more.pop(name) for name in ("codec", "raw_size") if name in more}
    message = Message(body, **more)
    return target.record(message_id.to_bytes(), message, app="shop", first_sent_at_ms=1000, **coding)


def test_a_record_says_all_that_the_message_had_and_where_it_comes_from() -> None:
    record = RecordView(
        replayed(key="k", tag="t", business_id="b", priority=7, ordered=True, properties={"x": "1", "y": "ü"})
    )
    record.verify()
    assert (record.topic, record.app, record.business_id, record.priority) == ("again", "shop", "b", 7)
    assert (record.key, record.tag, record.body, record.ordered) == ("k", "t", b"body", True)
    assert record.properties == {"x": "1", "y": "ü"}
    assert record.flags & (MOVED | REPLAYED) == MOVED | REPLAYED
    said = record.attributes
    assert (said.message_id, said.replay, said.original_send_time_ms) == (ID, "replay-1", 1000)
    assert (said.original_topic, record.send_time_ms) == ("again", 5000)


def test_a_message_that_is_moved_on_keeps_its_id_and_its_replay() -> None:
    moved = RecordView(
        moved_record(RecordView(replayed(key="k")), "%RETRY%g", sent_at_ms=6000, says=Attributes(group="g", attempt=1))
    )
    assert (moved.attributes.message_id, moved.attributes.replay, moved.key) == (ID, "replay-1", "k")
    assert moved.flags & REPLAYED


def test_the_ids_of_a_batch_are_found_at_once() -> None:
    ids = [MessageId(number % 3, number) for number in range(100)]
    records = [replayed(one, b"x" * number, key="k" if number % 2 else None) for number, one in enumerate(ids)]
    found = ids_of_replayed(b"".join(records), [*map(len, records)])
    assert [MessageId(*pair) for pair in found.tolist()] == ids


def test_a_record_is_found_by_its_id_and_by_its_key() -> None:
    ids = [MessageId(9, 1), MessageId(8, 2), MessageId(9, 3)]
    index, hashes = merged_hashes(np.array(ids, np.uint64), [0, 2], [key_hash("a"), key_hash("b")])
    assert index.tolist() == [0, 0, 1, 2, 2]
    assert hashes.tolist() == [id_hash(ids[0]), key_hash("a"), id_hash(ids[1]), id_hash(ids[2]), key_hash("b")]


def plain() -> bytes:
    return bytes(encode_batch("again", "shop", [Message(b"body")], sent_at_ms=1).data)


def marked(attributes: Attributes) -> bytes:
    names = name_bytes("topic", "again") + b"\0\0"
    return build_record(
        record_head(MOVED | REPLAYED, 0, 0),
        sent_at_ms=1,
        body=b"",
        body_crc=0,
        names=names,
        attributes=encode_attributes(attributes),
    )


@pytest.mark.parametrize(
    "bad",
    [
        plain(),
        moved_record(RecordView(plain()), "again", sent_at_ms=1, message_id=ID),
        marked(Attributes()),
        marked(Attributes(key="a key that is longer than an id")),
    ],
    ids=["plain", "moved", "nothing", "key"],
)
def test_what_is_not_marked_or_does_not_begin_with_its_id_is_refused(bad: bytes) -> None:
    records = [replayed(), replayed(), bad]
    with pytest.raises(InvalidMessage, match="record 2 of the batch"):
        ids_of_replayed(b"".join(records), [*map(len, records)])
