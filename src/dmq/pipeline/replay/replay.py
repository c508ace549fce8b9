"""A replay from its beginning to its end: what `dmq archive replay` does.

What always holds: without `execute` nothing is written and nothing is sent; with it, each message that was chosen when
the replay was first executed is in the target topic once, however often the same replay id is executed and wherever a
run was killed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from dmq.client.client import make_hello
from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import OneBroker, Router
from dmq.client.connection.url import parse_url
from dmq.clock import Clock, SystemClock
from dmq.errors import InvalidRequest
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.decode.journal_reader import server_url
from dmq.pipeline.replay.plan import Done, Plan, Plans
from dmq.pipeline.replay.plan_builder import make_plan
from dmq.pipeline.replay.selection import Selection
from dmq.pipeline.replay.sender import Progress, find_target, send_plan

__all__ = ["Outcome", "execute", "new_replay_id", "planned"]

APP: Final = "dmq-replay"


class Outcome(NamedTuple):
    """What became of it: messages that this run sent, and those that were there from earlier runs."""

    plan: Plan
    sent: int
    found: int


def new_replay_id(clock: Clock | None = None) -> str:
    """One that nobody has used."""
    now = (clock or SystemClock()).now_ms() // 1000
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(3)}"


def planned(archive: Archive, replay_id: str) -> tuple[Plan | None, Done | None]:
    """What is known of a replay: its plan, and that it was sent."""
    plans = Plans(archive.folder, replay_id)
    return plans.load(), plans.done()


def execute(
    archive: Archive,
    broker: str,
    selection: Selection | None,
    topic: str,
    replay_id: str,
    *,
    rate: float | None = None,
    timeout: float = 30.0,
    clock: Clock | None = None,
    on_rows: Callable[[int], None] = lambda _: None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Outcome:
    """Send what was chosen, or what of it is missing.

    Parameters:
        broker: its URL.
        selection: what is chosen; None goes on with a replay that was executed before, and so does the same choice.
        topic: where it goes; empty is where it went before.
        rate: messages a second at most.
        timeout: seconds that a broker may be away at the beginning.
        on_rows: called with the number of rows while they are chosen.

    Raises:
        InvalidRequest: the replay id stands for another choice, or the choice makes no sense.
        UnknownMessage: nothing is chosen.
        UnknownTopic: the topic is not there.
        DMQError: it could not go on; the same call goes on where it came to.
    """
    clock = clock or SystemClock()
    plans = Plans(archive.folder, replay_id)
    plan = plans.load()
    if plan is not None:
        _check_same(plan, selection, topic)
        if plans.done() is not None:
            return Outcome(plan, 0, plan.total)
    router = Router(
        OneBroker(parse_url(server_url(broker))), PoolSettings(make_hello(APP, None), clock, timeout=timeout)
    )
    router.open()
    try:
        if plan is None:
            if selection is None or not topic:
                raise InvalidRequest(f"there is no replay {replay_id} to go on with: say which messages, and where to")
            plan = make_plan(archive, selection, find_target(router, topic), plans, clock.now_ms(), on_rows)
        sent = send_plan(
            router,
            plans.folder.below(plan.folder),
            plan,
            rate=rate,
            now_ms=clock.now_ms,
            on_progress=on_progress,
        )
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
