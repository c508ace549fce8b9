"""What a client keeps of the answers to ROUTE."""

from __future__ import annotations

import tracemalloc

from dmq.client.connection.route_book import FULL_SECONDS, REFRESH_SECONDS, TOPICS_KEPT, RouteBook, RouteChange
from dmq.client.connection.url import Address
from dmq.model import place_of
from dmq.protocol.cluster.route import TOPICS_MAX, RouteReply, ShardRoute, SlotRoute, TopicRoute

CLUSTER = 77


def shard(number: int, epoch: int = 1, leader: str = "", **settings: object) -> ShardRoute:
    leader = leader or f"{number}:9611"
    return ShardRoute(number, f"s{number}", epoch, leader, [leader, f"{number}:9612"], **settings)  # type: ignore[arg-type]


def topic(name: str, *shards: int, version: int = 1, incarnation: int = 5, queues: int = 2) -> TopicRoute:
    return TopicRoute(name, incarnation, [SlotRoute(number, queues) for number in shards], version)


def answer(*rows: ShardRoute | TopicRoute, cluster: int = CLUSTER) -> RouteReply:
    shards = [row for row in rows if isinstance(row, ShardRoute)]
    return RouteReply(cluster, shards or [shard(1), shard(2)], [row for row in rows if isinstance(row, TopicRoute)])


def test_a_topic_is_at_the_shards_of_its_slots() -> None:
    book = RouteBook(answer(topic("orders", 1, 2), topic("bills", 2)))
    assert (book.brokers("orders"), book.brokers("bills")) == ([1, 2], [2])
    assert book.places("orders") == [place_of(queue, number) for number in (1, 2) for queue in (0, 1)]
    assert book.broker("orders", place_of(1, 2)) == 2
    assert book.addresses(2) == (Address("2", 9611), Address("2", 9612))


def test_a_system_topic_is_in_all_shards() -> None:
    assert RouteBook(answer(), home=2).brokers("%RETRY%billing%1") == [2, 1]


def test_a_topic_that_is_not_known_is_asked_for_at_home() -> None:
    book = RouteBook(answer(), home=2)
    assert book.brokers("nowhere") == (2,)
    assert book.places("nowhere") == []
    assert book.shards == [2, 1]


def test_home_is_a_shard_with_a_leader_unless_one_is_named() -> None:
    rows = [ShardRoute(1, "s1"), shard(2)]
    assert RouteBook(RouteReply(CLUSTER, rows)).home == 2
    assert RouteBook(RouteReply(CLUSTER, rows), home=1).home == 1
    assert RouteBook(RouteReply(CLUSTER, rows), home=9).home == 2


def test_a_lower_epoch_never_replaces_a_higher_one() -> None:
    book = RouteBook(answer(shard(1, 4, "a:1"), shard(2)))
    assert book.take(answer(shard(1, 3, "b:1"), shard(2))) == RouteChange()
    assert book.addresses(1)[0] == Address("a", 1)
    assert book.take(answer(shard(1, 5, "b:1"), shard(2))).shards == {1}
    assert book.addresses(1)[0] == Address("b", 1)


def test_a_weight_changes_within_an_epoch() -> None:
    book = RouteBook(answer(shard(1), shard(2)))
    assert book.take(answer(shard(1, weight=10), shard(2))).shards == {1}
    row = book.shard(1)
    assert row is not None
    assert row.weight == 10


def test_older_slots_never_replace_newer_ones_unless_the_topic_is_another() -> None:
    book = RouteBook(answer(topic("orders", 1, 2, version=4)))
    assert book.take(answer(topic("orders", 1, version=3))) == RouteChange()
    assert book.brokers("orders") == [1, 2]
    assert book.take(answer(topic("orders", 2, version=1, incarnation=6))).topics == {"orders"}
    assert book.brokers("orders") == [2]


def test_what_says_the_same_changes_nothing() -> None:
    reply = answer(topic("orders", 1, 2))
    book = RouteBook(reply)
    assert book.take(reply, ["orders"]) == RouteChange()


def test_a_topic_that_was_asked_for_and_is_not_there_is_forgotten() -> None:
    book = RouteBook(answer(topic("orders", 1), topic("bills", 1)))
    assert book.take(answer(), ["orders"]).topics == {"orders"}
    assert book.topic("orders") is None
    assert book.topic("bills") is not None


def test_a_shard_that_is_not_named_any_more_is_gone() -> None:
    book = RouteBook(answer(topic("orders", 1, 2)))
    assert book.take(answer(shard(1))).shards == {2}
    assert book.brokers("orders") == [1]
    assert book.addresses(2) == ()


def test_another_cluster_is_not_believed() -> None:
    book = RouteBook(answer(topic("orders", 1, 2)))
    assert book.take(answer(shard(1, 9, "evil:1"), topic("orders", 1, version=9), cluster=78)) == RouteChange()
    assert book.brokers("orders") == [1, 2]


def test_a_slot_that_was_taken_out_is_read_and_not_written() -> None:
    row = TopicRoute("orders", 5, [SlotRoute(1, 2), SlotRoute(2, 2, is_writable=False)], 2)
    book = RouteBook(answer(row))
    assert book.brokers("orders") == [1, 2]
    assert book.places("orders") == [place_of(0, 1), place_of(1, 1)]


def test_addresses_that_cannot_be_read_are_left_out() -> None:
    book = RouteBook(answer(ShardRoute(1, "s1", 1, "::bad::", ["", "good:1"])))
    assert book.addresses(1) == (Address("good", 1),)


def test_ten_thousand_topics_are_small_and_all_come_up_within_an_hour() -> None:
    book = RouteBook(answer())
    tracemalloc.start()
    for at in range(0, 10_000, TOPICS_MAX):
        book.take(answer(*(topic(f"topic-{number}", 1, 2) for number in range(at, min(at + TOPICS_MAX, 10_000)))))
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 6 << 20
    seen: list[str] = []
    for _ in range(int(FULL_SECONDS / REFRESH_SECONDS)):
        due = book.due()
        assert len(due) <= TOPICS_MAX
        seen += due
    assert {*seen} == {f"topic-{number}" for number in range(10_000)}


def test_the_oldest_topics_are_forgotten_beyond_the_bound() -> None:
    book = RouteBook(answer())
    for number in range(TOPICS_KEPT + 10):
        book._take_topic(topic(f"t{number}", 1))
    assert book.topic("t9") is None
    assert book.topic("t10") is not None
    assert len({name for _ in range(121) for name in book.due()}) == TOPICS_KEPT
