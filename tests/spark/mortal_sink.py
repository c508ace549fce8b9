"""A stream into a topic whose driver dies: `python -m tests.spark.mortal_sink URL TOPIC INPUT CHECKPOINT POINT`.

POINT is `write`, `commit` or `never`. At the point, in a micro-batch that is not the first, everything that belongs to
the driver is ended with kill -9. Its process group must be its own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from dmq.pipeline.sink.data_writer import PartitionWritten, StreamWriter, stream_writer
from tests.spark.conftest import JAVA_OPTIONS

BATCH_ROWS = 1000


def die() -> NoReturn:
    """The driver, its JVM, and this process, which may be a worker in a group of its own."""
    os.killpg(int(os.environ["DYING_GROUP"]), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("dead")


class DyingWriter(StreamWriter):
    """Dies at its point."""

    def __init__(self, options: Any, point: str) -> None:
        super().__init__(options)
        self._point = point

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PartitionWritten:
        return super().write(self._dying(iterator) if self._point == "write" else iterator)

    def _dying(self, iterator: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        is_last = int(context.getLocalProperty("streaming.sql.batchId") or 0) >= 1 and context.partitionId() == 0
        for number, batch in enumerate(iterator):
            if is_last and number == 5:  # four thousand rows are on their way, some of them stored
                die()
            yield batch

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        if self._point == "commit" and batchId >= 2:
            die()
        super().commit(messages, batchId)


class DyingSource(DataSource):
    """A sink only."""

    @classmethod
    def name(cls) -> str:
        return "dying"

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:  # noqa: N802
        options = {name: value for name, value in self.options.items() if name != "point"}
        return DyingWriter(stream_writer(options, schema, overwrite)._options, self.options["point"])


def stream(spark: SparkSession, url: str, topic: str, source: str, checkpoint: str, point: str) -> None:
    """Send the rows of all files, two files at a time."""
    spark.dataSource.register(DyingSource)
    rows = spark.readStream.schema("value string, key string").option("maxFilesPerTrigger", 2).json(source)
    (
        rows.writeStream.format("dying")
        .option("dmq.bootstrap.servers", url.removeprefix("dmq://"))
        .option("topic", topic)
        .option("point", point)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
        .awaitTermination()
    )


def main(*arguments: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["DYING_GROUP"] = str(os.getpgid(0))
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.extraJavaOptions", f"{JAVA_OPTIONS} -Djava.io.tmpdir={os.environ['TMPDIR']}")
        .config("spark.driver.memory", "1g")
        .config("spark.local.dir", os.environ["TMPDIR"])
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", str(BATCH_ROWS))
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    stream(spark, *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
