"""The archive on a standalone cluster, in files and in an object store, while brokers and executors are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from pathlib import Path

import pytest

import dmq
from dmq.pipeline.archive import __main__ as program
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.lookup.lookup import Lookup
from dmq.pipeline.tables import MESSAGE
from dmq.testing.processes import BrokerProcess, free_port
from tests.object_store import ObjectStore
from tests.spark import wounded_archive
from tests.spark.archive_history import POINTS
from tests.spark.cluster import Cluster
from tests.spark.producer_logs import check_archive, consume_all, outcomes, send_logged
from tests.spark.replay_command import arrived, replay_and_kill

MESSAGES = 20_000


@pytest.mark.soak
def test_a_cluster_archives_everything_once_while_the_broker_restarts_and_a_topic_appears(tmp_path: Path) -> None:
    tables = tmp_path / "archive"
    port = ("--port", str(free_port()))
    with BrokerProcess(tmp_path / "data", port) as broker, Cluster(tmp_path / "cluster") as cluster:
        with dmq.connect(broker.url, app="shop") as client:
            client.admin.create_topic("orders", queues=4)
            log = send_logged(client, "orders", MESSAGES, seed=1)
            consume_all(client, "orders", "billing", MESSAGES)

        def disturb() -> None:
            while not list(tables.glob("message/dt=*/*.parquet")):
                if over.wait(0.01):
                    return
            broker.kill()
            broker.start()
            with dmq.connect(broker.url, app="shop") as client:
                client.admin.create_topic("new", queues=1)
                log.extend(send_logged(client, "new", 500, seed=2))

        over = threading.Event()
        disturbing = threading.Thread(target=disturb)
        disturbing.start()
        arguments = ("--broker", broker.url, "--tables", str(tables), "--job", "archive")
        # Small batches: many of them are still to come when the broker is killed.
        ended = cluster.submit(Path(program.__file__), *arguments, "--batch-bytes", str(4 << 20))
        over.set()
        disturbing.join()
        assert ended.returncode == 0, ended.stderr
        assert "archive: archived" in ended.stdout
        assert "0 left" in ended.stdout
        assert len({line for line in cluster.log("master").splitlines() if "Launching executor" in line}) >= 2
        ended = cluster.submit(Path(program.__file__), *arguments)
        assert ended.returncode == 0, ended.stderr
    assert len(log) == MESSAGES + 500, "nothing was disturbed"
    archive = Archive(str(tables))
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): MESSAGES, ("billing", "acked", 1): MESSAGES}


@pytest.mark.soak
def test_each_row_is_there_once_though_executors_and_python_workers_are_killed(tmp_path: Path) -> None:
    tables = tmp_path / "archive"
    killed: list[str] = []
    with BrokerProcess(tmp_path / "data") as broker, Cluster(tmp_path / "cluster") as cluster:
        with dmq.connect(broker.url, app="shop") as client:
            client.admin.create_topic("orders", queues=4)
            log = send_logged(client, "orders", MESSAGES, seed=1)
            consume_all(client, "orders", "billing", MESSAGES)

        def kill() -> None:
            files = 0
            # One after the other, each while tasks are at work: when files have appeared since the last one.
            for word in ("pyspark.daemon", "CoarseGrainedExecutorBackend") * 2:
                while (now := len(list(tables.glob("message/dt=*/*.parquet")))) <= files:
                    if over.wait(0.01):
                        return
                files = now
                for pid in cluster.processes(word)[-1:]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(word)

        over = threading.Event()
        killing = threading.Thread(target=kill)
        killing.start()
        arguments = ("--broker", broker.url, "--tables", str(tables), "--job", "archive", "--batch-bytes", str(1 << 20))
        # Every kill may hit the same task, and Spark gives up one that has failed four times.
        ended = cluster.submit(Path(program.__file__), *arguments, conf={"spark.task.maxFailures": "8"})
        over.set()
        killing.join()
        assert ended.returncode == 0, ended.stderr
    assert set(killed) == {"pyspark.daemon", "CoarseGrainedExecutorBackend"}
    archive = Archive(str(tables))
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): MESSAGES, ("billing", "acked", 1): MESSAGES}


@pytest.mark.soak
def test_a_cluster_archives_into_an_object_store_compacts_and_replays_whatever_is_killed(
    tmp_path: Path, object_store: ObjectStore
) -> None:
    tables = f"{object_store.bucket()}/archive"
    with BrokerProcess(tmp_path / "data") as broker, Cluster(tmp_path / "cluster") as cluster:
        with dmq.connect(broker.url, app="shop") as client:
            client.admin.create_topic("orders", queues=4)
            client.admin.create_topic("again", queues=4)
            log = send_logged(client, "orders", MESSAGES, seed=1)
            consume_all(client, "orders", "billing", MESSAGES)
        pids = ",".join(map(str, cluster.pids))
        ended = cluster.submit(Path(wounded_archive.__file__), broker.url, tables, pids)
        assert ended.returncode == 0, ended.stderr
        killed = json.loads(ended.stdout.splitlines()[-1])
        assert {kind for _, kind in killed} == {*wounded_archive.KINDS}
        assert len({step for step, _ in killed}) > len(POINTS) // 2, killed  # one that died is not always back
        archive = Archive.open(tables)
        check_archive(archive, log)
        assert outcomes(archive) == {("billing", "delivered", 1): MESSAGES, ("billing", "acked", 1): MESSAGES}

        files = len(archive.table(MESSAGE).files())
        ended = cluster.submit(Path(program.__file__), "--tables", tables, "--job", "compact")
        assert ended.returncode == 0, ended.stderr
        assert len(archive.table(MESSAGE).files()) < files
        check_archive(archive, log)
        sent = next(one for one in log if one.key)
        with Lookup(tables) as lookup:
            assert [row["message_id"] for row in lookup.by_key(str(sent.key))] == [sent.id]
        with dmq.connect(broker.url, app="shop") as client:
            place = ["--master", cluster.url, *cluster.options()]
            replay_and_kill(client, broker.url, tables, MESSAGES, place, cluster.environment())
            assert arrived(client, "again") == Counter(one.id for one in log)
