"""A replay on Spark: its plan, of more rows than one process should sort, and the tasks that send it.

The plan: tasks ask DuckDB for the chosen rows of some files each, as one process asks it for all (`plan_builder`), so a
condition means the same in both; Spark finds what is there twice, and brings the rows of each queue together in their
order; tasks write the files of the plan.

Sending: each task sends some of the queues, as one process sends all (`sender`). A queue is sent by one task, in its
order. A task asks the broker how far its queues are before it sends, so one that is run again goes on where the one
before came to; two that overlap, as when an executor is lost and lives on, send the same batches under the same
numbers, of which the broker stores each once.

What always holds: the same archive and the same choice give the same plan, digest included, by Spark or by one
process. A file has a name of its own and counts for nothing until the plan names it, so a task that is run twice, or
dies, harms nobody. Sending keeps what `send_plan` promises. All tasks together send no more than the rate: each has its
share, by what it has to send.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from dmq.client.connection.router import Router
from dmq.errors import DMQError
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.archive.table_store import Archive, LiveFile
from dmq.pipeline.lookup.engine import Bounds, Engine
from dmq.pipeline.replay.plan import Plan, Plans, Selection, Target
from dmq.pipeline.replay.plan_builder import ORDER, STAGED, QueueFile, QueueFiles, check_bodies, keep_plan, queues_of
from dmq.pipeline.replay.sender import (
    ReplayProgress,
    SendOptions,
    Sent,
    check_sent,
    open_router,
    send_queues,
    stored_rows,
)
from dmq.pipeline.spark_session import task_errors
from dmq.pipeline.tables import MESSAGE, SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "ReplayRows",
    "RowsOption",
    "Share",
    "advice",
    "make_plan_by_spark",
    "send_plan_by_spark",
    "send_share",
    "shares",
]

_TASK_BYTES: Final = 128 << 20  # of files that one task reads
_MEMORY_BYTES: Final = 512 << 20
_READ_ROWS: Final = 2048
_BROADCAST_ROWS: Final = 1_000_000
_TARGET: Final = "target_queue"
_PLACE: Final = ("broker", "journal_offset")
_ORDER: Final = tuple(name.strip() for name in ORDER.split(","))
_ROWS: Final = pa.schema([*STAGED, *(SCHEMAS[MESSAGE].field(name) for name in _ORDER), pa.field(_TARGET, pa.int64())])
_IDS: Final = pa.schema([SCHEMAS[MESSAGE].field(name) for name in ("message_id", *_ORDER)])


class RowsOption(msgspec.Struct, frozen=True):
    """What the tasks that read are told."""

    tasks: list[list[str]]  # the files of each
    every: list[str]  # all files, if the condition asks about other messages than the one it is about
    selection: Selection
    target: Target


def make_plan_by_spark(
    spark: SparkSession, archive: Archive, selection: Selection, target: Target, *, plans: Plans, now_ms: int
) -> Plan:
    """Write down what is to be sent, and keep it as the plan; see `plan_builder.make_plan`.

    Raises:
        UnknownMessage: nothing is chosen.
        InvalidRequest: the selection's SQL is none.
    """
    selection.check()
    table = archive.table(MESSAGE)
    version, live = table.version(), table.live_files(where=selection.bounds())
    every = table.files() if "select" in selection.where.lower() else []
    _check_condition(selection)
    chosen = RowsOption(_tasks(live), every, selection, target)

    def write(folder: Folder) -> dict[int, QueueFile]:
        return _written(_rows(spark, chosen), folder, max(1, target.queues)) if live else {}

    return keep_plan(plans, selection, target, write, now_ms=now_ms, archive_version=version)


def _check_condition(selection: Selection) -> None:
    """Tell here, in a sentence, what would fail in every task."""
    with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
        engine.show(MESSAGE, [], SCHEMAS[MESSAGE])
        engine.confine([])
        engine.ask(f"SELECT 1 FROM {MESSAGE} WHERE {selection.condition()}")


def _tasks(live: Sequence[LiveFile]) -> list[list[str]]:
    """Files for each task, of about the same size."""
    tasks: list[list[str]] = []
    room = 0
    for file in live:
        if not tasks or file.bytes > room:
            tasks.append([])
            room = _TASK_BYTES
        tasks[-1].append(file.uri)
        room -= file.bytes
    return tasks


def _rows(spark: SparkSession, chosen: RowsOption) -> DataFrame:
    """Each message that is chosen, once: the row it had first."""
    spark.dataSource.register(ReplayRows)
    option = msgspec.json.encode(chosen).decode()

    def read(schema: pa.Schema) -> DataFrame:
        return spark.read.format(ReplayRows.name()).schema(from_arrow_schema(schema)).option("chosen", option).load()

    # Found first, and by ids alone: it is little, and the bodies need not be brought together by id.
    later = spark.sql(
        f"SELECT {', '.join(_PLACE)} FROM (SELECT *, row_number() OVER (PARTITION BY message_id ORDER BY {ORDER}) "
        "AS turn FROM {ids}) WHERE turn > 1",
        ids=read(_IDS),
    ).localCheckpoint()
    count = later.count()
    rows = read(_ROWS)
    if count == 0:
        return rows
    return rows.join(later.hint("broadcast") if count < _BROADCAST_ROWS else later, [*_PLACE], "left_anti")


def _written(rows: DataFrame, folder: Folder, queues: int) -> dict[int, QueueFile]:
    ordered = rows.repartition(queues, _TARGET).sortWithinPartitions(_TARGET, *_ORDER)
    with tempfile.TemporaryDirectory(prefix="dmq-") as place:
        manifest = Path(place) / "manifest.json"
        writer = ordered.select(*_ROWS.names).write.format(ReplayRows.name()).mode("append")
        writer.options(folder=folder.uri, manifest=str(manifest)).save()
        found: dict[str, list[Any]] = json.loads(manifest.read_text())
    return {int(queue): QueueFile(*file) for queue, file in found.items()}


# --- on executors -----------------------------------------------------------------------------------------------------


class ReplayRows(DataSource):
    """Chosen rows to read, and the rows of a plan to write. Private to the replay.

    Options: `chosen`, a `RowsOption` as JSON, to read; `folder` and `manifest`, to write.
    """

    @classmethod
    def name(cls) -> str:
        return "dmq_replay_rows"

    def reader(self, schema: StructType) -> _RowReader:
        return _RowReader(msgspec.json.decode(self.options["chosen"], type=RowsOption), [*schema.names])

    def writer(self, schema: StructType, overwrite: bool) -> _RowWriter:
        return _RowWriter(self.options["folder"], Path(self.options["manifest"]))


@dataclass
class _RowPartition(InputPartition):
    """Files that one task reads."""

    files: list[str]


class _RowReader(DataSourceReader):
    """Made in the driver; `read` is called on an executor, once for each partition."""

    def __init__(self, chosen: RowsOption, columns: list[str]) -> None:
        self._chosen = chosen
        self._schema = pa.schema([_ROWS.field(name) for name in columns])

    def partitions(self) -> list[InputPartition]:
        return [_RowPartition(files) for files in self._chosen.tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _RowPartition)
        chosen, columns = self._chosen, [name for name in self._schema.names if name != _TARGET]
        has_target = _TARGET in self._schema.names
        more = ("priority", "flags", "queue", "body_crc") if has_target else ()
        asked = ", ".join(dict.fromkeys((*columns, *more)))
        with Engine(Bounds(memory_bytes=_MEMORY_BYTES)) as engine:
            engine.show("mine", partition.files, SCHEMAS[MESSAGE])
            engine.show(MESSAGE, chosen.every or partition.files, SCHEMAS[MESSAGE])
            engine.confine([*partition.files, *chosen.every])
            query = f"SELECT {asked} FROM mine AS {MESSAGE} WHERE {chosen.selection.condition()}"
            for batch in engine.stream(query, _READ_ROWS):
                arrays = [batch[name].cast(self._schema.field(name).type) for name in columns]
                if has_target:
                    check_bodies(batch)
                    arrays.append(pa.array(queues_of(batch, chosen.target), pa.int64()))
                names = [*columns, *((_TARGET,) if has_target else ())]
                yield pa.RecordBatch.from_arrays(arrays, names=names).select(self._schema.names)


@dataclass
class _RowsWritten(WriterCommitMessage):
    """What a task wrote."""

    files: dict[int, QueueFile]


class _RowWriter(DataSourceArrowWriter):
    """Made in the driver; `write` is called on an executor for each partition, `commit` in a process beside the driver.

    Parameters:
        manifest: a file of the driver's machine, for what the tasks have written.
    """

    def __init__(self, folder: str, manifest: Path) -> None:
        self._folder = folder
        self._manifest = manifest

    def write(self, iterator: Iterator[pa.RecordBatch]) -> _RowsWritten:
        files = QueueFiles(Folder.at(self._folder), f"-{uuid.uuid4().hex}")
        for batch in iterator:
            files.add(batch, batch[_TARGET].to_numpy(zero_copy_only=False))
        return _RowsWritten(files.close())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        found: dict[int, QueueFile] = {}
        for message in messages:
            if isinstance(message, _RowsWritten):
                assert not found.keys() & message.files.keys()
                found |= message.files
        draft = self._manifest.with_suffix(".draft")
        draft.write_text(json.dumps(found))
        os.replace(draft, self._manifest)


_LOOK_SECONDS: Final = 2.0


class Share(NamedTuple):
    """What one task sends."""

    broker: str
    rows: str  # address of the plan's folder of rows
    plan: Plan
    queues: tuple[int, ...]
    rate: float | None


def send_plan_by_spark(
    spark: SparkSession, broker: str, router: Router, rows: Folder, *, plan: Plan, options: SendOptions
) -> Sent:
    """Send what is not stored yet; see `sender.send_plan`.

    Raises:
        DMQError: it cannot go on; what is stored stays, and another call goes on from there.
    """
    stored = stored_rows(router, plan)
    missing = {queue: count - stored[queue] for queue, count in plan.counts.items() if stored[queue] < count}
    tasks = [
        Share(broker, rows.uri, plan, queues, rate=part)
        for queues, part in shares(missing, spark.sparkContext.defaultParallelism, options.rate)
    ]
    if tasks:
        with _watched(router, plan, options.on_progress), task_errors(advice(plan.replay_id)):
            failed = spark.sparkContext.parallelize(tasks, len(tasks)).map(send_share).collect()
        for error in failed:
            if error is not None:
                raise error
    check_sent(router, plan)
    return Sent(sum(missing.values()), sum(stored.values()))


def advice(replay_id: str) -> str:
    """What to do when a task failed."""
    return f"nothing is lost, run it again with --replay-id {replay_id}, and it goes on where it came to"


def shares(missing: Mapping[int, int], tasks: int, rate: float | None) -> list[tuple[tuple[int, ...], float | None]]:
    """Queues for each task, so that all have about as much to send, and the rate each of them may have."""
    parts: list[list[int]] = [[] for _ in range(max(1, min(tasks, len(missing))))]
    sizes = [0] * len(parts)
    for queue in sorted(missing, key=lambda queue: (-missing[queue], queue)):
        least = sizes.index(min(sizes))
        parts[least].append(queue)
        sizes[least] += missing[queue]
    whole = sum(sizes)
    return [
        (tuple(part), None if rate is None else rate * size / whole)
        for part, size in zip(parts, sizes, strict=True)
        if part
    ]


def send_share(share: Share) -> DMQError | None:
    """Do it, on an executor. Returns the error that another attempt would meet again.

    Raises:
        DMQError: one that passes, for Spark to try again.
    """
    router = open_router(share.broker)
    try:
        stored = stored_rows(router, share.plan)
        mine = {queue: stored[queue] for queue in share.queues}
        rows = Folder.at(share.rows)
        send_queues(router, rows, share.plan, mine, options=SendOptions(share.rate))
    except DMQError as error:
        if error.retriable:
            raise
        return error
    finally:
        router.close()
    return None


@contextmanager
def _watched(router: Router, plan: Plan, on_progress: Callable[[ReplayProgress], None]) -> Iterator[None]:
    """While this lasts, ask the broker now and then how far it is."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS):
            try:
                on_progress(ReplayProgress(sum(stored_rows(router, plan).values()), plan.total))
            except DMQError:
                continue  # the tasks tell what is wrong, if it lasts

    watcher = threading.Thread(target=watch, name="dmq-replay-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
