"""The one Spark session that all tests here share, and the brokers they use.

What always holds: nothing is left in the tree, and the JVM and all its children have ended when the tests have.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dmq.testing.processes import BrokerProcess
from tests.object_store import StorePort

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""
# A small heap that starts fast. No file of performance data, which each JVM leaves in /tmp.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.spark)


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, store_port: StorePort) -> Iterator[SparkSession]:
    """A session on two cores, where `format("dmq")` is found by itself, and filters are pushed down.

    Where an object store listens is known before: workers have the environment that the JVM was started with.
    """
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    home = tmp_path_factory.mktemp("spark")
    (home / "log4j2.properties").write_text(LOG4J)
    java_options = f"{JAVA_OPTIONS} -Djava.io.tmpdir={home} -Dlog4j2.configurationFile=file:{home}/log4j2.properties"
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = str(ROOT)  # so that workers find what tests define
    os.environ["SPARK_LAUNCHER_OPTS"] = JAVA_OPTIONS
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    session = (
        SparkSession.builder.master("local[2]")
        .appName("dmq tests")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", java_options)
        .config("spark.local.dir", str(home))
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.sql.catalogImplementation", "in-memory")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.scheduler.mode", "FAIR")
        .getOrCreate()
    )
    gateway = SparkContext._gateway
    assert gateway is not None
    process = gateway.proc
    try:
        yield session
    finally:
        session.stop()
        gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None
        process.stdin.close()  # which is what the JVM waits for
        process.wait(30)
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker process for all tests that neither restart it nor mind what else is in it."""
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker
