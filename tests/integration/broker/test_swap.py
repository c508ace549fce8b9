"""A server whose broker goes and comes back while connections stay open."""

from __future__ import annotations

import asyncio

import pytest

from dmq.errors import BrokerStopping
from dmq.protocol import Command, Frame, Status, decode_request, decode_response
from dmq.protocol.consume import Pull, Subscribe, SubscriptionEnded
from dmq.protocol.produce import TransactionJoin
from dmq.protocol.session import Cluster, Heartbeat, Stats
from tests.integration.broker_thread import SECONDS, ServedBroker
from tests.integration.diagnostics.test_metrics import get
from tests.integration.frame_client import RawClient, port_of, produce
from tests.patience import eventually


def close_broker(served: ServedBroker) -> None:
    asyncio.run_coroutine_threadsafe(served.server.close_broker(), served.loop).result(SECONDS)


def open_broker(served: ServedBroker) -> None:
    async def run() -> None:
        served.server.open_broker()

    asyncio.run_coroutine_threadsafe(run(), served.loop).result(SECONDS)


def pushed(peer: RawClient, command: Command) -> Frame:
    """The next frame of a command that was not asked for."""
    while True:
        frame = peer.read()
        assert frame is not None, "the server hung up"
        if frame.command == command:
            return frame


def test_connections_stay_open_while_there_is_no_broker() -> None:
    with ServedBroker(auto_create=True) as served, RawClient(port_of(served.url)) as peer:
        assert peer.ask(Command.PRODUCE, *produce("orders", b"a")).status == 0
        close_broker(served)
        with pytest.raises(BrokerStopping, match="no broker"):
            _ = served.server.broker
        assert peer.ask(Command.HEARTBEAT, Heartbeat(0)).status == 0
        (me,) = decode_response(peer.ask(Command.CLUSTER, Cluster())).brokers
        assert (me.state, me.is_writable) == ("standby", False)
        values = decode_response(peer.ask(Command.STATS, Stats())).values
        assert values["broker_sessions"] == 1
        assert "broker_messages_in" not in values
        for command, header, body in (
            (Command.PRODUCE, *produce("orders", b"b")),
            (Command.PULL, Pull("orders", "g"), b""),
        ):
            refused = peer.ask(command, header, body)
            assert refused.status == Status.BROKER_STOPPING
            assert b"try again" in bytes(refused.body) + bytes(refused.header)
        with RawClient(port_of(served.url)) as late:
            assert late.ask(Command.HEARTBEAT, Heartbeat(0)).status == 0
            open_broker(served)
            for each in (peer, late):
                assert each.ask(Command.PRODUCE, *produce("orders", b"c")).status == 0
        reply = decode_response(peer.ask(Command.PULL, Pull("orders", "g", "m")))
        assert sum(lease.count for lease in reply.leases) >= 1


def test_subscriptions_end_with_their_broker_and_begin_again_with_the_next() -> None:
    with ServedBroker(auto_create=True, offline_delay_ms=0) as served, RawClient(port_of(served.url)) as peer:
        subscribe = Subscribe(1, "orders", "g", "m")
        assert peer.ask(Command.SUBSCRIBE, subscribe).status == 0
        waiting = RawClient(port_of(served.url))
        with waiting:
            correlation = waiting.request(Command.PULL, Pull("orders", "h", "m", wait_ms=600_000))
            eventually(lambda: ("orders", "h") in served.broker.channels.open)
            close_broker(served)
            answer = pushed(waiting, Command.PULL)
            assert (answer.correlation, answer.status) == (correlation, 0)
        ended: SubscriptionEnded = decode_request(pushed(peer, Command.SUBSCRIPTION_ENDED))
        assert (ended.subscription, ended.status) == (1, Status.BROKER_STOPPING)
        open_broker(served)
        assert peer.ask(Command.SUBSCRIBE, subscribe).status == 0
        peer.request(Command.PRODUCE, *produce("orders", b"a"))
        assert pushed(peer, Command.CONSUMER_PUSH).status == 0


def test_a_producer_answers_for_its_transactions_with_the_next_broker_too() -> None:
    with ServedBroker() as served, RawClient(port_of(served.url)) as peer:
        assert peer.ask(Command.TRANSACTION_JOIN, TransactionJoin("shop")).status == 0
        close_broker(served)
        open_broker(served)
        assert list(served.broker.transactions._members) == ["shop"]


def test_the_pages_of_a_server_without_a_broker_say_so() -> None:
    with ServedBroker(telnet_port=0) as served:
        close_broker(served)
        port = served.server.metrics_port
        assert get(port, "/readyz")[0] == 503
        assert get(port, "/metrics")[0] == 503
        assert get(port, "/healthz")[0] == 200
        open_broker(served)
        assert get(port, "/readyz")[0] == 200
