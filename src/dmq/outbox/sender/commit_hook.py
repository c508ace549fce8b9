"""Noticing commits: which send ids were inserted in which session, and when its transaction has ended.

Sessions tell by their events, also those that the user made; a plain connection tells just before it commits. Nothing
depends on it: the relay reads each row before it sends, so a hint that comes too early, or for a savepoint that was
rolled back, does no harm, and one that never comes only costs time.

What always holds: a session's rollback forgets what was inserted in it; hearing of a commit never waits and never
raises, since the business is done.

`@sends_messages`: what a business method inserted goes out when it returns (T-08).

What always holds: a method that raises sends nothing by this way; the method's own result or error is what its caller
gets, whatever becomes of the messages. Works on functions and on coroutine functions, in threads and tasks alike.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, event
from sqlalchemy.orm import Session

from dmq.event_log import EventLog

__all__ = ["Collected", "collect", "collected_by", "inserted", "sends_messages"]

log = EventLog(__name__)

Tell = Callable[[Sequence[str]], None]

_KEY: Final = "dmq.outbox"
_is_listening = False
_connections: WeakKeyDictionary[Connection, list[tuple[Tell, str]]] = WeakKeyDictionary()


class Collected:
    """What was inserted during one call of a method that `sends_messages`."""

    def __init__(self) -> None:
        self.inserted: list[tuple[Tell, str]] = []

    def tell(self) -> None:
        _tell(self.inserted)


collected_by: Final[contextvars.ContextVar[Collected | None]] = contextvars.ContextVar("dmq_outbox", default=None)


def collect(send_id: str, tell: Tell) -> None:
    """Note a send id for the method that runs now, if it is one that `sends_messages`."""
    collected = collected_by.get()
    if collected is not None:
        collected.inserted.append((tell, send_id))


def inserted(session: Session | Connection, send_id: str, tell: Tell) -> None:
    """Have `tell` called with the send id once the transaction of this session is committed."""
    global _is_listening
    if isinstance(session, Session):
        if not _is_listening:
            event.listen(Session, "after_commit", _committed)
            event.listen(Session, "after_rollback", _rolled_back)
            _is_listening = True
        session.info.setdefault(_KEY, []).append((tell, send_id))
        return
    waiting = _connections.get(session)
    if waiting is None:
        waiting = _connections[session] = []
        event.listen(session, "commit", _connection_commits)
        event.listen(session, "rollback", _connection_rolls_back)
    waiting.append((tell, send_id))


def _committed(session: Session) -> None:
    if _KEY in session.info and session.get_nested_transaction() is None:  # savepoints tell, too
        _tell(session.info.pop(_KEY))


def _rolled_back(session: Session) -> None:
    if _KEY in session.info and session.get_nested_transaction() is None:
        del session.info[_KEY]


def _connection_commits(connection: Connection) -> None:
    waiting = _connections.get(connection)
    if waiting:
        told = [*waiting]
        waiting.clear()
        _tell(told)


def _connection_rolls_back(connection: Connection) -> None:
    waiting = _connections.get(connection)
    if waiting:
        waiting.clear()


def _tell(told: Sequence[tuple[Tell, str]]) -> None:
    by_teller: dict[Any, list[str]] = {}
    for tell, send_id in told:
        by_teller.setdefault(tell, []).append(send_id)
    for tell, send_ids in by_teller.items():
        try:
            tell(send_ids)
        except Exception:
            log.exception("a commit could not be told to the relay, which finds it by itself", once_for=())


P = ParamSpec("P")
T = TypeVar("T")


def sends_messages(method: Callable[P, T]) -> Callable[P, T]:
    """Send at once what the method has inserted with `MessageService.send`, once its transaction is committed.

    Sessions tell of their commits by themselves, so that messages also leave without it. It serves a method that works
    on a plain connection, or commits in a way that a session does not see, and it says what the method does.
    """
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def run_async(*args: P.args, **kwargs: P.kwargs) -> Any:
            collected = Collected()
            token = collected_by.set(collected)
            try:
                result = await method(*args, **kwargs)
            finally:
                collected_by.reset(token)
            collected.tell()
            return result

        return cast("Callable[P, T]", run_async)

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        collected = Collected()
        token = collected_by.set(collected)
        try:
            result = method(*args, **kwargs)
        finally:
            collected_by.reset(token)
        collected.tell()
        return result

    return run
