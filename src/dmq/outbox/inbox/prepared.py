"""Messages that were prepared in a user's own session, until its transaction ends (T-11).

What always holds: a transaction does not commit with a message whose result was not said; what was said goes to the
sender after the commit, and is forgotten with a rollback.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import event
from sqlalchemy.orm import Session, SessionTransaction

from dmq.errors import InvalidRequest
from dmq.outbox.inbox.consumption import Consumption
from dmq.outbox.inbox.recorder import Earlier

__all__ = ["Answer", "Prepared"]

Answer = Callable[[Consumption, Earlier], object]
_KEY: Final = "dmq.prepared"  # in `Session.info`


class Prepared:
    """What a session has of ours.

    Parameters:
        answer: tells a sender; called right after a commit.
    """

    def __init__(self, session: Session, answer: Answer) -> None:
        self.open: tuple[Consumption, Any] | None = None  # with its savepoint
        self._answer = answer
        self._said: list[tuple[Consumption, Earlier]] = []
        event.listen(session, "before_commit", self._before_commit)
        event.listen(session, "after_commit", self._after_commit)
        event.listen(session, "after_soft_rollback", self._after_rollback)

    @classmethod
    def of(cls, session: Session, answer: Answer) -> Prepared:
        """That of a session, made when first asked for."""
        found: Prepared | None = session.info.get(_KEY)
        if found is None:
            found = session.info[_KEY] = cls(session, answer)
        return found

    def begin(self, taken: Consumption, savepoint: Any) -> None:
        """A message was prepared."""
        self.open = (taken, savepoint)

    def check_closed(self) -> None:
        """Raises InvalidRequest while a message waits for its result."""
        if self.open is not None:
            raise InvalidRequest("a message is prepared in this session: say consumed() of it, then prepare the next")

    def take(self, send_id: str) -> tuple[Consumption, Any]:
        """The message whose result is said, and its savepoint.

        Raises:
            InvalidRequest: it was not prepared here.
        """
        if self.open is None or self.open[0].row.send_id != send_id:
            raise InvalidRequest("the message was not prepared in this session: call prepare() first")
        found, self.open = self.open, None
        return found

    def said(self, taken: Consumption, earlier: Earlier) -> None:
        """What it came to, if the transaction commits."""
        self._said.append((taken, earlier))

    # --- the session's events ---------------------------------------------------------------------------------------

    def _before_commit(self, session: Session) -> None:
        # The business's own savepoints end here, too; ours is the innermost only when all of them have.
        if self.open is not None and session.get_nested_transaction() in (None, _plain(self.open[1])):
            raise InvalidRequest("the result of a prepared message is UNKNOWN: say consumed() before the commit")

    def _after_commit(self, session: Session) -> None:
        if session.get_nested_transaction() is None:
            said, self._said = self._said, []
            for taken, earlier in said:
                self._answer(taken, earlier)

    def _after_rollback(self, session: Session, ended: SessionTransaction) -> None:
        if not ended.nested:
            self.open, self._said = None, []


def _plain(savepoint: Any) -> SessionTransaction:
    """The transaction behind one of asyncio."""
    plain: SessionTransaction = getattr(savepoint, "sync_transaction", savepoint)
    return plain
