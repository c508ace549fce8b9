"""Frames and headers that several tests use, and the worked examples of docs/internals/protocol.md."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

import dmq
from dmq import protocol
from dmq.errors import RateLimited
from dmq.model import Durability
from dmq.protocol import (
    SPECS,
    Buffer,
    Command,
    Flag,
    Header,
    error_frame,
    frame_head,
    one_way_head,
    pack_batch,
    pack_records,
    request_head,
    response_head,
    seal_frame,
)
from dmq.protocol.consume import Lease, Outcome, Push, Settle, Settlement, Subscribe, SubscribeFlag
from dmq.protocol.header import LIST_MAX
from dmq.protocol.produce import Produce, ProduceReply
from dmq.protocol.session import FRAME_CRC, Heartbeat, Hello, HelloReply, Limits
from dmq.records import EncodedBatch, encode_batch


def all_headers() -> list[type[Header]]:
    """Every struct that may stand in a frame, nested ones included."""

    def below(cls: type[Header]) -> set[type[Header]]:
        return {cls}.union(*(below(sub) for sub in cls.__subclasses__()))

    return sorted((cls for cls in below(Header) if cls.__module__.startswith("dmq.")), key=lambda cls: cls.__name__)


def headers(cls: type[Header]) -> st.SearchStrategy[Any]:
    """Any value of a header that its types allow."""
    return values(msgspec.inspect.type_info(cls))


def values(info: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a type, as msgspec describes it."""
    match info:
        case msgspec.inspect.IntType():
            high = info.le if info.le is not None else (1 << 64) - 1
            return st.integers(info.ge if info.ge is not None else -(1 << 63), high)
        case msgspec.inspect.FloatType():
            return st.floats(allow_nan=False)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType():
            return st.text(min_size=info.min_length or 0, max_size=min(info.max_length or 20, 20))
        case msgspec.inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or 20, 20))
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.AnyType():
            return st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=9)
        case msgspec.inspect.EnumType():
            return st.sampled_from(list(info.cls))
        case msgspec.inspect.UnionType():
            return st.one_of(*map(values, info.types))
        case msgspec.inspect.ListType():
            assert info.max_length is None or info.max_length <= LIST_MAX
            return st.lists(values(info.item_type), min_size=info.min_length or 0, max_size=3)
        case msgspec.inspect.TupleType():
            return st.tuples(*map(values, info.item_types))
        case msgspec.inspect.DictType():
            return st.dictionaries(values(info.key_type), values(info.value_type), max_size=3)
        case msgspec.inspect.StructType():
            return st.builds(info.cls, **{field.name: values(field.type) for field in info.fields})
    raise NotImplementedError(info)


def batch_of(count: int, *, keys: bool = True, body: bytes = b"hello") -> EncodedBatch:
    """A batch of small messages."""
    messages = [dmq.Message(body, key=f"k-{index}" if keys else None) for index in range(count)]
    return encode_batch("orders", "shop", messages, sent_at_ms=1_700_000_000_000)


def produce_frame(batch: EncodedBatch, *, correlation: int = 7, flags: int = 0) -> bytes:
    """A batch on its way to a broker."""
    pieces = pack_batch(batch)
    header = Produce("orders", 3, batch.count, len(batch.hashes), 0x0102030405060708, 1, 42)
    body_bytes = sum(map(len, pieces))
    return b"".join((request_head(Command.PRODUCE, header, correlation, body_bytes, flags), *pieces))


def build_frame(
    kind: int,
    command: int,
    header: bytes = b"",
    body: Buffer = b"",
    *,
    correlation: int = 0,
    status: int = 0,
    flags: int = 0,
) -> bytes:
    """A whole frame, of any status."""
    head = bytearray(frame_head(kind, command, header, len(body), correlation=correlation, flags=flags))
    head[8:10] = status.to_bytes(2, "big")
    return bytes(head) + body


def frames() -> st.SearchStrategy[bytes]:
    """Whole frames: of every command, of none we know, with bodies around the parser's limits."""
    kinds = [(command, cls) for command, spec in SPECS.items() for cls in (spec.request, spec.response) if cls]
    real = st.sampled_from(kinds).flatmap(
        lambda pair: st.builds(
            lambda header, correlation: request_head(pair[0], header, correlation),
            headers(pair[1]),
            st.integers(0, protocol.CORRELATION_MAX),
        )
    )
    sizes = st.sampled_from([0, 1, 100, 16_383, 16_384, 40_000, 70_000, 200_000])
    made = st.builds(
        lambda kind, command, status, flags, header, size: build_frame(
            kind, command, header, bytes(size), status=status, flags=flags
        ),
        st.sampled_from(protocol.Kind),
        st.integers(0, 0xFFFF).filter(lambda command: command != Command.HELLO),  # whose body is a checksum
        st.integers(0, 0xFFFF),
        st.integers(0, 0xFFFF),
        st.binary(max_size=64),
        sizes,
    )
    return real | made


def examples() -> dict[str, bytes]:
    """The frames that the documentation shows in hex, by the names it gives them."""
    record = batch_of(1)
    hello = Hello("shop", "web-1", 1, 1, "dmq-python 0.1.0")
    limits = Limits(16 << 20, 4 << 20, 10_000, 1000, 8 << 20, 10_000)
    reply = HelloReply("b1", "127.0.0.1:9611", 1, limits, [], "web-1", "dmq 0.1.0", 1_700_000_000_000)
    lease = Lease(3, 1, 9, 77, 78, 1, 1, 30_000, ids=[(1, 0x1234, 7)])
    stored = bytes(record.data)
    lengths = pack_records([len(stored)])
    limited = RateLimited("topic orders is over 100 messages a second: wait", retry_after_ms=250)
    settle = Settle(
        "orders", "billing", [Settlement(3, 1, 9, Outcome.ACK), Settlement(2, 1, 8, Outcome.NACK, [(5, 2)])]
    )
    checked = msgspec.structs.replace(hello, features=[FRAME_CRC])
    checked_reply = msgspec.structs.replace(reply, features=[FRAME_CRC])
    return {
        "hello-checked": b"".join(seal_frame(request_head(Command.HELLO, checked, 1))),
        "hello-reply-checked": b"".join(seal_frame(response_head(Command.HELLO, checked_reply, 1))),
        "heartbeat-checked": b"".join(seal_frame(request_head(Command.HEARTBEAT, Heartbeat(1_700_000_000_000), 2))),
        "hello": request_head(Command.HELLO, hello, 1),
        "hello-reply": response_head(Command.HELLO, reply, 1),
        "produce": produce_frame(record, correlation=2),
        "produce-resend": produce_frame(record, correlation=3, flags=Flag.RESEND),
        "produce-reply": response_head(Command.PRODUCE, ProduceReply(3, 77, 123_456, Durability.FLUSHED), 2),
        "rate-limited": error_frame(limited, Command.PRODUCE, 2),
        "subscribe": request_head(
            Command.SUBSCRIBE, Subscribe(1, "orders", "billing", prefetch_messages=100, flags=SubscribeFlag.ORDERED), 4
        ),
        "push": one_way_head(Command.CONSUMER_PUSH, Push(1, [lease]), len(lengths) + len(stored)) + lengths + stored,
        "settle": request_head(Command.SETTLE, settle, 5),
        "unknown-command": request_head(0x7FFF, Header(), 6),
    }
