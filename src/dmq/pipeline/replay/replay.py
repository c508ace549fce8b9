"""A replay from its beginning to its end: what `dmq archive replay` does.

What always holds: without `execute` nothing is written and nothing is sent; with it, each message that was chosen when
the replay was first executed is in the target topic once, however often the same replay id is executed and wherever a
run was killed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from dmq.clock import SystemClock
from dmq.errors import InvalidRequest
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.replay.plan import Done, Plan, Plans, Selection
from dmq.pipeline.replay.plan_builder import make_plan
from dmq.pipeline.replay.sender import ReplayProgress, SendOptions, find_target, open_router, send_plan
from dmq.pipeline.spark_session import task_errors
from dmq.pipeline.tables import MESSAGE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Outcome", "ReplayRequest", "execute", "is_large", "new_replay_id", "planned", "session_for"]

LOCAL_BYTES_MAX: Final = 2 << 30  # of the archive's files; more than this is work for Spark


class Outcome(NamedTuple):
    """What became of it: messages that this run sent, and those that were there from earlier runs."""

    plan: Plan
    sent: int
    found: int


class ReplayRequest(NamedTuple):
    """What to replay.

    `selection` says which messages; None goes on with a replay that was executed before, and so does the same
    selection. `topic` is where they go; empty is where they went before. `rate` is messages a second at most.
    """

    selection: Selection | None
    topic: str
    replay_id: str
    rate: float | None = None


def new_replay_id() -> str:
    """A replay id that nobody has used."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def planned(archive: Archive, replay_id: str) -> tuple[Plan | None, Done | None]:
    """What is known of a replay: its plan, and that it was sent."""
    plans = Plans(archive.folder, replay_id)
    return plans.load(), plans.done()


def is_large(archive: Archive, replay_id: str, selection: Selection | None) -> bool:
    """Whether a replay is too much for one process: by its plan, or by the files that may have its messages."""
    plan = Plans(archive.folder, replay_id).load()
    if plan is not None:
        return plan.bytes > LOCAL_BYTES_MAX
    files = archive.table(MESSAGE).live_files(where=None if selection is None else selection.bounds())
    return sum(file.bytes for file in files) > LOCAL_BYTES_MAX


@contextmanager
def session_for(is_for_spark: bool, master: str | None, conf: Mapping[str, str]) -> Iterator[SparkSession | None]:
    """A session for one replay, stopped at the end; None where this process does it.

    Raises:
        InvalidSettings: Spark cannot start.
    """
    if not is_for_spark:
        yield None
        return
    from dmq.pipeline.spark_session import spark_session

    spark = spark_session(master, conf, app_name="dmq replay")
    try:
        yield spark
    finally:
        spark.stop()


def execute(
    archive: Archive,
    broker: str,
    request: ReplayRequest,
    on_progress: Callable[[ReplayProgress], None] = lambda _: None,
    *,
    spark: SparkSession | None = None,
) -> Outcome:
    """Send the selected messages, or those of them that are missing.

    Parameters:
        broker: its URL; it may be away for half a minute at the beginning.
        spark: whose executors plan and send; without it this process does. Each goes on with what the other began.

    Raises:
        InvalidRequest: the replay id stands for another choice, or the choice makes no sense.
        UnknownMessage: nothing is chosen.
        UnknownTopic: the topic does not exist.
        DMQError: it could not go on; the same call goes on where it came to.
    """
    selection, topic, replay_id, rate = request
    clock = SystemClock()
    plans = Plans(archive.folder, replay_id)
    plan = plans.load()
    if plan is not None:
        _check_same(plan, selection, topic)
        if plans.done() is not None:
            return Outcome(plan, 0, plan.total)
    router = open_router(broker)
    try:
        if plan is None:
            if selection is None or not topic:
                raise InvalidRequest(f"there is no replay {replay_id} to go on with: say which messages, and where to")
            target = find_target(router, topic)
            if spark is None:
                plan = make_plan(archive, selection, target, plans, now_ms=clock.now_ms())
            else:
                from dmq.pipeline.replay.spark_replay import advice, make_plan_by_spark

                with task_errors(advice(replay_id)):
                    plan = make_plan_by_spark(spark, archive, selection, target, plans=plans, now_ms=clock.now_ms())
        rows = plans.folder.below(plan.folder)
        options = SendOptions(rate, clock.now_ms, on_progress)
        if spark is None:
            sent = send_plan(router, rows, plan, options)
        else:
            from dmq.pipeline.replay.spark_replay import send_plan_by_spark

            sent = send_plan_by_spark(spark, broker, router, rows, plan=plan, options=options)
    finally:
        router.close()
    plans.finish(plan, Done(sent=plan.total, at_ms=clock.now_ms()))
    return Outcome(plan, sent.sent, sent.found)


def _check_same(plan: Plan, selection: Selection | None, topic: str) -> None:
    if topic not in ("", plan.topic) or selection not in (None, plan.selection):
        raise InvalidRequest(
            f"replay {plan.replay_id} sends other messages ({plan.selection.words()}) into topic {plan.topic!r}: say "
            "nothing but its id to go on with it, or choose another --replay-id"
        )
