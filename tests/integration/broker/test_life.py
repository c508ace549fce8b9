"""A broker from start to end: stopping, coming back, a full disk, a failing one, and what it owes its clients then."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import dmq
from dmq.client.consumer.message import ReceivedMessage
from dmq.protocol import Command, decode_request, decode_response, one_way_head
from dmq.protocol.admin import GroupDelete
from dmq.protocol.consume import (
    Lease,
    Outcome,
    Point,
    PointKind,
    Pull,
    PullReply,
    Seek,
    Settle,
    Settlement,
    Subscribe,
)
from dmq.protocol.read import Fetch, FetchReply, Offsets
from dmq.protocol.session import ServerReboot
from dmq.settings import StoreSettings
from dmq.testing import MemoryFiles
from dmq.testing.processes import BrokerProcess, free_port, read_line
from tests.integration.broker_thread import ServedBroker
from tests.integration.frame_client import RawClient, port_of, produce
from tests.patience import eventually

ROOT = Path(__file__).resolve().parents[3]


# --- stopping and coming back -----------------------------------------------------------------------------------------


def test_a_stop_tells_clients_finishes_what_runs_and_leaves_a_clean_directory(tmp_path: Path) -> None:
    data = tmp_path / "data"
    broker = BrokerProcess(data, ("--auto-create", "--set", "broker.drain_seconds=30")).start()
    assert (data / "RUNNING").exists()
    with RawClient(port_of(broker.url)) as listener, dmq.connect(broker.url) as client:
        client.producer().send("orders", b"x")
        begun, may_end = threading.Event(), threading.Event()

        def handle(message: ReceivedMessage) -> None:
            begun.set()
            assert may_end.wait(30)

        consumer = client.consumer("orders", "billing")
        running = threading.Thread(target=consumer.run, args=(handle,), kwargs={"workers": 1})
        running.start()
        assert begun.wait(30)
        os.kill(broker.pid, signal.SIGTERM)
        told = listener.read()
        assert told is not None
        assert told.command == Command.SERVER_REBOOT
        may_end.set()  # it has waited for this one
        assert broker.stop(30) == 0
        assert not (data / "RUNNING").exists()
        broker.start()
        with dmq.connect(broker.url) as other:
            assert other.admin.lag("orders", "billing").total == 0
        client.close()
        running.join(30)
    broker.stop()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_clients_come_back_by_themselves(tmp_path: Path, how: str) -> None:
    arguments = ("--auto-create", "--port", str(free_port()))
    with BrokerProcess(tmp_path / "data", arguments) as broker, dmq.connect(broker.url) as client:
        producer = client.producer(timeout=60)
        producer.send("orders", b"before")
        consumer = client.consumer("orders", "billing")
        seen: list[tuple[bytes, int]] = []
        running = threading.Thread(
            target=consumer.run, args=(lambda message: seen.append((message.body, message.attempt)),)
        )
        running.start()
        eventually(lambda: seen == [(b"before", 1)])
        if how == "kill":
            broker.kill()
        else:
            assert broker.stop() == 0
        late = producer.send_async("orders", b"meanwhile")
        broker.start()
        producer.send("orders", b"after")
        assert late.result(60).topic == "orders"
        eventually(lambda: len(seen) == 3)
        assert sorted(seen) == [(b"after", 1), (b"before", 1), (b"meanwhile", 1)]
        eventually(lambda: client.admin.lag("orders", "billing").total == 0)
        consumer.close()
        running.join(30)


def test_leases_of_before_a_clean_restart_are_not_mistaken_for_new_ones() -> None:
    with ServedBroker(auto_create=True) as broker:
        with RawClient(port_of(broker.url)) as peer:
            peer.ask(Command.PRODUCE, *produce("orders", b"a", b"b"))
            old = pulled(peer, "orders", "g", 1)
        broker.restart()
        with RawClient(port_of(broker.url)) as peer:
            new = pulled(peer, "orders", "g", 2)
            assert new.epoch > old.epoch
            settle(peer, "orders", "g", Settlement(0, old.epoch, old.lease, Outcome.NACK))
            settle(peer, "orders", "g", Settlement(0, old.epoch, old.lease, Outcome.ACK, [(old.first_offset, 1)]))
            with dmq.connect(broker.url) as client:
                assert client.admin.lag("orders", "g").total == 1, "the ack counts, once, and nothing else does"


def pulled(peer: RawClient, topic: str, group: str, count: int, **options: object) -> Lease:
    """What a pull of one queue gave."""
    asked = Pull(topic, group, "member", 0, count, **options)  # type: ignore[arg-type]
    reply: PullReply = decode_response(peer.ask(Command.PULL, asked))
    (lease,) = reply.leases
    return lease


def settle(peer: RawClient, topic: str, group: str, *said: Settlement) -> list[int]:
    """Settle, and return the statuses of what was refused."""
    reply = decode_response(peer.ask(Command.SETTLE, Settle(topic, group, list(said), "member")))
    return [refusal.status for refusal in reply.refused]


# --- disks ------------------------------------------------------------------------------------------------------------

ROOMY = StoreSettings(
    segment_bytes=64 << 10, unit_bytes_max=16 << 10, body_bytes_max=4 << 10, checkpoint_bytes=64 << 10,
    disk_clean=1.0, disk_force=1.0, disk_refuse=1.0,
)  # fmt: skip


def test_on_a_full_disk_producers_are_told_consumers_go_on_and_space_mends_it() -> None:
    files = MemoryFiles(capacity_bytes=300_000)
    with ServedBroker(files, store=ROOMY, auto_create=True) as broker, dmq.connect(broker.url) as client:
        producer = client.producer(timeout=2, retries=0, compression="none")
        sent = 0

        def fill() -> None:
            nonlocal sent
            for _ in range(1000):
                producer.send("orders", bytes(3000))
                sent += 1

        with pytest.raises(dmq.DiskFull, match="free some space"):
            fill()
        assert sent > 0
        got = 0
        consumer = client.consumer("orders", "billing")
        while batch := consumer.pull(10, wait=0.5):
            got += len(batch)
            batch.ack()
        assert got >= sent
        with pytest.raises(dmq.DiskFull):
            producer.send("orders", bytes(3000))
        files.capacity_bytes = None
        producer.send("orders", b"after")
        assert [message.body for message in consumer.pull(10)] == [b"after"]


def test_a_flush_that_fails_is_not_acknowledged_and_ends_the_process_with_an_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.broker.failing_broker"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        found = re.search(r"dmq://\S+:\d+", read_line(process.stdout, time.monotonic() + 120) or "")
        assert found
        with dmq.connect(found[0], reconnect=False) as client:
            producer = client.producer(timeout=120)
            producer.send("orders", b"good")
            process.stdin.write(b"now\n")
            process.stdin.flush()
            assert read_line(process.stdout, time.monotonic() + 120) == "failing\n"
            with pytest.raises(dmq.DMQError):
                producer.send("orders", b"bad")
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1
    assert b"the store failed while serving: check the disk" in errors
    assert b"Traceback" not in errors


# --- consumed ---------------------------------------------------------------------------------------------------------


def test_a_send_that_waits_to_be_consumed_returns_with_the_ack() -> None:
    with ServedBroker(auto_create=True) as broker, dmq.connect(broker.url) as client:
        seen: list[bytes] = []
        consumer = client.consumer("orders", "billing")
        running = threading.Thread(target=consumer.run, args=(lambda message: seen.append(message.body),))
        running.start()
        producer = client.producer(timeout=120)
        receipt = producer.send("orders", b"x", durability="consumed", consumed_by="billing")
        assert (seen, receipt.durability) == ([b"x"], "consumed")
        receipts = producer.send_many(
            "orders", [dmq.Message(b"%d" % n) for n in range(500)], durability="consumed", consumed_by="billing"
        )
        assert len(receipts) == 500
        assert len(seen) == 501
        consumer.close()
        running.join(30)


@pytest.mark.parametrize("fate", ["nobody", "nacked", "rejected", "filtered"])
def test_a_send_that_is_not_consumed_in_time_says_where_the_message_is(fate: str) -> None:
    with ServedBroker(auto_create=True) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        client.producer().send("orders", b"first")
        consumer = client.consumer("orders", "billing", tags="wanted" if fate == "filtered" else "")
        consumer.pull(1, wait=0.05).ack()

        def handle() -> None:
            if batch := consumer.pull(1, wait=1):
                if fate == "rejected":
                    batch[0].reject("bad")
                else:
                    batch.nack(delay=60)
            # An ack of another message of the queue says nothing of this one.
            client.producer().send("orders", b"another", tag="wanted")
            if batch := consumer.pull(1, wait=1):
                batch.ack()

        helper = threading.Thread(target=handle)
        if fate != "nobody":
            helper.start()
        with pytest.raises(dmq.ConsumeTimeout) as caught:
            client.producer(timeout=3).send("orders", b"x", durability="consumed", consumed_by="billing")
        assert caught.value.detail["queue"] == 0
        assert caught.value.detail["offset"] == 1
        assert caught.value.detail["topic"] == "orders"
        receipt = caught.value.receipt
        assert (receipt.topic, receipt.queue, receipt.offset, receipt.durability) == ("orders", 0, 1, "flushed")
        assert [found.body for found in client.admin.find(topic="orders", id=receipt.id)] == [b"x"]
        assert [message.body for message in client.admin.peek("orders", queue=0, at=1, limit=1)] == [b"x"]
        if fate != "nobody":
            helper.join(30)


# --- rejected ---------------------------------------------------------------------------------------------------------


def test_a_rejected_message_is_kept_once_and_others_are_not() -> None:
    with ServedBroker(auto_create=True) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        producer = client.producer()
        for tag in ("other", "wanted", "other"):
            producer.send("orders", tag.encode(), tag=tag, key="k")
        (message,) = client.consumer("orders", "billing", tags="wanted").pull(10)
        message.reject("broken")
        eventually(lambda: client.admin.lag("orders", "billing").total == 0)
        (dead,) = client.admin.peek("%DLQ%billing", limit=10)
        assert (dead.body, dead.key) == (b"wanted", "k")


def test_a_rejected_message_that_cannot_be_kept_comes_again() -> None:
    files = MemoryFiles()
    with ServedBroker(files, auto_create=True) as broker, dmq.connect(broker.url) as client:
        client.admin.create_topic("orders", queues=1)
        client.producer().send_many("orders", [dmq.Message(b"0"), dmq.Message(b"1")])
        consumer = client.consumer("orders", "billing", ordered=True)
        first = consumer.pull(1)
        first[0].reject("so that the topic of dead letters is there")
        eventually(lambda: client.admin.lag("orders", "billing").total == 1)
        (message,) = consumer.pull(1)
        files.fail("write", lambda path, number: True, 28)  # ENOSPC
        message.reject("bad")
        with RawClient(port_of(broker.url)) as peer:
            eventually(lambda: broker.broker.channels.open["orders", "billing"].cursors[0].redelivering == 1)
            peer.ask(Command.OFFSETS, Offsets("orders"))
        files.heal()
        (again,) = consumer.pull(1, wait=30)
        assert (again.body, again.attempt) == (b"1", 2)
        again.reject("bad")
        eventually(lambda: client.admin.lag("orders", "billing").total == 0)
        assert [dead.body for dead in client.admin.peek("%DLQ%billing", limit=10)] == [b"0", b"1"]


# --- members, positions, waiting --------------------------------------------------------------------------------------


def test_a_member_that_is_back_before_its_old_connection_is_gone_keeps_waiting() -> None:
    with ServedBroker(auto_create=True) as broker:
        port = port_of(broker.url)
        old, new = RawClient(port, client_id="worker"), RawClient(port, client_id="worker")
        with old, new:
            old.request(Command.PULL, Pull("orders", "g", "worker", wait_ms=60_000))
            correlation = new.request(Command.PULL, Pull("orders", "g", "worker", wait_ms=60_000))
            eventually(lambda: len(broker.broker.channels.open) == 1)
            sessions = len(broker.server.dispatcher.sessions)
            old.close()
            eventually(lambda: len(broker.server.dispatcher.sessions) < sessions)
            with RawClient(port) as sender:
                sender.ask(Command.PRODUCE, *produce("orders", b"x"))
            answer = new.read()
            assert answer is not None
            assert answer.correlation == correlation
            assert len(decode_response(answer).leases) == 1


def test_a_seek_comes_after_the_acks_before_it_also_on_disk() -> None:
    with ServedBroker(auto_create=True) as broker:
        with RawClient(port_of(broker.url)) as peer:
            peer.ask(Command.PRODUCE, *produce("orders", b"a", b"b"))
            lease = pulled(peer, "orders", "g", 2)
            ack = Settle("orders", "g", [Settlement(0, lease.epoch, lease.lease, Outcome.ACK)], "member")
            earliest = Seek("orders", "g", Point(PointKind.EARLIEST))
            peer.send(one_way_head(Command.SETTLE, ack) + one_way_head(Command.SEEK, earliest))  # in one piece
            decode_response(peer.ask(Command.OFFSETS, Offsets("orders")))
        broker.restart()
        with dmq.connect(broker.url) as client:
            assert client.admin.lag("orders", "g").total == 2


def test_a_deleted_group_stays_deleted_whatever_was_acked_just_before() -> None:
    with ServedBroker(auto_create=True) as broker, RawClient(port_of(broker.url)) as peer:
        peer.ask(Command.PRODUCE, *produce("orders", b"a"))
        lease = pulled(peer, "orders", "g", 1)
        ack = Settle("orders", "g", [Settlement(0, lease.epoch, lease.lease, Outcome.ACK)], "member")
        peer.send(one_way_head(Command.SETTLE, ack) + one_way_head(Command.GROUP_DELETE, GroupDelete("g")))
        eventually(lambda: broker.broker.store.queries.groups() == [])
        broker.restart()
        assert broker.broker.store.queries.groups() == []


def test_a_queue_that_is_not_there_is_refused_instead_of_waited_for() -> None:
    with ServedBroker(auto_create=True) as broker, RawClient(port_of(broker.url)) as peer:
        for command, header in (
            (Command.PULL, Pull("orders", "g", queue=200, wait_ms=60_000)),
            (Command.SUBSCRIBE, Subscribe(1, "orders", "g", queues=[0, 200])),
        ):
            with pytest.raises(dmq.UnknownTopic, match="not 200"):
                decode_response(peer.ask(command, header))


def test_a_fetch_waits_for_the_journal_and_is_bounded() -> None:
    with ServedBroker(auto_create=True, pulls_waiting_max=3) as broker, RawClient(port_of(broker.url)) as peer:
        peer.ask(Command.PRODUCE, *produce("orders", b"a"))
        end = decode_response(peer.ask(Command.OFFSETS, Offsets("orders"))).visible_journal_offset
        waiting = [peer.request(Command.FETCH, Fetch(end, wait_ms=60_000)) for _ in range(3)]
        with pytest.raises(dmq.Busy):
            decode_response(peer.ask(Command.FETCH, Fetch(end, wait_ms=60_000)))
        with RawClient(port_of(broker.url)) as sender:
            sender.ask(Command.PRODUCE, *produce("orders", b"b", sequence=1))
        answered = set()  # answers tell what they answer, and come as they are read from the disk
        for _ in waiting:
            answer = peer.read()
            assert answer is not None
            answered.add(answer.correlation)
            reply: FetchReply = decode_response(answer)
            assert reply.end > end
        assert answered == set(waiting)


def test_a_group_that_nobody_uses_costs_no_memory_and_loses_nothing() -> None:
    with ServedBroker(auto_create=True) as broker, dmq.connect(broker.url) as client:
        client.producer().send_many("orders", [dmq.Message(b"x")] * 10)
        for number in range(50):
            client.admin.create_group(f"g-{number}", "orders")
            client.admin.reset("orders", f"g-{number}", "earliest", dry_run=True)  # so it is in use
        consumer = client.consumer("orders", "g-0")
        consumer.pull(1).ack()
        consumer.close()
        server = broker.broker
        assert len(server.channels.open) == 50

        def leave_them_alone() -> None:
            for channel in server.channels.open.values():
                channel.group.members.clear()
                if channel.idle_since_ms is not None:
                    channel.idle_since_ms -= 3_600_000

        def is_forgotten() -> bool:
            broker.loop.call_soon_threadsafe(leave_them_alone)
            return not server.channels.open

        eventually(is_forgotten)
        assert client.admin.lag("orders", "g-0").total == 9
        assert client.admin.lag("orders", "g-1").total == 10
        assert len(client.consumer("orders", "g-0").pull(100, wait=0)) > 0


def test_a_reboot_is_announced_with_the_time_there_is() -> None:
    with ServedBroker(drain_seconds=0.2) as broker, RawClient(port_of(broker.url)) as peer:
        thread = threading.Thread(target=broker.stop, args=(None,))
        thread.start()
        told = peer.read()
        assert told is not None
        reboot: ServerReboot = decode_request(told)
        assert reboot.grace_ms == 200
        thread.join(30)
