"""The format of a cluster: what newer members write only once everybody knows it."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from dmq.registry.contents import CLUSTER_FORMAT, ClusterContent, decode_content, encode_content
from dmq.registry.paths import Paths
from dmq.registry.registry import Put
from dmq.registry.url import open_registry
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def set_format(cluster: ClusterProcesses, number: int) -> None:
    async def write() -> None:
        registry, path = await open_registry(cluster.registry, "test"), Paths().cluster
        try:
            entry = await registry.read(path)
            assert entry is not None
            content = decode_content(ClusterContent, entry.value, path)
            changed = msgspec.structs.replace(content, format=number)
            await registry.write([Put(path, encode_content(changed), entry.version)])
        finally:
            await registry.close()

    asyncio.run(write())


def test_a_cluster_that_was_upgraded_writes_what_is_new_only_after_finalize(cluster: ClusterProcesses) -> None:
    """As one of an earlier version, whose brokers were all replaced: some may still be, so nothing new is written."""
    at = ("--url", cluster.url)
    set_format(cluster, 1)
    try:
        refused = run("shard", "set", "s1", "--async", *at)
        assert refused.code == 1
        assert "this needs format 2 of the cluster, and it has 1" in refused.err
        assert "dmq cluster finalize" in refused.err
        done = run("cluster", "finalize", *at)
        assert done.code == 0, done.err
        assert f"the cluster has format {CLUSTER_FORMAT}, before 1" in done.out
        assert json.loads(run("cluster", "show", *at, "--format", "json").out)["format"] == CLUSTER_FORMAT
        assert run("shard", "set", "s1", "--async", *at).code == 0
        assert run("shard", "set", "s1", "--no-async", *at).code == 0
        assert f"the cluster has format {CLUSTER_FORMAT} already" in run("cluster", "finalize", *at).out
    finally:
        set_format(cluster, CLUSTER_FORMAT)
