"""What a broker has going on besides answering at once: coroutines, and requests that wait for a change.

What always holds: a coroutine that fails tells whoever is responsible for it, and harms nobody else; a client has at
most `WORKING_MAX` requests that go on by themselves, changes apart, which have a bound of their own; a request that
waits is served once, in its turn, or told why not, unless its connection is gone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from dmq.broker.catalog.changes import Change, Changes, Later
from dmq.broker.wire.session import Session
from dmq.errors import BrokerStopping, Busy, DMQError
from dmq.protocol.commands import Command
from dmq.protocol.frame import Frame

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["WORKING_MAX", "Tasks", "Work", "check_changes", "go_on", "wait_for"]

log = logging.getLogger(__name__)

# A coroutine begins only at the end of the turn, and thousands of requests may come in one: without a bound here, they
# would all be in memory before the first of them could be refused or answered.
WORKING_MAX: Final = 256
_AGAIN_MS: Final = 50

Work = Coroutine[Any, Any, None]


class Tasks:
    """Coroutines under way."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def run(
        self, work: Work, failed: Callable[[BaseException], None], ended: Callable[[], None] = lambda: None
    ) -> None:
        """Let a coroutine go on by itself.

        Parameters:
            failed: called if it does not come to its end.
            ended: called before, whatever came of it.
        """
        task = self._loop.create_task(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            ended()
            if task.cancelled():
                failed(BrokerStopping("the broker stopped before this was done: ask another one, or this one later"))
                return
            error = task.exception()
            if error is not None:
                if not isinstance(error, DMQError):
                    log.error("a command failed", exc_info=error)
                failed(error)

        task.add_done_callback(done)

    async def finish(self, seconds: float) -> None:
        """Wait for all of them, then cancel those that are late."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=seconds)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)


def go_on(broker: Broker, handler: Callable[..., object], session: Session, frame: Frame, work: Work) -> None:
    """Let a request go on by itself; `handler` gave the work.

    Raises:
        Busy: the client has too many of them.
    """
    # What is not a coroutine itself has begun a change already, and ends it only by going on.
    if session.working >= WORKING_MAX and inspect.iscoroutinefunction(handler):
        work.close()
        raise Busy(
            f"{session.working} requests of this connection are under way: wait for some of the answers",
            retry_after_ms=_AGAIN_MS,
        )
    session.working += 1

    def ended() -> None:
        session.working -= 1

    broker.run(work, lambda error: broker.failed_request(session.connection, frame, error), ended)


def check_changes(changes: Changes, session: Session, header: Any) -> None:
    """Raises Later if a request is about something that is being changed."""
    changes.check(("topic", getattr(header, "topic", "")), ("group", getattr(header, "group", "")))
    waiting = session.subscribing.get(getattr(header, "subscription", None))
    if waiting is not None:
        raise Later(waiting)


def wait_for(broker: Broker, change: Change, session: Session, frame: Frame, header: Any) -> None:
    """Serve a request once a change is done.

    Raises:
        Busy: too many wait already.
    """
    number = header.subscription if frame.command == Command.SUBSCRIBE else None

    def resume(error: DMQError | None) -> None:
        if number is not None:
            session.subscribing.pop(number, None)
        if not session.connection.is_open:
            return
        if error is not None:
            broker.failed_request(session.connection, frame, error)
        else:
            broker.received(session.connection, frame)

    broker.changes.wait(change, resume, len(frame.body))
    if number is not None:
        session.subscribing[number] = change
