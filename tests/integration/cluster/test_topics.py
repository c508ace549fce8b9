"""Topics over several shards of real processes."""

from __future__ import annotations

import json
import time

import pytest

from dmq.errors import StaleRoute, TopicExists, UnknownTopic
from dmq.model import Message
from dmq.protocol import admin
from dmq.protocol.batch import pack_batch
from dmq.protocol.cluster.route import Route, RouteChanged
from dmq.protocol.commands import Command, decode_request
from dmq.protocol.produce import Produce, ProduceReply
from dmq.records import encode_batch
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.questions import ask
from tests.integration.frame_client import RawClient
from tests.patience import PATIENCE_S

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


def test_the_slots_of_a_topic_change_by_command(cluster: ClusterProcesses) -> None:
    url = cluster.url_of("s1")
    done = run("topic", "create", "placed", "--queues", "2", "--url", url)
    assert done.code == 0, done.err
    done = run("topic", "place", "placed", "--remove", "s3", "--force", "--url", url, "--format", "json")
    assert done.code == 0, done.err
    facts = json.loads(done.out)
    assert {(slot["shard"], slot["queues"]) for slot in facts["slots"]} == {("s1", 2), ("s2", 2)}
    done = run("topic", "place", "placed", "--add", "s3", "--queues", "3", "--drain", "--url", url)
    assert done.code == 0, done.err
    assert describe(cluster, "s3a", "placed").config.queues == 3
    shown = run("topic", "show", "placed", "--url", url)
    assert "shards" in shown.out, shown.err
    port, version = cluster.members["s2a"].port, describe(cluster, "s2a", "placed").slots_version
    assert version == 4
    body = b"".join(pack_batch(encode_batch("placed", "app", [Message(b"x")], sent_at_ms=1)))
    with pytest.raises(StaleRoute):
        ask(port, Command.PRODUCE, Produce("placed", 0, 1, 0, 5, 0, 1, slots_version=version - 1), body, raises=True)
    reply = ask(port, Command.PRODUCE, Produce("placed", 0, 1, 0, 5, 0, 1, slots_version=version), body, raises=True)
    assert isinstance(reply, ProduceReply)
    assert (reply.shard, reply.first_offset) == (cluster.numbers["s2"], 0)
    # It is emptied by nobody: it stays, and is read on.
    assert run("topic", "place", "placed", "--remove", "s2", "--url", url).code == 0
    route = cluster.topic("placed", "s1a")
    assert route is not None
    assert {(slot.shard, slot.is_writable) for slot in route.slots if slot.shard == reply.shard} == {
        (reply.shard, False)
    }
    assert run("topic", "delete", "placed", "--yes", "--url", url).code == 0


def test_a_shard_that_was_down_gets_what_it_missed_and_clients_hear_of_every_change(cluster: ClusterProcesses) -> None:
    port = cluster.members["s1a"].port
    ask(port, Command.TOPIC_CREATE, admin.TopicCreate("gone", {"queues": 1}), raises=True)
    with RawClient(port) as watcher:
        watcher.ask(Command.ROUTE, Route([], is_watched=True))
        cluster.members["s3a"].kill()
        cluster.until(lambda found: any(not row.leader for row in found.shards), "s3 has a leader", member="s1a")
        assert changed(watcher) == []  # the shards
        made = ask(port, Command.TOPIC_CREATE, admin.TopicCreate("missed", {"queues": 1}), raises=True)
        assert isinstance(made, admin.TopicInfo)
        assert made.lacking == ["s3"]
        while "missed" not in changed(watcher):
            pass
    ask(port, Command.TOPIC_DELETE, admin.TopicDelete("gone"), raises=True)
    cluster.start_all()
    cluster.until_led()
    cluster.until(lambda found: not found.topics, "the tombstone is a topic", "gone", member="s3a")
    deadline = time.monotonic() + PATIENCE_S
    while True:
        names = ask(cluster.members["s3a"].port, Command.TOPIC_LIST, admin.TopicList())  # None while it does not lead
        here = {info.topic for info in names.topics if info.topic_id} if isinstance(names, admin.TopicListReply) else ()
        if "missed" in here and "gone" not in here:
            break
        assert time.monotonic() < deadline, names
        time.sleep(0.05)
    ask(port, Command.TOPIC_DELETE, admin.TopicDelete("missed"), raises=True)


def changed(watcher: RawClient) -> list[str]:
    """The topics that the next ROUTE_CHANGED names."""
    while True:
        frame = watcher.read()
        assert frame is not None
        if frame.command == Command.ROUTE_CHANGED:
            found = decode_request(frame)
            assert isinstance(found, RouteChanged)
            return found.topics
