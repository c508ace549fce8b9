"""What a person on call reads: the log of a broker that is started, used, killed and stopped."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import dmq
from dmq.protocol import Command
from dmq.protocol.session import Hello
from dmq.testing.processes import BrokerProcess
from dmq.version import __version__
from tests.integration.frame_client import RawClient, port_of
from tests.patience import eventually

SETTINGS = """
[log]
format = "json"

[broker]
connections_max = 4
hello_seconds = 0.5

[store]
segment_bytes = "64KiB"
unit_bytes_max = "32KiB"
body_bytes_max = "8KiB"
retention_bytes = "128KiB"
"""


def told(broker: BrokerProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in broker.log.splitlines()]


def the(lines: list[dict[str, Any]], event: str, **facts: object) -> dict[str, Any]:
    """The only line of an event, with these facts."""
    found = [line for line in lines if line["event"] == event and facts.items() <= line.items()]
    assert len(found) == 1, (event, facts, [line for line in lines if line["event"] == event] or lines)
    return found[0]


def use(url: str) -> None:
    with dmq.connect(url, app="shop") as client:
        admin = client.admin
        admin.create_topic("orders", queues=2)
        admin.create_topic("bills", queues=1)
        admin.update_topic("orders", queues=3)
        admin.create_group("billing", "orders")
        client.producer().send_many("orders", [dmq.Message(os.urandom(1000)) for _ in range(300)])
        admin.reset("orders", "billing", to="latest")
        admin.set_limit(topic="orders", messages=50_000)
        admin.set_limit(topic="orders")
        admin.delete_group("billing")
        admin.delete_topic("bills")


def crowd(port: int) -> None:
    """Clients that are refused: two of another version, one that speaks HTTP, one that is too much."""
    for _ in range(2):
        with RawClient(port, app=None) as stranger:
            assert stranger.ask(Command.HELLO, Hello("old", version_min=98, version_max=99)).status
    with socket.create_connection(("127.0.0.1", port)) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: dmq\r\n\r\n")
        assert browser.recv(1000)
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(6)]
    for one in sockets:
        one.settimeout(20.0)
        while one.recv(1000):  # until the broker hangs up: too many, or without a hello
            pass
        one.close()


def test_the_log_tells_the_life_of_a_broker(tmp_path: Path) -> None:
    settings = tmp_path / "my.toml"
    settings.write_text(SETTINGS)
    broker = BrokerProcess(tmp_path / "data", ("--config", str(settings), "--name", "one"))
    with broker:
        first = broker.pid
        use(broker.url)
        crowd(port_of(broker.url))
        eventually(lambda: any(line["event"] == "segments dropped" for line in told(broker)), "segments are dropped")
        before, address = told(broker), broker.url.removeprefix("dmq://")
        broker.kill()
        tail = max((tmp_path / "data" / "journal").iterdir())
        with tail.open("ab") as torn:
            torn.write(b"half a unit")
        broker.start()
        with dmq.connect(broker.url) as client:
            client.admin.drain(reason="new kernel")
            client.admin.undrain()
        last = broker.pid
        assert broker.stop() == 0
        after = told(broker)[len(before) :]

    start = the(before, "broker started", version=__version__, name="one", clients=address, pid=first)
    assert (start["data"], start["settings"]) == (str(tmp_path / "data"), str(settings))
    assert {"metrics", "telnet", "status", "python", "loop"} <= start.keys()
    the(before, "store opened", units_checked=0)
    made = the(before, "topic created", topic="orders", queues=2, settings="default")
    assert made["by"].startswith("shop-")
    the(before, "topic updated", topic="orders", changed="queues=3")
    the(before, "topic deleted", topic="bills", messages=0)
    the(before, "group created", topic="orders", group="billing", queues=3, lag=0)
    assert "->" in the(before, "group reset", topic="orders", group="billing")["moves"]
    the(before, "group deleted", group="billing", topic="all")
    the(before, "limit changed", topic="orders", messages_per_second=50_000)
    the(before, "limit removed", topic="orders")
    # What was left out of these lines follows after ten seconds, if the test takes as long.
    refused = [line for line in before if line["event"] == "connection refused"][:3]
    assert [line.get("code") for line in refused] == ["VERSION_MISMATCH", None, None], "the second of them is counted"
    assert "protocol 98-99" in refused[0]["reason"]
    assert "HTTP" in refused[1]["reason"]
    assert "broker.connections_max = 4" in refused[2]["reason"]
    assert "no hello" in the(before, "stalled connection closed")["reason"]
    assert not [line for line in before if line["level"] in ("error", "critical")]

    recovered = the(after, "store recovered after a crash", bytes_cut=len("half a unit"), rebuilt=False)
    assert Path(recovered["salvage"]).read_bytes() == b"half a unit"
    assert {"units_checked", "bytes_checked", "seconds"} <= recovered.keys()
    the(after, "drain begun", reason="new kernel")
    the(after, "drain ended: the broker is in use again")
    the(after, "broker stopping", reason="SIGTERM")
    the(after, "broker stopped", reason="SIGTERM", pid=last)
    assert [line["event"] for line in after][-1] == "broker stopped"


def test_a_flood_of_refused_connections_is_a_few_lines(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", ("--log-level", "warning", "--log-format", "json")) as broker:
        for _ in range(200):
            with RawClient(port_of(broker.url), app=None) as stranger:
                stranger.ask(Command.HELLO, Hello("old", version_min=98, version_max=99))
        lines = told(broker)
    assert 1 <= len(lines) < 20
    assert all(line["event"] == "connection refused" for line in lines)
