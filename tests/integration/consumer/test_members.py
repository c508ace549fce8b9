"""Members of a group: how they share, come and go; pausing and seeking; connections that break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing import TestBroker
from tests.integration.consumer.handler_thread import PATIENCE, Handling, lag, send
from tests.patience import eventually

# --- members ----------------------------------------------------------------------------------------------------------


def test_parallel_bounds_what_is_out_of_one_queue(client: Client) -> None:
    send(client, *map(str, range(30)))
    one = client.consumer("orders", "billing", parallel=20, batch=10)
    two = client.consumer("orders", "billing", parallel=20, batch=10)
    assert len(one.pull(10)) == 10
    assert len(two.pull(20)) == 10
    assert len(two.pull(20, wait=0.05)) == 0


def test_two_members_share_the_work(broker: TestBroker, client: Client) -> None:
    seen: dict[str, set[bytes]] = {"one": set(), "two": set()}
    consumers = {name: broker.connect().consumer("orders", "billing", prefetch=10, batch=5) for name in seen}

    def handler(name: str) -> Callable[[ReceivedMessage], None]:
        def handle(message: ReceivedMessage) -> None:
            seen[name].add(message.body)
            time.sleep(0.001)

        return handle

    with (
        Handling(consumers["one"], handler("one"), workers=1, policy="block"),
        Handling(consumers["two"], handler("two"), workers=1, policy="block"),
    ):
        client.admin.create_group("billing", "orders")
        eventually(lambda: client.admin.group("billing").members == 2)
        client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(300)])
        eventually(lambda: len(seen["one"] | seen["two"]) == 300)
    assert seen["one"]
    assert seen["two"]
    assert not seen["one"] & seen["two"]


def test_members_with_slow_handlers_share_by_need(broker: TestBroker, client: Client) -> None:
    """The prefetch has room for all of them, and one member got them all."""
    seen: dict[str, int] = {"one": 0, "two": 0}
    consumers = {name: broker.connect().consumer("orders", "billing") for name in seen}

    def handler(name: str) -> Callable[[ReceivedMessage], None]:
        def handle(message: ReceivedMessage) -> None:
            time.sleep(0.1)
            seen[name] += 1

        return handle

    with (
        Handling(consumers["one"], handler("one"), workers=1, policy="block"),
        Handling(consumers["two"], handler("two"), workers=1, policy="block"),
    ):
        client.admin.create_group("billing", "orders")
        eventually(lambda: client.admin.group("billing").members == 2)
        client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(40)])
        eventually(lambda: sum(seen.values()) == 40)
    assert min(seen.values()) >= 12, seen


def test_a_member_that_joins_later_gets_what_a_slow_one_will_not_get_to(broker: TestBroker, client: Client) -> None:
    is_slow, is_over = threading.Event(), threading.Event()
    done: list[bytes] = []

    def handle(message: ReceivedMessage) -> None:
        if is_slow.is_set():
            is_over.wait(PATIENCE)
        done.append(message.body)

    client.producer().send_many("orders", [dmq.Message(b"fast") for _ in range(300)])
    slow = broker.connect().consumer("orders", "billing")
    threading.Thread(target=slow.run, args=(handle,), kwargs={"workers": 1, "policy": "block"}, daemon=True).start()
    eventually(lambda: len(done) == 300)  # it has all the credit that it may have
    is_slow.set()
    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(50)])
    idle = broker.connect().consumer("orders", "billing")
    # All but one that the slow one works on, and one that waits for it.
    found = {message.body for _, message in zip(range(48), idle, strict=False)}
    is_over.set()
    assert len(found) == 48


def test_a_member_that_closes_gives_back_what_it_had_untried(broker: TestBroker, client: Client) -> None:
    send(client, "a", "b")
    leaving = broker.connect().consumer("orders", "billing")
    next(leaving)
    leaving.close()
    assert [(m.body, m.attempt) for m in client.consumer("orders", "billing").pull()] == [(b"a", 1), (b"b", 1)]


def test_a_member_that_died_is_replaced_after_its_grace() -> None:
    with TestBroker(grace_seconds=10.0) as broker:
        client = broker.connect()
        send(client, "a")
        dying = broker.connect(reconnect=False)
        held = next(dying.consumer("orders", "billing"))
        assert held.attempt == 1
        connection = dying._router.home.current()
        assert connection is not None
        connection.close(dmq.NotConnected("pulled the plug"))
        other = client.consumer("orders", "billing")
        assert len(other.pull(wait=0.1)) == 0
        broker.clock.advance(11)
        (message,) = other.pull()
        assert (message.body, message.attempt) == (b"a", 2)


def test_members_with_other_tags_are_refused_and_a_higher_version_takes_over(client: Client) -> None:
    send(client, "a", tag="x")
    old = client.consumer("orders", "billing", tags="x")
    next(old).ack()
    with pytest.raises(dmq.SubscriptionConflict, match="version"):
        next(client.consumer("orders", "billing", tags="y"))
    new = client.consumer("orders", "billing", tags="y", version=1)
    assert len(new.pull(wait=0.0)) == 0  # from now on its filter holds
    send(client, "b", tag="y")
    assert [message.body for message in new.pull()] == [b"b"]
    with pytest.raises(dmq.SubscriptionSuperseded):
        next(old)
    with pytest.raises(dmq.SubscriptionSuperseded):
        client.consumer("orders", "billing", tags="x").run(lambda message: None)


def test_an_unknown_topic_is_refused() -> None:
    with TestBroker(auto_create=False) as broker:
        consumer = broker.connect().consumer("nowhere", "billing")
        with pytest.raises(dmq.UnknownTopic):
            next(consumer)
        with pytest.raises(dmq.UnknownTopic):
            broker.connect().consumer("nowhere", "billing").pull()


# --- control ----------------------------------------------------------------------------------------------------------


def test_a_paused_consumer_gets_nothing_until_it_is_resumed(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    seen: list[bytes] = []
    with Handling(consumer, lambda message: seen.append(message.body)):
        send(client, "a")
        eventually(lambda: seen == [b"a"])
        consumer.pause()
        send(client, "b")
        client.admin.topics()
        assert seen == [b"a"]
        consumer.resume()
        eventually(lambda: seen == [b"a", b"b"])


def test_seeking_back_replays_what_was_done(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    send(client, "a", "b", "c")
    for body in (b"a", b"b"):
        message = next(consumer)
        assert message.body == body
        message.ack()
    consumer.seek("earliest")
    assert [next(consumer).body for _ in range(3)] == [b"a", b"b", b"c"]
    consumer.seek(2)
    assert next(consumer).body == b"c"
    consumer.seek("latest")
    send(client, "d")
    assert next(consumer).body == b"d"


def test_a_reset_by_an_operator_replays_too(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    send(client, "a")
    next(consumer).ack()
    eventually(lambda: lag(client) == 0)
    client.admin.reset("orders", "billing", to="earliest")
    assert next(consumer).body == b"a"


# --- connections that break -------------------------------------------------------------------------------------------


def cut(client: Client) -> None:
    connection = client._router.home.current()
    assert connection is not None
    connection.close(dmq.NotConnected("cut by a test"))


def test_a_consumer_resumes_after_a_cut_with_what_it_had(client: Client) -> None:
    send(client, *map(str, range(20)))
    consumer = client.consumer("orders", "billing", batch=5)
    first = [next(consumer) for _ in range(7)]
    cut(client)
    rest = [next(consumer) for _ in range(13)]
    assert [int(m.body) for m in (*first, *rest)] == list(range(20))
    assert {m.attempt for m in (*first, *rest)} == {1}
    for message in (*first, *rest):
        message.ack()
    consumer.close()
    assert lag(client) == 0


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_consuming_goes_on_over_a_restart_of_the_broker(broker: TestBroker, client: Client, how: str) -> None:
    seen: list[tuple[bytes, int]] = []
    lock = threading.Lock()

    def handle(message: ReceivedMessage) -> None:
        with lock:
            seen.append((message.body, message.attempt))
        time.sleep(0.001)

    client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(400)])
    with Handling(client.consumer("orders", "billing", prefetch=100), handle, workers=4):
        eventually(lambda: len(seen) > 50)
        if how == "kill":
            broker.kill()
            broker.start()
        else:
            broker.restart()
        eventually(lambda: len({body for body, _ in seen}) == 400)
        eventually(lambda: lag(client) == 0)
    assert {attempt for _, attempt in seen} == {1}, "a restart is not a failure"
    assert len(seen) == len({body for body, _ in seen}), "what was done before is not done again"


def test_a_message_in_hand_is_not_handled_again_when_the_broker_restarts(broker: TestBroker, client: Client) -> None:
    send(client, "slow")
    may_end = threading.Event()
    calls: list[int] = []

    def handle(message: ReceivedMessage) -> None:
        calls.append(message.attempt)
        assert may_end.wait(PATIENCE)

    consumer = client.consumer("orders", "billing")
    with Handling(consumer, handle, workers=2):
        eventually(lambda: calls == [1])
        broker.kill()
        broker.start()
        eventually(lambda: client.admin.lag("orders", "billing").queues[0].leased == 1)
        may_end.set()
        eventually(lambda: lag(client) == 0)
    assert calls == [1]


def test_a_client_that_is_closed_ends_its_consumers(broker: TestBroker) -> None:
    client = broker.connect()
    with Handling(client.consumer("orders", "billing"), lambda message: None) as handling:
        client.close()
        handling.join()
    assert handling.error is None


def test_in_plain_mode_a_broken_connection_is_an_error(broker: TestBroker) -> None:
    client = broker.connect(reconnect=False)
    with Handling(client.consumer("orders", "billing"), lambda message: None) as handling:
        eventually(lambda: client._router.home.current() is not None)
        cut(client)
        handling.join()
        assert isinstance(handling.error, dmq.NotConnected)


def test_a_consumer_that_pulled_and_closed_is_no_member_any_more_and_holds_up_no_other_tags(client: Client) -> None:
    client.producer().send("orders", b"x", tag="created")
    first = client.consumer("orders", "alerts", tags="created")
    other = client.consumer("orders", "alerts", tags="created")
    assert len(other.pull(1, wait=PATIENCE)) == 1
    assert len(first.pull(1, wait=0.0)) == 0
    assert client.admin.group("alerts").members == 2
    other.close()
    (again,) = first.pull(1, wait=PATIENCE)
    assert again.attempt == 1, "it was given back untried"
    again.ack()
    assert client.admin.group("alerts").members == 1
    first.close()
    assert client.admin.group("alerts").members == 0
    client.consumer("orders", "alerts", tags="paid").pull(1, wait=0.0)


def test_a_pull_that_waits_ends_when_its_consumer_is_closed(client: Client) -> None:
    consumer = client.consumer("orders", "billing")
    pulled: list[int] = []
    waiting = threading.Thread(target=lambda: pulled.append(len(consumer.pull(wait=3600))))
    waiting.start()
    eventually(lambda: any(group.name == "billing" and group.members for group in client.admin.groups()))
    consumer.close()
    waiting.join(PATIENCE)
    assert pulled == [0]
