"""What a measurement is: figures with their baseline, the spread of several rounds, and the machine they are from.

What always holds: a figure that a baseline was asked for is measured in the same run as that baseline, in turns.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeAlias

import dmq
from dmq.client.client import Client, connect
from dmq.model import DurabilityName, Message
from dmq.testing.benchmark.bodies import BodyName, made_bodies

__all__ = [
    "APP",
    "BrokerCpu",
    "Figure",
    "Load",
    "Progress",
    "Rates",
    "Ways",
    "bench_topic",
    "latency_figure",
    "machine",
    "measured",
    "percentile",
    "percentiles",
]

APP = "dmq-bench"

Progress: TypeAlias = Callable[[int], None]
_STRAIGHT: Final = "broker_straight"
_LEFT: Final = "broker_straight_left"
BrokerCpu: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent. Bodies are all different, and made before the timed part; messages are made within it."""

    messages: int
    size: int
    batch: int
    durability: DurabilityName = "stored"
    rounds: int = 3
    seed: int = 1
    body: BodyName = "random"

    def bodies(self) -> list[bytes]:
        """As many bodies as there are messages."""
        return made_bodies(self.body, self.messages, self.size, self.seed)

    def groups(self, bodies: Sequence[bytes]) -> list[Sequence[bytes]]:
        """The bodies, by batches."""
        return [bodies[at : at + self.batch] for at in range(0, len(bodies), self.batch)]

    @staticmethod
    def made(bodies: Sequence[bytes], first: int) -> list[Message]:
        """Messages with keys."""
        return [Message(body, f"k-{first + number}") for number, body in enumerate(bodies)]


@dataclass(slots=True)
class Figure:
    """One line of a result."""

    name: str
    values: dict[str, float | int | None]
    rounds: dict[str, list[float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        return {"name": self.name, **self.values, "rounds": self.rounds}


class Ways:
    """How many requests of producers took the broker's straight path, within `with`, and why the others did not."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._client: Client | None = None

    def __call__(self, client: Client) -> Self:
        self._client = client
        return self

    def __enter__(self) -> None:
        self._count(-1)

    def __exit__(self, *_: object) -> None:
        self._count(1)

    def _count(self, sign: int) -> None:
        assert self._client is not None
        for name, count in self._client.admin.stats(_STRAIGHT).items():
            self._counts[name] = self._counts.get(name, 0) + sign * count

    def values(self) -> dict[str, float | int | None]:
        """The share, and how many left it for which reason; nothing of a broker that does not count them."""
        counts = dict(self._counts)
        taken, left = counts.pop(_STRAIGHT, 0), counts.pop(_LEFT, 0)
        if not taken + left:
            return {}
        reasons = {f"left_for_{name.removeprefix(_LEFT)[1:]}": int(count) for name, count in counts.items() if count}
        return {"straight_share": taken / (taken + left), **reasons}


@dataclass(slots=True)
class Rates:
    """Rounds of moving messages, beside the floor that moves the same bodies."""

    messages: int
    bytes: int
    seconds: list[float] = field(default_factory=list)
    floor_seconds: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    broker_cpu: list[float] = field(default_factory=list)

    def figure(self, name: str, **more: float | int | None) -> Figure:
        """The medians, and every round."""
        seconds = statistics.median(self.seconds)
        values: dict[str, float | int | None] = {
            "messages_per_second": self.messages / seconds,
            "megabytes_per_second": self.bytes / seconds / 1e6,
            "client_us_per_message": _median(self.client_cpu, 1e6 / self.messages),
            "broker_us_per_message": _median(self.broker_cpu, 1e6 / self.messages),
        }
        rounds = {"messages_per_second": [self.messages / taken for taken in self.seconds]}
        if self.floor_seconds:
            ratios = [raw / taken for raw, taken in zip(self.floor_seconds, self.seconds, strict=True)]
            values["floor_messages_per_second"] = self.messages / statistics.median(self.floor_seconds)
            values["of_floor"] = statistics.median(ratios)
            rounds["of_floor"] = ratios
        return Figure(name, {**values, **more}, rounds)


def _median(values: Sequence[float], factor: float) -> float | None:
    return statistics.median(values) * factor if values and any(values) else None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which a share of them lies."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def latency_figure(name: str, seconds: Sequence[float], **more: float | int | None) -> Figure:
    """Microseconds: median, and what one in a hundred and one in a thousand takes."""
    return Figure(name, {**percentiles(seconds), **more})


def percentiles(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """Microseconds: what half of them take at most, all but one in a hundred, all but one in a thousand, and all."""
    ordered = sorted(seconds)
    return {
        "p50_us": percentile(ordered, 0.5) * 1e6,
        "p99_us": percentile(ordered, 0.99) * 1e6,
        "p999_us": percentile(ordered, 0.999) * 1e6,
        "max_us": ordered[-1] * 1e6,
    }


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {
        "dmq": dmq.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


@contextlib.contextmanager
def bench_topic(url: str, queues: int = 4) -> Iterator[tuple[Client, str]]:
    """A client, and a topic that is gone afterwards."""
    with connect(url, app=APP) as client:
        topic = f"bench-{secrets.token_hex(4)}"
        client.admin.create_topic(topic, queues)
        try:
            yield client, topic
        finally:
            client.admin.delete_topic(topic)


def measured(rates: Rates, run: Callable[[], None], broker_cpu: BrokerCpu, is_warm: bool) -> None:
    """One round; it counts if the rounds before have warmed everything up."""
    cpu, broker, began = time.process_time(), broker_cpu(), time.perf_counter()
    run()
    taken = time.perf_counter() - began
    if is_warm:
        rates.seconds.append(taken)
        rates.client_cpu.append(time.process_time() - cpu)
        rates.broker_cpu.append(broker_cpu() - broker)
