"""What frames, headers and batches cost: `python -m bench.protocol`.

Every figure is the best of several rounds, in microseconds a call, on one core.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterator

import dmq
from dmq.model import Durability
from dmq.protocol import (
    FRAME_BYTES_MAX,
    Command,
    FrameParser,
    decode_request,
    decode_response,
    pack_batch,
    request_head,
    response_head,
    unpack_batch,
)
from dmq.protocol.produce import Produce, ProduceReply
from dmq.records import EncodedBatch, encode_batch

ROUNDS = 7


def best_us(call: Callable[[], object], seconds: float = 0.2) -> float:
    """The cost of one call in its best round."""
    timer = timeit.Timer(call)
    number = max(1, int(seconds / ROUNDS / max(timer.timeit(3) / 3, 1e-8)))
    return min(timer.repeat(ROUNDS, number)) / number * 1e6


def batch_of(count: int, body_bytes: int) -> EncodedBatch:
    """Messages with a key each."""
    messages = [dmq.Message(bytes(body_bytes), key=f"order-{index}") for index in range(count)]
    return encode_batch("orders", "shop", messages, sent_at_ms=1_700_000_000_000)


def build_produce(batch: EncodedBatch) -> bytes:
    """The way of a batch out of a client."""
    pieces = pack_batch(batch)
    header = Produce("orders", 3, batch.count, len(batch.hashes), 1 << 63, 0, 12_345, Durability.STORED)
    return b"".join((request_head(Command.PRODUCE, header, 7, sum(map(len, pieces))), *pieces))


def take_produce(parser: FrameParser, data: bytes) -> object:
    """The way of a batch into a broker, received as bytes."""
    for frame in parser.feed(data):
        header = decode_request(frame)
        taken = unpack_batch(frame.body, header.count, header.keys)
    return taken


def receive_produce(parser: FrameParser, data: bytes) -> object:
    """The same, received into the parser's own buffer; the copy stands for the kernel's."""
    taken: object = None
    view = memoryview(data)
    while len(view):
        room = parser.get_buffer()
        size = min(len(room), len(view))
        room[:size] = view[:size]
        for frame in parser.buffer_updated(size):
            header = decode_request(frame)
            taken = unpack_batch(frame.body, header.count, header.keys)
        view = view[size:]
    return taken


def take_reply(parser: FrameParser, data: bytes) -> object:
    """A response on its way into a client."""
    return decode_response(parser.feed(data)[0])


def rows() -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured."""
    parser = FrameParser(FRAME_BYTES_MAX)
    for count, body_bytes in ((1, 200), (10, 200), (500, 200), (500, 1024), (5000, 1024)):
        batch = batch_of(count, body_bytes)
        data = build_produce(batch)
        what = f"PRODUCE, {count} x {body_bytes} B"
        yield f"{what}: build", lambda batch=batch: build_produce(batch)  # type: ignore[misc]
        yield f"{what}: feed, decode, divide", lambda data=data: take_produce(parser, data)  # type: ignore[misc]
        yield f"{what}: the same through the buffer", lambda data=data: receive_produce(parser, data)  # type: ignore[misc]
    one = build_produce(batch_of(1, 200))
    burst = one * 100
    yield "100 x PRODUCE of 1 in one piece: feed only", lambda: parser.feed(burst)
    reply = ProduceReply(3, 77, 123_456, Durability.STORED)
    answer = response_head(Command.PRODUCE, reply, 7)
    yield "answer: build", lambda: response_head(Command.PRODUCE, reply, 7)
    yield "answer: feed, decode", lambda: take_reply(parser, answer)


def main() -> None:
    """Print the table."""
    for what, call in rows():
        print(f"{what:<60}{best_us(call):>10.2f} us")


if __name__ == "__main__":
    main()
