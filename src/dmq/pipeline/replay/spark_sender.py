"""The sender of a plan on Spark: each task sends some of its queues, as one process sends all (`sender`).

A queue is sent by one task, in its order. A task asks the broker how far its queues are before it sends, so one that
is run again goes on where the one before came to; two that overlap, as when an executor is lost and lives on, send the
same batches under the same numbers, of which the broker stores each once.

What always holds: as of `send_plan`. All tasks together send no more than the rate: each has its share, by what it has
to send.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.client.connection.router import Router
from dmq.errors import DMQError
from dmq.pipeline.archive.folder import Folder
from dmq.pipeline.replay.plan import Plan
from dmq.pipeline.replay.sender import (
    ReplayProgress,
    SendOptions,
    Sent,
    check_sent,
    open_router,
    send_queues,
    stored_rows,
)
from dmq.pipeline.task_error import task_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Share", "advice", "send_plan_by_spark", "send_share", "shares"]

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
