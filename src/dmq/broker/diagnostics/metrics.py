"""What a broker counts and measures: the figures of STATS and the status page, and what Prometheus calls them.

`FIGURES` and `SERIES` are the whole list, with a sentence for each; docs/guide/monitoring.md is checked against it.

What always holds: what counts up never falls while the broker runs; no figure is had by looking at every group.

The load of a broker, as its entry in the registry tells it to the rest of the cluster, every 30 seconds.

What always holds: rates are means over the time since the last ones were taken; a member that does not lead has none of
messages, since followers serve no producers and no consumers.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import Final, NamedTuple

from dmq.broker.broker import Broker
from dmq.broker.diagnostics.disk_report import disk_figures
from dmq.broker.maintenance import Audience
from dmq.clock import Clock
from dmq.model import SYSTEM_PREFIX
from dmq.storage.state.state import Topic

__all__ = ["FIGURES", "SERIES", "Metric", "NodeLoad", "lags", "numbers", "shown_pairs", "shown_topics"]

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"


class Metric(NamedTuple):
    """A metric as Prometheus knows it."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


# By the name of a figure of STATS.
FIGURES: Final[dict[str, Metric]] = {
    key: Metric(name, COUNTER if name.endswith("_total") else GAUGE, text)
    for key, name, text in (
        ("broker_connections", "dmq_connections_total", "Connections that clients opened."),
        ("broker_requests", "dmq_requests_total", "Requests of clients."),
        ("broker_errors", "dmq_request_errors_total", "Requests that were answered with an error."),
        (
            "broker_frames_damaged",
            "dmq_damaged_frames_total",
            "Frames that were damaged on their way from a client; each ended its connection.",
        ),
        ("broker_sessions", "dmq_clients", "Clients that are connected."),
        ("broker_messages_in", "dmq_produced_messages_total", "Messages stored for producers."),
        ("broker_bytes_in", "dmq_produced_bytes_total", "Bytes of the records stored for producers."),
        ("broker_duplicates", "dmq_produced_duplicate_batches_total", "Batches that were sent again and stored once."),
        ("broker_straight", "dmq_straight_requests_total", "Requests of producers that took the straight path."),
        ("broker_straight_left", "dmq_straight_left_total", "Requests of producers that took the general way."),
        ("broker_limited", "dmq_limited_messages_total", "Messages over a rate limit."),
        ("broker_waiting_bytes", "dmq_write_queue_bytes", "Bytes of requests that are not written and flushed yet."),
        ("broker_flushes", "dmq_journal_flushes_total", "Flushes of the journal to the disk."),
        ("broker_units", "dmq_journal_units_total", "Units appended to the journal."),
        ("broker_out", "dmq_leased_messages", "Messages that consumers have and have not settled."),
        ("broker_delivered", "dmq_delivered_messages_total", "Messages handed to consumers, each attempt counted."),
        ("broker_delivered_bytes", "dmq_delivered_bytes_total", "Bytes of the records handed to consumers."),
        (
            "broker_redelivered",
            "dmq_redelivered_messages_total",
            "Messages handed out not for the first time.",
        ),
        ("broker_acked", "dmq_acked_messages_total", "Messages that consumers acked."),
        ("broker_retried", "dmq_retried_messages_total", "Messages that failed and wait for another attempt."),
        ("broker_dead", "dmq_dead_letter_messages_total", "Messages that became dead letters."),
        (
            "broker_members_silent",
            "dmq_silent_members",
            "Members that give no sign of life.",
        ),
        (
            "broker_clock_behind_seconds",
            "dmq_clock_behind_seconds",
            "How far the broker's time is behind its machine's clock, which was set while it ran.",
        ),
        ("broker_groups", "dmq_groups", "Consumer groups, each broadcast member counted."),
        ("broker_group_pairs", "dmq_group_topics", "Pairs of a topic and a group that consumes it."),
        ("broker_lag", "dmq_lag_messages", "Messages not consumed yet, the lags of all groups added up."),
        ("broker_delays_fired", "dmq_delays_fired_total", "Delayed messages that were due and delivered."),
        ("broker_delays_cancelled", "dmq_delays_cancelled_total", "Delayed messages that were cancelled."),
        ("broker_delays_dead", "dmq_delays_dead_total", "Delayed messages that became dead letters."),
        ("broker_delays_unreadable", "dmq_delays_unreadable_total", "Delayed messages that could not be read."),
        ("broker_transactions_committed", "dmq_transactions_committed_total", "Transactions committed."),
        (
            "broker_transactions_rolled_back",
            "dmq_transactions_rolled_back_total",
            "Transactions rolled back.",
        ),
        (
            "broker_transactions_given_up",
            "dmq_transactions_given_up_total",
            "Transactions of unknown outcome.",
        ),
        (
            "broker_transactions_checked",
            "dmq_transactions_checked_total",
            "Questions to producers.",
        ),
        ("broker_dead_letters_drained", "dmq_dead_letters_drained_total", "Dead letters written to their database."),
        (
            "broker_dead_letters_taken",
            "dmq_dead_letters_taken_total",
            "Refused messages kept as dead letters.",
        ),
        (
            "broker_dead_letters_turned_away",
            "dmq_dead_letters_turned_away_total",
            "Refused messages not kept.",
        ),
        ("broker_dead_letters_resent", "dmq_dead_letters_resent_total", "Dead letters sent again."),
        ("broker_dead_letters_deleted", "dmq_dead_letters_deleted_total", "Dead letters that were deleted."),
        ("broker_dead_letters_failures", "dmq_dead_letters_failures_total", "Calls of their database that failed."),
        (
            "broker_dead_letters_waiting",
            "dmq_dead_letters_waiting",
            "Dead letters not in their database yet.",
        ),
        ("broker_dead_letters_refused", "dmq_dead_letters_refused", "Dead letters that their database refuses."),
        (
            "broker_dead_letters_database_down",
            "dmq_dead_letters_database_down",
            "1 while it cannot be used.",
        ),
        ("store_journal_start", "dmq_journal_start_bytes", "Journal offset of the oldest byte that is kept."),
        ("store_journal_end", "dmq_journal_end_bytes", "Journal offset of the next byte to be written."),
        ("store_visible", "dmq_journal_visible_bytes", "Journal offset up to which consumers may see."),
        ("store_flushed", "dmq_journal_flushed_bytes", "Journal offset up to which everything is on the disk."),
        ("store_archived", "dmq_journal_archived_bytes", "Journal offset up to which everything is in the archive."),
        ("store_epoch", "dmq_epoch", "Epoch of the broker, one more with each start."),
        ("store_segments", "dmq_journal_segments", "Segments of the journal."),
        ("store_topics", "dmq_topics", "Topics, those of DMQ itself included."),
        ("store_queues", "dmq_queues", "Queues that have had messages."),
        ("store_producers", "dmq_producers", "Producers whose sequence numbers are remembered."),
        ("store_transactions", "dmq_transactions_open", "Transactions that are neither committed nor rolled back."),
        ("store_delays", "dmq_delays_pending", "Delayed messages that are not due yet."),
        ("store_damage", "dmq_journal_damaged_ranges", "Ranges of the journal that cannot be read."),
        (
            "store_read_failures",
            "dmq_journal_read_failures_total",
            "Reads of the journal that the disk refused (an I/O error).",
        ),
        (
            "store_doubtful",
            "dmq_journal_doubtful_ranges",
            "Ranges that the disk refused to read, and that are asked for again.",
        ),
        ("store_mended", "dmq_journal_mended_ranges_total", "Of those, ranges that came back from another member."),
        ("scrub_rounds", "dmq_scrub_rounds_total", "Times the whole journal was looked through for damage."),
        ("scrub_bytes", "dmq_scrub_bytes_total", "Bytes of the journal that were looked through."),
        ("scrub_found", "dmq_scrub_found_ranges_total", "Damaged ranges that this found, and nothing before it."),
        ("scrub_progress", "dmq_scrub_progress_ratio", "Share of the journal that this round has behind it."),
        ("scrub_ended", "dmq_scrub_ended_seconds", "When the last round ended, in seconds since 1970; 0 if none has."),
        ("store_refusing", "dmq_store_refusing", "1 while the disk is too full to take messages."),
        ("disk_used_ratio", "dmq_disk_used_ratio", "Share of the disk in use, as df counts it."),
        ("disk_used_bytes", "dmq_disk_used_bytes", "Bytes of the disk in use."),
        ("disk_available_bytes", "dmq_disk_available_bytes", "Bytes of the disk that are free for the broker."),
        ("disk_ballast_bytes", "dmq_disk_ballast_bytes", "Bytes kept back for a disk that is full."),
        ("disk_refusing", "dmq_disk_refusing", "1 while the disk is too full to take messages."),
        ("retention_held_bytes", "dmq_retention_held_bytes", "Bytes past the retention, kept for groups."),
        ("retention_dropped_messages", "dmq_retention_dropped_messages_total", "Messages that retention dropped."),
        (
            "retention_dropped_unconsumed_messages",
            "dmq_retention_dropped_unconsumed_messages_total",
            "Of those, messages that a group had not consumed, counted for each group.",
        ),
        ("shard_leading", "dmq_shard_leading", "1 while this member leads its shard and may serve."),
        ("shard_following", "dmq_shard_following", "1 while this member follows its leader."),
        ("shard_epoch", "dmq_shard_epoch", "Epoch of the shard that this member leads or follows."),
        ("shard_members", "dmq_shard_members", "Members of the shard."),
        ("shard_in_sync", "dmq_shard_in_sync_members", "Of those, members that have all that is acknowledged."),
        ("shard_min_in_sync", "dmq_shard_min_in_sync", "Members that must have a message before it is acknowledged."),
        ("shard_uncommitted", "dmq_shard_uncommitted_bytes", "Bytes of this member not known to be committed."),
        ("shard_lag", "dmq_shard_lag_bytes", "Bytes that the last follower has not on its disk; the leader tells."),
        ("shard_behind", "dmq_shard_behind_seconds", "How long that follower has been behind; the leader tells."),
        ("shard_skew", "dmq_shard_skew_seconds", "How far apart a follower's clock and the leader's are; it tells."),
        ("shard_terms", "dmq_shard_terms_total", "Elections that this member has won and served."),
        ("shard_cuts", "dmq_shard_cuts_total", "Times this member has cut what is not part of the shard's history."),
        ("shard_doubtful", "dmq_shard_doubtful", "1 while this member lost something and has not caught up since."),
        ("shard_parked", "dmq_shard_parked", "1 while this member takes no part until a person decides."),
        ("shard_registry_down", "dmq_shard_registry_down", "1 while the registry does not answer this member."),
        ("store_failed", "dmq_store_failed", "1 once the disk refused a flush and nothing is written any more."),
    )
}

