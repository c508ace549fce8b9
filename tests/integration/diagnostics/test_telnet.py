"""The telnet port of a real broker, as a person with `telnet` or `nc` uses it. (D-11)"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

import dmq
from dmq.broker.diagnostics.telnet import TelnetServer
from dmq.broker.server import BrokerServer
from dmq.errors import NotAllowed, PortTaken
from dmq.settings import BrokerSettings, Settings
from dmq.testing import MemoryFiles
from tests.integration.broker_thread import ServedBroker
from tests.patience import PATIENCE_S


class Terminal:
    """A connected person; what is read ends with the prompt, or where the other side closes."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def read(self) -> str:
        seen = b""
        while not seen.endswith(b"> "):
            data = self._socket.recv(65536)
            if not data:
                break
            seen += data
        return seen.decode("utf-8", "replace").removesuffix("> ")

    def ask(self, line: str, end: str = "\r\n") -> str:
        self.send((line + end).encode())
        return self.read()

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(scope="module")
def served() -> Iterator[ServedBroker]:
    with (
        ServedBroker(telnet_port=0, auto_create=True) as running,
        dmq.connect(running.url, app="shop", client_id="till-1") as client,
    ):
        client.admin.create_topic("orders", queues=2)
        producer = client.producer(group="payers", check=lambda message: "unknown")
        for number in range(3):
            producer.send("orders", b"%d" % number, business_id="b", ordered=True)
        producer.send("orders", b"later", delay=3600.0)
        producer.transaction("orders", b"half")
        client.admin.create_group("billing", "orders")
        client.admin.set_limit(topic="orders", messages=1000, policy="dead-letter")
        client.admin.update_topic("orders", can_consume=False)
        yield running


@pytest.fixture
def terminal(served: ServedBroker) -> Iterator[Terminal]:
    with contextlib.closing(Terminal(served.server.telnet_port)) as made:
        greeting = made.read()
        assert greeting.startswith("DMQ ")
        assert "Type help, or quit." in greeting
        yield made


def test_help_names_every_command_and_every_one_answers(terminal: Terminal) -> None:
    lines = terminal.ask("help").splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert {"stats", "topics", "groups", "clients", "lag", "delays", "transactions", "limits", "quit"} <= set(names)
    for name in names[:-1]:
        answer = terminal.ask(name, "\n")
        assert answer.strip()
        assert "no command" not in answer


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("status", ["running", "clients", "messages out"]),
        ("stats broker_messages", ["broker_messages_in", "5"]),
        ("topics", ["orders", "consume"]),
        ("topic orders", ["queue", "billing"]),
        ("groups", ["billing", "orders", "3"]),
        ("lag", ["billing", "3"]),
        ("clients", ["till-1", "shop", "127.0.0.1:"]),
        ("delays", ["orders", "in 60 min", "1 wait"]),
        ("transactions", ["orders", "payers", "1 are open"]),
        ("limits", ["orders", "1000", "dead-letter"]),
        ("LIMITS", ["orders"]),
        ("topic nothing", ["no topic 'nothing'"]),
        ("topic", ["topic NAME"]),
        ("drop orders", ["no command drop", "help"]),
    ],
)
def test_each_command_shows_what_it_says(terminal: Terminal, line: str, words: list[str]) -> None:
    answer = terminal.ask(line)
    for word in words:
        assert word in answer
    assert answer.endswith("\r\n")


def test_a_telnet_client_that_negotiates_is_declined_and_served(terminal: Terminal) -> None:
    terminal.send(bytes((255, 253, 1, 255, 251, 31)) + b"topics\r\n")
    answer = terminal.read()
    assert "orders" in answer


@pytest.mark.parametrize("line", [b"quit\r\n", b"EXIT\n", b"\x04", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"x" * 600])
def test_who_leaves_speaks_http_or_sends_no_lines_is_closed(terminal: Terminal, line: bytes) -> None:
    terminal.send(line)
    with contextlib.suppress(ConnectionResetError):
        assert "orders" not in terminal.read()


def test_what_is_empty_is_answered_with_a_prompt_alone(terminal: Terminal) -> None:
    assert terminal.ask("") == ""
    assert "orders" in terminal.ask("topics")


def test_no_more_than_so_many_are_served_and_who_types_nothing_is_closed(served: ServedBroker) -> None:
    async def serve() -> TelnetServer:
        server = TelnetServer(lambda: served.broker, connections_max=1, idle_seconds=0.3)
        ports.append(await server.listen("127.0.0.1", 0))
        return server

    ports: list[int] = []
    server = asyncio.run_coroutine_threadsafe(serve(), served.loop).result(PATIENCE_S)
    try:
        with contextlib.closing(Terminal(ports[0])) as first:
            assert "Type help" in first.read()
            with contextlib.closing(Terminal(ports[0])) as second:
                assert "1 connections are open here" in second.read()
            assert first.read() == ""  # closed for its silence
    finally:
        asyncio.run_coroutine_threadsafe(server.close(), served.loop).result(PATIENCE_S)


def test_the_port_can_be_off_must_be_free_and_is_for_this_machine_alone(served: ServedBroker) -> None:
    with ServedBroker() as other:
        assert other.server.telnet_port == 0
    taken = Settings(broker=BrokerSettings(port=0, metrics_port=0, telnet_port=served.server.telnet_port))

    async def start() -> None:
        await BrokerServer(taken, files=MemoryFiles()).start()

    with pytest.raises(PortTaken):
        asyncio.run(start())
    with pytest.raises(NotAllowed):
        BrokerServer(Settings(broker=BrokerSettings(host="0.0.0.0", telnet_port=0)), files=MemoryFiles())


def test_a_broker_that_stops_closes_its_terminals() -> None:
    with ServedBroker(telnet_port=0) as running:
        terminal = Terminal(running.server.telnet_port)
        terminal.read()
    assert terminal.read() == ""
    terminal.close()
