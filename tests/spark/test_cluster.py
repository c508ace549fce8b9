"""Reading and writing on a standalone cluster, started by `spark-submit`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import dmq
from dmq.testing.processes import BrokerProcess
from tests.integration.pipeline.test_sink import stored
from tests.spark.cluster import Cluster


@pytest.mark.soak
def test_a_program_copies_a_topic_on_two_workers(tmp_path: Path) -> None:
    bodies = [b"row %d" % number for number in range(10_000)]
    with BrokerProcess() as broker, dmq.connect(broker.url) as client, Cluster(tmp_path) as cluster:
        client.admin.create_topic("from", queues=4)
        client.admin.create_topic("to", queues=3)
        with client.producer() as producer:
            producer.send_many("from", [dmq.Message(body, key=body.decode()) for body in bodies])
        program = Path(__file__).with_name("copy_topic.py")
        ended = cluster.submit(program, broker.url.removeprefix("dmq://"), "from", "to")
        assert ended.returncode == 0, ended.stderr
        assert "copied by 2 executors" in ended.stdout
        found = stored(client, "to", len(bodies))
    assert Counter(message.body for message in found) == Counter(bodies)
    assert all(message.key == message.body.decode() for message in found)
