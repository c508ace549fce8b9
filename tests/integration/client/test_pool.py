"""Connections that break, brokers that are silent, and clients that come back."""

from __future__ import annotations

import socket
import threading
import time

import pytest

import dmq
from dmq.client.producer.future import SendFuture
from dmq.protocol import Command, Flag, Frame, Header, decode_request
from dmq.protocol.session import ServerHealth, ServerReboot
from dmq.testing.processes import free_port
from tests.integration.client.servers import Peer, usual
from tests.patience import PATIENCE_S, eventually


class Heard:
    """Listeners that write down what they hear."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def connect(self, url: str, **options: object) -> dmq.Client:
        return dmq.connect(
            url,
            app="shop",
            on_exception=lambda error: self.events.append(type(error).__name__),
            on_interrupted=lambda: self.events.append("interrupted"),
            on_resumed=lambda: self.events.append("resumed"),
            **options,  # type: ignore[arg-type]
        )


def test_connect_fails_at_once_with_one_sentence() -> None:
    with pytest.raises(dmq.NotConnected) as caught:
        dmq.connect(f"dmq://127.0.0.1:{free_port()}")
    assert "no broker answers at 127.0.0.1" in caught.value.message
    assert "\n" not in caught.value.message


def test_connect_waits_if_told_so() -> None:
    port = free_port()
    peers: list[Peer] = []
    threading.Timer(0.4, lambda: peers.append(Peer(port=port))).start()
    with dmq.connect(f"dmq://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
        assert client.producer().send("t", b"x").topic == "t"
    peers[0].close()


def test_connect_tells_when_the_port_is_somebody_elses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            sock.recv(100)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            sock.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(dmq.ProtocolError):
            dmq.connect(f"dmq://127.0.0.1:{server.getsockname()[1]}")


def test_the_second_address_is_taken_when_the_first_is_silent() -> None:
    with Peer() as peer, dmq.connect(f"dmq://127.0.0.1:{free_port()},127.0.0.1:{peer.port}") as client:
        assert client.producer().send("t", b"x").topic == "t"


def test_a_broken_connection_comes_back_and_is_told_once() -> None:
    heard = Heard()
    with Peer() as peer, heard.connect(peer.url) as client:
        producer = client.producer()
        producer.send("t", b"x")
        peer.cut()
        eventually(lambda: heard.events == ["NotConnected", "interrupted", "resumed"])
        for _ in range(20):
            producer.send("t", b"x")
        assert len(heard.events) == 3


def test_a_send_waits_until_the_connection_is_back() -> None:
    peer = Peer()
    with dmq.connect(peer.url) as client:
        producer = client.producer(timeout=None)
        producer.send("t", b"x")
        peer.close()
        eventually(lambda: client._router.home.current() is None)
        again: list[Peer] = []
        threading.Timer(0.5, lambda: again.append(Peer(port=peer.port))).start()
        start = time.monotonic()
        producer.send("t", b"y")
        assert time.monotonic() - start > 0.3
        producer.close()
    again[0].close()


def test_with_a_timeout_a_send_raises_while_there_is_no_connection() -> None:
    peer = Peer()
    with dmq.connect(peer.url, timeout=0.5) as client:
        producer = client.producer(timeout=None)
        producer.send("t", b"x")
        peer.close()
        eventually(lambda: client._router.home.current() is None)
        late = producer.send_async("t", b"async")
        with pytest.raises(dmq.NotConnected):
            producer.send("t", b"y")
        assert isinstance(late.exception(PATIENCE_S), dmq.NotConnected)
        producer.close(0.1)


def test_plain_mode_tells_and_stays_closed() -> None:
    heard = Heard()
    with Peer() as peer, heard.connect(peer.url, reconnect=False) as client:
        producer = client.producer()
        producer.send("t", b"x")
        peer.cut()
        eventually(lambda: heard.events == ["NotConnected", "interrupted"])
        for _ in range(3):
            with pytest.raises(dmq.NotConnected, match="closed"):
                producer.send("t", b"x")
        with pytest.raises(dmq.NotConnected, match="closed"):
            producer.send_async("t", b"x")
        with pytest.raises(dmq.NotConnected, match="closed"):
            client.admin.topics()
        time.sleep(0.3)
        assert heard.events == ["NotConnected", "interrupted"]
        assert peer.sockets == []


def test_an_unanswered_batch_is_sent_again_as_resend_after_the_connection_broke() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | None:
        if frame.command == Command.PRODUCE and not frame.flags & Flag.RESEND:
            peer.cut()
            return None
        return usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        client.producer().send("t", b"x")
        first, second = peer.produced()
        one, two = decode_request(first), decode_request(second)
        assert second.flags & Flag.RESEND
        assert (one.producer_id, one.first_sequence, one.count, one.queue) == (
            two.producer_id, two.first_sequence, two.count, two.queue,
        )  # fmt: skip
        assert bytes(first.body) == bytes(second.body)


def test_a_send_that_is_never_answered_times_out() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | None:
        return None if frame.command == Command.PRODUCE else usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        producer = client.producer(timeout=0.3)
        start = time.monotonic()
        with pytest.raises(dmq.TimedOut):
            producer.send("t", b"x")
        assert time.monotonic() - start > 0.25


def test_busy_is_honoured_within_the_timeout() -> None:
    def answer(peer: Peer, frame: Frame) -> Header | Exception:
        if frame.command == Command.PRODUCE and len(peer.produced()) < 4:
            return dmq.Busy("full", retry_after_ms=50)
        return usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        client.producer().send("t", b"x")
        assert len(peer.produced()) == 4

    def never(peer: Peer, frame: Frame) -> Header | Exception:
        return dmq.Busy("full", retry_after_ms=100) if frame.command == Command.PRODUCE else usual(frame)

    with Peer(never) as peer, dmq.connect(peer.url) as client, pytest.raises(dmq.Busy):
        client.producer(timeout=0.5).send("t", b"x")


def test_a_refused_send_is_taken_to_another_broker() -> None:
    def refuse(peer: Peer, frame: Frame) -> Header | Exception:
        return dmq.BrokerStopping("bye") if frame.command == Command.PRODUCE else usual(frame)

    with Peer(refuse) as first, Peer() as second:
        with dmq.connect(f"dmq://127.0.0.1:{first.port},127.0.0.1:{second.port}") as client:
            client.producer().send("t", b"x")
            client.producer().send("t", b"y")
        assert len(second.produced()) == 2
        assert len(second.sockets) == 1, "one connection to a broker is enough"


def test_a_rebooting_broker_is_left_for_another_and_comes_back_into_use() -> None:
    heard = Heard()
    with (
        Peer() as first,
        Peer() as second,
        heard.connect(f"dmq://127.0.0.1:{first.port},127.0.0.1:{second.port}") as client,
    ):
        producer = client.producer()
        producer.send("t", b"x")
        first.push(Command.SERVER_REBOOT, ServerReboot("peer", 1000))
        eventually(lambda: (c := client._router.home.current()) and c.address.port == second.port)
        producer.send("t", b"y")
        assert len(second.produced()) == 1
        assert heard.events == []
        second.push(Command.SERVER_HEALTH, ServerHealth("first", f"127.0.0.1:{first.port}"))
        time.sleep(0.7)
        second.cut()
        eventually(lambda: (c := client._router.home.current()) and c.address.port == first.port)


def test_hearts_beat_both_ways_and_silence_is_noticed() -> None:
    heard = Heard()
    with Peer(heartbeat_ms=200) as peer, heard.connect(peer.url):
        eventually(lambda: any(frame.command == Command.HEARTBEAT for frame in peer.frames))
        peer.send = lambda sock, data: None  # type: ignore[method-assign]
        eventually(lambda: "interrupted" in heard.events)


def test_an_idle_client_notices_that_its_connection_broke() -> None:
    heard = Heard()
    with Peer() as peer, heard.connect(peer.url):
        peer.close()
        eventually(lambda: heard.events == ["NotConnected", "interrupted"])


def test_a_peer_that_does_not_read_holds_up_senders_but_not_memory() -> None:
    gate = threading.Event()

    def answer(peer: Peer, frame: Frame) -> Header:
        if frame.command == Command.PRODUCE:
            gate.wait(PATIENCE_S)
        return usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        producer = client.producer(window_bytes=1 << 20, compression="none", on_full="raise")
        futures: list[SendFuture] = []
        with pytest.raises(dmq.Busy, match="window"):
            futures.extend(producer.send_async("t", bytes(10_000)) for _ in range(10_000))
        assert len(futures) < 110
        gate.set()
        producer.flush(10)
        assert all(future.exception(0) is None for future in futures)


def test_the_users_function_hears_of_a_full_window() -> None:
    told: list[tuple[str, bytes]] = []

    def answer(peer: Peer, frame: Frame) -> Header | None:
        return None if frame.command == Command.PRODUCE else usual(frame)

    with Peer(answer) as peer, dmq.connect(peer.url) as client:
        producer = client.producer(
            window_bytes=1, timeout=0.5, on_full=lambda topic, message: told.append((topic, message.body))
        )
        producer.send_async("t", b"first")
        with pytest.raises(dmq.Busy):
            producer.send_async("t", b"second")
        assert told == [("t", b"second")]
        producer.close(0.1)


def test_many_threads_share_one_connection() -> None:
    with Peer() as peer, dmq.connect(peer.url) as client:
        producer = client.producer()
        done: list[int] = []

        def work() -> None:
            for _ in range(100):
                producer.send("t", b"x")
                client._router.home.request(Command.TOPIC_DESCRIBE, _describe(), timeout=5)
            done.append(1)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert len(done) == 6
        assert len(peer.sockets) == 1


def _describe() -> Header:
    from dmq.protocol.admin import TopicDescribe

    return TopicDescribe("t")


def test_a_lone_send_starts_no_thread() -> None:
    before = {thread.name for thread in threading.enumerate()}
    with Peer() as peer, dmq.connect(peer.url, app="solo") as client:
        client.producer().send("t", b"x")
        new = {thread.name for thread in threading.enumerate()} - before
        assert not any(name == f"dmq-127.0.0.1:{peer.port}" for name in new), "nobody but the caller reads"


def test_closing_leaves_no_thread_behind() -> None:
    with Peer() as peer:
        client = dmq.connect(peer.url, app="gone")
        client.producer().send_async("t", b"x", on_delivery=lambda *_: None).result(PATIENCE_S)
        client.close()
        eventually(lambda: not any(thread.name.startswith("dmq-gone") for thread in threading.enumerate()))
        with pytest.raises(dmq.NotConnected, match="closed"):
            client.admin.topics()
