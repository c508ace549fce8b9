"""Routes: any member tells where the leaders of all shards are."""

from __future__ import annotations

import pytest

from tests.integration.cluster.processes import ClusterProcesses

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def test_every_member_knows_every_leader(cluster: ClusterProcesses) -> None:
    for member in cluster.members:
        found = cluster.routes(member=member)
        assert found is not None
        assert found.cluster
        assert [row.number for row in found.shards] == [1, 2, 3]
        assert {row.name for row in found.shards} == {"s1", "s2", "s3"}
        for row in found.shards:
            address = f"127.0.0.1:{cluster.members[row.name + 'a'].port}"
            assert (row.leader, row.members, row.is_writable, row.weight) == (address, [address], True, 100)
            assert row.epoch >= 1
