"""A send whose outcome is not known is repeated by its caller: the message is stored once. (D-06, D-15)"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest

import dmq
import dmq.aio
from dmq.model import MessageId
from dmq.testing.processes import BrokerProcess, free_port

PATIENCE = 60.0
TIMEOUT = 0.3


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with BrokerProcess(arguments=("--auto-create", "--port", str(free_port()))) as running:
        yield running


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[dmq.Client]:
    with dmq.connect(broker.url) as client:
        yield client


@pytest.fixture
def topic(client: dmq.Client, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    client.admin.create_topic(name, queues=2)
    return name


@contextmanager
def stopped(broker: BrokerProcess) -> Iterator[None]:
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.pid, signal.SIGCONT)


def again(send: Callable[[], Any]) -> Any:
    """What a caller does: the same thing until it is known to have worked."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return send()
        except (dmq.TimedOut, dmq.NotConnected):
            if time.monotonic() > end:
                raise


def stored(client: dmq.Client, topic: str) -> dict[MessageId | None, bytes]:
    return {message.id: message.body for message in client.admin.peek(topic, limit=1000)}


def producer_of(client: dmq.Client, topic: str, **options: Any) -> dmq.Producer:
    producer = client.producer(timeout=PATIENCE, **options)
    producer.send(topic, b"first")
    return client.producer(timeout=TIMEOUT, **options)


@pytest.mark.parametrize("options", [{}, {"business_id": "u-7", "ordered": True}], ids=["any", "ordered"])
def test_the_same_object_sent_again_is_stored_once(
    broker: BrokerProcess, client: dmq.Client, topic: str, options: dict[str, Any]
) -> None:
    producer, message = producer_of(client, topic), dmq.Message(b"once", **options)
    with stopped(broker):
        for _ in range(3):
            with pytest.raises(dmq.TimedOut, match="stored once"):
                producer.send(topic, message)
    receipt = again(lambda: producer.send(topic, message))
    client.producer(timeout=PATIENCE).send(topic, b"last")
    found = stored(client, topic)
    assert sorted(found.values()) == [b"first", b"last", b"once"]
    assert found[receipt.id] == b"once"
    assert again(lambda: producer.send(topic, message)).id != receipt.id  # its outcome was known: a new message


def test_the_same_id_is_one_message_also_when_it_is_known_to_be_stored(
    broker: BrokerProcess, client: dmq.Client, topic: str
) -> None:
    producer = producer_of(client, topic)
    with stopped(broker), pytest.raises(dmq.TimedOut):
        producer.send(topic, b"once", id="order-17")
    first = again(lambda: producer.send(topic, b"once", id="order-17"))
    assert again(lambda: producer.send(topic, b"once", id="order-17")) == first
    assert producer.send_async(topic, b"once", id="order-17").result(PATIENCE) == first
    with pytest.raises(dmq.InvalidMessage, match="another message"):
        producer.send(topic, b"other", id="order-17")
    assert sorted(stored(client, topic).values()) == [b"first", b"once"]


