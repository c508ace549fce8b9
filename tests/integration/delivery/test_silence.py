"""A member whose process is stopped: others get its messages, no attempt is counted, and it takes part again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

import dmq
from dmq.client.client import Client
from dmq.testing.processes import BrokerProcess
from tests.integration.delivery import member_process
from tests.integration.delivery.member_process import GROUP, LEASE_SECONDS
from tests.integration.delivery.scenes import Scene
from tests.patience import eventually

HOWS = ["push", "pull", "asyncio", "ordered"]


class Member:
    """A process of `tests.integration.delivery.member_process`, and what it said."""

    def __init__(self, url: str, topic: str, how: str, pace: float, prefetch: int) -> None:
        arguments = [member_process.__file__, url, topic, how, str(pace), str(prefetch)]
        self._process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        self.done: list[tuple[int, int]] = []  # body, attempt
        self.times: list[tuple[int, float, float]] = []  # body, from when to when it was handled
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            body, attempt, begun, ended = line.split()
            self.times.append((int(body), float(begun), float(ended)))
            self.done.append((int(body), int(attempt)))

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        self._process.kill()
        self._reader.join()
        self._process.communicate()


@contextmanager
def members(scene: Scene, url: str, how: str, pace: float, prefetch: int = 20) -> Iterator[tuple[Member, Member]]:
    with scene.consumer() as consumer:
        consumer.pull(1, wait=0.0)  # the group is there
    both = (Member(url, scene.topic, how, pace, prefetch), Member(url, scene.topic, how, pace, prefetch))
    try:
        eventually(lambda: len(silences(scene)) == 2)
        yield both
    finally:
        for member in both:
            member.end()


def silences(scene: Scene) -> list[bool]:
    """Whether each member of the topic is silent."""
    return [member.is_silent for member in scene.client.admin.group(GROUP).details if member.topic == scene.topic]


def bodies(*those: Member) -> set[int]:
    return {body for member in those for body, _ in member.done}


@pytest.mark.parametrize("how", HOWS)
def test_what_a_stopped_member_had_is_handled_by_the_other_and_nothing_is_lost(
    how: str, broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, f"stopped-{how}", queues=4)
    # Few at a time: one that lives must not let a lease run out, which would be an attempt.
    with members(scene, broker.url, how, 0.02, prefetch=5) as (stopped, idle):
        scene.send(*range(60))
        eventually(lambda: stopped.done)
        stopped.signal(signal.SIGSTOP)  # with messages in hand
        scene.send(*range(60, 100))
        eventually(lambda: bodies(stopped, idle) >= set(range(100)))
        assert silences(scene).count(True) == 1
        stopped.signal(signal.SIGCONT)
        before = len(stopped.done)
        numbers = iter(range(100, 10_000))

        def is_back() -> bool:
            scene.send(next(numbers))
            return len(stopped.done) > before + 5

        eventually(is_back)
        last = next(numbers)
        eventually(lambda: bodies(stopped, idle) >= set(range(last)))
        stopped.signal(signal.SIGSTOP)  # with nothing in hand
        scene.send(*range(last, last + 60))
        eventually(lambda: bodies(stopped, idle) >= set(range(last + 60)))
        assert {attempt for _, attempt in (*stopped.done, *idle.done)} == {1}
        if how == "push":
            idle.signal(signal.SIGSTOP)
            receipts = scene.send(*range(last + 60, last + 100))  # more than one member takes
            eventually(lambda: all(silences(scene)))
            why = client.admin.why(receipts[-1].id)
            assert "all its connected members (2) are silent" in str(why)
            group = ["group", "show", GROUP, "--url", broker.url, "--format", "json"]
            said = json.loads(subprocess.check_output([sys.executable, "-m", "dmq.cli", *group]))
            assert [row["silent"] for row in said["member_details"] if row["topic"] == scene.topic] == [True, True]
    assert not [*client.admin.dead_letters(group=GROUP)]


def is_at_it(member: Member, before: int) -> bool:
    return len(member.done) > before


@pytest.mark.parametrize(
    ("how", "pauses"), [("push", 1), *(pytest.param(how, 60, marks=pytest.mark.soak) for how in HOWS)]
)
def test_after_a_pause_nothing_is_begun_that_another_member_has_done(
    how: str, pauses: int, broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, f"paused-{how}-{pauses}", queues=4)
    with members(scene, broker.url, how, 0.02) as (paused, other):
        for number in range(pauses):
            scene.send(*range(100 * number, 100 * number + 100))
            before = len(paused.done)
            eventually(partial(is_at_it, paused, before))
            paused.signal(signal.SIGSTOP)
            eventually(lambda: not scene.lag() or any(silences(scene)))
            time.sleep(LEASE_SECONDS)  # the other works meanwhile
            paused.signal(signal.SIGCONT)
            eventually(lambda: not scene.lag())
        count = 100 * pauses
        eventually(lambda: bodies(paused, other) >= set(range(count)))
        ended = {body: ended for body, _, ended in other.times}
        late = [body for body, begun, _ in paused.times if begun > ended.get(body, begun)]
    assert late == []
    assert not [*client.admin.dead_letters(topic=scene.topic)]


def test_members_that_ask_for_much_share_slow_messages(broker: BrokerProcess, client: Client) -> None:
    scene = Scene(client, "shared", queues=4)
    with members(scene, broker.url, "push", 0.1, prefetch=1000) as both:
        with client.producer() as producer:
            producer.send_many(scene.topic, [dmq.Message(str(number)) for number in range(60)])
        eventually(lambda: bodies(*both) >= set(range(60)))
        shares = sorted(len(member.done) for member in both)
    assert shares[0] >= 20, shares


def test_a_broker_that_was_stopped_ends_no_lease_before_it_has_read_what_came_meanwhile(
    broker: BrokerProcess, client: Client
) -> None:
    scene = Scene(client, "standstill", queues=4)
    with members(scene, broker.url, "push", 0.1) as both:
        numbers = iter(range(10_000))

        def is_busy() -> bool:
            scene.send(next(numbers))
            return all(member.done for member in both)

        eventually(is_busy)
        count = next(numbers)
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            time.sleep(3 * LEASE_SECONDS)
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        eventually(lambda: scene.lag() == 0)
        eventually(lambda: bodies(*both) == set(range(count)))  # what they said may still be on its way here
        assert sorted((*both[0].done, *both[1].done)) == [(body, 1) for body in range(count)]
