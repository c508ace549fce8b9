"""Messages of a batch that is gone through in order: what they say is what each says when asked by itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from dmq.client.consumer.core import ConsumerCore
from dmq.client.consumer.message import Batch, OpenedMessage, ReceivedMessage
from dmq.client.consumer.prefetch import Part
from dmq.errors import RecordCorrupt
from dmq.model import Message
from dmq.protocol import Buffer, pack_records
from dmq.protocol.consume import Lease, Outcome
from dmq.records import EncodeOptions, encode_batch
from dmq.records.compression import Compressor
from dmq.records.layout import BODY_AT
from tests.unit.client.deliveries import book, core, frame
from tests.unit.records.test_block import json_bodies

MANY = 300  # more than are opened at a time


def pulled(made: ConsumerCore, leases: Sequence[Lease], body: Buffer) -> list[Part]:
    return made.pulled(book(made), leases, body)


def opened(leases: Sequence[Lease], body: Buffer) -> Batch[ReceivedMessage]:
    return Batch(ReceivedMessage, pulled(core(), leases, body), OpenedMessage)


def asked(batch: Batch[ReceivedMessage]) -> list[tuple[bytes, str | None]]:
    return [(batch[at].body, batch[at].key) for at in range(len(batch))]


def gone_through(batch: Batch[ReceivedMessage]) -> list[tuple[bytes, str | None]]:
    return [(message.body, message.key) for message in batch]


@pytest.mark.parametrize("keys", ["all", "none", "some", "not ascii"])
def test_bodies_and_keys_are_those_of_each_message(keys: str) -> None:
    messages = [
        Message(
            f"body {n}".encode() * (n % 7 + 1),
            {"all": f"k-{n}", "none": None, "some": f"k-{n}" if n % 3 else None, "not ascii": f"ключ {n}"}[keys],
            tag="t" if n % 5 == 0 and keys == "all" else None,
        )
        for n in range(MANY)
    ]
    batch = opened(*frame(1, messages))
    assert gone_through(batch) == asked(batch) == [(message.body, message.key) for message in messages]
    assert gone_through(batch) == asked(batch), "a batch can be gone through again"


def test_opened_messages_are_settled_and_described_like_others() -> None:
    batch = opened(*frame(1, [Message(b"%d" % n, f"k-{n}") for n in range(MANY)], first=40))
    taken = [*batch]
    assert {type(message) for message in taken} == {OpenedMessage}
    assert [message.offset for message in taken] == [*range(40, 40 + MANY)]
    assert [message.value for message in taken[:2]] == [message.raw for message in taken[:2]] == [b"0", b"1"]
    taken[5].ack()
    assert batch[5].is_settled
    assert not batch[6].is_settled


def test_bodies_that_are_compressed_are_expanded() -> None:
    messages = [Message(b"again and " * 100, f"k-{n}") for n in range(MANY)]
    encoded = encode_batch(
        "orders", "shop", messages, sent_at_ms=1, options=EncodeOptions(compressor=Compressor("zstd"))
    )
    lease = Lease(0, 1, 1, 0, MANY, MANY, 1, 30_000, ids=[(MANY, 7, 0)])
    batch = opened([lease], pack_records(encoded.lengths) + bytes(encoded.data))
    assert gone_through(batch) == [(message.body, message.key) for message in messages]


def test_a_key_that_is_no_text_is_told_by_the_message_that_has_it() -> None:
    """Over a link whose frames have a checksum records are not looked at again: the broker let it pass."""
    leases, body = frame(1, [Message(b"b", f"k-{n:03}") for n in range(MANY)])
    broken = bytes(body).replace(b"k-007", b"k-\xff\xff7")
    made = core()
    book(made).is_vouched = True
    found = [*Batch(ReceivedMessage, pulled(made, leases, broken), OpenedMessage)]
    assert found[6].key == "k-006"
    with pytest.raises((UnicodeDecodeError, RecordCorrupt)):
        _ = found[7].key
    assert found[200].key == "k-200"


def in_blocks(messages: Sequence[Message]) -> tuple[list[Lease], Buffer]:
    return frame(1, messages, encoding=EncodeOptions(compressor=Compressor("lz4"), blocks=True))


def vouched() -> ConsumerCore:
    made = core()
    book(made).is_vouched = True
    return made


@pytest.mark.parametrize("count", [80, MANY])
def test_bodies_in_blocks_are_read_alike_in_order_and_one_by_one(count: int) -> None:
    messages = [Message(body, f"k-{n}") for n, body in enumerate(json_bodies(count))]
    known = [(message.body, message.key) for message in messages]
    leases, body = in_blocks(messages)
    assert len(body) < sum(len(text) for text, _ in known)
    in_order, body_first, key_first = (
        Batch(ReceivedMessage, pulled(vouched(), leases, body), OpenedMessage) for _ in range(3)
    )
    assert gone_through(in_order) == known
    assert gone_through(in_order) == known, "a batch can be gone through again"
    assert asked(in_order) == asked(body_first) == gone_through(body_first) == known
    assert [(key_first[at].key, key_first[at].raw) for at in range(count)] == [(key, text) for text, key in known]
    assert gone_through(key_first) == known


def test_a_body_that_lies_outside_its_block_goes_back_and_the_others_are_handed_out() -> None:
    leases, body = in_blocks([Message(text, f"k-{n}") for n, text in enumerate(json_bodies(MANY))])
    data = bytearray(body)
    lengths = struct.unpack_from(f">{MANY}I", data)
    struct.pack_into(">I", data, 4 * MANY + sum(lengths[:7]) + BODY_AT + 4, 1 << 20)
    made = vouched()
    batch = Batch(ReceivedMessage, pulled(made, leases, bytes(data)), OpenedMessage)
    assert gone_through(batch) == [(text, f"k-{n}") for n, text in enumerate(json_bodies(MANY)) if n != 7]
    ((settlement,),) = (settle.settlements for settle in made.reports(book(made)))
    assert (settlement.outcome, settlement.ranges) == (Outcome.NACK, [(7, 1)])


def test_a_key_that_is_no_text_leaves_the_bodies_in_blocks_to_be_read() -> None:
    leases, body = in_blocks([Message(text, f"k-{n:03}") for n, text in enumerate(json_bodies(MANY))])
    broken = bytes(body).replace(b"k-007", b"k-\xff\xff7")
    found = [*Batch(ReceivedMessage, pulled(vouched(), leases, broken), OpenedMessage)]
    assert [message.body for message in found] == json_bodies(MANY)
    assert found[6].key == "k-006"
    with pytest.raises((UnicodeDecodeError, RecordCorrupt)):
        _ = found[7].key


def test_a_body_that_is_not_of_the_type_is_rejected_and_in_no_batch() -> None:
    made = core(type=dict)
    messages = [Message(b'{"n": %d}' % n if n != 3 else b"{", f"k-{n}") for n in range(MANY)]
    batch = Batch(ReceivedMessage, pulled(made, *frame(1, messages)), OpenedMessage)
    assert [message.body["n"] for message in batch] == [n for n in range(MANY) if n != 3]
    ((settlement,),) = (settle.settlements for settle in made.reports(book(made)))
    assert (settlement.outcome, settlement.ranges) == (Outcome.REJECT, [(3, 1)])
    assert "not of type dict" in settlement.reason


def test_a_typed_body_is_another_object_for_each_who_asks() -> None:
    """A handler that is tried again after an error must not find what its first try has changed."""
    (part,) = pulled(core(type=dict), *frame(1, [Message(b'{"n": 1}')]))
    message = Batch(ReceivedMessage, [part])[0]
    message.body["n"] = 2
    assert message.body == {"n": 1}


def test_a_type_that_fails_by_itself_is_told_to_who_asks_for_the_body() -> None:
    class Broken:
        @staticmethod
        def model_validate_json(body: bytes) -> object:
            raise KeyError("a mistake of the program")

    (part,) = pulled(core(type=Broken), *frame(1, [Message(b"{}")]))
    with pytest.raises(KeyError, match="mistake"):
        _ = Batch(ReceivedMessage, [part])[0].body


def test_some_messages_of_a_delivery_are_opened_alone() -> None:
    made = core()
    (part,) = pulled(made, *frame(1, [Message(struct.pack(">I", n), f"k-{n}") for n in range(MANY)]))
    delivery, indexes = part
    batch: Batch[ReceivedMessage] = Batch(ReceivedMessage, [(delivery, indexes[17:250])], OpenedMessage)
    assert gone_through(batch) == [(struct.pack(">I", n), f"k-{n}") for n in range(17, 250)]
