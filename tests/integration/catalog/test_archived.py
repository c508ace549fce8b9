"""ARCHIVED: how far the archive is, kept by the broker, and waited for by retention."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import dmq
from dmq.client.client import Client
from dmq.errors import InvalidRequest, OffsetGone
from dmq.testing.processes import BrokerProcess

BODY = random.Random(1).randbytes(4096)
SECONDS = 60.0
# Segments and retention so small that a few hundred messages are too many.
SMALL = (
    *("--set", "store.body_bytes_max=64KiB"),
    *("--set", "store.unit_bytes_max=256KiB"),
    *("--set", "store.segment_bytes=1MiB"),
    *("--set", "store.retention_bytes=1MiB"),
)
KEEPING = (*SMALL, "--set", "store.keep_unarchived=true")


def send(client: Client, count: int) -> None:
    with client.producer() as producer:
        for _ in range(count):
            producer.send_async("orders", BODY)


def test_what_was_archived_is_kept_and_never_goes_back(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with dmq.connect(broker.url, app="archive") as client:
            client.admin.create_topic("orders", queues=1)
            send(client, 10)
            begun = client.admin.archived()
            assert begun.archived == 0
            assert 0 < begun.flushed <= begun.visible
            told = client.admin.archived(begun.journal_id, begun.visible)
            assert told.archived == begun.visible
            assert client.admin.archived(begun.journal_id, 5).archived == begun.visible
            with pytest.raises(InvalidRequest, match="this broker has journal"):
                client.admin.archived(begun.journal_id ^ 1, 5)
            with pytest.raises(OffsetGone, match="nobody can have archived"):
                client.admin.archived(begun.journal_id, told.visible + (1 << 30))
            assert client.admin.stats("store_archived")["store_archived"] == begun.visible
        broker.kill()
        broker.start()
        with dmq.connect(broker.url, app="archive") as client:
            found = client.admin.archived()
            assert (found.journal_id, found.archived) == (begun.journal_id, begun.visible)


def first_after_retention(client: Client) -> int:
    """Where the journal begins once retention has taken something, or does not within the time."""
    deadline = time.monotonic() + SECONDS
    while (first := client.admin.archived().first) == 0 and time.monotonic() < deadline:
        send(client, 20)
    return first


def test_retention_waits_for_the_archive(tmp_path: Path) -> None:
    with (
        BrokerProcess(tmp_path / "keeping", KEEPING) as keeping,
        BrokerProcess(tmp_path / "other", SMALL) as other,
        dmq.connect(keeping.url, app="archive") as client,
        dmq.connect(other.url, app="archive") as beside,
    ):
        for each in (client, beside):
            each.admin.create_topic("orders", queues=1)
            send(each, 1500)
        # One that waits for nobody shows that the other has had its turns, too.
        assert first_after_retention(beside) > 0
        report = client.admin.archived()
        assert report.first == 0
        client.admin.archived(report.journal_id, report.visible)
        assert 0 < first_after_retention(client) <= report.visible
