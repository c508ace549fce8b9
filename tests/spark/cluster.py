"""A standalone Spark cluster out of the installed wheel: a master and workers, each in a process of its own.

What always holds: once entered, all workers are registered; afterwards no process of the cluster is left. Everything it
writes lies in its folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pyspark

from dmq.testing.processes import free_port
from tests.spark.conftest import JAVA_OPTIONS, LOG4J, ROOT

SPARK_HOME = Path(pyspark.__file__).parent
SECONDS = 120.0


class Cluster:
    """One cluster.

    Parameters:
        folder: for logs and scratch files.
        workers: how many.
        cores: of each.
        memory: for the executor on each.
    """

    def __init__(self, folder: Path, *, workers: int = 2, cores: int = 1, memory: str = "1g") -> None:
        self._folder = folder
        self._workers = workers
        self._cores = cores
        self._memory = memory
        self._processes: list[subprocess.Popen[bytes]] = []
        self.url = ""
        """Of the master: `spark://…`."""

    def __enter__(self) -> Self:
        (self._folder / "scratch").mkdir(parents=True, exist_ok=True)
        # The daemons' log level is what tells when they are ready.
        (self._folder / "daemon.properties").write_text(
            LOG4J.replace("rootLogger.level = error", "rootLogger.level = info")
        )
        (self._folder / "submit.properties").write_text(LOG4J)
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        try:
            self._start("master", "--port", str(port))
            self._wait_for("master", "I have been elected leader")
            for number in range(self._workers):
                self._start(f"worker-{number}", "--cores", str(self._cores), "--memory", self._memory, self.url)
            for number in range(self._workers):
                self._wait_for(f"worker-{number}", "Successfully registered with master")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def submit(
        self, program: Path, *arguments: str, conf: Mapping[str, str] | None = None, timeout: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python program on the cluster with `spark-submit`, until it ends.

        Parameters:
            conf: more settings for Spark.
        """
        options = self.options(conf)
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", self.url, *options, str(program), *arguments]
        return subprocess.run(
            command,
            env=self.environment(),
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def options(self, conf: Mapping[str, str] | None = None) -> list[str]:
        """Settings for a driver, as `spark-submit` and `dmq archive` take them."""
        settings = {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "512m",
            "spark.driver.extraJavaOptions": self._java_options("submit"),
            "spark.executor.extraJavaOptions": self._java_options("submit"),
            "spark.executor.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            **(conf or {}),
        }
        return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]

    @property
    def pids(self) -> list[int]:
        """Of master and workers."""
        return [process.pid for process in self._processes]

    def log(self, name: str) -> str:
        """What `master`, `worker-0` and so on have said."""
        return (self._folder / f"{name}.log").read_text(errors="replace")

    def processes(self, word: str) -> list[int]:
        """Processes below the workers whose command line has a word, as `CoarseGrainedExecutorBackend`."""
        every = [pid for process in self._processes for pid in descendants(process.pid)]
        return [pid for pid in every if word in command_line(pid)]

    def _start(self, name: str, *arguments: str) -> None:
        kind = name.partition("-")[0]
        command = [
            str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}.{kind.title()}",
            "--host", "127.0.0.1", "--webui-port", "0", *arguments,
        ]  # fmt: skip
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self.environment(),
                    cwd=self._folder,
                    start_new_session=True,
                )
            )

    def _wait_for(self, name: str, word: str) -> None:
        deadline = time.monotonic() + SECONDS
        while word not in self.log(name):
            assert time.monotonic() < deadline, f"{name} is not ready:\n{self.log(name)[-2000:]}"
            time.sleep(0.1)

    def _java_options(self, log: str) -> str:
        scratch = self._folder / "scratch"
        return (
            f"{JAVA_OPTIONS} -Djava.io.tmpdir={scratch} -Dlog4j2.configurationFile=file:{self._folder}/{log}.properties"
        )

    def environment(self) -> dict[str, str]:
        """Of its processes, and of drivers."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),  # so that they find what tests define
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._folder / "scratch"),
            "SPARK_WORKER_DIR": str(self._folder / "work"),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": self._java_options("daemon"),
            "SPARK_LAUNCHER_OPTS": JAVA_OPTIONS,
            "TMPDIR": str(self._folder / "scratch"),
        }

    def stop(self) -> None:
        """End all of it: workers first, which end their executors."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with contextlib.suppress(ProcessLookupError):  # processes left in its session
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes.clear()


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in task.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def command_line(pid: int) -> str:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    return ""
