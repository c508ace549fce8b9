"""Broadcast: every member, known by its client id, gets every message and has a place of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import dmq
from dmq.client.client import Client, connect
from dmq.client.consumer.consumer import Consumer
from dmq.testing.processes import BrokerProcess
from tests.integration.delivery.scenes import Scene, bodies
from tests.patience import eventually


class Member:
    """A client with a name, and its consumer."""

    def __init__(self, url: str, name: str, topic: str, **options: object) -> None:
        self.client = connect(url, app="test", client_id=name, timeout=60.0)
        self.consumer: Consumer = self.client.consumer(topic, "news", broadcast=True, **options)  # type: ignore[call-overload]

    def take(self, count: int) -> list[int]:
        """The next messages, done with."""
        found: list[int] = []
        while len(found) < count:
            batch = self.consumer.pull(count - len(found), wait=20.0)
            assert batch, "there is less than expected"
            found += bodies(batch)
            self.consumer.ack(batch)
        return found

    def end(self) -> None:
        self.client.close()


@pytest.fixture
def url(broker: BrokerProcess) -> str:
    return broker.url


@pytest.fixture
def members() -> Iterator[list[Member]]:
    running: list[Member] = []
    yield running
    for member in running:
        member.end()


def test_every_member_gets_everything(scene: Scene, url: str, members: list[Member]) -> None:
    members += [Member(url, f"m-{n}", scene.topic) for n in range(3)]
    scene.send(*range(10))
    assert [member.take(10) for member in members] == [[*range(10)]] * 3


def test_a_member_that_comes_back_under_its_name_goes_on_where_it_was(
    scene: Scene, url: str, members: list[Member]
) -> None:
    scene.send(*range(10))
    first = Member(url, "same", scene.topic)
    assert first.take(4) == [0, 1, 2, 3]
    first.end()
    scene.send(10)
    members.append(Member(url, "same", scene.topic, start_from="latest"))
    assert members[0].take(7) == [*range(4, 11)]


def test_a_new_member_begins_where_it_says(scene: Scene, url: str, members: list[Member]) -> None:
    scene.send(*range(5))
    members += [
        Member(url, "early", scene.topic),
        Member(url, "late", scene.topic, start_from="latest"),
        Member(url, "middle", scene.topic, start_from=3),
    ]
    assert not members[1].consumer.pull(wait=0.05)  # it has a place from now on
    members[0].consumer.seek("earliest")
    scene.send(5)
    assert [member.take(count) for member, count in zip(members, (6, 1, 3), strict=True)] == [
        [*range(6)],
        [5],
        [3, 4, 5],
    ]


def test_what_one_member_fails_with_comes_again_to_that_one(scene: Scene, url: str, members: list[Member]) -> None:
    members += [Member(url, name, scene.topic) for name in ("failing", "well")]
    scene.send(1)
    failing, well = (member.consumer for member in members)
    failing.pull(wait=20.0)[0].nack(delay=0.0)
    well.ack(well.pull(wait=20.0))
    (again,) = failing.pull(wait=20.0)
    assert (again.body, again.attempt) == (b"1", 2)
    again.ack()
    scene.send(2)
    assert [member.take(1) for member in members] == [[2], [2]]


def test_places_outlive_a_kill_of_the_broker(mortal: BrokerProcess, members: list[Member]) -> None:
    with connect(mortal.url, app="test", timeout=60.0) as client:
        scene = Scene(client, "news")
        scene.send(*range(6))
        ahead, behind = Member(mortal.url, "ahead", "news"), Member(mortal.url, "behind", "news")
        assert (ahead.take(5), behind.take(1)) == ([*range(5)], [0])
        ahead.end()
        behind.end()
        scene.send(6)  # the acks are flushed with it
        mortal.kill()
        mortal.start()
        members += [Member(mortal.url, "ahead", "news"), Member(mortal.url, "behind", "news")]
        assert [member.take(count) for member, count in zip(members, (2, 6), strict=True)] == [
            [5, 6],
            [*range(1, 7)],
        ]


def test_a_member_needs_a_name_that_stays(scene: Scene) -> None:
    with pytest.raises(dmq.MissingClientId, match="client_id"):
        scene.consumer(broadcast=True).pull(wait=0.1)


def test_seeking_moves_one_member_and_resetting_the_group_is_refused(
    scene: Scene, client: Client, url: str, members: list[Member]
) -> None:
    members += [Member(url, name, scene.topic) for name in ("one", "two")]
    scene.send(*range(3))
    assert [member.take(3) for member in members] == [[0, 1, 2]] * 2
    members[0].consumer.seek("earliest")
    assert members[0].take(3) == [0, 1, 2]
    scene.send(3)
    assert members[1].take(1) == [3]
    eventually(lambda: members[0].take(1) == [3])
    with pytest.raises(dmq.InvalidRequest, match=r"seek"):
        client.admin.reset(scene.topic, "news", to="earliest")
