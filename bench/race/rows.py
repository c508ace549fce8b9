"""What is measured beside what: the rows of the table.

What always holds: a row's baseline is measured in the same round as the row, and the row itself twice in each round, so
that the same code stands beside itself; the first round warms up; every other round goes the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from bench.race.bar import Bar
from bench.race.racer import Task

__all__ = ["ROWS", "Line", "Row", "median_of", "percentile_of", "rate_of"]

Answer = dict[str, Any]
Ratio = Callable[[Answer, Answer], float]

# How many messages a round has; `--quick` has a tenth.
_BULK: Final = 100_000
_ONES: Final = 3_000
_SECONDS: Final = 5
_NO_BAR: Final = Bar()


class Line(NamedTuple):
    """A ratio of a row, and its bar; 1.2 of what is meant by `of`."""

    what: str
    of: str
    ratio: Ratio
    bar: Bar = _NO_BAR


class Row(NamedTuple):
    """One measurement.

    Attributes:
        floor: what the floor does beside it.
        beside: what the tree itself does beside it.
        cpus: on how many it runs with all that belongs to it; 0 is all.
        rounds: fixed for what does not vary.
    """

    name: str
    own: Task
    lines: tuple[Line, ...]
    floor: Task | None = None
    beside: Task | None = None
    cpus: int = 0
    rounds: int | None = None


def rate_of(answer: Answer) -> float:
    """Messages a second."""
    return float(answer["count"] / answer["seconds"])


def percentile_of(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def median_of(answer: Answer, name: str) -> float:
    return percentile_of(answer["samples"][name], 0.5)


def _faster(own: Answer, base: Answer) -> float:
    return rate_of(own) / rate_of(base)


def _in_echoes(own: Answer, _: Answer) -> float:
    return median_of(own, "send") / median_of(own, "echo")


def _in_fdatasyncs(own: Answer, _: Answer) -> float:
    return (median_of(own, "flushed") - median_of(own, "stored")) / median_of(own, "fdatasync")


def _in_relays(share: float) -> Ratio:
    def ratio(own: Answer, base: Answer) -> float:
        return percentile_of(own["samples"]["end_to_end"], share) / percentile_of(base["samples"]["relay"], share)

    return ratio


def _in_bodies(own: Answer, _: Answer) -> float:
    return float(own["disk_bytes"] / own["body_bytes"])


def _busy(own: Answer, _: Answer) -> float:
    return float(own["broker"] / own["seconds"])


def _json(name: str, load: str, size: int, bar: Bar) -> Row:
    count = _BULK if size < 1000 else _BULK // 2
    task = Task(load, {"count": count, "batch": 500})
    return Row(
        name,
        task.given(bodies=f"json-{size}"),
        (Line(f"{name}, by 500", "random bodies", _faster, bar),),
        beside=task.given(bodies=f"random-{size}"),
    )


def _bulk(name: str, what: str, own: Task, floor: Task, bar: Bar = _NO_BAR) -> Row:
    return Row(name, own, (Line(what, "floor", _faster, bar),), floor=floor)


def _end_to_end(name: str, rate: int, way: str, bars: Sequence[Bar]) -> Row:
    task = {"bodies": "random-200", "count": rate * _SECONDS, "rate": rate}
    what = f"{way} to handler at {rate:,}/s"
    shares = (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999))
    return Row(
        name,
        Task("end_to_end", {**task, "way": way}),
        tuple(
            Line(f"{what}, {label}", "floor relay", _in_relays(share), bar)
            for (label, share), bar in zip(shares, bars, strict=True)
        ),
        floor=Task("floor_relay", task),
    )


def _produce(load: str, **options: Any) -> Task:
    return Task(load, {"bodies": "random-200", "count": _BULK, **options})


def _lone(name: str, cpus: int, bar: Bar = _NO_BAR) -> Row:
    return Row(
        name,
        Task("lone", {"bodies": "random-200", "count": _ONES}),
        (Line(f"send, stored, p50, {'one CPU' if cpus == 1 else 'two CPUs'}", "echo", _in_echoes, bar),),
        cpus=cpus,
    )


def _senders(name: str, bar: Bar) -> Row:
    options = {"bodies": "random-200", "count": 20_000, "senders": 100}
    return _bulk(name, f"100 {name}, one message each", Task(name, options), Task("floor_window", options), bar)


_LATENCY: Final = (Bar(2.2, 1.8, is_most=True), Bar(4, 3, is_most=True), _NO_BAR)

ROWS: Final[dict[str, Row]] = {
    row.name: row
    for row in (
        _json("json-produce-200", "many", 200, Bar(0.75, 0.9)),
        _json("json-produce-1024", "many", 1024, Bar(0.9, 0.9)),
        _json("json-consume-200", "pull", 200, Bar(0.9, 0.9)),
        _json("json-consume-1024", "pull", 1024, Bar(0.9, 0.9)),
        _bulk(
            "many-500",
            "send_many by 500, 200 B",
            _produce("many", batch=500),
            _produce("floor_produce", batch=500),
            Bar(0.28, 0.4),
        ),
        _bulk(
            "many-2000",
            "send_many by 2,000, 200 B",
            _produce("many", batch=2000),
            _produce("floor_produce", batch=2000),
        ),
        _bulk(
            "async",
            "send_async, 200 B",
            _produce("each_async"),
            _produce("floor_produce", batch=500),
            Bar(0.17, 0.22),
        ),
        _bulk(
            "pull-500",
            "pull and ack by 500, 200 B",
            _produce("pull", batch=500),
            _produce("floor_consume", batch=500),
            Bar(0.35, 0.4),
        ),
        _bulk("handler", "a handler for each, 200 B", _produce("handler"), _produce("floor_consume", batch=500)),
        _lone("lone", 1, Bar(3.5, 2.6, is_most=True)),
        _lone("lone-two", 2),
        Row(
            "flushed",
            Task("flushed", {"bodies": "random-200", "count": _ONES // 10}),
            (Line("send, flushed less stored, p50", "fdatasync", _in_fdatasyncs, Bar(1.3, 1.3, is_most=True)),),
        ),
        _end_to_end("relay-1000", 1_000, "send_async", _LATENCY),
        _end_to_end("relay-10000", 10_000, "send_async", _LATENCY),
        _end_to_end("relay-send", 1_000, "send", (_NO_BAR, _NO_BAR, _NO_BAR)),
        _senders("tasks", Bar(0.6, 0.7)),
        _senders("threads", Bar(0.3, 0.35)),
        Row(
            "disk",
            Task("disk", {"bodies": "json-200", "count": 200_000, "batch": 500}),
            (Line("bytes on disk, 200 B JSON by 500", "body", _in_bodies, Bar(1.15, 1.15, is_most=True)),),
            rounds=1,
        ),
        Row(
            "idle",
            Task("idle", {"queues": 10_000, "seconds": _SECONDS}),
            (Line("broker of an idle group, 10,000 queues", "CPU", _busy),),
        ),
    )
}
