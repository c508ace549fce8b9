"""What the compiled pieces of a lone send do, the plain ones do as well; what they are not sure of is left to these."""

from __future__ import annotations

import inspect
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmq.client.connection.route_book import ANY
from dmq.client.connection.socket import LONE_SECONDS, OUT_BYTES_MAX, Wire
from dmq.client.producer import straight_path
from dmq.client.producer.message import TEXT_MAX, SendOptions
from dmq.client.producer.outcome import DURABILITY_NAMES
from dmq.client.producer.routes import FRESH_SECONDS, Route
from dmq.client.producer.straight_path import LonePath
from dmq.model import DurabilityName, Message, MessageId, Receipt
from tests.patience import eventually
from tests.sampling import sample_size
from tests.unit.client.producer.test_sender import Rig
from tests.unit.compiled.extension import grown_kb, speed

BODY_MAX = straight_path._BODY_BYTES_MAX
find: Any = inspect.unwrap(LonePath._find)
prepare: Any = inspect.unwrap(LonePath._prepare)
stored: Any = inspect.unwrap(LonePath.stored)
request_of: Any = inspect.unwrap(straight_path.request_of)
quick_find: Any = speed.quick_find(find, ANY, (FRESH_SECONDS, LONE_SECONDS), (BODY_MAX, TEXT_MAX))
quick_prepare: Any = speed.quick_prepare(prepare)
quick_stored: Any = speed.quick_stored(stored, Receipt, MessageId, DURABILITY_NAMES)
quick_request_of: Any = speed.quick_request_of(request_of)


class Field:
    """A straight path over fake links, whose topic was sent to before."""

    def __init__(self) -> None:
        self.rig = Rig()
        accumulator = self.rig.core.accumulator
        accumulator._random, accumulator._producer_id = random.Random(1), 7
        durabilities: tuple[DurabilityName, ...] = ("stored", "none")
        for durability in durabilities:
            self.rig.core.draft(self.rig.route, Message(b""), SendOptions("orders", durability))
        self.lane = self.rig.core._plain["orders", "stored"]
        self.path: Any = LonePath(self.rig.core, self.rig.lines)  # type: ignore[arg-type]

    def told(self, call: Callable[..., Any], *given_arguments: Any) -> Any:
        """What a call gives or raises, and what the path and its lane count then."""
        try:
            got = call(self.path, *given_arguments)
        except Exception as error:
            got = type(error), str(error)
        accumulator, lane = self.rig.core.accumulator, self.lane
        counted = self.path.taken, self.path.left, accumulator.bytes, accumulator.messages
        return got, counted, lane.under_way, lane.turn, [*lane.stream.under_way]


messages = st.builds(
    Message,
    st.binary(max_size=40) | st.sampled_from(("text", b"x" * (BODY_MAX + 1), bytearray(b"z"), None)),
    st.none() | st.text(max_size=5) | st.sampled_from(("k" * (TEXT_MAX + 1), 7)),
    tag=st.none() | st.sampled_from(("t", "t" * 70_000, 3)),
    business_id=st.none() | st.just("b"),
    priority=st.sampled_from((4, 4, 4, 9, 10, True)),
    properties=st.none() | st.sampled_from(({}, {"a": "b"}, {"a": 1})),
)
mostly_plain = st.builds(Message, st.binary(max_size=40), st.none() | st.text(max_size=5)) | messages


def _hold(field: Field) -> None:
    field.lane.is_held = True


def _send(field: Field) -> None:
    field.rig.send()


def _gather(field: Field) -> None:
    field.lane.under_way = 0
    assert field.rig.core.accumulator.append_plain(field.lane, b"x", None, 1) is not None


def _shrink(field: Field) -> None:
    field.rig.core.sender.body_bytes_max = 10


def _disconnect(field: Field) -> None:
    field.rig.link.is_usable = False