TOPIC: Final = ("topic",)
GROUP: Final = ("topic", "group")
SERIES: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric("dmq_build_info", GAUGE, "Always 1; what runs stands in the labels.", ("version", "python", "loop")),
        Metric("dmq_start_time_seconds", GAUGE, "When the broker was started, in seconds since 1970."),
        Metric(
            "dmq_produce_seconds",
            HISTOGRAM,
            "Time from a request until its answer; one turn of the loop in eight is measured.",
        ),
        Metric("dmq_delivery_seconds", HISTOGRAM, "Time from when a message was stored until it was first handed out."),
        Metric("dmq_straight_left_reasons_total", COUNTER, "Why they took the general way.", ("reason",)),
        Metric("dmq_series_hidden", GAUGE, "Topics and groups that only /metrics/detail shows.", ("of",)),
        Metric("dmq_topic_produced_messages_total", COUNTER, "Messages stored for producers.", TOPIC),
        Metric("dmq_topic_produced_bytes_total", COUNTER, "Bytes of the records stored for producers.", TOPIC),
        Metric("dmq_topic_kept_messages", GAUGE, "Messages that the journal still has.", TOPIC),
        Metric("dmq_group_lag_messages", GAUGE, "Messages the group has not consumed yet.", GROUP),
        Metric("dmq_group_oldest_age_seconds", GAUGE, "Age of the oldest message not consumed yet; 0 if none.", GROUP),
        Metric("dmq_group_dropped_messages_total", COUNTER, "Messages dropped before the group consumed them.", GROUP),
        Metric("dmq_group_members", GAUGE, "Consumers that take part.", GROUP),
        Metric("dmq_group_leased_messages", GAUGE, "Messages its consumers have and have not settled.", GROUP),
        Metric("dmq_group_retrying_messages", GAUGE, "Messages that failed and wait for another attempt.", GROUP),
        Metric("dmq_group_delivered_messages_total", COUNTER, "Messages handed out, each attempt counted.", GROUP),
        Metric("dmq_group_delivered_bytes_total", COUNTER, "Bytes of the records handed out.", GROUP),
        Metric("dmq_group_redelivered_messages_total", COUNTER, "Of those, not for the first time.", GROUP),
        Metric("dmq_group_acked_messages_total", COUNTER, "Messages acked.", GROUP),
        Metric("dmq_group_retried_messages_total", COUNTER, "Messages that failed and were to be tried again.", GROUP),
        Metric("dmq_group_dead_letter_messages_total", COUNTER, "Messages that became dead letters.", GROUP),
    )
}


