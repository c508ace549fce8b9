"""A cluster of real processes whose registry is down: messages go on, and what needs it says so, and which it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dmq
from dmq.cli import exit_code
from tests.integration.cli.test_commands import dmq as run
from tests.integration.cluster.processes import ClusterProcesses
from tests.patience import eventually

pytestmark = [pytest.mark.uncounted, pytest.mark.xdist_group("cluster")]


@pytest.fixture
def left_alone(cluster: ClusterProcesses) -> Iterator[ClusterProcesses]:
    """The cluster while its name server is dead; afterwards it is back."""
    with dmq.connect(cluster.url) as client:
        client.admin.create_topic("known", queues=1)
    (server,) = cluster.name_servers
    server.kill()
    try:
        yield cluster
    finally:
        if not server.pid:
            server.start()
        with dmq.connect(cluster.url, timeout=30) as client:
            eventually(lambda: _is_deleted(client, "known"))
        cluster.until_led()


def _is_deleted(client: dmq.Client, topic: str) -> bool:
    try:
        client.admin.delete_topic(topic)
    except dmq.RegistryDown:
        return False
    return True


def _refused(ask: Callable[[dmq.Client], Any], client: dmq.Client) -> dmq.DMQError:
    with pytest.raises(dmq.RegistryDown) as caught:
        ask(client)
    return caught.value


def test_what_needs_the_registry_names_it_and_messages_go_on(left_alone: ClusterProcesses) -> None:
    cluster = left_alone
    where = cluster.registry.removeprefix("dmq://")
    asked: list[Callable[[dmq.Client], Any]] = [
        lambda client: client.admin.create_topic("new"),
        lambda client: client.admin.update_topic("known", ttl=60.0),
        lambda client: client.admin.delete_topic("known"),
        lambda client: client.admin.set_limit(topic="known", messages=9),
        lambda client: client.admin.set_limit(app="shop", messages=9),
        lambda client: client.registry.put("space", "key", b"value"),
        lambda client: client.admin.set_shard("s2", weight=50),
        lambda client: client.admin.create_shard("s9"),
        lambda client: client.admin.cluster_report(),
        lambda client: client.admin.export_cluster(),
    ]
    with dmq.connect(cluster.url, timeout=30) as client:
        with ThreadPoolExecutor(len(asked)) as threads:  # each waits for the registry for a moment
            errors = [*threads.map(lambda ask: _refused(ask, client), asked)]
        for error in errors:
            assert where in error.message
            assert error.message.count("this needs the registry, and ") == 1
            assert (error.retriable, exit_code(error)) == (True, 3)
        assert client.producer().send("known", b"sent").topic == "known"
        assert {broker.shard for broker in client.admin.cluster()} == {*cluster.shards}  # as they were known last
    done = run("topic", "create", "new", "--url", cluster.url)
    assert (done.code, where in done.err) == (3, True)
    (found,) = json.loads(run("shard", "list", "--url", cluster.url, "--format", "json").out)
    assert where in found["findings"][0]["what"]


def test_a_group_is_made_without_the_registry_which_is_told_when_it_is_back(left_alone: ClusterProcesses) -> None:
    cluster = left_alone
    with dmq.connect(cluster.url, timeout=30) as client:
        client.admin.create_group("readers", "known")
        assert [group.name for group in client.admin.groups("known")] == ["readers"]
        cluster.name_servers[0].start()

        def is_told() -> bool:
            try:
                entries = client.admin.export_cluster()["entries"]
            except dmq.RegistryDown:
                return False
            return any(entry["path"] == "topic/known/readers" for entry in entries)

        eventually(is_told)
