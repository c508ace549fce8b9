"""Peers that stall, flood, babble or never speak: each costs little, gets a clear word, and harms nobody else."""

from __future__ import annotations

import resource
import shutil
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import dmq
from dmq.model import Durability
from dmq.protocol import Command, Header, Kind, decode_response, request_head
from dmq.protocol.consume import Point, PointKind, Subscribe
from dmq.protocol.read import Fetch, Peek
from dmq.protocol.session import Heartbeat, Hello, Stats
from dmq.testing.processes import BrokerProcess, resident_bytes
from tests.integration.frame_client import RawClient, port_of, produce
from tests.patience import eventually
from tests.sampling import sample_size

HALF_OPEN = 1000
IDLE = 10_000
STALLED = 100
BACKLOG_BYTES = sample_size(share=128 << 20, whole=1 << 30)
GROWTH_BYTES_MAX = 128 << 20
TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(60)


def more_files(count: int) -> None:
    """Let this process, and those it starts, hold so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(count, hard), hard))


def settings(**values: object) -> tuple[str, ...]:
    return tuple(word for name, value in values.items() for word in ("--set", f"broker.{name}={value}"))


@contextmanager
def sending(url: str, topic: str = "orders") -> Iterator[list[dmq.Receipt]]:
    """A producer that goes on sending meanwhile; nothing of it may fail."""
    receipts: list[dmq.Receipt] = []
    problems: list[BaseException] = []
    is_over = threading.Event()

    def send() -> None:
        try:
            with dmq.connect(url, app="steady") as client, client.producer(timeout=30) as producer:
                while not is_over.is_set():
                    receipts.append(producer.send(topic, b"steady", durability="stored"))
                    is_over.wait(0.002)
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        eventually(lambda: receipts or problems)
        yield receipts
    finally:
        is_over.set()
        thread.join(60)
    assert not problems, problems
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    more_files(20_000)
    quick = settings(hello_seconds=1.0, partial_seconds=1.0, heartbeat_seconds=600.0)
    with BrokerProcess(arguments=("--auto-create", "--log-level", "error", *quick)) as running:
        yield running


def test_half_open_connections_are_dropped_in_time_while_a_producer_goes_on(broker: BrokerProcess) -> None:
    half = request_head(Command.PRODUCE, produce("orders", b"x")[0], 1, 100_000)
    with sending(broker.url) as receipts, ExitStack() as stack:
        silent, partial = [], []
        for number in range(HALF_OPEN):
            if number % 2:
                silent.append(stack.enter_context(RawClient(port_of(broker.url), None)))
            else:
                partial.append(stack.enter_context(RawClient(port_of(broker.url))))
                partial[-1].send(half[: 1 + number % len(half)])
        before = len(receipts)
        assert [peer.read() for peer in (*silent, *partial)] == [None] * HALF_OPEN
        eventually(lambda: len(receipts) > before)


def test_idle_connections_are_held_and_cost_little(broker: BrokerProcess) -> None:
    before = resident_bytes(broker.pid)
    with sending(broker.url), ExitStack() as stack:
        idle = [stack.enter_context(RawClient(port_of(broker.url))) for _ in range(IDLE)]
        with dmq.connect(broker.url) as client:
            assert client.admin.stats("broker_sessions")["broker_sessions"] >= IDLE
        for peer in (idle[0], idle[IDLE // 2], idle[-1]):
            assert peer.ask(Command.HEARTBEAT, Heartbeat()).status == 0
        assert (resident_bytes(broker.pid) - before) / IDLE < 32 << 10


def test_large_frames_cost_what_was_sent_of_them_and_nothing_afterwards(tmp_path: Path) -> None:
    """Half-sent ones are held as far as they were sent; who sent one, or is gone, holds no buffer any more."""

    def batch(size: int) -> bytes:
        header, body = produce("orders", bytes(size))
        return request_head(Command.PRODUCE, header, 1, len(body)) + body

    with BrokerProcess(tmp_path / "data", ("--auto-create", "--log-level", "error")) as broker:
        port = port_of(broker.url)
        whole, large = batch(100_000), batch(4 << 20)
        with RawClient(port) as first:
            for _ in range(400):  # until the cache for readers is full
                first.send(whole)
                first.read()
        with ExitStack() as stack:
            peers = [stack.enter_context(RawClient(port)) for _ in range(IDLE // 20)]
            before = resident_bytes(broker.pid)
            for peer in peers:
                peer.send(whole)
                answer = peer.read()
                assert answer is not None
                assert answer.status == 0
            assert (resident_bytes(broker.pid) - before) / len(peers) < 16 << 10
        before = resident_bytes(broker.pid)
        with ExitStack() as stack:
            for _ in range(STALLED):
                stack.enter_context(RawClient(port)).send(large[: len(large) // 2])
            # All of it has arrived; the system may give memory in pages of 2 MiB.
            eventually(lambda: resident_bytes(broker.pid) - before > STALLED * len(large) * 0.45)
            assert resident_bytes(broker.pid) - before < STALLED * (len(large) // 2 + (2 << 20))
        eventually(lambda: resident_bytes(broker.pid) - before < GROWTH_BYTES_MAX)


def fill(url: str, topic: str, size: int, body_bytes: int) -> None:
    """A backlog of so many bytes."""
    count = size // body_bytes
    with dmq.connect(url) as client, client.producer(timeout=60, compression="none") as producer:
        for at in range(0, count, 2000):
            messages = [dmq.Message(bytes(body_bytes))] * min(2000, count - at)
            producer.send_many(topic, messages, durability="stored")


@pytest.fixture(scope="module", params=[1000, 20_000], ids=["1 KB", "20 KB"])
def filled(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[BrokerProcess]:
    """A broker with a backlog that is not running: a test that starts it finds its memory as a start leaves it."""
    folder = tmp_path_factory.mktemp("backlog") / "data"
    broker = BrokerProcess(folder, ("--auto-create", "--log-level", "error"))
    with broker:
        fill(broker.url, "backlog", BACKLOG_BYTES, request.param)
        with dmq.connect(broker.url) as client:
            assert client.admin.topic("backlog").messages == BACKLOG_BYTES // request.param
    yield broker
    shutil.rmtree(folder)


@pytest.mark.sampled
@pytest.mark.parametrize("is_shared", [True, False], ids=["one group", "a group each"])
def test_stalled_consumers_over_a_backlog_cost_bounded_memory(filled: BrokerProcess, is_shared: bool) -> None:
    with filled as broker, ExitStack() as stack:
        before = resident_bytes(broker.pid)
        with dmq.connect(broker.url) as client:
            ends = [queue.next_offset for queue in client.admin.offsets("backlog")]
        for number in range(STALLED):
            peer = stack.enter_context(RawClient(port_of(broker.url), receive_bytes=4096))
            group = "stalled" if is_shared else f"stalled-{number}"
            # Each from another place: what many are sent is in memory once.
            place = Point(PointKind.OFFSET, 0 if is_shared else min(ends) * number // STALLED)
            asked = Subscribe(1, "backlog", group, f"member-{number}", prefetch_messages=100_000, start_from=place)
            peer.request(Command.SUBSCRIBE, asked)
        with dmq.connect(broker.url) as client:
            delivered = 0.0

            def stands_still() -> bool:
                nonlocal delivered
                time.sleep(0.25)
                last, delivered = delivered, client.admin.stats("broker_delivered")["broker_delivered"]
                return bool(delivered) and delivered == last

            eventually(stands_still)
            with sending(broker.url):
                consumer = client.consumer("backlog", "lively")
                batch = consumer.pull(1000)
                assert len(batch) > 0
                batch.ack()
        growth = resident_bytes(broker.pid) - before
        assert before > 0 < growth + before, "nothing was measured"
    print(f"{STALLED} stalled consumers over {BACKLOG_BYTES >> 20} MiB: {growth >> 20} MiB more, {delivered:.0f} out")
    assert growth < GROWTH_BYTES_MAX


def test_a_peer_that_does_not_read_its_answers_is_not_read_from(broker: BrokerProcess) -> None:
    fill(broker.url, "greedy", 8 << 20, 1000)
    before = resident_bytes(broker.pid)
    with RawClient(port_of(broker.url), receive_bytes=4096) as greedy:
        greedy.sock.settimeout(1.0)
        peek = request_head(Command.PEEK, Peek("greedy", 0, max_messages=2000, max_bytes=2 << 20), 1)
        fetch = request_head(Command.FETCH, Fetch(0, 4 << 20), 2)
        with pytest.raises(TimeoutError):
            greedy.send((peek * 50 + fetch * 50) * 10_000)
        assert resident_bytes(broker.pid) - before < 64 << 20
        with sending(broker.url):
            pass


def test_a_flood_is_told_to_come_back_later(tmp_path: Path) -> None:
    arguments = ("--auto-create", *settings(waiting_bytes_max="1MiB"))
    with BrokerProcess(tmp_path / "data", arguments) as broker, RawClient(port_of(broker.url)) as flood:
        frames = []
        for number in range(40):
            header, body = produce("orders", bytes(400_000), sequence=number, durability=Durability.FLUSHED)
            frames.append(request_head(Command.PRODUCE, header, number + 1, len(body)) + body)
        flood_thread = threading.Thread(target=flood.send, args=(b"".join(frames),))
        flood_thread.start()
        answers = [flood.read() for _ in frames]
        flood_thread.join()
        refused = [answer for answer in answers if answer is not None and answer.status]
        assert 0 < len(refused) < len(frames)
        for answer in refused:
            with pytest.raises(dmq.Busy) as caught:
                decode_response(answer)
            assert caught.value.retry_after
        with dmq.connect(broker.url) as client:  # a patient producer gets everything through
            futures = [client.producer().send_async("orders", bytes(400_000)) for _ in range(20)]
            assert len({future.result(30).offset for future in futures}) > 1


@pytest.mark.parametrize(
    ("garbage", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", "HTTP"),
        (TLS_HELLO, "TLS"),
        (b"\xff" * 64, ""),
        (bytes(64), ""),
        (struct.pack(">I", 1 << 30) + bytes(64), ""),
    ],
    ids=["http", "tls", "ones", "zeros", "too large"],
)
def test_garbage_is_answered_with_what_is_wrong_and_the_connection_ends(
    broker: BrokerProcess, garbage: bytes, words: str
) -> None:
    with sending(broker.url), RawClient(port_of(broker.url), None) as stranger:
        stranger.send(garbage)
        answer = stranger.read()
        assert answer is not None
        with pytest.raises((dmq.ProtocolError, dmq.VersionMismatch)) as caught:
            decode_response(answer)
        assert words in caught.value.message
        assert stranger.read() is None


def test_a_frame_over_the_limit_is_refused_before_it_is_received(broker: BrokerProcess) -> None:
    with sending(broker.url), RawClient(port_of(broker.url)) as large:
        header, _ = produce("orders", b"x")
        large.send(request_head(Command.PRODUCE, header, 1, 100 << 20))
        answer = large.read()
        assert answer is not None
        with pytest.raises(dmq.ProtocolError):
            decode_response(answer)
        assert large.read() is None


def test_before_the_hello_frames_are_small_and_nothing_else_is_served(broker: BrokerProcess) -> None:
    with RawClient(port_of(broker.url), None) as peer:
        assert is_error(peer.ask(Command.STATS, Stats()), dmq.InvalidRequest)
        assert peer.read() is None
    with RawClient(port_of(broker.url), None) as peer:
        peer.send(request_head(Command.HELLO, Hello("x"), 1, 100_000))
        answer = peer.read()
        assert answer is not None
        assert is_error(answer, dmq.ProtocolError)


def is_error(answer: object, kind: type[dmq.DMQError]) -> bool:
    try:
        decode_response(answer)  # type: ignore[arg-type]
    except dmq.DMQError as error:
        return isinstance(error, kind)
    return False


def test_an_unknown_command_is_answered_and_the_connection_goes_on(broker: BrokerProcess) -> None:
    with RawClient(port_of(broker.url)) as peer:
        assert is_error(peer.ask(0x7FFF, Header()), dmq.UnknownCommand)
        peer.send(request_head(0x7FFE, Header(), 9)[:2])  # and in pieces
        peer.send(request_head(0x7FFE, Header(), 9)[2:])
        answer = peer.read()
        assert answer is not None
        assert (answer.kind, answer.correlation) == (Kind.RESPONSE, 9)
        assert peer.ask(Command.HEARTBEAT, Heartbeat()).status == 0


def test_more_connections_than_allowed_are_told_so(tmp_path: Path) -> None:
    arguments = settings(connections_max=3)
    with BrokerProcess(tmp_path / "data", arguments) as broker, ExitStack() as stack:
        port = port_of(broker.url)
        peers = [stack.enter_context(RawClient(port)) for _ in range(3)]
        with RawClient(port, None) as refused:
            answer = refused.read()
            assert answer is not None
            assert is_error(answer, dmq.Busy)
            assert refused.read() is None
        peers.pop().sock.shutdown(socket.SHUT_RDWR)
        eventually(lambda: _is_let_in(port))


def _is_let_in(port: int) -> bool:
    with RawClient(port, None) as peer:
        peer.send(request_head(Command.HELLO, Hello("again"), 1))
        answer = peer.read()
        return answer is not None and answer.status == 0
