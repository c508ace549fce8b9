"""The archive job by `spark-submit` on a standalone cluster, while its broker restarts and a topic appears."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import dmq
from dmq.pipeline.archive import __main__ as program
from dmq.pipeline.archive.table_store import Archive
from dmq.testing.processes import BrokerProcess, free_port
from tests.spark.cluster import Cluster
from tests.spark.producer_logs import check_archive, consume_all, outcomes, send_logged

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
        arguments = ("--broker", broker.url, "--tables", str(tables), "--job", "archive")
        ended = cluster.submit(Path(program.__file__), *arguments, "--batch-bytes", str(1 << 20))
        over.set()
        killing.join()
        assert ended.returncode == 0, ended.stderr
    assert set(killed) == {"pyspark.daemon", "CoarseGrainedExecutorBackend"}
    archive = Archive(str(tables))
    check_archive(archive, log)
    assert outcomes(archive) == {("billing", "delivered", 1): MESSAGES, ("billing", "acked", 1): MESSAGES}
