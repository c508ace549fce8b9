"""The figures of a broker in Prometheus' text format.

`/metrics` has the figures of the whole broker, and of topics and groups one by one only as many as
`broker.metrics_series_max` allows: the topics with the most messages and the groups with the largest lags.
`/metrics/detail` has all of them, in slices.

What always holds: every metric has HELP and TYPE, and a name that `promtool check metrics` accepts; after every 25
topics or groups the loop does other work; ages of at most `_READS_MAX` messages are read from the disk for one page.
"""

from __future__ import annotations

import asyncio
import platform
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, TypeAlias

from dmq.broker.broker import Broker
from dmq.broker.delivery.channel import Traffic
from dmq.broker.diagnostics.disk_report import dropped_by_group
from dmq.broker.diagnostics.metrics import FIGURES, SERIES, Metric, numbers
from dmq.broker.maintenance import Audience
from dmq.broker.runtime.runtime import Histogram
from dmq.errors import DMQError, InvalidRequest
from dmq.model import SYSTEM_PREFIX
from dmq.storage.state.positions import Pair
from dmq.storage.state.state import Topic, queue_key
from dmq.version import __version__

__all__ = ["Exposition", "standby_metrics"]

SLICE_MAX: Final = 500
_TURN: Final = 25
_PART_LINES: Final = 250
_READS_MAX: Final = 32
_TIMES_MAX: Final = 16_384
_NOTHING: Final = Traffic()

Head: TypeAlias = tuple[int, int]  # the key of a queue, and an offset in it


class _Text:
    """Samples, gathered by metric, since those of one metric must stand together."""

    def __init__(self) -> None:
        self._samples: dict[str, list[str]] = {}

    def add(self, metric: Metric, value: float, labels: str = "") -> None:
        self._lines(metric).append(f"{metric.name}{labels} {_number(value)}")

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

    async def parts(self) -> list[str]:
        """The text; the loop does other work between its parts."""
        parts: list[str] = []
        for name in sorted(self._samples):
            lines = self._samples[name]
            for start in range(0, len(lines), _PART_LINES):
                parts.append("\n".join((*lines[start : start + _PART_LINES], "")))
                if len(lines) > _PART_LINES:
                    await asyncio.sleep(0)
        return parts


async def standby_metrics(audience: Audience) -> list[str]:
    """A member of a shard that does not lead it: its clients, and the shard."""
    text = _Text()
    _add_build(text)
    for key, value in numbers(audience, None).items():
        text.add(FIGURES[key], value)
    return await text.parts()


def _add_build(text: _Text) -> None:
    loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    build = SERIES["dmq_build_info"]
    text.add(build, 1, _labels(build, __version__, platform.python_version(), loop))


