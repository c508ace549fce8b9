"""The confirm service (T-07): what it answers, to whom, and what it does not let happen to it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

import dmq
from dmq.client.client import Client
from dmq.client.consumer.message import ReceivedMessage
from dmq.outbox import BusinessState, ConfirmOptions, Inbox, Rollback
from dmq.outbox.repair.compensator import ConfirmClient
from dmq.outbox.repair.confirm_service import IDS_MAX, Confirmed, ConfirmServer, ask_address
from dmq.testing import TestBroker
from tests.integration.outbox.effects import outgoing, until

SUCCESS, ROLLBACK = BusinessState.SUCCESS, BusinessState.ROLLBACK


def consumed(inbox: Inbox, client: Client, *bodies: str) -> list[str]:
    """Messages that were consumed in the group stock; their send ids."""

    @inbox.consumes_messages
    def handle(session: Session, message: ReceivedMessage) -> BusinessState:
        if message.body == b"no":
            raise Rollback("no stock")
        return SUCCESS

    sent = [outgoing(body) for body in bodies]
    client.producer().send_many("orders", sent)
    consumer = client.consumer("orders", "stock")
    left = len(bodies)
    while left:
        batch = consumer.pull(left)
        for message in batch:
            handle(message)
        batch.ack()
        left -= len(batch)
    consumer.close()
    return [message.properties["dmq.send_id"] for message in sent if message.properties]


def test_it_answers_by_send_id_for_its_groups_alone(plain: Engine, client: Client) -> None:
    inbox = Inbox(plain, client)
    assert inbox.confirm is not None
    assert inbox.confirm.address == ""
    yes, no = consumed(inbox, client, "yes", "no")
    found = ask_address(inbox.confirm.address, "stock", [yes, no, "f" * 32], 5.0)
    assert {send_id: (one.state, one.reason) for send_id, one in found.items()} == {
        yes: (SUCCESS, ""),
        no: (ROLLBACK, "no stock"),
    }
    assert all(one.consumer_id for one in found.values())
    assert ask_address(inbox.confirm.address, "stock", [], 5.0) == {}
    with pytest.raises(dmq.NotConnected, match="does not consume here"):
        ask_address(inbox.confirm.address, "mail", [yes], 5.0)


def test_its_address_is_in_the_registry_as_long_as_it_lives(broker: TestBroker, plain: Engine, client: Client) -> None:
    other = broker.connect()
    inboxes = [Inbox(plain, one) for one in (client, other)]
    for inbox in inboxes:
        inbox.begin("stock")
    until(lambda: len(client.registry.entries("dmq.confirm", "stock/")) == 2)
    addresses = {inbox.confirm.address for inbox in inboxes if inbox.confirm}
    assert {one.decode() for one in client.registry.entries("dmq.confirm").values()} == addresses
    other.close()
    assert len(client.registry.entries("dmq.confirm", "stock/")) == 1
    broker.clock.advance(31)  # nobody renews it while time jumps
    assert client.registry.entries("dmq.confirm", "stock/") == {}


def test_it_starts_with_the_consumer_not_with_the_first_message(plain: Engine, client: Client) -> None:
    inbox = Inbox(plain, client)
    consumer = client.consumer("orders", "stock")
    handler = inbox.consumes_messages(lambda session, message: SUCCESS)
    thread = threading.Thread(target=lambda: consumer.run(handler, workers=1))
    thread.start()
    until(lambda: client.registry.entries("dmq.confirm", "stock/"))
    consumer.close()
    thread.join()


def test_any_live_instance_is_asked_and_many_ids_in_parts(plain: Engine, client: Client) -> None:
    inbox = Inbox(plain, client)
    ids = consumed(inbox, client, *(["yes"] * 3))
    until(lambda: client.registry.entries("dmq.confirm", "stock/"))
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        for number in range(5):
            client.registry.put("dmq.confirm", f"stock/dead{number}", f"127.0.0.1:{held.getsockname()[1]}")
        client.registry.put("dmq.confirm", "stock/nonsense", "nonsense")
        asker = ConfirmClient(client, 5.0)
        unknown = [f"{number:032x}" for number in range(IDS_MAX + 50)]
        found = asker.ask("stock", [*unknown, *ids])
    assert found is not None
    assert [send_id for send_id, one in found.items() if one is not None] == ids
    assert len(found) == len(unknown) + 3
    assert asker.ask("mail", ids) is None


def test_strangers_and_slow_peers_do_not_stop_it(plain: Engine, client: Client) -> None:
    calls: list[str] = []

    def find(group: str, send_ids: list[str]) -> list[Confirmed]:
        calls.append(group)
        return []

    server = ConfirmServer(find, ConfirmOptions(thread_num=2))
    host, _, port = server.address.rpartition(":")
    try:
        for rubbish in (b"GET / HTTP/1.1\r\n\r\n", struct.pack(">2sHI", b"dc", 1, 1 << 30), b"dc"):
            stranger = socket.create_connection((host, int(port)), 5.0)
            # It does not wait for what strangers have to say.
            with stranger, contextlib.suppress(OSError):
                stranger.sendall(rubbish)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(100) == b""
        with socket.create_connection((host, int(port)), 5.0):  # says nothing, and has one of two threads
            assert ask_address(server.address, "stock", ["a"], 5.0) == {}
    finally:
        server.close()
    assert calls == ["stock"]
    with pytest.raises(dmq.NotConnected, match="did not answer"):
        ask_address(server.address, "stock", ["a"], 1.0)


def test_a_database_that_is_down_is_said_to_be_so(plain: Engine, client: Client) -> None:
    inbox = Inbox(plain, client)
    consumed(inbox, client, "yes")
    assert inbox.confirm is not None
    inbox.tables.consumer.drop(plain)
    with pytest.raises(dmq.NotConnected, match="cannot look"):
        ask_address(inbox.confirm.address, "stock", ["a"], 5.0)


def test_another_address_than_loopback_has_to_be_meant() -> None:
    for host in ("0.0.0.0", "::", "example.org"):
        with pytest.raises(dmq.NotAllowed, match="insecure=True"):
            ConfirmOptions(host=host).check()
    assert ConfirmOptions(host="0.0.0.0", insecure=True).check().insecure
    with pytest.raises(dmq.InvalidSettings, match="thread_num"):
        ConfirmOptions(thread_num=0).check()


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = ConfirmOptions(port=taken.getsockname()[1])
        with pytest.raises(dmq.InvalidSettings, match="choose another port"):
            ConfirmServer(lambda group, send_ids: [], options)


def test_an_answer_that_does_not_come_is_given_up_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(dmq.NotConnected, match="did not answer"):
        ask_address(f"127.0.0.1:{silent.getsockname()[1]}", "stock", ["a"], 0.2)
