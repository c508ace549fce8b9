"""The lag of a stream, from the progress that Spark reports."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dmq.pipeline.source.stream_lag import StreamLag, StreamLagListener, stream_lag

PROGRESS = {
    "id": "q",
    "name": None,
    "sources": [
        {
            "endOffset": {"orders": {"0": 5, "1": 7, "incarnation": {"0": 3}}},
            "latestOffset": {"orders": {"0": 9, "1": 7, "2": 2, "incarnation": {"0": 3}}},
            "inputRowsPerSecond": 4.0,
            "processedRowsPerSecond": 8.0,
        },
        {"endOffset": {"logOffset": 3}, "latestOffset": None},
        {"endOffset": "7", "latestOffset": "8"},
    ],
}


def test_what_waits_in_each_partition_and_in_all() -> None:
    assert stream_lag(PROGRESS) == [StreamLag(0, 4, 2.0, 6, 4.0, 8.0)]


def test_a_listener_knows_the_queries_that_run() -> None:
    import json

    listener = StreamLagListener()
    query: Any = SimpleNamespace(id="q")
    event: Any = SimpleNamespace(progress=SimpleNamespace(id="q", name=None, json=json.dumps(PROGRESS)))
    assert listener.of(query) == []
    listener.onQueryProgress(event)
    assert listener.of(query) == [StreamLag(0, 4, 2.0, 6, 4.0, 8.0)]
    listener.onQueryTerminated(query)
    assert listener.of(query) == []
