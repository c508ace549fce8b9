"""Many records moved at once are what each would be alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dmq.model import Message, MessageId
from dmq.records import (
    Attributes,
    Compressor,
    EncodeOptions,
    RecordView,
    Stamp,
    encode_attributes,
    encode_batch,
    id_hash,
    moved_record,
    stamp_few,
)
from dmq.records.hashes import id_hashes
from dmq.records.move import moved_many
from tests.unit.records.samples import SENT_AT_MS, messages

ADDRESS = b"\x0a\x00\x00\x01\x12\x34"
PRODUCER = 0xF00D_0000_0000_0001
EXTRAS = st.sampled_from(
    [
        b"",
        encode_attributes(Attributes(expires_at_ms=SENT_AT_MS + 50)),
        encode_attributes(Attributes(target_topic="elsewhere", attempt=3, message_id=MessageId(1, 2))),
        encode_attributes(Attributes(group="payments")),
        encode_attributes(Attributes(unknown=((77, b"later"),))),
    ]
)


@given(st.lists(st.tuples(messages, EXTRAS), min_size=1, max_size=30), st.integers(0, 1 << 40))
def test_many_records_moved_at_once_are_what_each_would_be_alone(
    sent: list[tuple[Message, bytes]], first_sequence: int
) -> None:
    batch = [message for message, _ in sent]
    encoded = encode_batch(
        "orders",
        "shop",
        batch,
        sent_at_ms=SENT_AT_MS,
        options=EncodeOptions(compressor=Compressor("lz4")),
        extra=[extra for _, extra in sent],
    )
    data = bytearray(encoded.data)
    lengths = np.array(encoded.lengths, np.int64)
    starts = np.cumsum(lengths) - lengths
    stamp = Stamp(5, 77, ADDRESS, ADDRESS, SENT_AT_MS + 1, SENT_AT_MS + 2, ipv6=True)
    stamp_few(data, starts.tolist(), (starts + 9_000).tolist(), stamp)
    sequences = np.arange(first_sequence, first_sequence + len(batch)).astype(np.uint64)
    moved = moved_many(data, starts, lengths, PRODUCER, sequences, SENT_AT_MS + 60_000)
    for start, sequence, record in zip(starts.tolist(), sequences.tolist(), moved, strict=True):
        assert record == moved_record(
            RecordView(data, start),
            "orders",
            sent_at_ms=SENT_AT_MS + 60_000,
            message_id=MessageId(PRODUCER, sequence),
            is_placed=False,
        )
        RecordView(record).verify()


@given(st.integers(0, (1 << 64) - 1), st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=8))
def test_hashes_of_many_ids_are_those_of_each(producer_id: int, sequences: list[int]) -> None:
    hashes = id_hashes(producer_id, np.array(sequences, np.uint64)).tolist()
    assert hashes == [id_hash(MessageId(producer_id, sequence)) for sequence in sequences]
