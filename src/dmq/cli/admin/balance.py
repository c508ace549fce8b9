"""`dmq cluster balance`: spread leaders over hosts, and topics over shards; one move at a time.

What always holds: without `--execute` nothing is moved, and with it nothing while a shard is not whole; the next leader
moves when the shard of the one before is whole again. What was moved before an error is shown.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dmq.cli.admin.shard import hand_over
from dmq.cli.options import DEFAULT_URL, Format, Formatted, Url, connected
from dmq.cli.output import printable, show_rows
from dmq.errors import ShardConflict

if TYPE_CHECKING:
    from dmq.client.admin.cluster import BalancePlan, LeaderMove, SlotMove

__all__ = ["balance"]

_WHOLE_SECONDS = 60.0
_LOOK_SECONDS = 0.2


def balance(
    execute: Annotated[bool, typer.Option("--execute", help="Do it; without this it is a dry run.")] = False,
    leaders: Annotated[bool, typer.Option("--leaders/--no-leaders", help="Spread leaders over hosts.")] = True,
    topics: Annotated[
        bool, typer.Option("--topics/--no-topics", help="Give shards queues of topics, by weight and load.")
    ] = True,
    drain: Annotated[
        bool,
        typer.Option(
            "--drain", help="Hold ordered messages until those before them are consumed, so that order is kept."
        ),
    ] = False,
    url: Url = DEFAULT_URL,
    form: Formatted = Format.TABLE,
) -> None:
    """Spread leaders over hosts, and topics over shards; show what is moved, and why.

    A leader moves by a hand-over, for which sends wait about a second. Messages never move: a shard that gets queues
    takes its share of the new ones. Ordered messages go to other queues then, so give --drain where their order counts.
    """
    with connected(url) as client:
        plan = client.admin.balance_plan()
    moves: list[LeaderMove | SlotMove] = [*(plan.leaders if leaders else ()), *(plan.slots if topics else ())]
    done = 0
    try:
        if execute and plan.obstacles:
            raise ShardConflict(f"nothing was moved: {'; '.join(plan.obstacles)}")
        if execute:
            for move in moves:
                _carry_out(move, url, drain=drain)
                done += 1
    except BaseException:
        if done:
            _show(plan, moves, done, form)
        raise
    _show(plan, moves, done, form)
    if form == Format.TABLE and moves and not execute:
        typer.echo("\nthis was a dry run: say --execute to do it")


def _carry_out(move: LeaderMove | SlotMove, url: str, *, drain: bool) -> None:
    from dmq.client.admin.cluster import LeaderMove

    if isinstance(move, LeaderMove):
        hand_over(url, move.shard, move.after)
        _wait_whole(move, url)
        return
    add, remove = (move.shard, "") if move.is_added else ("", move.shard)
    with connected(url) as client:
        client.admin.place_topic(move.topic, add=add, remove=remove, drain=drain)


def _wait_whole(move: LeaderMove, url: str) -> None:
    """Wait until the new leader serves, and every member has what it has.

    Raises:
        ShardConflict: that takes too long.
    """
    deadline = time.monotonic() + _WHOLE_SECONDS
    with connected(url, any_member=True) as client:
        while True:
            shard = client.admin.shard(move.shard)
            if shard.leader == move.after and len(shard.in_sync) == len(shard.members):
                return
            if time.monotonic() > deadline:
                raise ShardConflict(
                    f"shard {move.shard} is not whole {_WHOLE_SECONDS:g} s after {move.after} was asked to lead it: "
                    f"dmq shard show {move.shard} says why; give the same command again when it is"
                )
            time.sleep(_LOOK_SECONDS)


def _show(plan: BalancePlan, moves: list[LeaderMove | SlotMove], done: int, form: Format) -> None:
    rows = [{**_row(move), "done": at < done} for at, move in enumerate(moves)]
    if form == Format.JSON:
        typer.echo(json.dumps({"moves": rows, "obstacles": [*plan.obstacles]}, indent=2))
        return
    show_rows(rows, form, empty="all is balanced")
    for obstacle in plan.obstacles:
        typer.echo(printable(f"nothing can be moved now: {obstacle}"), err=True)


def _row(move: LeaderMove | SlotMove) -> dict[str, Any]:
    from dmq.client.admin.cluster import LeaderMove

    if isinstance(move, LeaderMove):
        return {"move": "leader", "of": move.shard, "from": move.before, "to": move.after, "why": move.why}
    before, after = (None, move.shard) if move.is_added else (move.shard, None)
    return {"move": "queues", "of": move.topic, "from": before, "to": after, "why": move.why}
