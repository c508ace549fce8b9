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

from dmq.client.connection.pool import PoolSettings
from dmq.client.connection.router import Router
from dmq.client.connection.session import make_hello
from dmq.client.connection.url import OneBroker
from dmq.clock import SystemClock
from dmq.errors import InvalidRequest
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.decode.journal_reader import server_url
from dmq.pipeline.replay.plan import Done, Plan, Plans
from dmq.pipeline.replay.plan_builder import make_plan
from dmq.pipeline.replay.selection import Selection
from dmq.pipeline.replay.sender import ReplayProgress, find_target, send_plan

__all__ = ["Outcome", "ReplayRequest", "execute", "new_replay_id", "planned"]

APP: Final = "dmq-replay"
_TIMEOUT_SECONDS: Final = 30.0


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


def execute(
    archive: Archive,
    broker: str,
    request: ReplayRequest,
    on_progress: Callable[[ReplayProgress], None] = lambda _: None,
) -> Outcome:
    """Send the selected messages, or those of them that are missing.

    Parameters:
        broker: its URL; it may be away for half a minute at the beginning.

    Raises:
        InvalidRequest: the replay id stands for another choice, or the choice makes no sense.
        UnknownMessage: nothing is chosen.
        UnknownTopic: the topic is not there.
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
    router = Router(
        OneBroker.at(server_url(broker), _TIMEOUT_SECONDS),
        PoolSettings(make_hello(APP, None), clock, timeout=_TIMEOUT_SECONDS),
    )
    router.open()
    try:
        if plan is None:
            if selection is None or not topic:
                raise InvalidRequest(f"there is no replay {replay_id} to go on with: say which messages, and where to")
            plan = make_plan(archive, selection, find_target(router, topic), plans, now_ms=clock.now_ms())
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
