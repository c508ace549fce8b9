"""A benchmark sends what it says it sends, and its figures follow from its rounds."""

from __future__ import annotations

import json
import zlib
from typing import Any, cast

import pytest

from dmq.testing.benchmark.benchmark import Load, Rates, Ways, latency_figure, machine, percentile
from dmq.testing.benchmark.bodies import BODY_NAMES, BodyName


@pytest.mark.parametrize("name", BODY_NAMES)
@pytest.mark.parametrize("size", [8, 64, 100, 200, 1024])
def test_bodies_are_all_different_and_of_the_size_asked_for(size: int, name: BodyName) -> None:
    load = Load(2000, size, 500, body=name)
    bodies = load.bodies()
    assert len(set(bodies)) == 2000
    assert {len(body) for body in bodies} == {size}
    assert bodies == load.bodies()


@pytest.mark.parametrize("name", BODY_NAMES)
def test_bodies_of_one_byte_are_of_one_byte(name: BodyName) -> None:
    assert {len(body) for body in Load(20, 1, 500, body=name).bodies()} == {1}


def test_json_has_the_same_fields_in_all_and_in_each_item() -> None:
    for body in Load(100, 200, 500, body="json").bodies():
        order = json.loads(body)
        assert list(order) == ["id", "state", "items", "note"]
        assert len(order["items"]) >= 2
        assert {tuple(item) for item in order["items"]} == {("item", "units", "price")}


@pytest.mark.parametrize(("name", "most"), [("json", 0.9), ("text", 0.9), ("random", 1.1)])
def test_json_and_text_of_200_bytes_compress_each_by_itself_and_random_bytes_do_not(
    name: BodyName, most: float
) -> None:
    bodies = Load(100, 200, 500, body=name).bodies()
    share = sum(len(zlib.compress(body)) for body in bodies) / sum(map(len, bodies))
    assert most - 0.4 < share < most


def test_batches_cover_every_body_and_keys_go_on() -> None:
    load = Load(1100, 64, 500)
    groups = load.groups(load.bodies())
    assert [len(group) for group in groups] == [500, 500, 100]
    assert [message.key for message in load.made(groups[2], 1000)][:2] == ["k-1000", "k-1001"]


def test_a_ratio_compares_each_round_with_its_own_baseline() -> None:
    rates = Rates(1000, 200_000, [1.0, 2.0, 4.0], [0.5, 0.5, 4.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0])
    figure = rates.figure("x", extra=7)
    assert figure.rounds["of_floor"] == [0.5, 0.25, 1.0]
    assert figure.values["of_floor"] == 0.5
    assert figure.values["floor_messages_per_second"] == 2000
    assert figure.values["messages_per_second"] == 500
    assert figure.values["client_us_per_message"] == pytest.approx(100)
    assert figure.values["broker_us_per_message"] is None
    assert figure.plain()["extra"] == 7


class Counting:
    """Stands for a client whose broker counts."""

    def __init__(self, *told: dict[str, float]) -> None:
        self._told = iter(told)
        self.admin = self

    def stats(self, prefix: str) -> dict[str, float]:
        return next(self._told)


def test_the_share_of_the_straight_path_is_that_of_the_rounds_alone() -> None:
    before = {"broker_straight": 10.0, "broker_straight_left": 5.0, "broker_straight_left_batch": 5.0}
    after = {"broker_straight": 40.0, "broker_straight_left": 15.0, "broker_straight_left_batch": 5.0}
    ways = Ways()
    with ways(cast(Any, Counting(before, {**after, "broker_straight_left_busy": 10.0}))):
        pass
    assert ways.values() == {"straight_share": 0.75, "left_for_busy": 10}


def test_a_broker_that_does_not_count_has_no_share() -> None:
    ways = Ways()
    with ways(cast(Any, Counting({}, {}))):
        pass
    assert ways.values() == {}


def test_percentiles() -> None:
    ordered = [float(number) for number in range(1000)]
    assert (percentile(ordered, 0.5), percentile(ordered, 0.99), percentile([1.0], 0.999)) == (500, 990, 1)
    figure = latency_figure("x", [3e-6, 1e-6, 2e-6])
    assert figure.values["p50_us"] == pytest.approx(2)
    assert figure.values["max_us"] == pytest.approx(3)


def test_the_machine_is_named() -> None:
    assert {"dmq", "python", "cpus", "system", "load"} == set(machine())
