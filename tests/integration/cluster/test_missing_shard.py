"""One of three shards is away: commands answer with what the others have, and name it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

import dmq
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import PATIENCE_S, eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


class Scene(NamedTuple):
    """A topic whose third shard is away.

    Attributes:
        here, gone: a message of a shard that answers, and one of the other.
        homes: shards by business id.
    """

    client: dmq.Client
    url: str
    here: dmq.Receipt
    gone: dmq.Receipt
    homes: Mapping[str, int]


@pytest.fixture(scope="module")
def scene(cluster: ClusterProcesses) -> Iterator[Scene]:
    with dmq.connect(cluster.url, app="shop", timeout=PATIENCE_S) as client:
        client.admin.create_topic("parts", queues=1)
        producer = client.producer(timeout=PATIENCE_S, group="parts", check=lambda message: None)
        sent = [producer.send("parts", b"x", key="k", business_id=f"u{n}", ordered=True) for n in range(30)]
        by_shard = {receipt.shard: receipt for receipt in sent}
        assert by_shard.keys() == {1, 2, 3}
        [producer.send("parts", b"later", delay=3600) for _ in range(9)]
        client.admin.create_group("g", "parts")
        with client.consumer("parts", "g") as consumer:
            assert consumer.pull(wait=PATIENCE_S)
        # A pull may be answered before all shards know of the group.
        eventually(lambda: {row.shard for row in client.admin.lag("parts", "g").queues} == {1, 2, 3})
        open_one = producer.transaction("parts", b"half")
        open_one.__enter__()
        third = cluster.numbers["s3"]
        cluster.members["s3a"].kill()
        try:
            eventually(lambda: client.admin.lag("parts", "g").missing == ("s3",))
            gone = by_shard.pop(third)
            homes = {f"u{n}": receipt.shard for n, receipt in enumerate(sent)}
            yield Scene(client, cluster.url_of("s1"), next(iter(by_shard.values())), gone, homes)
        finally:
            cluster.start_all()
            cluster.until_led()
            open_one.rollback()
            client.admin.delete_topic("parts")


def test_every_list_has_what_the_others_have_and_names_the_one_that_is_missing(scene: Scene) -> None:
    admin = scene.client.admin
    third = {scene.gone.shard}
    assert admin.delays("parts").missing == ("s3",)
    assert admin.transactions().missing == ("s3",)
    moves = admin.reset("parts", "g", "earliest", dry_run=True)
    assert ({move.shard for move in moves}, moves.missing) == ({1, 2, 3} - third, ("s3",))
    assert admin.find("parts", key="k").missing == ("s3",)
    assert ({row.shard for row in admin.peek("parts", limit=9)}) == {1, 2, 3} - third
    for found in (admin.trace(scene.here.id), admin.why(scene.here.id)):
        assert (found.missing, found.is_complete) == (("s3",), False)
    with pytest.raises(dmq.UnknownMessage, match="shard s3 did not answer, and may know more"):
        admin.trace(scene.gone.id)
    with pytest.raises(dmq.UnknownMessage, match="shard s3 did not answer, and may know more"):
        admin.why(scene.gone.id)


def test_commands_name_the_one_that_is_missing_as_text_and_as_json(scene: Scene) -> None:
    found: Any = json.loads(run("find", "--key", "k", "--url", scene.url, "--format", "json").out)
    assert found[-1] == {"missing": ["s3"]}
    assert {row["shard"] for row in found[:-1]} == {"s1", "s2"}
    followed = run("tail", "parts", "--from", "earliest", "--no-follow", "--format", "json", "--url", scene.url)
    assert followed.code == 0
    assert followed.err.startswith("shard s3 does not answer, and is left out until it does")
    rows = [json.loads(line) for line in followed.out.splitlines()]
    assert {row["shard"] for row in rows} == {"s1", "s2"}
    sent = run("send", "parts", "--json-lines", "--stdin", "--url", scene.url, stdin=followed.out.splitlines()[0])
    assert sent.code == 0, sent.err
    assert "shard" in sent.out.splitlines()[0]
    lone = json.loads(run("send", "parts", "hello", "--url", scene.url, "--format", "json").out)
    assert lone["shard"] in ("s1", "s2")


def test_sends_that_need_the_shard_say_which_it_is_and_what_to_do(scene: Scene) -> None:
    producer = scene.client.producer(timeout=0.3)
    name = next(f"u{n}" for n in range(30) if scene.homes[f"u{n}"] == scene.gone.shard)
    with pytest.raises(dmq.NotConnected, match=r"no leader of shard s3 could be reached .* `dmq shard show s3` says"):
        producer.send("parts", b"x", business_id=name, ordered=True)
    assert producer.send("parts", b"x").shard != scene.gone.shard
    with pytest.raises(dmq.UnknownTopic, match="there is no topic 'nosuch': create it first"):
        producer.send("nosuch", b"x")
