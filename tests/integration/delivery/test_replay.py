"""Position control and replay (J-12): where to, dry runs, and members that are at work meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import dmq
from dmq.client.client import Client, connect
from dmq.client.consumer.message import ReceivedMessage
from dmq.testing.processes import BrokerProcess
from tests.integration.consumer.handler_thread import PATIENCE, Handling
from tests.integration.delivery.scenes import GROUP, Scene, bodies
from tests.patience import eventually


class Halves:
    """Ten messages, and a moment between the first five and the others."""

    def __init__(self, client: Client) -> None:
        self.scene = Scene(client, "halves")
        self.scene.send(*range(5))
        time.sleep(0.05)
        self.moment = time.time()
        time.sleep(0.05)
        self.scene.send(*range(5, 10))
        client.admin.create_group(GROUP, "halves")

    def place(self, name: str) -> Any:
        match name:
            case "datetime":
                return datetime.fromtimestamp(self.moment, UTC)
            case "seconds since 1970":
                return self.moment
            case "timedelta":
                return timedelta(seconds=time.time() - self.moment)
            case "text":
                return f"{time.time() - self.moment:.3f}s"
            case "hours":
                return "2h"
            case "offset":
                return 7
            case "far offset":
                return 1000
        return name


@pytest.fixture(scope="module")
def halves(broker: BrokerProcess) -> Any:
    with connect(broker.url, app="test") as client:
        yield Halves(client)


PLACES = [
    ("earliest", 0),
    ("latest", 10),
    ("offset", 7),
    ("far offset", 10),
    ("datetime", 5),
    ("seconds since 1970", 5),
    ("timedelta", 5),
    ("text", 5),
    ("hours", 0),
]


@pytest.mark.parametrize(("name", "offset"), PLACES)
def test_a_group_is_moved_to_any_place_after_a_dry_run(halves: Halves, client: Client, name: str, offset: int) -> None:
    scene = halves.scene
    client.admin.reset("halves", GROUP, to=3)
    (dry,) = client.admin.reset("halves", GROUP, to=halves.place(name), dry_run=True)
    assert (dry.before, dry.after) == (3, offset)
    assert scene.queue().floor == 3
    (done,) = client.admin.reset("halves", GROUP, to=halves.place(name))
    assert (done.before, done.after) == (3, offset)
    assert scene.queue().floor == offset


@pytest.mark.parametrize(("name", "offset"), PLACES)
def test_a_consumer_seeks_the_same_places(halves: Halves, client: Client, name: str, offset: int) -> None:
    with client.consumer("halves", GROUP) as consumer:
        consumer.seek(halves.place(name))
        assert halves.scene.queue().floor == offset
        assert bodies(consumer.pull(1, wait=0.1)) == [*range(offset, 10)][:1]


@pytest.mark.parametrize("place", ["yesterday", "2", "h", -1, -0.5, float("nan"), True, None, datetime(2030, 1, 1)])
def test_what_is_no_place_is_refused(halves: Halves, client: Client, place: Any) -> None:
    with pytest.raises(dmq.InvalidSettings):
        client.admin.reset("halves", GROUP, to=place)


def test_one_queue_is_moved_alone_and_one_that_is_not_there_is_refused(client: Client) -> None:
    scene = Scene(client, "two-queues", queues=2)
    client.admin.create_group(GROUP, "two-queues")
    for n in range(20):
        scene.send(n, business_id=f"u-{n}", ordered=True)
    (move,) = client.admin.reset("two-queues", GROUP, to="latest", queue=1)
    assert (move.queue, scene.queue(1).lag) == (1, 0)
    assert scene.queue(0).floor == 0
    assert scene.queue(0).lag > 0
    with pytest.raises(dmq.DMQError, match="queue"):
        client.admin.reset("two-queues", GROUP, to="latest", queue=2)


def test_the_command_line_needs_execute(broker: BrokerProcess, client: Client) -> None:
    scene = Scene(client, "by-command")
    scene.send(*range(10))
    client.admin.create_group(GROUP, "by-command")

    def run(*arguments: str) -> Any:
        command = [sys.executable, "-m", "dmq.cli", "group", *arguments, "--topic", "by-command", "--url", broker.url]
        done = subprocess.run([*command, "--format", "json"], check=True, capture_output=True, timeout=300)
        return json.loads(done.stdout)

    assert [(row["to"], row["done"]) for row in run("skip", GROUP)] == [(10, False)]
    assert scene.queue().floor == 0
    assert [(row["to"], row["done"]) for row in run("skip", GROUP, "--by", "4", "--execute")] == [(4, True)]
    assert scene.queue().floor == 4
    assert [(row["to"], row["done"]) for row in run("reset", GROUP, "--to", "2h")] == [(0, False)]
    assert scene.queue().floor == 4
    assert [(row["to"], row["done"]) for row in run("reset", GROUP, "--to", "2h", "--execute")] == [(0, True)]
    assert scene.queue().floor == 0


# --- members at work --------------------------------------------------------------------------------------------------


def test_members_at_work_get_everything_again_and_nothing_is_lost(client: Client) -> None:
    scene = Scene(client, "at-work", queues=2)
    done: Counter[int] = Counter()
    lock = threading.Lock()

    def handle(message: ReceivedMessage) -> None:
        with lock:
            done[int(message.body)] += 1

    one, two = (scene.consumer(prefetch=50) for _ in range(2))
    with Handling(one, handle, workers=2), Handling(two, handle, workers=2):
        with client.producer() as producer:
            producer.send_many("at-work", [dmq.Message(b"%d" % n) for n in range(400)])
        eventually(lambda: len(done) == 400 and scene.lag() == 0)
        with lock:
            before = Counter(done)
        client.admin.reset("at-work", GROUP, to="earliest")
        eventually(lambda: all(done[n] > before[n] for n in range(400)))
        eventually(lambda: scene.lag() == 0)
        client.admin.reset("at-work", GROUP, to="earliest")
        eventually(lambda: all(done[n] > before[n] + 1 for n in range(400)))
        eventually(lambda: scene.lag() == 0)


def test_an_ack_from_before_does_not_settle_what_is_replayed(scene: Scene) -> None:
    scene.send(*range(3))
    calls: Counter[int] = Counter()
    may_end = threading.Event()

    def handle(message: ReceivedMessage) -> None:
        calls[int(message.body)] += 1
        if sum(calls.values()) <= 3:
            assert may_end.wait(PATIENCE)

    with Handling(scene.consumer(), handle, workers=3, policy="block"):
        eventually(lambda: sum(calls.values()) == 3)
        scene.client.admin.reset(scene.topic, GROUP, to="earliest")
        eventually(lambda: scene.queue().leased == 3)  # they were handed out anew
        may_end.set()
        eventually(lambda: scene.lag() == 0)
    assert calls == {0: 2, 1: 2, 2: 2}


def test_a_reset_to_the_end_leaves_out_what_waits(scene: Scene) -> None:
    scene.send(*range(50))
    consumer = scene.consumer(prefetch=10)
    assert int(next(consumer).body) == 0
    scene.client.admin.reset(scene.topic, GROUP, to="latest")
    scene.send(50)
    seen: list[int] = []
    while not seen or seen[-1] != 50:
        seen.append(int(next(consumer).body))
    # What was here already may come; what was not, does not.
    assert len(seen) <= 10
    assert scene.queue().lag == 1


@pytest.mark.parametrize("is_sought_before", [False, True])
def test_a_replay_is_no_duplicate_also_if_the_broker_is_killed_before_it_begins(
    mortal: BrokerProcess, is_sought_before: bool
) -> None:
    """The consumer remembers what it has done; the reset says that it is to be done again."""
    with connect(mortal.url, app="test", timeout=60.0) as client:
        scene = Scene(client, "orders")
        scene.send(*range(20))
        done: Counter[int] = Counter()
        consumer = scene.consumer()
        with Handling(consumer, lambda message: done.update([int(message.body)]), workers=1):
            eventually(lambda: len(done) == 20 and scene.lag() == 0)
            if is_sought_before:
                for _ in range(3):
                    client.admin.reset("orders", GROUP, to="earliest")
                    eventually(lambda: scene.lag() == 0)
            before = Counter(done)
            consumer.pause()
            client.admin.reset("orders", GROUP, to="earliest")
            mortal.kill()
            mortal.start()
            consumer.resume()
            eventually(lambda: all(done[n] > before[n] for n in range(20)))
            eventually(lambda: scene.lag() == 0)
            again = Counter(done)
            client.admin.reset("orders", GROUP, to="earliest")
            eventually(lambda: all(done[n] > again[n] for n in range(20)))


def test_without_a_reset_a_killed_broker_brings_nothing_twice(mortal: BrokerProcess) -> None:
    with connect(mortal.url, app="test", timeout=60.0) as client:
        scene = Scene(client, "orders")
        done: Counter[int] = Counter()
        with Handling(scene.consumer(), lambda message: done.update([int(message.body)]), workers=1):
            scene.send(*range(20))
            client.admin.reset("orders", GROUP, to="earliest")
            eventually(lambda: len(done) == 20 and scene.lag() == 0)
            before = Counter(done)
            mortal.kill()
            mortal.start()
            scene.send(20)
            eventually(lambda: done[20] == 1 and scene.lag() == 0)
        assert done - before == {20: 1}
