"""Rebalance between processes (R-08): members join, are killed and leave, and nobody else stops.

What is sent goes on meanwhile. Order is judged by a clock that all processes share.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import dmq
from dmq.client.client import Client, connect
from dmq.client.consumer.strategy import STRATEGIES
from dmq.testing.processes import BrokerProcess
from tests.integration.consumer import group_member
from tests.patience import eventually

PATIENCE = 90.0
QUEUES = 6
PACE = 0.002
HOW = ["shared", "average", "circle", "consistent-hash"]


class Done(NamedTuple):
    """One message that a member handled."""

    at: int
    queue: int
    offset: int
    body: int


class Member:
    """A process of `tests.integration.consumer.group_member`, and what it said."""

    def __init__(self, url: str, strategy: str, order: str = "unordered", pace: float = PACE) -> None:
        self._process = subprocess.Popen(
            [sys.executable, group_member.__file__, url, strategy, order, str(pace)], stdout=subprocess.PIPE, text=True
        )
        self.done: list[Done] = []
        self.queues: tuple[int, ...] = ()
        self.has_begun = self.has_ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            match line.split():
                case ["done", queue, offset, body, _, at]:
                    self.done.append(Done(int(at), int(queue), int(offset), int(body)))
                case ["queues", *said]:
                    self.has_begun = True
                    self.queues = tuple(map(int, said[0].split(","))) if said else ()
                case ["ended"]:
                    self.has_ended = True

    def goes_on(self, count: int = 30, *, or_idle: bool = False) -> None:
        """It handles more messages from now on; or, if that may be, it has no queue."""
        goal = len(self.done) + count
        eventually(lambda: len(self.done) >= goal or (or_idle and not self.queues), "a member stands still")

    def end(self, number: int = signal.SIGKILL) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
        self._process.wait(30)
        self._reader.join(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Sending:
    """A producer that goes on until it is told to stop."""

    def __init__(self, client: Client, *, ordered: bool = False) -> None:
        self._client = client
        self._ordered = ordered
        self._over = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        with self._client.producer() as producer:
            while not self._over.is_set():
                numbers = range(self.count, self.count + 24)
                messages = [
                    dmq.Message(b"%d" % n, business_id=f"u-{n % 24}" if self._ordered else None, ordered=self._ordered)
                    for n in numbers
                ]
                producer.send_many("orders", messages)
                self.count = numbers.stop
                self._over.wait(0.04)

    def stop(self) -> int:
        """Returns how many were sent."""
        self._over.set()
        self._thread.join(PATIENCE)
        return self.count


@pytest.fixture
def members() -> Iterator[list[Member]]:
    running: list[Member] = []
    yield running
    for member in running:
        member.end()


def serve(folder: Path, grace_seconds: float) -> BrokerProcess:
    return BrokerProcess(folder, ["--set", f"broker.grace_seconds={grace_seconds}"])


def assert_divided(strategy: str, members: list[Member]) -> None:
    """Every queue is with one member, in the shares that the strategy gives to so many."""
    if strategy == "shared":
        return
    eventually(
        lambda: sorted(q for member in members for q in member.queues) == [*range(QUEUES)],
        "a queue has no member, or two",
    )
    if strategy != "consistent-hash":
        names = [str(at) for at in range(len(members))]
        wanted = sorted(map(tuple, STRATEGIES[strategy](range(QUEUES), names).values()))
        eventually(lambda: sorted(member.queues for member in members) == wanted, "the shares are others")


def assert_all_work(strategy: str, members: list[Member]) -> None:
    """Every queue has its member, and every member that has one goes on."""
    assert_divided(strategy, members)
    for member in members:
        # One without a share is not seen to work, and a signal before it runs would end it without a word.
        if strategy != "shared":  # which has no queues to tell of
            eventually(lambda member=member: member.has_begun, "a member does not begin")  # type: ignore[misc]
        # By hash a share may be empty, or become so when others join: where few queues fall on the ring is chance.
        member.goes_on(or_idle=strategy == "consistent-hash")


@pytest.mark.parametrize("strategy", HOW)
def test_members_join_die_and_leave_while_the_others_go_on(
    strategy: str, tmp_path: Path, members: list[Member]
) -> None:
    with serve(tmp_path / "data", 1.0) as broker, connect(broker.url, app="test") as client:
        client.admin.create_topic("orders", queues=QUEUES)
        sending = Sending(client)
        try:
            one, two = Member(broker.url, strategy), Member(broker.url, strategy)
            members += [one, two]
            assert_all_work(strategy, [one, two])

            three = Member(broker.url, strategy)
            members.append(three)
            assert_all_work(strategy, [one, two, three])

            two.end()
            assert_all_work(strategy, [one, three])

            one.end(signal.SIGTERM)
            assert one.has_ended
            assert_all_work(strategy, [three])
        finally:
            sent = sending.stop()
        everything = {*range(sent)}
        eventually(lambda: {d.body for m in members for d in m.done} == everything, "a message was lost")
        eventually(lambda: client.admin.lag("orders", "billing").total == 0, "something is not settled")
        done = [d.body for m in members for d in m.done]
        # What the killed one had in hand or had done without the broker knowing may come twice: its prefetch.
        assert len(done) - sent <= 20


@pytest.mark.parametrize("strategy", ["shared", "average"])
def test_the_others_do_not_wait_for_one_that_is_dead(strategy: str, tmp_path: Path, members: list[Member]) -> None:
    """Its grace time never ends here, so a member that waited for that would wait for ever."""
    with serve(tmp_path / "data", 3600.0) as broker, connect(broker.url, app="test") as client:
        client.admin.create_topic("orders", queues=QUEUES)
        sending = Sending(client)
        try:
            members += [Member(broker.url, strategy) for _ in range(3)]
            for member in members:
                member.goes_on()
            assert_divided(strategy, members)
            dead, *others = members
            before = dead.queues if dead.queues else tuple(range(QUEUES))
            dead.end()
            eventually(
                lambda: [m.is_connected for m in client.admin.group("billing").details].count(False) == 1,
                "nobody noticed that it died",
            )
            assert_divided(strategy, others)
            # All its queues go on, with the messages that it did not have.
            for queue in before:
                first = client.admin.lag("orders", "billing").queues[queue].next_offset
                eventually(
                    lambda queue=queue, first=first: any(  # type: ignore[misc]
                        d.queue == queue and d.offset >= first for m in others for d in m.done
                    ),
                    f"queue {queue} stands still",
                )
            assert [m.is_connected for m in client.admin.group("billing").details].count(False) == 1
        finally:
            sending.stop()


@pytest.mark.parametrize("strategy", ["shared", "average"])
def test_an_ordered_group_keeps_its_order_while_members_come_and_go(
    strategy: str, tmp_path: Path, members: list[Member]
) -> None:
    with serve(tmp_path / "data", 1.0) as broker, connect(broker.url, app="test") as client:
        client.admin.create_topic("orders", queues=QUEUES)
        sending = Sending(client, ordered=True)
        try:
            one, two = (Member(broker.url, strategy, "ordered") for _ in range(2))
            members += [one, two]
            one.goes_on()
            two.goes_on()
            members.append(Member(broker.url, strategy, "ordered"))
            for member in members:
                member.goes_on()
            two.end(signal.SIGTERM)
            one.goes_on()
            calm = sorted(d for m in members for d in m.done)
            one.end()
            members[2].goes_on(200)
        finally:
            sent = sending.stop()
        everything = {*range(sent)}
        eventually(lambda: {d.body for m in members for d in m.done} == everything, "a message was lost")
    # As long as nobody was killed, nothing came twice.
    assert len(calm) == len({d.body for d in calm})
    for queue in range(QUEUES):
        offsets = [d.offset for d in sorted(d for m in members for d in m.done) if d.queue == queue]
        firsts = list(dict.fromkeys(offsets))
        assert firsts == sorted(firsts), f"queue {queue} was not handled in order"


def test_a_topic_that_grows_is_divided_anew(tmp_path: Path, members: list[Member]) -> None:
    with serve(tmp_path / "data", 1.0) as broker, connect(broker.url, app="test") as client:
        client.admin.create_topic("orders", queues=2)
        members += [Member(broker.url, "average") for _ in range(3)]
        eventually(lambda: sorted(m.queues for m in members) == [(), (0,), (1,)], "2 over 3 is 1, 1, 0")
        client.admin.update_topic("orders", queues=10)
        eventually(
            lambda: sorted(m.queues for m in members) == [(0, 1, 2, 3), (4, 5, 6), (7, 8, 9)], "10 over 3 is 4, 3, 3"
        )


def test_a_killed_broker_finds_the_members_as_they_were(tmp_path: Path, members: list[Member]) -> None:
    from dmq.testing.processes import free_port

    port = str(free_port())
    broker = BrokerProcess(tmp_path / "data", ["--port", port])
    with broker, connect(broker.url, app="test", timeout=PATIENCE) as client:
        client.admin.create_topic("orders", queues=QUEUES)
        members += [Member(broker.url, "average") for _ in range(2)]
        eventually(lambda: sorted(m.queues for m in members) == [(0, 1, 2), (3, 4, 5)], "it was not divided")
        broker.kill()
        broker.start()
        client.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(300)])
        eventually(lambda: {d.body for m in members for d in m.done} == {*range(300)}, "a message was lost")
        eventually(lambda: sorted(m.queues for m in members) == [(0, 1, 2), (3, 4, 5)], "it was not divided")
