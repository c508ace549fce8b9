"""`dmq archive replay`: archived messages back into a topic, each once for every replay id."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.archive.options import Conf, Master, Since, Tables, Until, needs_spark_extra
from dmq.cli.archive.query import plain
from dmq.cli.contexts import choose_url
from dmq.cli.message.messages import body_text
from dmq.cli.options import DEFAULT_URL, Format, Formatted, checked_id, parse_moment, parse_pairs
from dmq.cli.output import cut, show_facts, show_rows

if TYPE_CHECKING:
    from dmq.pipeline.archive.table_store import Archive
    from dmq.pipeline.replay.plan import Selection
    from dmq.pipeline.replay.replay import Outcome, ReplayRequest
    from dmq.pipeline.replay.sender import ReplayProgress

__all__ = ["replay"]

_SHOWN_CHARS = 60
_SHOW_SECONDS = 1.0

Broker = Annotated[
    str, typer.Option("--broker", envvar="DMQ_URL", metavar="URL", callback=choose_url, help="Where the broker is.")
]
BySpark = Annotated[
    bool | None,
    typer.Option("--spark/--local", help="By Spark, or by this process; left out, by Spark if it is much."),
]


def replay(
    tables: Tables,
    topic: Annotated[str, typer.Option(metavar="TOPIC", help="Messages of this topic.")] = "",
    message_ids: Annotated[
        list[str] | None, typer.Option("--id", metavar="ID", help="With this id; may be repeated.")
    ] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="KEY", help="With this key; may be repeated.")
    ] = None,
    business_ids: Annotated[
        list[str] | None, typer.Option("--business-id", metavar="ID", help="With this business id; may be repeated.")
    ] = None,
    since: Since = None,
    until: Until = None,
    where: Annotated[
        str, typer.Option(metavar="SQL", help="A condition on the columns of table message: \"tag = 'paid'\".")
    ] = "",
    to: Annotated[
        str, typer.Option("--to", metavar="TOPIC", help="Where they go; their own --topic if left out.")
    ] = "",
    rate: Annotated[
        float | None, typer.Option(min=0.01, metavar="N", help="At most this many messages a second.")
    ] = None,
    replay_id: Annotated[
        str | None,
        typer.Option("--replay-id", metavar="ID", help="Its name: what was sent under it is not sent again."),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="Send; without this, only show what would be sent.")
    ] = False,
    by_spark: BySpark = None,
    master: Master = None,
    conf: Conf = None,
    broker: Broker = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Send archived messages again, with their bytes, keys, properties and ids, marked as replayed.

    A dry run until --execute. If it is interrupted, the same --replay-id with --execute goes on where it came to: no
    message is lost and none sent twice.
    """
    with needs_spark_extra():
        from dmq.pipeline.archive.table_store import Archive
        from dmq.pipeline.replay.plan import Selection
        from dmq.pipeline.replay.replay import execute as send
        from dmq.pipeline.replay.replay import session_for

    archive = Archive.open(tables)
    selection = Selection(
        topic=topic,
        ids=tuple(map(checked_id, message_ids or ())),
        keys=tuple(keys or ()),
        business_ids=tuple(business_ids or ()),
        since=parse_moment(since),
        until=parse_moment(until),
        where=where,
    )
    chosen = None if selection == Selection() else selection
    if chosen is None and replay_id is None:
        raise typer.BadParameter("say which messages: --topic, --id, --key, --business-id, --since, --until or --where")
    if not execute:
        _show_dry(archive, chosen, to or topic, replay_id, form=form)
        return
    request = _request(chosen, to or topic, replay_id, rate)
    is_for_spark = _is_large(archive, request) if by_spark is None else by_spark
    with session_for(is_for_spark, master, parse_pairs(conf)) as spark:
        _show_outcome(send(archive, broker, request, _Shown(), spark=spark), form)


def _request(chosen: Selection | None, to: str, replay_id: str | None, rate: float | None) -> ReplayRequest:
    from dmq.pipeline.replay.replay import ReplayRequest, new_replay_id

    if replay_id is not None:
        return ReplayRequest(chosen, to, replay_id, rate)
    if not to:
        raise typer.BadParameter("say where they go: --to TOPIC")
    request = ReplayRequest(chosen, to, new_replay_id(), rate)
    typer.echo(f"replay id: {request.replay_id}", err=True)
    return request


def _is_large(archive: Archive, request: ReplayRequest) -> bool:
    """Whether it is work for Spark, and Spark is there."""
    from dmq.pipeline.replay.replay import is_large

    if not is_large(archive, request.replay_id, request.selection):
        return False
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        typer.echo("this is much for one process: with Java 17 or newer, Spark would share it out", err=True)
        return False
    return True


class _Shown:
    """Progress on the terminal, now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SHOW_SECONDS

    def __call__(self, progress: ReplayProgress) -> None:
        now = time.monotonic()
        if now >= self._next and sys.stderr.isatty():
            self._next = now + _SHOW_SECONDS
            typer.echo(f"{progress.stored:,} of {progress.total:,} stored", err=True)


def _show_dry(archive: Archive, chosen: Selection | None, to: str, replay_id: str | None, form: Format) -> None:
    from dmq.pipeline.replay.plan_builder import overview
    from dmq.pipeline.replay.replay import planned

    plan, done = planned(archive, replay_id) if replay_id is not None else (None, None)
    if plan is not None:
        state = "sent" if done is not None else "begun, perhaps not sent to its end: --execute goes on with it"
        facts = {"replay_id": plan.replay_id, "messages": plan.total, "chosen": plan.selection.words()}
        show_facts(facts | {"to": plan.topic, "state": state}, form)
        return
    if chosen is None:
        raise typer.BadParameter(f"there is no replay {replay_id} yet: say which messages")
    found = overview(archive, chosen)
    topics = [{name: plain(value) for name, value in row.items()} for row in found.topics]
    sample = [_sample_row(row) for row in found.sample]
    if form == Format.JSON:
        facts = {"messages": found.total, "bytes": found.bytes, "to": to or None}
        typer.echo(json.dumps(facts | {"topics": topics, "sample": sample}, indent=2))
        return
    show_rows(topics, form, empty="no archived message matches")
    if found.total:
        typer.echo("\nthe first of them:")
        show_rows(sample, form, empty="")
        where = f" into topic {to}" if to else ""
        typer.echo(f"\nthis was a dry run of {found.total:,} messages{where}: say --execute to send them")


def _sample_row(row: dict[str, Any]) -> dict[str, Any]:
    shown = {name: plain(value) for name, value in row.items() if name != "body"}
    return shown | {"body": cut(body_text(row["body"]), _SHOWN_CHARS)}


def _show_outcome(outcome: Outcome, form: Format) -> None:
    plan = outcome.plan
    if form == Format.JSON:
        facts = {"replay_id": plan.replay_id, "to": plan.topic, "messages": plan.total}
        show_facts(facts | {"sent": outcome.sent, "found_stored": outcome.found}, form)
        return
    before = f"; {outcome.found:,} were stored before" if outcome.found else ""
    typer.echo(f"replay {plan.replay_id}: {outcome.sent:,} of {plan.total:,} messages sent to {plan.topic}{before}")
