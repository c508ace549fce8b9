"""Topics over several shards of real processes."""

from __future__ import annotations

import pytest

from dmq.errors import TopicExists, UnknownTopic
from dmq.protocol import admin
from dmq.protocol.commands import Command
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.questions import ask

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def describe(cluster: ClusterProcesses, member: str, topic: str) -> admin.TopicInfo:
    reply = ask(cluster.members[member].port, Command.TOPIC_DESCRIBE, admin.TopicDescribe(topic), raises=True)
    assert isinstance(reply, admin.TopicDescribeReply)
    return reply.info


def test_a_topic_is_made_at_any_leader_and_is_on_all_shards_when_that_is_answered(cluster: ClusterProcesses) -> None:
    port = cluster.members["s2a"].port
    made = ask(port, Command.TOPIC_CREATE, admin.TopicCreate("made", {"queues": 3}), raises=True)
    assert isinstance(made, admin.TopicInfo)
    assert {(slot.shard, slot.queues, slot.is_writable) for slot in made.slots} == {
        ("s1", 3, True),
        ("s2", 3, True),
        ("s3", 3, True),
    }
    assert (made.slots_version, made.lacking) == (1, [])
    for member in cluster.members:
        info = describe(cluster, member, "made")
        assert (info.config.queues, info.incarnation, bool(info.topic_id)) == (3, made.incarnation, True)
        route = cluster.topic("made", member)
        assert route is not None
        assert (route.incarnation, route.slots_version) == (made.incarnation, 1)
        assert {slot.shard for slot in route.slots} == {*cluster.numbers.values()}
    with pytest.raises(TopicExists):
        ask(cluster.members["s1a"].port, Command.TOPIC_CREATE, admin.TopicCreate("made"), raises=True)
    ask(cluster.members["s3a"].port, Command.TOPIC_DELETE, admin.TopicDelete("made"), raises=True)
    for member in cluster.members:
        with pytest.raises(UnknownTopic):
            describe(cluster, member, "made")
        assert cluster.topic("made", member) is None