class Exposition:
    """The pages of one broker."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._times: OrderedDict[Head, int] = OrderedDict()  # when messages were stored that groups wait for

    async def metrics(self) -> list[str]:
        """The broker, its fullest topics, and the groups that are behind most."""
        broker, text = self.broker, _Text()
        _add_build(text)
        text.add(SERIES["dmq_start_time_seconds"], broker.times.started_ms / 1000)
        for key, value in numbers(broker.audience, broker).items():
            text.add(FIGURES[key], value)
        text.add_histogram(SERIES["dmq_produce_seconds"], broker.writer.probe.waits)
        text.add_histogram(SERIES["dmq_delivery_seconds"], broker.channels.waits)
        reasons = SERIES["dmq_straight_left_reasons_total"]
        for reason, count in broker.straight.left.items():
            text.add(reasons, count, _labels(reasons, reason))
        table, most = broker.queries.lags, broker.settings.metrics_series_max
        topics = [topic for topic_id in table.fullest(most + 2) if (topic := self._shown(topic_id))][:most]
        pairs = [pair for pair in table.largest(most) if self._shown(pair.topic_id)]
        hidden = SERIES["dmq_series_hidden"]
        text.add(hidden, max(0, broker.queries.topic_count - len(topics)), _labels(hidden, "topics"))
        text.add(hidden, max(0, len(table) - len(pairs)), _labels(hidden, "groups"))
        await self._add_topics(text, topics)
        await self._add_pairs(text, pairs)
        return await text.parts()

    async def detail(self, asked: Mapping[str, str]) -> list[str]:
        """A slice of all topics or of all groups.

        Parameters:
            asked: `of` is `topics` or `groups`; `after` is where the slice begins and `limit` how long it is at most.

        Raises:
            InvalidRequest: that is not a slice.
        """
        of, after, limit = asked.get("of", "groups"), asked.get("after", "0"), asked.get("limit", str(SLICE_MAX))
        if of not in ("topics", "groups") or not after.isdecimal() or not limit.isdecimal() or len(after + limit) > 15:
            raise InvalidRequest("ask as in /metrics/detail?of=groups&after=0&limit=500; of is groups or topics")
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
        following = [f"# next: /metrics/detail?of={of}&after={stop}&limit={stop - start}\n"] if stop < size else []
        return await text.parts() + following

    def _shown(self, topic_id: int) -> Topic | None:
        topic = self.broker.queries.topic_by_id(topic_id)
        return None if topic is None or topic.name.startswith(SYSTEM_PREFIX) else topic

    # --- topics -----------------------------------------------------------------------------------------------------

    async def _add_topics(self, text: _Text, topics: Sequence[Topic]) -> None:
        for number, topic in enumerate(topics, 1):
            messages, size = self.broker.publisher.by_topic.get(topic.name, (0, 0))
            labels = _labels(SERIES["dmq_topic_kept_messages"], topic.name)
            text.add(SERIES["dmq_topic_produced_messages_total"], messages, labels)
            text.add(SERIES["dmq_topic_produced_bytes_total"], size, labels)
            text.add(SERIES["dmq_topic_kept_messages"], self.broker.catalog.amounts(topic)[0], labels)
            if number % _TURN == 0:
                await asyncio.sleep(0)

    # --- groups -----------------------------------------------------------------------------------------------------

    async def _add_pairs(self, text: _Text, pairs: Sequence[Pair]) -> None:
        dropped = dropped_by_group(self.broker)
        reads = 0
        for number, pair in enumerate(pairs, 1):
            if number % _TURN == 0:
                await asyncio.sleep(0)
            topic = self._shown(pair.topic_id)
            if topic is None:
                continue  # deleted meanwhile
            labels = _labels(SERIES["dmq_group_lag_messages"], topic.name, pair.group)
            lag = self._add_pair(text, topic, pair, labels)
            text.add(SERIES["dmq_group_dropped_messages_total"], dropped.get((topic.name, pair.group), 0), labels)
            heads = self._heads(topic, pair.group) if lag else []
            missing = [head for head in heads if head not in self._times]
            if missing and reads < _READS_MAX:
                reads += 1
                await self._learn_times(topic, missing)
            times = [stored_ms for head in heads if (stored_ms := self._times.get(head)) is not None]
            if times or not lag:
                oldest_ms = min(times, default=0)
                age_ms = max(0, self.broker.clock.wall.now_ms() - oldest_ms) if times else 0
                text.add(SERIES["dmq_group_oldest_age_seconds"], age_ms / 1000, labels)

    def _add_pair(self, text: _Text, topic: Topic, pair: Pair, labels: str) -> int:
        """What is known of a group without the disk; returns its lag."""
        broker, table = self.broker, self.broker.queries.lags
        live = broker.channels.open.get((topic.name, pair.group))
        lag = live.lag() if live is not None else table.of(pair) if pair in table else 0
        text.add(SERIES["dmq_group_lag_messages"], lag, labels)
        text.add(SERIES["dmq_group_members"], 0 if live is None else len(live.group.members), labels)
        text.add(SERIES["dmq_group_leased_messages"], 0 if live is None else live.out, labels)
        text.add(SERIES["dmq_group_retrying_messages"], broker.queries.retrying_all(pair.group, topic), labels)
        traffic = broker.channels.traffic_of(topic.name, pair.group) or _NOTHING
        text.add(SERIES["dmq_group_delivered_messages_total"], traffic.delivered, labels)
        text.add(SERIES["dmq_group_delivered_bytes_total"], traffic.delivered_bytes, labels)
        text.add(SERIES["dmq_group_redelivered_messages_total"], traffic.redelivered, labels)
        text.add(SERIES["dmq_group_acked_messages_total"], traffic.acked, labels)
        text.add(SERIES["dmq_group_retried_messages_total"], traffic.retried, labels)
        text.add(SERIES["dmq_group_dead_letter_messages_total"], traffic.dead, labels)
        return lag

    def _heads(self, topic: Topic, group: str) -> list[Head]:
        """The oldest message a group has not consumed in each queue, as (key of the queue, offset)."""
        state = self.broker.queries.derived.state
        found = []
        for queue in range(topic.config.queues):
            key = queue_key(topic.id, queue)
            position, first = state.positions.get(group, topic.id, queue), state.first.get(key, 0)
            at = first if position is None else max(first, position.floor)
            if at < state.next.get(key, 0):
                found.append((key, at))
        return found

    async def _learn_times(self, topic: Topic, heads: Sequence[Head]) -> None:
        """Learn when messages were stored: by the marks of the journal, or from the record where there is none."""
        queries, times = self.broker.queries, self.broker.times
        for key, at in heads:
            try:
                ask = partial(queries.journal_offset, topic.name, key & 255, at)
                place = await self.broker.reads.ask(ask)
                stored_ms = None if place is None else times.at(place)
                if place is not None and stored_ms is None:
                    found = await self.broker.reads.ask(partial(queries.record_at, place))
                    stored_ms = None if found is None else found.record.store_time_ms
            except DMQError:
                continue  # deleted meanwhile, or damaged
            if stored_ms is not None:
                self._times[key, at] = stored_ms
        while len(self._times) > _TIMES_MAX:
            self._times.popitem(last=False)


def _labels(metric: Metric, *texts: str) -> str:
    pairs = zip(metric.labels, texts, strict=True)
    return "{" + ",".join(f'{label}="{_escaped(text)}"' for label, text in pairs) + "}"


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))  # also what is true or false
    return str(int(value)) if value.is_integer() else repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
