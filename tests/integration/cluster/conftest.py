"""One cluster for all tests of this room that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.cluster.processes import ClusterProcesses


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Three shards of one member each."""
    with ClusterProcesses(Path(tmp_path_factory.mktemp("cluster"))) as running:
        yield running
