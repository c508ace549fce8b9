"""Groups, limits and the key-value space of a cluster of real processes: the same at every leader."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from dmq.protocol import admin, key_values
from dmq.protocol.commands import Command
from dmq.protocol.header import Header
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.questions import ask
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def check_everywhere(
    cluster: ClusterProcesses, command: Command, header: Header, holds: Callable[[Header], object]
) -> None:
    """Every leader comes to answer so."""
    for member in cluster.members.values():
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = ask(member.port, command, header, raises=True)
            assert answer is not None
            if holds(answer):
                break
            assert time.monotonic() < deadline, answer
            time.sleep(0.02)


def tell(cluster: ClusterProcesses, member: str, command: Command, header: Header) -> None:
    assert ask(cluster.members[member].port, command, header, raises=True) is not None


def test_groups_limits_and_keys_are_the_same_at_every_leader(cluster: ClusterProcesses) -> None:
    tell(cluster, "s1a", Command.TOPIC_CREATE, admin.TopicCreate("told", {"queues": 1}))
    tell(cluster, "s2a", Command.GROUP_CREATE, admin.GroupCreate("readers", "told"))
    check_everywhere(
        cluster,
        Command.GROUP_LIST,
        admin.GroupList("told"),
        lambda found: [one.group for one in getattr(found, "groups")] == ["readers"],  # noqa: B009
    )
    tell(cluster, "s3a", Command.LIMIT_SET, admin.LimitSet(admin.LimitInfo("told", messages=9)))
    check_everywhere(
        cluster,
        Command.LIMIT_GET,
        admin.LimitGet("told"),
        lambda found: found == admin.LimitReply([admin.LimitInfo("told", messages=9)]),
    )
    tell(cluster, "s1a", Command.KEY_PUT, key_values.KeyPut("space", "key", b"value"))
    check_everywhere(
        cluster,
        Command.KEY_GET,
        key_values.KeyGet("space", "key"),
        lambda found: found == key_values.KeyReply(key_values.KeyInfo("key", b"value")),
    )
    tell(cluster, "s3a", Command.GROUP_DELETE, admin.GroupDelete("readers"))
    check_everywhere(
        cluster, Command.GROUP_LIST, admin.GroupList("told"), lambda found: found == admin.GroupListReply([])
    )
    tell(cluster, "s2a", Command.TOPIC_DELETE, admin.TopicDelete("told"))