def _forget(field: Field) -> None:
    field.rig.routes.drop("orders")


def _grow_old(field: Field) -> None:
    field.rig.clock.advance(FRESH_SECONDS)


def _prioritize(field: Field) -> None:
    field.rig.routes.put("orders", Route(4, True, field.rig.clock.monotonic()))


states = st.sampled_from(
    (None, None, None, _hold, _send, _gather, _shrink, _disconnect, _forget, _grow_old, _prioritize)
)


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(
    mostly_plain,
    st.sampled_from(("orders", "orders", "orders", "nobody's")),
    st.sampled_from(("stored", "stored", "stored", "none", "never")),
    st.none() | st.sampled_from((0.5, 1.0, 1.5, 1e9)),
    states,
)
def test_a_way_is_found_where_the_plain_code_finds_it(
    message: Message, topic: str, durability: str, left: float | None, state: Callable[[Field], None] | None
) -> None:
    field = Field()
    field.path._groove("orders", "stored")
    if state is not None:
        state(field)
    deadline = None if left is None else field.rig.clock.monotonic() + left
    expected = field.told(find, topic, message, durability, deadline)
    field.path.left = 0
    assert field.told(quick_find, topic, message, durability, deadline) == expected


@pytest.mark.sampled
@settings(max_examples=sample_size(share=150, whole=5000), deadline=None)
@given(mostly_plain, st.booleans())
def test_a_message_is_prepared_as_the_plain_code_does_it(message: Message, is_known: bool) -> None:
    field = Field()
    if is_known:
        for size in range(-1, 6):
            field.path._encoder._plain_shape("orders", size)
    expected = field.told(prepare, "orders", message)
    assert field.told(quick_prepare, "orders", message) == expected


@pytest.mark.sampled
@settings(max_examples=sample_size(share=60, whole=2000), deadline=None)
@given(st.binary(max_size=40), st.none() | st.just("k"), st.integers(1, 2**32 - 1), st.integers(0, 254), st.booleans())
def test_a_request_is_made_as_the_plain_code_does_it(
    body: bytes, key: str | None, correlation: int, queue: int, is_shaped: bool
) -> None:
    field = Field()
    groove = field.path._groove("orders", "stored")
    lone = field.rig.core.accumulator.take_lone(field.lane, 10, ~queue)
    prepared = prepare(field.path, "orders", Message(body, key))
    if not is_shaped:
        encoded, keys = field.path._encoder.encode_lone("orders", Message(body, key))
        prepared = None, encoded, None, keys
    assert quick_request_of(groove, lone, correlation, prepared) == request_of(groove, lone, correlation, prepared)


replies = st.tuples(st.integers(0, 254), st.integers(0, 2**64 - 1), st.integers(1, 3))


@pytest.mark.sampled
@settings(max_examples=sample_size(share=60, whole=2000), deadline=None)
@given(replies, st.sampled_from((4, ~3, ~(2 << 8 | 5))), st.booleans())
def test_the_end_of_a_message_is_that_of_the_plain_code(reply: Any, queues: int, is_waited_for: bool) -> None:
    ends = []
    for way in (stored, quick_stored):
        field = Field()
        lone = field.rig.core.accumulator.take_lone(field.lane, 10, queues)
        if is_waited_for:
            assert len([*field.rig.core.accumulator.unsettled()]) == 1
        got, *counted = field.told(way, field.lane, lone, reply)
        assert isinstance(got, Receipt) != is_waited_for
        receipt = got if isinstance(got, Receipt) else got.receipt(0)
        assert type(receipt.id) is MessageId
        ends.append((receipt, counted))
    assert ends[0] == ends[1]


@pytest.fixture
def wire() -> Iterator[tuple[Wire, socket.socket]]:
    one, other = socket.socketpair()
    made = Wire(_Tcp(fileno=one.detach()))
    with other:
        yield made, other
    made.dispose()


