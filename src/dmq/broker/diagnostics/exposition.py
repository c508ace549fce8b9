"""The figures of a broker in Prometheus' text format.

`/metrics` has the figures of the whole broker, and of topics and groups one by one only as many as
`broker.metrics_series_max` allows: the topics with the most messages and the groups with the largest lags.
`/metrics/detail` has all of them, in slices.

What always holds: every metric has HELP and TYPE, and a name that `promtool check metrics` accepts; between a hundred
topics or groups the loop does other work; ages of at most `_READS_MAX` messages are read from the disk for one page.
"""

from __future__ import annotations

import asyncio
import platform
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.disk_report import dropped_by_group
from dmq.broker.diagnostics.metrics import FIGURES, SERIES, Metric, numbers
from dmq.broker.runtime.histogram import Histogram
from dmq.errors import DMQError, InvalidRequest
from dmq.model import SYSTEM_PREFIX
from dmq.storage.state.lag_table import Pair
from dmq.storage.state.state import Topic
from dmq.version import __version__

__all__ = ["Exposition"]

SLICE_MAX: Final = 1000
_TURN: Final = 100
_READS_MAX: Final = 32
_TIMES_MAX: Final = 4096

Labels = tuple[str, ...]


class _Text:
    """Samples, gathered by metric, since those of one metric must stand together."""

    def __init__(self) -> None:
        self._samples: dict[str, list[str]] = {}

    def add(self, metric: Metric, value: float, labels: Labels = ()) -> None:
        name = metric.name
        if labels:
            pairs = zip(metric.labels, labels, strict=True)
            name += "{" + ",".join(f'{label}="{_escaped(text)}"' for label, text in pairs) + "}"
        self._lines(metric).append(f"{name} {_number(value)}")

    def add_histogram(self, metric: Metric, found: Histogram) -> None:
        lines = self._lines(metric)
        cumulative = found.cumulative()
        lines += [f'{metric.name}_bucket{{le="{bound}"}} {count}' for bound, count in cumulative]
        lines += [f"{metric.name}_sum {_number(found.sum)}", f"{metric.name}_count {cumulative[-1][1]}"]

    def _lines(self, metric: Metric) -> list[str]:
        lines = self._samples.get(metric.name)
        if lines is None:
            head = [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
            lines = self._samples[metric.name] = head
        return lines

    def __str__(self) -> str:
        return "".join(f"{line}\n" for name in sorted(self._samples) for line in self._samples[name])


class Exposition:
    """The pages of one broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._times: OrderedDict[int, int] = OrderedDict()  # when it was stored, by journal offset

    async def metrics(self) -> str:
        """The broker, its fullest topics, and the groups that are behind most."""
        broker, text = self.broker, _Text()
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        text.add(SERIES["dmq_build_info"], 1, (__version__, platform.python_version(), loop))
        text.add(SERIES["dmq_start_time_seconds"], broker.started_ms / 1000)
        for key, value in numbers(broker.audience, broker).items():
            text.add(FIGURES[key], value)
        text.add_histogram(SERIES["dmq_produce_seconds"], broker.writer.waits)
        text.add_histogram(SERIES["dmq_delivery_seconds"], broker.channels.waits)
        table, most = broker.queries.lags, broker.settings.metrics_series_max
        topics = [topic for topic_id in table.fullest(most + 2) if (topic := self._shown(topic_id))][:most]
        pairs = [pair for pair in table.largest(most) if self._shown(pair.topic_id)]
        text.add(SERIES["dmq_series_hidden"], max(0, broker.queries.topic_count - len(topics)), ("topics",))
        text.add(SERIES["dmq_series_hidden"], max(0, len(table) - len(pairs)), ("groups",))
        await self._add_topics(text, topics)
        await self._add_pairs(text, pairs)
        return str(text)

    async def detail(self, asked: Mapping[str, str]) -> str:
        """A slice of all topics or of all groups.

        Parameters:
            asked: `of` is `topics` or `groups`; `after` is where the slice begins and `limit` how long it is at most.

        Raises:
            InvalidRequest: that is not a slice.
        """
        of, after, limit = asked.get("of", "groups"), asked.get("after", "0"), asked.get("limit", str(SLICE_MAX))
        if of not in ("topics", "groups") or not after.isdecimal() or not limit.isdecimal() or len(after + limit) > 15:
            raise InvalidRequest("ask as in /metrics/detail?of=groups&after=0&limit=1000; of is groups or topics")
        text, start = _Text(), int(after)
        stop = start + max(1, min(int(limit), SLICE_MAX))
        table = self.broker.queries.lags
        if of == "topics":
            ids = table.topic_slots[start:stop]
            await self._add_topics(text, [topic for topic_id in ids if (topic := self._shown(topic_id))])
            size = len(table.topic_slots)
        else:
            found = table.slots[start:stop]
            await self._add_pairs(text, [pair for pair in found if pair is not None and self._shown(pair.topic_id)])
            size = len(table.slots)
        following = f"# next: /metrics/detail?of={of}&after={stop}&limit={stop - start}\n" if stop < size else ""
        return str(text) + following

    def _shown(self, topic_id: int) -> Topic | None:
        topic = self.broker.queries.topic_by_id(topic_id)
        return None if topic is None or topic.name.startswith(SYSTEM_PREFIX) else topic

    # --- topics -----------------------------------------------------------------------------------------------------

    async def _add_topics(self, text: _Text, topics: Sequence[Topic]) -> None:
        for number, topic in enumerate(topics, 1):
            messages, size = self.broker.publisher.by_topic.get(topic.name, (0, 0))
            labels = (topic.name,)
            text.add(SERIES["dmq_topic_produced_messages_total"], messages, labels)
            text.add(SERIES["dmq_topic_produced_bytes_total"], size, labels)
            text.add(SERIES["dmq_topic_kept_messages"], self.broker.catalog.kept(topic), labels)
            if number % _TURN == 0:
                await asyncio.sleep(0)

    # --- groups -----------------------------------------------------------------------------------------------------

    async def _add_pairs(self, text: _Text, pairs: Sequence[Pair]) -> None:
        reads = 0
        dropped = dropped_by_group(self.broker)
        for number, pair in enumerate(pairs, 1):
            if number % _TURN == 0:
                await asyncio.sleep(0)
            topic = self._shown(pair.topic_id)
            if topic is None:
                continue  # deleted meanwhile
            labels = (topic.name, pair.group)
            lag = self._add_pair(text, topic, pair)
            text.add(SERIES["dmq_group_dropped_messages_total"], dropped.get(labels, 0), labels)
            oldest = await self._oldest(topic, pair.group) if lag else None
            stored_ms = None if oldest is None else self.broker.times.at(oldest) or self._times.get(oldest)
            if oldest is not None and stored_ms is None and reads < _READS_MAX:
                reads += 1
                stored_ms = await self._read_time(oldest)
            if stored_ms is not None or not lag:
                age_ms = 0 if stored_ms is None else max(0, self.broker.clock.wall.now_ms() - stored_ms)
                text.add(SERIES["dmq_group_oldest_age_seconds"], age_ms / 1000, labels)

    def _add_pair(self, text: _Text, topic: Topic, pair: Pair) -> int:
        """What is known of a group without the disk; returns its lag."""
        broker, labels = self.broker, (topic.name, pair.group)
        live = broker.channels.open.get(labels)
        table = broker.queries.lags
        lag = live.lag() if live is not None else table.of(pair) if pair in table else 0
        text.add(SERIES["dmq_group_lag_messages"], lag, labels)
        text.add(SERIES["dmq_group_members"], 0 if live is None else len(live.group.members), labels)
        text.add(SERIES["dmq_group_leased_messages"], 0 if live is None else live.out, labels)
        retrying = sum(broker.queries.retrying(pair.group, topic.id, queue) for queue in range(topic.config.queues))
        text.add(SERIES["dmq_group_retrying_messages"], retrying, labels)
        traffic = broker.channels.traffic_of(*labels)
        for name, count in (
            ("delivered_messages", 0 if traffic is None else traffic.delivered),
            ("delivered_bytes", 0 if traffic is None else traffic.delivered_bytes),
            ("redelivered_messages", 0 if traffic is None else traffic.redelivered),
            ("acked_messages", 0 if traffic is None else traffic.acked),
            ("retried_messages", 0 if traffic is None else traffic.retried),
            ("dead_letter_messages", 0 if traffic is None else traffic.dead),
        ):
            text.add(SERIES[f"dmq_group_{name}_total"], count, labels)
        return lag

    async def _oldest(self, topic: Topic, group: str) -> int | None:
        """The journal offset of the oldest message a group has not consumed."""
        queries = self.broker.queries
        state = queries.derived.state

        def look() -> int | None:
            places = []
            for queue in range(topic.config.queues):
                first, following = queries.bounds(topic.name, queue)
                position = state.positions.get(group, topic.id, queue)
                at = first if position is None else max(first, position.floor)
                if at < following and (place := queries.journal_offset(topic.name, queue, at)) is not None:
                    places.append(place)
            return min(places, default=None)

        try:
            return await self.broker.reads.ask(look)
        except DMQError:
            return None  # deleted meanwhile, or damaged

    async def _read_time(self, offset: int) -> int | None:
        """When a message was stored that was there before the broker started."""
        try:
            found = await self.broker.reads.ask(lambda: self.broker.queries.record_at(offset))
        except DMQError:
            return None
        if found is None:
            return None
        stored_ms = found.record.store_time_ms
        self._times[offset] = stored_ms
        if len(self._times) > _TIMES_MAX:
            self._times.popitem(last=False)
        return stored_ms


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
