"""A benchmark sends what it says it sends, and its figures follow from its rounds."""

from __future__ import annotations

import json

import pytest

from dmq.testing.benchmark.benchmark import Load, Rates, latency_figure, machine, percentile


@pytest.mark.parametrize("is_json", [False, True])
@pytest.mark.parametrize("size", [100, 200, 1024])
def test_bodies_are_all_different_and_of_the_size_asked_for(size: int, is_json: bool) -> None:
    load = Load(2000, size, 500, is_json=is_json)
    bodies = load.bodies()
    assert len(set(bodies)) == 2000
    assert {len(body) for body in bodies} == {size}
    assert bodies == load.bodies()
    if is_json:
        assert json.loads(bodies[7])["order"] == 7


def test_batches_cover_every_body_and_keys_go_on() -> None:
    load = Load(1100, 64, 500)
    groups = load.groups(load.bodies())
    assert [len(group) for group in groups] == [500, 500, 100]
    assert [message.key for message in load.made(groups[2], 1000)][:2] == ["k-1000", "k-1001"]


def test_a_ratio_compares_each_round_with_its_own_baseline() -> None:
    rates = Rates(1000, 200_000, [1.0, 2.0, 4.0], [0.5, 0.5, 4.0], [0.1, 0.1, 0.1], [0.0, 0.0, 0.0])
    figure = rates.figure("x", extra=7)
    assert figure.rounds["of_baseline"] == [0.5, 0.25, 1.0]
    assert figure.values["of_baseline"] == 0.5
    assert figure.values["messages_per_second"] == 500
    assert figure.values["client_us_per_message"] == pytest.approx(100)
    assert figure.values["broker_us_per_message"] is None
    assert figure.plain()["extra"] == 7


def test_percentiles() -> None:
    ordered = [float(number) for number in range(1000)]
    assert (percentile(ordered, 0.5), percentile(ordered, 0.99), percentile([1.0], 0.999)) == (500, 990, 1)
    figure = latency_figure("x", [3e-6, 1e-6, 2e-6])
    assert figure.values["p50_us"] == pytest.approx(2)
    assert figure.values["max_us"] == pytest.approx(3)


def test_the_machine_is_named() -> None:
    assert {"dmq", "python", "cpus", "system", "load"} == set(machine())
