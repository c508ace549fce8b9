"""Streams of messages: what a JSON line means, and that receipts come in order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from dmq.cli.message.stream import parse_json_line, send_stream
from dmq.client.producer.producer import Producer
from dmq.errors import DiskFull, InvalidMessage
from dmq.model import MessageId, Receipt


class Future:
    """Done after it was asked a few times."""

    def __init__(self, number: int, patience: int, fails: bool) -> None:
        self._number, self._patience, self._fails = number, patience, fails

    def done(self) -> bool:
        self._patience -= 1
        return self._patience < 0

    def result(self) -> Receipt:
        if self._fails:
            raise DiskFull("no space left")
        return Receipt(MessageId(1, self._number), "orders", 0, self._number, "flushed")


class StubProducer:
    """Notes what it is asked to send."""

    def __init__(self, patience: int = 0, failing: int = -1) -> None:
        self.sent: list[tuple[bytes, dict[str, Any]]] = []
        self._patience, self._failing = patience, failing

    def send_async(self, topic: str, body: bytes, **options: Any) -> Future:
        self.sent.append((body, options))
        return Future(len(self.sent) - 1, self._patience, len(self.sent) - 1 == self._failing)


def stream(stub: StubProducer, count: int, **options: int) -> list[int]:
    messages = ((b"x" * number, {"key": str(number)}) for number in range(count))
    found = send_stream(cast(Producer, stub), "orders", messages, {"tag": "t", "key": None}, **options)
    return [receipt.offset for receipt, size in found if size == receipt.offset]


@pytest.mark.parametrize("patience", [0, 3, 1000])
def test_receipts_come_in_the_order_of_the_messages(patience: int) -> None:
    stub = StubProducer(patience)
    assert stream(stub, 50) == list(range(50))
    assert stub.sent[7] == (b"x" * 7, {"tag": "t", "key": "7"})


def test_a_message_leaves_before_the_next_is_read() -> None:
    stub = StubProducer(patience=1000)
    read: list[int] = []

    def messages() -> Any:
        for number in range(3):
            assert len(stub.sent) == number
            read.append(number)
            yield b"", {}

    assert len([*send_stream(cast(Producer, stub), "orders", messages(), {})]) == 3
    assert read == [0, 1, 2]


def test_so_many_wait_for_their_receipts_and_no_more() -> None:
    stub = StubProducer(patience=1000)
    receipts = send_stream(cast(Producer, stub), "orders", ((b"", {}) for _ in range(100)), {}, outstanding_max=10)
    next(receipts)
    assert len(stub.sent) == 11


def test_the_first_that_fails_is_raised_after_the_receipts_before_it() -> None:
    messages: list[tuple[bytes, dict[str, Any]]] = [(b"", {})] * 10
    receipts = send_stream(cast(Producer, StubProducer(patience=1000, failing=4)), "orders", messages, {})
    assert [next(receipts)[0].offset for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(DiskFull):
        next(receipts)


def test_what_cannot_be_read_is_raised_after_the_receipts_before_it() -> None:
    def messages() -> Iterator[tuple[bytes, dict[str, Any]]]:
        yield b"", {}
        yield b"x", {}
        raise InvalidMessage("line 3 is not JSON")

    found = send_stream(cast(Producer, StubProducer(patience=100)), "orders", messages(), {})
    assert [next(found)[0].offset, next(found)[0].offset] == [0, 1]
    with pytest.raises(InvalidMessage, match="line 3"):
        next(found)


def test_json_lines() -> None:
    assert parse_json_line(b'{"body": "hello"}') == (b"hello", {})
    assert parse_json_line(b'{"body": {"a": 1}, "key": "k"}') == (b'{"a":1}', {"key": "k"})
    assert parse_json_line(b'{"body": null}') == (b"null", {})
    assert parse_json_line(b'{"body_base64": "/wA=", "tag": null}') == (b"\xff\x00", {})


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"hello", "not JSON"),
        (b'"hello"', "an object"),
        (b"{}", "give body or body_base64"),
        (b'{"body": "a", "body_base64": "YQ=="}', "one of them"),
        (b'{"body_base64": "%%"}', "not base64"),
        (b'{"body_base64": 7}', "not base64"),
        (b'{"body": "a", "kee": "k"}', "'kee' is not known"),
    ],
)
def test_a_line_that_cannot_be_sent_says_why(line: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_json_line(line)
