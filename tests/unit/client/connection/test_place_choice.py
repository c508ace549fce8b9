"""Which shard gets a message that may go to any."""

from __future__ import annotations

from collections import Counter

from dmq.client.connection.link import FAILED_MAX, FAILED_MIN, SAMPLES_MIN, SLOW_SECONDS, ShardHealth
from dmq.client.connection.route_book import ANY, WHEEL_MAX, PlaceChoice, any_shard
from dmq.model import place_queue, place_shard
from dmq.protocol.cluster.route import SlotRoute

SLOTS = [SlotRoute(1, 4), SlotRoute(2, 4), SlotRoute(3, 4, is_writable=False)]


def test_a_wheel_has_each_shard_as_often_as_its_weight_says() -> None:
    wheel = PlaceChoice(1).wheel(SLOTS, ANY, {1: 100, 2: 25, 3: 100})
    assert Counter(map(place_shard, wheel)) == {1: 16, 2: 4}
    assert {place_queue(place) for place in wheel} == {0, 1, 2, 3}


def test_weight_zero_is_chosen_only_if_all_have_it() -> None:
    choice = PlaceChoice(1)
    assert {*map(place_shard, choice.wheel(SLOTS, ANY, {1: 0, 2: 1}))} == {2}
    assert {*map(place_shard, choice.wheel(SLOTS, ANY, {1: 0, 2: 0}))} == {1, 2}
    assert choice.wheel(SLOTS, ANY, {3: 100}) == ()


def test_a_priority_is_one_queue_of_every_shard() -> None:
    assert {*PlaceChoice(1).wheel(SLOTS, any_shard(2), {1: 1, 2: 1})} == {1 << 8 | 2, 2 << 8 | 2}


def test_a_wheel_of_a_thousand_shards_is_bounded() -> None:
    slots = [SlotRoute(number, 255) for number in range(1, 1001)]
    assert len(PlaceChoice(1).wheel(slots, ANY, {number: number for number in range(1, 1001)})) == WHEEL_MAX


def test_a_shard_that_fails_is_avoided_longer_each_time() -> None:
    health, now = ShardHealth(), 100.0
    health.failed(1, now)
    assert health.avoided([1, 2], now + FAILED_MIN / 2) == [1]
    assert health.avoided([1, 2], now + FAILED_MIN) == []
    for _ in range(10):
        now += FAILED_MAX
        health.failed(1, now)
    assert health.avoided([1], now + FAILED_MAX - 0.1) == [1]
    assert health.avoided([1], now + FAILED_MAX) == []
    health.answered(1, 0.001, now)
    health.failed(1, now + FAILED_MAX)
    assert health.avoided([1], now + FAILED_MAX + FAILED_MIN) == []


def test_a_slow_shard_is_avoided_and_tried_anew() -> None:
    health = ShardHealth()
    for _ in range(SAMPLES_MIN):
        health.answered(1, 0.01, 10.0)
        health.answered(2, 0.5, 10.0)
    assert health.avoided([1, 2], 10.0) == [2]
    assert health.avoided([1, 2], 10.0 + SLOW_SECONDS) == []


def test_shards_that_are_all_slow_are_not_avoided() -> None:
    health = ShardHealth()
    for _ in range(20):
        health.answered(1, 1.0, 10.0)
        health.answered(2, 1.5, 10.0)
    assert health.avoided([1, 2], 10.0) == []
