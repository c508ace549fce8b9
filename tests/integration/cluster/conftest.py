"""Clusters for all tests of this room that leave them as they found them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import dmq
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.shard.processes import SETTINGS


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Three shards of one member each, with one database of dead letters."""
    folder = Path(tmp_path_factory.mktemp("cluster"))
    settings = (*SETTINGS, f"broker.dead_letters_url=sqlite:///{folder}/letters.db")
    with ClusterProcesses(folder, settings=settings) as running:
        yield running


@pytest.fixture(scope="package")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Two shards of two members each; tests that use it are of the group "cluster-failover"."""
    with ClusterProcesses(Path(tmp_path_factory.mktemp("pairs")), shards=2, replicas=2) as running:
        with dmq.connect(running.url, timeout=30) as client:
            for topic in ("any", "ordered", "spooled"):
                client.admin.create_topic(topic, queues=2)
        yield running