def test_a_send_may_have_a_timeout_of_its_own(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    patient = client.producer(timeout=3600.0)
    patient.send(topic, b"first")
    with stopped(broker):
        with pytest.raises(dmq.TimedOut, match=r"0\.2 s"):
            patient.send(topic, b"late", timeout=0.2)
        with pytest.raises(dmq.TimedOut, match=r"0\.3 s"):
            patient.send_many(topic, [dmq.Message(b"later")], timeout=0.3)
    for wrong in (0, -1.0, "soon"):
        with pytest.raises(dmq.InvalidSettings, match="timeout is a time in seconds"):
            patient.send(topic, b"never", timeout=wrong)  # type: ignore[arg-type]
    patient.send(topic, b"last", timeout=PATIENCE)
    patient.flush()
    assert sorted(stored(client, topic).values()) == [b"first", b"last", b"late", b"later"]


def test_a_send_of_asyncio_may_have_a_timeout_of_its_own(broker: BrokerProcess, topic: str) -> None:
    async def main() -> None:
        async with dmq.aio.connect(broker.url) as client:
            producer = client.producer(timeout=3600.0)
            await producer.send(topic, b"first")
            with stopped(broker):
                with pytest.raises(dmq.TimedOut, match=r"0\.2 s"):
                    await producer.send(topic, b"late", timeout=0.2)
                with pytest.raises(dmq.TimedOut, match=r"0\.3 s"):
                    await producer.send_many(topic, [dmq.Message(b"later")], timeout=0.3)
            await producer.send(topic, b"last", timeout=PATIENCE)

    asyncio.run(main())


def test_an_error_names_the_message_that_may_be_stored(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    producer = producer_of(client, topic)
    with stopped(broker), pytest.raises(dmq.TimedOut) as failed:
        producer.send(topic, b"once")
    name = failed.value.detail["id"]
    receipt = again(lambda: producer.send(topic, b"once", id=name))
    assert str(receipt.id) == name
    assert sorted(stored(client, topic).values()) == [b"first", b"once"]


def test_a_list_sent_again_whole_in_part_or_among_others_is_stored_once(
    broker: BrokerProcess, client: dmq.Client, topic: str
) -> None:
    producer = producer_of(client, topic)
    messages = [dmq.Message(b"%d" % number) for number in range(20)]
    with stopped(broker), pytest.raises(dmq.TimedOut):
        producer.send_many(topic, messages)
    part = again(lambda: producer.send_many(topic, messages[5:8]))
    new = dmq.Message(b"new")
    mixed = again(lambda: producer.send_many(topic, [messages[9], new, *messages[:5]]))
    rest = [*again(lambda: producer.send_many(topic, [*messages[10:], messages[8]]))]
    receipts = [*mixed[2:], *part, rest[-1], mixed[0], *rest[:-1]]
    found = stored(client, topic)
    assert [found[receipt.id] for receipt in receipts] == [message.body for message in messages]
    assert len(found) == 22
    assert found[mixed[1].id] == b"new"


def test_a_list_that_was_stored_in_part_is_repeated_whole(client: dmq.Client, topic: str) -> None:
    producer = client.producer(timeout=PATIENCE)
    messages = [dmq.Message(b"%d" % number) for number in range(4096)]
    client.admin.set_limit(topic=topic, messages=2048)
    with pytest.raises(dmq.RateLimited) as failed:
        producer.send_many(topic, messages)
    assert failed.value.detail["stored"] == 2048
    client.admin.set_limit(topic=topic)
    receipts = producer.send_many(topic, messages)
    assert len({receipt.id for receipt in receipts}) == 4096
    assert sum(queue.next_offset for queue in client.admin.offsets(topic)) == 4096
    producer.send_many(topic, messages[:2])
    assert sum(queue.next_offset for queue in client.admin.offsets(topic)) == 4098


def test_threads_that_repeat_one_id_send_one_message(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    producer = producer_of(client, topic)
    receipts = []

    def send() -> None:
        receipts.append(again(lambda: producer.send(topic, b"once", id="n")))

    threads = [threading.Thread(target=send) for _ in range(8)]
    with stopped(broker):
        for thread in threads:
            thread.start()
        time.sleep(2 * TIMEOUT)
    for thread in threads:
        thread.join()
    assert len({receipt.id for receipt in receipts}) == 1
    assert sorted(stored(client, topic).values()) == [b"first", b"once"]


def test_one_object_many_times_is_as_many_messages(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    producer, message = producer_of(client, topic), dmq.Message(b"x")
    with stopped(broker), pytest.raises(dmq.TimedOut):
        producer.send_many(topic, [message] * 5)
    again(lambda: producer.send_many(topic, [message] * 5))
    assert len(stored(client, topic)) == 6
    again(lambda: producer.send_many(topic, [message] * 5))
    assert len(stored(client, topic)) == 11


def test_a_delayed_message_sent_again_waits_once(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    producer, message = producer_of(client, topic), dmq.Message(b"later")
    with stopped(broker):
        with pytest.raises(dmq.TimedOut):
            producer.send(topic, message, delay=3600)
        with pytest.raises(dmq.TimedOut):
            producer.send_many(topic, [message], delay=3600)
    again(lambda: producer.send(topic, message, delay=3600))
    assert len(client.admin.delays(topic=topic)) == 1


def test_what_others_sent_meanwhile_changes_nothing(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    producer, message = producer_of(client, topic), dmq.Message(b"once")
    with stopped(broker):
        with pytest.raises(dmq.TimedOut):
            producer.send(topic, message)
        others = [producer.send_async(topic, b"other %d" % number) for number in range(50)]
    for other in others:
        other.result(PATIENCE)
    for number in range(50):
        again(partial(producer.send, topic, b"more", id=str(number)))
    receipt = again(lambda: producer.send(topic, message))
    bodies = [*stored(client, topic).values()]
    assert bodies.count(b"once") == 1
    assert len(bodies) == 102
    assert stored(client, topic)[receipt.id] == b"once"


def test_a_broker_that_is_killed_in_between_stores_it_once(
    broker: BrokerProcess, client: dmq.Client, topic: str
) -> None:
    producer, message = producer_of(client, topic), dmq.Message(b"once")
    with stopped(broker), pytest.raises(dmq.TimedOut):
        producer.send(topic, message)
    os.kill(broker.pid, signal.SIGSTOP)
    is_open = True
    with suppress(dmq.TimedOut):
        producer.send(topic, message)
        is_open = False  # its answer was on its way before the broker stopped; from here on it is another message
    broker.kill()
    broker.start()
    if is_open:
        again(lambda: producer.send(topic, message))
    assert sorted(stored(client, topic).values()) == [b"first", b"once"]


def test_asyncio_repeats_as_well(broker: BrokerProcess, client: dmq.Client, topic: str) -> None:
    message, listed = dmq.Message(b"once"), [dmq.Message(b"a"), dmq.Message(b"b")]

    async def main() -> None:
        async with dmq.aio.connect(broker.url) as other:
            producer = other.producer(timeout=TIMEOUT)
            await other.producer(timeout=PATIENCE).send(topic, b"first")
            with stopped(broker):
                for send in (
                    lambda: producer.send(topic, message),
                    lambda: producer.send(topic, b"named", id="n"),
                    lambda: producer.send_many(topic, listed),
                ):
                    with pytest.raises((dmq.TimedOut, dmq.NotConnected)):  # or never left
                        await send()
            for send in (
                lambda: producer.send(topic, message),
                lambda: producer.send(topic, b"named", id="n"),
                lambda: producer.send_many(topic, listed),
            ):
                end = time.monotonic() + PATIENCE
                while time.monotonic() < end:
                    try:
                        await send()
                        break
                    except (dmq.TimedOut, dmq.NotConnected):
                        pass

    asyncio.run(main())
    assert sorted(stored(client, topic).values()) == [b"a", b"b", b"first", b"named", b"once"]


class Swallower:
    """Between a client and a broker: on demand, what the broker says does not arrive."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port = port
        self.is_deaf = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"dmq://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far, suppress(OSError):
            while True:
                for ready in select.select([near, far], [], [])[0]:
                    data = ready.recv(65536)
                    if not data:
                        return
                    if ready is near:
                        far.sendall(data)
                    elif not self.is_deaf:
                        near.sendall(data)

    def close(self) -> None:
        self._listener.close()


def test_answers_that_are_lost_on_the_way_are_asked_for_again(
    broker: BrokerProcess, client: dmq.Client, topic: str
) -> None:
    swallower = Swallower(int(broker.url.rsplit(":", 1)[1]))
    with dmq.connect(swallower.url) as other:
        producer, message = producer_of(other, topic), dmq.Message(b"once")
        swallower.is_deaf = True
        with pytest.raises(dmq.TimedOut):
            producer.send(topic, message)
        with pytest.raises((dmq.TimedOut, dmq.NotConnected)):
            producer.send_many(topic, [named := dmq.Message(b"many")])
        swallower.is_deaf = False
        # The answers are gone for good, and the batches are sent again on their own after 30 s only.
        receipt = again(lambda: producer.send(topic, message))
        again(lambda: producer.send_many(topic, [named]))
        found = stored(client, topic)
        assert found[receipt.id] == b"once"
        assert sorted(found.values()) == [b"first", b"many", b"once"]
    swallower.close()
