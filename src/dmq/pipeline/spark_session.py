"""Spark sessions: the one place that makes one, and tells what failed in it as if it had failed here.

When a task fails, Spark hands the driver a page of text: Java's stack, and in it the trace of the Python worker. Its
last line is what a user needs.

What always holds: Python workers run the interpreter of the driver, times are UTC, columns pass as Arrow, and only
errors are shown on the terminal. On a local master the JVM is kept small; on a cluster its sizes are the operator's. An
error of ours that a task raised has its class and its sentence in the driver, too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dmq import errors
from dmq.errors import DMQError, InvalidSettings, OutOfRetries

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["settings_for", "spark_session", "task_error", "task_errors"]

_ALWAYS: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.pyspark.fallback.enabled": "true",
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
    "spark.scheduler.mode": "FAIR",  # what runs beside the archive job in a pool of its own does not hold it up
}
_LOCAL: Final = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC",
}
_LOG4J: Final = Path(__file__).with_name("log4j2.properties")


def settings_for(master: str | None, conf: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings of a session; whatever `conf` says goes before ours."""
    found = dict(_ALWAYS)
    if master is not None and master.startswith("local"):
        found |= _LOCAL
    return found | dict(conf or {})


def spark_session(
    master: str | None = None, conf: Mapping[str, str] | None = None, *, app_name: str = "dmq"
) -> SparkSession:
    """The session of this process, made if there is none.

    Parameters:
        master: as Spark has it; None is what `spark-submit` says, and `local[*]` outside of it.
        conf: settings, which go before ours. Those of the JVM count only where it is not running yet.

    Raises:
        InvalidSettings: Spark is not installed, or cannot start; the message says what is missing.
    """
    try:
        from pyspark import SparkContext
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise InvalidSettings('Spark is not installed: pip install "dmq[spark]"') from error
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if master is None and not is_submitted:
        master = "local[*]"
    settings = settings_for(master, conf)
    is_running = SparkContext._active_spark_context is not None
    if not is_submitted and not is_running:
        settings["spark.driver.extraJavaOptions"] = _with_log4j(settings.get("spark.driver.extraJavaOptions", ""))
    builder = SparkSession.builder.appName(app_name)
    if master is not None:
        builder = builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        session = builder.getOrCreate()
    except (PySparkException, OSError) as error:
        why = str(error).rstrip(".")
        raise InvalidSettings(
            f"Spark cannot start: {why}: install Java 17 or newer, and name its directory in JAVA_HOME"
        ) from error
    session.sparkContext.setLogLevel("ERROR")
    return session


def _with_log4j(options: str) -> str:
    """Java options that name a log configuration of ours, unless they name one."""
    if "log4j" in options:
        return options
    return f'{options} -Dlog4j2.configurationFile="{_LOG4J.as_uri()}"'.strip()


_TRACE: Final = "Traceback (most recent call last):"
_ABORTED: Final = "Job aborted"
_LAST: Final = "most recent failure: "
_ERROR: Final = re.compile(r"^([A-Za-z_][\w.]*): (.+)$")
_SAID_MAX: Final = 500


def task_error(text: str, advice: str) -> DMQError | None:
    """The error for what Spark says of a job that failed; None if no task of it has.

    Parameters:
        advice: what to do after one that is not ours.
    """
    if _TRACE in text:
        trace = text.rpartition(_TRACE)[2].partition("\n\tat ")[0]
        for line in reversed(trace.splitlines()):
            found = _ERROR.match(line)
            if found is None:
                continue
            kind = getattr(errors, found[1].removeprefix("dmq.errors."), None)
            if isinstance(kind, type) and issubclass(kind, DMQError):
                return kind(found[2])
            return OutOfRetries(f"a task of Spark failed: {found[0][:_SAID_MAX]}; {advice}")
    if _ABORTED in text:
        said = text.strip().splitlines()[0].rpartition(_LAST)[2]
        return OutOfRetries(f"a task of Spark failed: {said[:_SAID_MAX]}; {advice}")
    return None


@contextmanager
def task_errors(advice: str) -> Iterator[None]:
    """Tasks that failed as often as Spark allows are told in a sentence in here; see `task_error`.

    Raises:
        DMQError: what the last attempt of a task met.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (Py4JJavaError, PySparkException) as error:
        text = str(error.java_exception) if isinstance(error, Py4JJavaError) else str(error)
        found = task_error(text, advice)
        if found is None:
            raise
        raise found from error