class _Tcp(socket.socket):
    """A pair's end, which has no options of TCP."""

    def setsockopt(self, level: int, *options: Any) -> None:
        if level == socket.SOL_SOCKET:
            super().setsockopt(level, *options)


def test_what_comes_after_a_frame_is_its_answer(wire: tuple[Wire, socket.socket]) -> None:
    mine, peer = wire
    peer.send(b"answer")
    assert speed.ask_now(mine, b"frame") == b"answer"
    assert peer.recv(100) == b"frame"
    peer.send(b"x" * 5000)
    assert speed.ask_now(mine, b"frame") == b"x" * 4096
    threading.Timer(0.05, lambda: peer.send(b"late")).start()
    mine.sock.recv(904)
    assert speed.ask_now(mine, b"frame") == b"late"
    assert not mine.out_bytes


def test_nothing_is_sent_while_others_write_or_have_something_kept(wire: tuple[Wire, socket.socket]) -> None:
    mine, peer = wire
    assert speed.ask_now(mine, bytearray(b"frame")) is None
    with mine.writing:
        assert speed.ask_now(mine, b"frame") is None
    mine.keep_rest(b"kept", 1)
    assert speed.ask_now(mine, b"frame") is None
    assert mine.flush() is None
    assert peer.recv(100) == b"ept"
    peer.close()
    mine.write((b"frame",), 5)
    assert speed.ask_now(mine, b"frame") is None, "the general way says what is broken"


def test_a_frame_that_the_socket_does_not_take_whole_is_kept(wire: tuple[Wire, socket.socket]) -> None:
    mine, peer = wire
    frame = bytes(OUT_BYTES_MAX)
    with pytest.raises(BlockingIOError):
        speed.ask_now(mine, frame)
    assert 0 < mine.out_bytes < len(frame)
    assert speed.ask_now(mine, frame) is None
    got = 0
    while got < len(frame):
        got += len(peer.recv(1 << 20))
        assert mine.flush() is None
    assert got == len(frame)


def test_an_end_and_a_time_without_an_answer_are_told_as_by_the_library(wire: tuple[Wire, socket.socket]) -> None:
    mine, peer = wire
    mine.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, b"\0" * 8 + b"\x10\x27" + b"\0" * 6)
    with pytest.raises(BlockingIOError):
        speed.ask_now(mine, b"frame")
    threading.Timer(0.0, peer.shutdown, (socket.SHUT_WR,)).start()
    answers: list[bytes] = []

    def has_ended() -> bool:
        try:
            answers.append(speed.ask_now(mine, b"frame"))
        except BlockingIOError:
            return False
        return answers == [b""]

    eventually(has_ended)


def test_a_signal_ends_the_wait_only_if_its_handler_raises(wire: tuple[Wire, socket.socket]) -> None:
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    def answer(*_: object) -> None:
        peer.send(b"answer")

    mine, peer = wire
    before = signal.signal(signal.SIGALRM, answer)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert speed.ask_now(mine, b"frame") == b"answer"
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Stop):
            speed.ask_now(mine, b"frame")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_nothing_is_kept_of_a_lone_message(wire: tuple[Wire, socket.socket]) -> None:
    field, (mine, peer) = Field(), wire
    field.path._groove("orders", "stored")
    message = Message(b"x" * 100, "key")
    prepare(field.path, "orders", message)

    def work() -> None:
        groove, _, queues, _ = quick_find(field.path, "orders", message, "stored", None)
        lone = field.rig.core.accumulator.take_lone(field.lane, 10, queues)
        frame = quick_request_of(groove, lone, 7, quick_prepare(field.path, "orders", message))
        peer.send(b"answer")
        assert speed.ask_now(mine, frame) == b"answer"
        assert peer.recv(4096) == frame
        assert quick_stored(field.path, field.lane, lone, (1, 1 << 40, 1)).queue == 1

    assert grown_kb(work, 5000) < 500