def numbers(audience: Audience, broker: Broker | None) -> dict[str, float]:
    """Counters and gauges by name; without a Broker those of its clients and of its shard."""
    values: dict[str, float] = {f"broker_{name}": value for name, value in audience.counters.items()}
    values["broker_sessions"] = len(audience)
    values |= audience.figures()
    if broker is None:
        return values
    publisher, writer, channels, lag_table = broker.publisher, broker.writer, broker.channels, broker.queries.lags
    traffic = channels.traffic
    values |= {
        "broker_messages_in": publisher.messages_in,
        "broker_bytes_in": publisher.bytes_in,
        "broker_duplicates": publisher.duplicates,
        "broker_straight": broker.straight.taken,
        "broker_straight_left": sum(broker.straight.left.values()),
        "broker_limited": broker.limits.limited,
        "broker_waiting_bytes": writer.waiting_bytes,
        "broker_flushes": writer.flushes,
        "broker_units": writer.units,
        "broker_out": channels.out,
        "broker_members_silent": len(channels.silent),
        "broker_clock_behind_seconds": broker.clock.behind_ms / 1000,
        "broker_delivered": traffic.delivered,
        "broker_delivered_bytes": traffic.delivered_bytes,
        "broker_redelivered": traffic.redelivered,
        "broker_acked": traffic.acked,
        "broker_retried": traffic.retried,
        "broker_dead": traffic.dead,
        "broker_groups": broker.queries.group_count,
        "broker_group_pairs": len(lag_table),
        "broker_lag": lag_table.total(),
    }
    values |= {f"store_{name}": float(value) for name, value in broker.store.stats().items()}
    if broker.scrubber is not None:
        values |= broker.scrubber.figures()
    values |= disk_figures(broker)
    values |= {f"broker_{name}": value for name, value in broker.dead_letters.figures().items()}
    values |= {f"broker_{name}": value for name, value in broker.delays.figures().items()}
    values |= {f"broker_{name}": value for name, value in broker.transactions.figures().items()}
    return values


