"""How far streams of `format("dmq")` are behind, and how fast they are, from the progress that Spark reports.

Spark has no metrics of sources written in Python: the offsets of a query's progress are all there is. They are enough,
since the source reports the latest offsets with every micro-batch.

What always holds: nothing here asks a broker; a source of another kind is passed over.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from dmq.errors import InvalidSettings
from dmq.event_log import EventLog
from dmq.pipeline.source.offsets import parse_offsets

__all__ = ["StreamLag", "StreamLagListener", "stream_lag"]

log = EventLog(__name__)


@dataclass(frozen=True)
class StreamLag:
    """One source of a query after a micro-batch. Names of the first three are those of Kafka's connector."""

    min_offsets_behind_latest: int
    max_offsets_behind_latest: int
    avg_offsets_behind_latest: float
    offsets_behind_latest: int
    """Of all partitions together."""
    input_rows_per_second: float
    processed_rows_per_second: float


def stream_lag(progress: Any) -> list[StreamLag]:
    """The lag of each `dmq` source, of a `StreamingQueryProgress` or the dict that `query.lastProgress` is."""
    if not isinstance(progress, dict):
        progress = json.loads(progress.json)
    found = []
    for source in progress.get("sources", ()):
        ends, latest = (_offsets(source.get(name)) for name in ("endOffset", "latestOffset"))
        if ends is None or latest is None:
            continue
        behind = [max(0, last - ends.get(place, 0)) for place, last in latest.items()] or [0]
        found.append(
            StreamLag(
                min(behind),
                max(behind),
                sum(behind) / len(behind),
                sum(behind),
                input_rows_per_second=float(source.get("inputRowsPerSecond") or 0.0),
                processed_rows_per_second=float(source.get("processedRowsPerSecond") or 0.0),
            )
        )
    return found


def _offsets(raw: Any) -> dict[Any, int] | None:
    """Offsets of ours, as JSON or parsed; None if they are of another source."""
    try:
        return {**parse_offsets(raw, "progress").places}
    except InvalidSettings:
        return None


class StreamLagListener(StreamingQueryListener):
    """Keeps the lag of every query, and logs it: `spark.streams.addListener(StreamLagListener())`."""

    def __init__(self) -> None:
        self._lags: dict[str, list[StreamLag]] = {}
        self._lock = threading.Lock()

    def of(self, query: Any) -> list[StreamLag]:
        """The lag of each source of a query, as of its last micro-batch; none if it had none yet, or has ended."""
        with self._lock:
            return [*self._lags.get(str(query.id), ())]

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802
        """Nothing is known yet."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802
        lags = stream_lag(event.progress)
        with self._lock:
            self._lags[str(event.progress.id)] = lags
        for lag in lags:
            log.info(
                "stream progressed",
                query=event.progress.name or str(event.progress.id),
                behind=lag.offsets_behind_latest,
                rows_per_second=round(lag.processed_rows_per_second),
            )

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802
        """The last lag holds."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802
        with self._lock:
            self._lags.pop(str(event.id), None)
