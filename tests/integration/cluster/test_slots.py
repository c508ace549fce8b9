"""Slots that are added to a topic, and the groups and limits that it has."""

from __future__ import annotations

import re
from random import getrandbits

import pytest

import dmq
from dmq.protocol.batch import pack_batch
from dmq.protocol.commands import Command
from dmq.protocol.produce import Produce
from dmq.records import encode_batch
from tests.integration.cluster.processes import ClusterProcesses
from tests.integration.cluster.questions import ask
from tests.integration.cluster.test_consumers import pulled
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


def test_a_group_misses_nothing_of_a_slot_that_is_added_while_it_is_away(cluster: ClusterProcesses) -> None:
    with dmq.connect(cluster.url, client_id="alone", timeout=PATIENCE_S) as client:
        client.admin.create_topic("widened", queues=1)
        for shard in ("s2", "s3"):
            client.admin.place_topic("widened", remove=shard, force=True)
        with (
            client.consumer("widened", "away", start_from="latest") as consumer,
            client.consumer("widened", "all", broadcast=True, start_from="latest") as everybody,
        ):
            assert not consumer.pull(wait=0.01)
            assert not everybody.pull(wait=0.01)
        eventually(lambda: len(named(cluster)) == 2)
        for shard in ("s2", "s3"):
            client.admin.place_topic("widened", add=shard)
        producer, sent = client.producer(), set[bytes]()
        shards: set[int] = set()
        while len(shards) < 3:  # until the producer has heard of the new slots
            bodies = [b"%d" % number for number in range(len(sent), len(sent) + 30)]
            shards |= {receipt.shard for receipt in producer.send_many("widened", [*map(dmq.Message, bodies)])}
            sent.update(bodies)
        with client.consumer("widened", "away", start_from="latest") as consumer:
            assert {message.body for message in pulled(consumer, len(sent))} == sent
        with client.consumer("widened", "all", broadcast=True, start_from="latest") as everybody:
            assert {message.body for message in pulled(everybody, len(sent))} == sent
        client.admin.delete_topic("widened")


def named(cluster: ClusterProcesses) -> list[str]:
    """The groups of the topic in the registry."""
    with dmq.connect(cluster.url, any_member=True) as client:
        entries = client.admin.export_cluster()["entries"]
    return [row["path"] for row in entries if row["path"].startswith("topic/widened/")]


def test_the_limit_of_a_topic_is_divided_anew_when_its_slots_change(cluster: ClusterProcesses) -> None:
    with dmq.connect(cluster.url, timeout=PATIENCE_S) as client:
        client.admin.create_topic("limited", queues=2)
        client.admin.set_limit(topic="limited", messages=30)
        eventually(lambda: [limit.messages for limit in client.admin.limits(topic="limited")] == [30])
        eventually(lambda: shares(cluster) == {"s1": 10, "s2": 10, "s3": 10})
        client.admin.place_topic("limited", remove="s3")
        eventually(lambda: shares(cluster) == {"s1": 15, "s2": 15})
        client.admin.place_topic("limited", add="s3", queues=6)
        eventually(lambda: shares(cluster) == {"s1": 6, "s2": 6, "s3": 18})
        client.admin.set_limit(topic="limited")
        client.admin.delete_topic("limited")


def shares(cluster: ClusterProcesses) -> dict[str, int]:
    """The limit that each shard has in force, as it says to who is over it."""
    body = b"".join(pack_batch(encode_batch("limited", "app", [dmq.Message(b"x")] * 500, sent_at_ms=1)))
    found = {}
    for shard in cluster.shards:
        for _ in range(2):  # a full bucket lets a large batch pass
            batch = Produce("limited", 0, 500, 0, producer_id=getrandbits(60), producer_epoch=0, first_sequence=1)
            try:
                ask(cluster.members[f"{shard}a"].port, Command.PRODUCE, batch, body, raises=True)
            except dmq.RateLimited as error:
                found[shard] = int(re.findall(r"(\d+) messages", error.message)[0])
            except dmq.DMQError:
                break  # it takes no messages of the topic
    return found