def shown_topics(broker: Broker) -> list[Topic]:
    """The topics that are shown one by one: those with the most messages, as many as the settings allow."""
    most, queries = broker.settings.metrics_series_max, broker.queries
    found = dict.fromkeys(queries.lags.fullest(most + 2))
    # Topics that never had a message nor a group are in no table.
    found |= {topic.id: None for topic in islice(queries.derived.state.topics.values(), most + 2)}
    topics = [topic for topic_id in found if (topic := _by_id(broker, topic_id)) is not None]
    return topics[:most]


def shown_pairs(broker: Broker) -> dict[tuple[str, str], tuple[Topic, int]]:
    """The groups that are shown one by one, those with the largest lags: their topics and lags, by topic and group."""
    table = broker.queries.lags
    found: dict[tuple[str, str], tuple[Topic, int]] = {}
    for pair in table.largest(broker.settings.metrics_series_max):
        topic = _by_id(broker, pair.topic_id)
        if topic is not None and not pair.group.startswith(SYSTEM_PREFIX):
            live = broker.channels.open.get((topic.name, pair.group))
            found[topic.name, pair.group] = (topic, table.of(pair) if live is None else live.lag())
    return found


def _by_id(broker: Broker, topic_id: int) -> Topic | None:
    topic = broker.queries.topic_by_id(topic_id)
    return None if topic is None or topic.name.startswith(SYSTEM_PREFIX) else topic


def lags(broker: Broker) -> dict[tuple[str, str], int]:
    """How much each group has not settled, by topic and group, whether its consumers are there or not."""
    queries, table = broker.queries, broker.queries.lags
    found: dict[tuple[str, str], int] = {}
    for pair in table:
        topic = queries.topic_by_id(pair.topic_id)
        if topic is not None:
            found[topic.name, pair.group] = table.of(pair)
    return found | {key: channel.lag() for key, channel in broker.channels.open.items()}


class NodeLoad:
    """The load of one process. Messages and bytes are a second; `cpu` is in cores, `disk_used` a share.

    Parameters:
        audience: its clients.
    """

    def __init__(self, audience: Audience, clock: Clock) -> None:
        self._audience = audience
        self._clock = clock
        self._taken_at = clock.monotonic()
        self._cpu = time.process_time()
        self._counts: dict[str, int] = {}

    def take(self, broker: Broker | None) -> dict[str, float]:
        """The load since it was taken last.

        Parameters:
            broker: what serves the clients, if there is one; one that was made meanwhile counts from its start.
        """
        now, cpu = self._clock.monotonic(), time.process_time()
        seconds = max(now - self._taken_at, 0.001)
        found = {"cpu": round((cpu - self._cpu) / seconds, 3), "connections": float(len(self._audience))}
        counts = {} if broker is None else _counts(broker)
        for name, count in counts.items():
            before = self._counts.get(name, 0)
            found[name] = round((count - before if count >= before else count) / seconds, 1)
        if broker is not None:
            found["disk_used"] = round(broker.store.space.usage.share, 3)
        self._taken_at, self._cpu, self._counts = now, cpu, counts
        return found


def _counts(broker: Broker) -> dict[str, int]:
    publisher, traffic = broker.publisher, broker.channels.traffic
    return {
        "messages_in": publisher.messages_in,
        "bytes_in": publisher.bytes_in,
        "messages_out": traffic.delivered,
        "bytes_out": traffic.delivered_bytes,
    }
