"""Which broker a message goes to."""

from __future__ import annotations

from typing import Any

from dmq.client.connection.router import Listeners
from dmq.errors import NotConnected
from dmq.protocol.admin import TopicDescribe
from dmq.protocol.session import Heartbeat
from dmq.testing import FakeClock
from tests.unit.client.links import FakeLink, FakeRouter

GONE = NotConnected("gone")


def over(*hosts: str) -> tuple[FakeRouter, list[FakeLink]]:
    links = [FakeLink(host) for host in hosts]
    return FakeRouter(FakeClock(), *links), links


class Watcher:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def connected(self, link: FakeLink) -> None:
        self.seen.append(link)


def test_with_one_broker_all_goes_there() -> None:
    router, (link,) = over("one")
    assert router.link_for("orders") is router.link_for("orders", 7) is link
    assert [*router.reachable("orders", 3)] == [0, 1, 2]
    assert router.pools_of("orders") == [router.home]
    assert router.is_single
    link.is_usable = False
    assert router.link_for("orders") is None
    assert not router.is_connected


def test_each_queue_goes_to_its_broker() -> None:
    router, (one, two) = over("one", "two")
    assert [router.link_for("orders", queue) for queue in range(4)] == [one, one, two, two]
    assert [pool.link for pool in router.pools_of("orders")] == [one, two]
    assert not router.is_single


def test_any_queue_goes_to_a_broker_that_is_connected() -> None:
    router, (one, two) = over("one", "two")
    one.is_usable = False
    assert router.link_for("orders") is router.pool_for("orders").link is two
    assert router.link_for("orders", 0) is None
    assert [*router.reachable("orders", 4)] == [2, 3]
    two.is_usable = False
    assert router.link_for("orders") is None
    assert [*router.reachable("orders", 4)] == []


def test_a_request_without_a_topic_goes_home() -> None:
    router, (one, two) = over("one", "two")
    assert router.pool_asked(Heartbeat(0)).link is one
    one.is_usable = False
    assert router.pool_asked(Heartbeat(0)).link is one
    assert router.pool_asked(TopicDescribe("orders")).link is two


def test_a_broker_has_one_pool_made_when_it_is_first_asked_for() -> None:
    router, _ = over("one", "two")
    assert len(router._pools) == 1
    assert router.pool_for("orders", 2) is router.pool_for("bills", 3)
    assert len(router._pools) == 2


def test_who_watches_hears_of_brokers_that_are_added_later() -> None:
    router, (one, two) = over("one", "two")
    watcher = Watcher()
    router.watch(watcher)
    assert watcher.seen == [one]
    router.link_for("orders", 2)
    assert watcher.seen == [one, two]
    router.unwatch(watcher)
    assert [pool.watchers for pool in router.pools_of("orders")] == [[], []]


def test_the_first_broker_that_is_lost_interrupts_and_the_last_that_is_back_resumes() -> None:
    router, _ = over("one", "two")
    events: list[str] = []
    router.listeners = Listeners(
        lambda error: events.append("exception"),
        lambda: events.append("interrupted"),
        lambda: events.append("resumed"),
    )
    router.interrupted(0, GONE)
    router.interrupted(1, GONE)
    router.resumed(0)
    assert events == ["exception", "interrupted", "exception"]
    router.resumed(1)
    assert events[-1] == "resumed"
