"""When routes are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from dmq.client.connection.route_book import ANSWER_SECONDS, LOST_SECONDS, REFRESH_SECONDS
from dmq.client.connection.url import Address
from dmq.errors import Busy, NotConnected
from dmq.model import place_of
from dmq.protocol import Command
from dmq.protocol.cluster.route import TOPICS_MAX, RouteChanged, RouteReply, ShardRoute
from dmq.testing import FakeClock
from tests.unit.client.connection.test_route_book import answer, shard, topic
from tests.unit.client.links import FakeLink, FakeRouter, Request


class Heard:
    """A watcher of a router."""

    def __init__(self) -> None:
        self.links: list[FakeLink] = []
        self.topics: list[str] = []

    def connected(self, link: FakeLink) -> None:
        self.links.append(link)

    def routes_changed(self, topics: Sequence[str]) -> None:
        self.topics += sorted(topics)


def over(*rows: object) -> FakeRouter:
    """A router of a cluster of two shards that has begun to ask."""
    router = FakeRouter(FakeClock(), FakeLink("url"))
    router.join(answer(*rows))  # type: ignore[arg-type]
    assert router._keeper is not None
    router._keeper.begin()
    return router


def asked(router: FakeRouter, number: int = 1) -> list[Request]:
    return [one for one in router._pools[number].link.requests if one.command == Command.ROUTE]


def test_each_place_goes_to_the_leader_of_its_shard() -> None:
    router = over(topic("orders", 1, 2))
    one, two = (router._pools[number].link for number in (1, 2))
    assert router.link_for("orders", place_of(1, 1)) is one
    assert router.link_for("orders", place_of(1, 2)) is two
    assert [pool.shard for pool in router.pools_of("orders")] == [1, 2]
    assert not router.is_single
    assert sorted(router.reachable("orders", 2)) == [place_of(queue, number) for number in (1, 2) for queue in (0, 1)]
    one.is_usable = False
    router.interrupted(1, NotConnected("gone"))
    assert sorted(router.reachable("orders", 2)) == [place_of(0, 2), place_of(1, 2)]


def test_a_shard_that_takes_nothing_new_is_left_out() -> None:
    router = over(shard(1), shard(2, is_writable=False), topic("orders", 1, 2))
    assert sorted(router.reachable("orders", 2)) == [place_of(0, 1), place_of(1, 1)]
    assert len(router.pools_of("orders")) == 2


def test_what_belongs_to_no_topic_goes_to_another_shard_if_the_home_one_has_no_leader() -> None:
    router = over()
    assert router.home.shard == 1
    router._pools[1].link.is_usable = False
    assert router.home.shard == 2
    router._pools[2].link.is_usable = False
    assert router.home.shard == 1


def test_routes_are_asked_for_at_the_start_and_every_half_minute() -> None:
    router = over(topic("orders", 1))
    router.advance(1.0)
    (first,) = asked(router)
    assert (first.header.topics, first.header.is_watched) == ([], True)
    first.answer(answer(topic("orders", 1)))
    router.advance(REFRESH_SECONDS)
    assert [one.header.topics for one in asked(router)[1:]] == [["orders"]]


def test_a_push_has_the_topics_asked_for_that_it_names() -> None:
    router = over(topic("orders", 1))
    router.advance(1.0)
    asked(router)[0].answer(answer())
    heard = Heard()
    router.watch(heard)
    router.route_changed(RouteChanged(["bills"]))
    router.route_changed(RouteChanged(["orders"]))
    router.advance(1.0)
    assert asked(router)[1].header.topics == ["bills", "orders"], "in one question"
    asked(router)[1].answer(answer(topic("orders", 1, 2, version=2)))
    assert heard.topics == ["orders"]
    assert [pool.shard for pool in router.pools_of("orders")] == [1, 2]


def test_many_topics_are_asked_for_in_chunks() -> None:
    router = over()
    router.advance(1.0)
    asked(router)[0].answer(answer())
    router.route_changed(RouteChanged([f"t{number}" for number in range(TOPICS_MAX)]))
    router.route_changed(RouteChanged(["more"]))
    router.advance(1.0)
    assert len(asked(router)[1].header.topics) == TOPICS_MAX
    assert len(asked(router)) == 2, "one question at a time"
    asked(router)[1].answer(answer())
    assert len(asked(router)[2].header.topics) == 1


def test_a_lost_shard_has_routes_asked_for_until_it_is_back() -> None:
    router = over()
    router.advance(1.0)
    asked(router)[0].answer(answer())
    router._pools[2].link.is_usable = False
    router.interrupted(2, NotConnected("gone"))
    router.advance(1.0)
    asked(router)[1].answer(answer(shard(1), shard(2, 2, "new:1")))
    addresses, leader, epoch = router._pools[2].aimed[0]
    assert (str(addresses[0]), leader, epoch) == ("new:1", "new:1", 2)


def test_where_no_shard_is_connected_the_addresses_of_the_url_are_asked() -> None:
    router = over()
    for pool in router._pools.values():
        pool.link.is_usable = False
    router.advance(1.0)
    assert len(router.scouted) == 1
    assert router._keeper is not None
    router._keeper.missed(router.scouted[0])
    router.advance(2 * LOST_SECONDS)
    assert len(router.scouted) >= 2


def test_a_question_that_is_refused_or_not_answered_is_asked_again() -> None:
    router = over()
    router.advance(1.0)
    asked(router)[0].refuse(Busy("later"))
    router.advance(2 * LOST_SECONDS)
    assert len(asked(router)) == 2
    router.advance(ANSWER_SECONDS + REFRESH_SECONDS)
    assert len(asked(router)) >= 3


def test_a_new_shard_gets_a_pool_and_watchers_hear_of_it() -> None:
    router = over()
    heard = Heard()
    router.watch(heard)
    router._made[Address("3", 9611)] = FakeLink("3")
    router.advance(1.0)
    asked(router)[0].answer(answer(shard(1), shard(2), shard(3)))
    assert [link.address.host for link in heard.links] == ["1", "2", "3"]


def test_a_shard_that_is_gone_loses_its_pool_in_silence() -> None:
    router = over(topic("orders", 1, 2))
    gone = router._pools[2]
    router.advance(1.0)
    asked(router)[0].answer(answer(shard(1)))
    assert isinstance(gone.closed_by, NotConnected)
    assert [pool.shard for pool in router.pools_of("orders")] == [1]


def test_a_watcher_that_raises_keeps_nobody_from_hearing() -> None:
    class Angry(Heard):
        def routes_changed(self, topics: Sequence[str]) -> None:
            raise ValueError("no")

    router, heard = over(), Heard()
    router.watch(Angry())
    router.watch(heard)
    router.advance(1.0)
    asked(router)[0].answer(answer(topic("orders", 1)))
    assert heard.topics == ["orders"]


def test_a_lone_broker_is_asked_for_nothing() -> None:
    link = FakeLink("one")
    router = FakeRouter(FakeClock(), link)
    router.route_changed(RouteChanged([]))
    router.stale("orders")
    router.interrupted(0, NotConnected("gone"))
    router.advance(100.0)
    assert not link.requests
    assert router.is_single


def test_a_shard_without_members_is_looked_for_where_the_url_says() -> None:
    router = FakeRouter(FakeClock(), FakeLink("url"))
    router.join(RouteReply(7, [shard(1), ShardRoute(2, "s2")]))
    assert [str(address) for address in router._at(2).addresses] == ["url:9611"]
