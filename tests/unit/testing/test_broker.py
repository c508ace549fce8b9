"""The broker for tests: what it keeps over restarts and kills, its clock, and the fixture it comes with."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import dmq
from dmq.testing import FakeClock, TestBroker


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_what_was_acknowledged_survives(how: str) -> None:
    with TestBroker() as broker:
        port = broker.port
        client = broker.connect()
        client.producer().send("orders", b"kept")
        if how == "kill":
            broker.kill()
            broker.start()
        else:
            broker.restart()
        assert broker.port == port
        (message,) = client.consumer("orders", "billing").pull()
        assert message.body == b"kept"


def test_it_leaves_no_thread_behind() -> None:
    before = threading.active_count()
    with TestBroker() as broker:
        broker.connect().producer().send("orders", b"x")
    names = [thread.name for thread in threading.enumerate()]
    assert "dmq-test-broker" not in names
    assert threading.active_count() <= before + 2, names  # threads of a pool end when they notice


def test_a_clock_of_ones_own_stands_still() -> None:
    clock = FakeClock()
    with TestBroker(clock=clock) as broker:
        client = broker.connect()
        client.producer().send("orders", b"x")
        consumer = client.consumer("orders", "billing", lease=30.0)
        assert len(consumer.pull(wait=0)) == 1
        clock.advance(29)
        assert len(consumer.pull(wait=0)) == 0
        broker.clock.advance(2)
        assert [message.attempt for message in consumer.pull()] == [2]
        broker.restart()


async def _with_asyncio() -> None:
    async with TestBroker() as broker:
        client = await broker.aio_connect()
        producer = client.producer()
        receipt = await producer.send("orders", b"in two hours", delay=7200)
        consumer = client.consumer("orders", "billing")
        assert len(await consumer.pull(wait=0)) == 0
        broker.clock.advance(7300)
        # A client of asyncio knows the broker's time: what it sends for this moment is not late.
        moment = broker.clock.now_ms() / 1000
        await producer.send("orders", b"now", deliver_at=moment)
        found: dict[bytes, str] = {}
        while len(found) < 2:
            batch = await consumer.pull(wait=5)
            found |= {bytes(message.body): str(message.id) for message in batch}
            await consumer.ack(batch)
        assert found[b"in two hours"] == str(receipt.id)
        await asyncio.to_thread(broker.restart)
        async with broker.aio_connect("other") as other:
            assert [topic.name for topic in await other.admin.topics()] == ["orders"]


def test_an_asyncio_program_has_the_same_broker_and_its_clock() -> None:
    asyncio.run(_with_asyncio())
    assert "dmq-test-broker" not in [thread.name for thread in threading.enumerate()]


def test_its_settings_are_those_of_a_broker() -> None:
    with TestBroker(auto_create=False) as broker, pytest.raises(dmq.UnknownTopic):
        broker.connect().producer().send("orders", b"x")
    with pytest.raises(TypeError):
        TestBroker(colour="blue").start()


def test_the_fixture_is_there_where_dmq_is_installed(tmp_path: Path) -> None:
    (tmp_path / "test_fixture.py").write_text(
        "def test_it(dmq_broker):\n"
        "    client = dmq_broker.connect()\n"
        "    client.producer().send('orders', b'x')\n"
        "    assert [m.body for m in client.consumer('orders', 'g').pull()] == [b'x']\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "dmq.testing.fixtures", "-p", "no:dmq", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_fixtures_import_nothing_heavy() -> None:
    code = (
        "import sys, dmq.testing.fixtures; print([m for m in sys.modules if m in ('numpy', 'asyncio', 'dmq.broker')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert run.stdout.strip() == "[]"
