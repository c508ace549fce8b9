"""Taking a broker out of use and putting it back, without losing or stranding anything."""

from __future__ import annotations

from pathlib import Path

import pytest

import dmq
from dmq.protocol import Command, decode_request, decode_response
from dmq.protocol.admin import TopicCreate
from dmq.protocol.consume import Pull, Subscribe
from dmq.protocol.session import Cluster, Drain, DrainAction, DrainReply, ServerHealth, ServerReboot
from dmq.testing.processes import BrokerProcess
from tests.integration.broker_thread import ServedBroker
from tests.integration.cli.test_commands import check_failure
from tests.integration.cli.test_commands import dmq as run
from tests.integration.diagnostics.test_metrics import get
from tests.integration.frame_client import RawClient, port_of, produce
from tests.patience import eventually


def drain(peer: RawClient, action: DrainAction) -> DrainReply:
    reply: DrainReply = decode_response(peer.ask(Command.DRAIN, Drain(action, 1500, "upgrade")))
    return reply


def test_a_drained_broker_takes_nothing_new_and_goes_on_when_it_is_back() -> None:
    with ServedBroker(auto_create=True) as broker, RawClient(port_of(broker.url)) as peer:
        assert peer.ask(Command.PRODUCE, *produce("orders", b"a", b"b")).status == 0
        assert len(decode_response(peer.ask(Command.PULL, Pull("orders", "g", "m", max_messages=1))).leases) == 1
        assert drain(peer, DrainAction.BEGIN) == DrainReply("drained", 1, 0, 0, 1)
        for command, *asked in (
            (Command.PRODUCE, *produce("orders", b"c", sequence=2)),
            (Command.PULL, Pull("orders", "g", "m")),
            (Command.SUBSCRIBE, Subscribe(1, "orders", "g", "n")),
            (Command.TOPIC_CREATE, TopicCreate("new")),
        ):
            with pytest.raises(dmq.BrokerStopping, match="drained") as caught:
                decode_response(peer.ask(command, *asked))
            assert caught.value.retriable
        assert get(broker.server.metrics_port, "/readyz")[0] == 503
        assert get(broker.server.metrics_port, "/healthz")[0] == 200
        (info,) = decode_response(peer.ask(Command.CLUSTER, Cluster())).brokers
        assert (info.state, info.is_writable) == ("drained", False)
        assert drain(peer, DrainAction.END).state == "running"
        assert get(broker.server.metrics_port, "/readyz")[0] == 200
        assert peer.ask(Command.PRODUCE, *produce("orders", b"c", sequence=2)).status == 0


def test_clients_are_told_of_both_also_those_that_come_later() -> None:
    with ServedBroker() as broker, RawClient(port_of(broker.url)) as one, RawClient(port_of(broker.url)) as operator:
        drain(operator, DrainAction.BEGIN)
        told = one.read()
        assert told is not None
        assert decode_request(told) == ServerReboot("dmq", 1500, "upgrade")
        with RawClient(port_of(broker.url)) as late:
            told = late.read()
            assert told is not None
            assert told.command == Command.SERVER_REBOOT
            drain(operator, DrainAction.END)
            for client in (one, late):
                told = client.read()
                assert told is not None
                assert decode_request(told) == ServerHealth("dmq", f"127.0.0.1:{port_of(broker.url)}")


def test_a_consumer_settles_what_it_has_and_gets_more_when_the_broker_is_back() -> None:
    with ServedBroker(auto_create=True) as broker, dmq.connect(broker.url) as client:
        admin = client.admin
        client.producer().send_many("orders", [dmq.Message(b"%d" % i) for i in range(3)])
        consumer = client.consumer("orders", "g", prefetch=1)
        first = next(consumer)
        assert admin.drain().out == 1
        first.ack()
        eventually(lambda: admin.drain_progress().is_idle)
        assert broker.broker.channels.open["orders", "g"].traffic.delivered == 1, "nothing is handed out any more"
        admin.undrain()
        bodies = {first.body}
        for _ in range(2):
            message = next(consumer)
            message.ack()
            bodies.add(message.body)
        assert len(bodies) == 3


def test_producers_go_to_another_broker_meanwhile() -> None:
    with ServedBroker(auto_create=True, name="one") as one, ServedBroker(auto_create=True, name="two") as two:
        ports = f"127.0.0.1:{port_of(one.url)},127.0.0.1:{port_of(two.url)}"
        with dmq.connect(f"dmq://{ports}") as client:
            producer = client.producer()
            producer.send("orders", b"x")
            used, other = (one, two) if one.broker.publisher.messages_in else (two, one)
            with dmq.connect(used.url) as operator:
                operator.admin.drain()
            for _ in range(5):
                producer.send("orders", b"y")
            assert other.broker.publisher.messages_in == 5
            assert used.broker.publisher.messages_in == 1


def test_the_command_waits_until_it_is_safe_and_can_undo_it(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", ("--auto-create",)) as broker:
        url = ("--url", broker.url)
        with dmq.connect(broker.url) as client:
            client.producer().send("orders", b"x")
            batch = client.consumer("orders", "g").pull(1)
            check_failure(
                run("broker", "drain", *url, "--timeout", "300ms", "--format", "json"), 1, "1 messages are still leased"
            )
            batch.ack()
            done = run("broker", "drain", *url)
            assert (done.code, "safe to stop" in done.out) == (0, True)
            with pytest.raises(dmq.DMQError):
                client.producer(retries=0).send("orders", b"y")
            done = run("broker", "drain", "--undo", *url, "--format", "json")
            assert done.json["state"] == "running"
            client.producer().send("orders", b"y")


def test_the_command_stops_a_broker_once_it_is_drained(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", ("--auto-create",)).start()
    with dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
    done = run("broker", "drain", "--stop", "--url", broker.url)
    assert (done.code, done.out) == (0, "stopping\n")
    assert broker.ended(30) == 0
    assert not (tmp_path / "data" / "RUNNING").exists()


def test_the_command_wants_to_know_which_broker(tmp_path: Path) -> None:
    check_failure(run("broker", "drain", "--url", "dmq://127.0.0.1:1,127.0.0.1:2"), 2, "one broker")
    check_failure(run("broker", "drain", "--undo", "--stop"), 2, "--undo")
