"""What the derived tables should hold, worked out in plain Python, row by row, without any cleverness."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import UTC, datetime, time, timedelta
from typing import Any

import numpy as np
import pytest

from dmq.records.layout import MOVED, REPLAYED
from tests.archive_rows import Days, Row

MINUTE = timedelta(minutes=1)


def ms(later: datetime, earlier: datetime) -> int:
    return (later - earlier) // timedelta(milliseconds=1)


def minute_of(at: datetime) -> datetime:
    return at.replace(second=0, microsecond=0)


def offered(message: Row) -> datetime:
    """When the broker had to store it: delays are not latency."""
    at: datetime = message["received_at"] if message["flags"] & (MOVED | REPLAYED) else message["sent_at"]
    return at


def happened(event: Row) -> datetime:
    midnight = datetime.combine(event["dt"], time(), UTC)
    at: datetime = min(max(event["at"], midnight), midnight + timedelta(days=1, microseconds=-1))
    return at


def trace(days: Days) -> list[Row]:
    by_message: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for event in days.events:
        by_message[event["message_id"]][event["group"]].append(event)
    rows = []
    for message in days.messages:
        base: Row = {name: message[name] for name in ("message_id", "topic", "sent_at", "stored_at", "dt")}
        base["store_latency_ms"] = ms(message["stored_at"], offered(message))
        groups = by_message.get(message["message_id"])
        if not groups:
            rows.append(base | _NOTHING)
        for group, events in (groups or {}).items():
            rows.append(base | {"group": group} | _life(message, sorted(events, key=lambda event: event["at"])))
    return sorted(rows, key=lambda row: (row["message_id"], row["group"] or ""))


_NOTHING: Row = dict.fromkeys(
    (
        "group",
        "delivered_at",
        "acked_at",
        "delivery_latency_ms",
        "ack_latency_ms",
        "last_error",
        "outcome_at",
        "error_at",
    )
) | {"attempts": 0, "outcome": "stored"}


def _life(message: Row, events: list[Row]) -> Row:
    delivered = next((event["at"] for event in events if event["outcome"] == "delivered"), None)
    acked = next((event["at"] for event in events if event["outcome"] == "acked"), None)
    errors = [event for event in events if event["error"]]
    return {
        "delivered_at": delivered,
        "acked_at": acked,
        "delivery_latency_ms": None if delivered is None else ms(delivered, message["stored_at"]),
        "ack_latency_ms": None if acked is None else ms(acked, message["stored_at"]),
        "attempts": max(event["attempt"] for event in events),
        "outcome": events[-1]["outcome"],
        "last_error": errors[-1]["error"] if errors else None,
        "outcome_at": events[-1]["at"],
        "error_at": errors[-1]["at"] if errors else None,
    }


def percentiles(took: list[int]) -> Row:
    if not took:
        return dict.fromkeys(("latency_p50_ms", "latency_p99_ms", "latency_max_ms"))
    return {
        "latency_p50_ms": float(np.percentile(took, 50)),
        "latency_p99_ms": float(np.percentile(took, 99)),
        "latency_max_ms": float(max(took)),
    }


def metrics_in(days: Days) -> dict[Any, Row]:
    found: dict[Any, list[Row]] = defaultdict(list)
    for message in days.messages:
        found[minute_of(message["stored_at"]), message["topic"], message["app"]].append(message)
    return {
        key: {"messages_in": len(rows), "bytes_in": sum(len(row["body"]) for row in rows), "dt": rows[0]["dt"]}
        | percentiles([ms(row["stored_at"], offered(row)) for row in rows])
        for key, rows in found.items()
    }


def metrics_out(days: Days) -> dict[Any, Row]:
    stored = {message["message_id"]: message["stored_at"] for message in days.messages}
    counts: dict[Any, Counter[str]] = defaultdict(Counter)
    took: dict[Any, list[int]] = defaultdict(list)
    for event in days.events:
        if event["outcome"] == "delivered":
            continue
        key = minute_of(happened(event)), event["topic"], event["group"]
        counts[key][event["outcome"]] += 1
        if event["outcome"] == "acked" and event["message_id"] in stored:
            took[key].append(ms(happened(event), stored[event["message_id"]]))
    return {
        key: {"messages_out": count["acked"], "retries": count["failed"], "dead": count["dead"] + count["expired"]}
        | percentiles(took[key])
        for key, count in counts.items()
    }


def lag(days: Days, topic: str, group: str, minute: datetime) -> int:
    """How far behind a group was at the end of a minute, looking at everything from the beginning."""
    end = minute + MINUTE
    places = {message["message_id"]: message for message in days.messages}
    queue_ends: dict[int, int] = {}
    for message in days.messages:
        if message["topic"] == topic and message["stored_at"] < end:
            queue_ends[message["queue"]] = max(queue_ends.get(message["queue"], 0), message["queue_offset"] + 1)
    settled = [
        event
        for event in days.events
        if (event["topic"], event["group"]) == (topic, group)
        and event["outcome"] != "delivered"
        and happened(event) < end
        and event["message_id"] in places
    ]
    positions: dict[int, tuple[datetime, int]] = {}
    waiting: set[str] = set()
    over: set[str] = set()
    for event in sorted(settled, key=happened):
        message, name = places[event["message_id"]], event["message_id"]
        if name not in waiting | over:  # else it came from a retry, not from its queue
            at, position = positions.get(message["queue"], (minute, 0))
            now = minute_of(happened(event))
            past = message["queue_offset"] + 1
            positions[message["queue"]] = (now, max(position, past) if at == now else past)
        if event["outcome"] == "failed" and name not in over:
            waiting.add(name)
        elif event["outcome"] != "failed" and name in waiting:
            waiting.discard(name)
            over.add(name)
    behind = sum(max(0, queue_ends[queue] - position) for queue, (_, position) in positions.items())
    return behind + len(waiting)


def dead_letters(days: Days) -> dict[Any, Row]:
    found: dict[Any, list[Row]] = defaultdict(list)
    for letter in days.copies:
        found[letter["dt"], letter["origin_topic"], letter["group"], letter["reason"]].append(letter)
    answer = {}
    for key, letters in found.items():
        errors = Counter(letter["error"].split("\n")[0] for letter in letters)
        top = sorted(errors.items(), key=lambda item: (-item[1], item[0]))[:5]
        ordered = sorted(letters, key=lambda letter: (letter["stored_at"], letter["message_id"]))
        answer[key] = {
            "count": len(letters),
            "top_errors": [{"error": error, "count": count} for error, count in top],
            "samples": [letter["message_id"] for letter in ordered[:5]],
        }
    return answer


# --- compared ---------------------------------------------------------------------------------------------------------

ROUNDING = 1 / 512  # of latencies over a second


def check_metrics(rows: list[Row], days: Days) -> None:
    """See that rows of `metrics_1m` are what they should be."""
    came = {(row["minute"], row["topic"], row["app"]): row for row in rows if row["group"] is None}
    expected = metrics_in(days)
    assert came.keys() == expected.keys()
    for key, facts in expected.items():
        assert {name: came[key][name] for name in facts} == _about(facts)
    went = {(row["minute"], row["topic"], row["group"]): row for row in rows if row["group"] is not None}
    settled = metrics_out(days)
    assert settled.keys() <= went.keys()
    nothing = {"messages_out": 0, "retries": 0, "dead": 0}
    for key, row in went.items():
        facts = settled.get(key, nothing)
        assert {name: row[name] for name in facts} == _about(facts)
        minute, topic, group = key
        assert row["lag"] == lag(days, topic, group, minute), key
        assert row["dt"] == minute.date()
    assert len(came) + len(went) == len(rows)


def _about(facts: Row) -> Row:
    """These, with latencies that may be rounded where there are some over a second."""
    most = facts.get("latency_max_ms") or 0.0
    slack = most * ROUNDING if most >= 1024 else 1e-9
    return {
        name: pytest.approx(value, abs=slack) if name in ("latency_p50_ms", "latency_p99_ms") else value
        for name, value in facts.items()
    }
