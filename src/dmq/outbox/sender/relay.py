"""The relay: sends what was committed, at once where it is told of a commit, and whatever a crash left behind.

One thread, which looks for hints (send ids that were perhaps just committed) and, at intervals, for unsent rows whose
claim is over. Both ways read the row from the table: what is not committed is not there, so it cannot go out.

What always holds: messages of one topic and business id go out in the order of their insertion, whichever of several
relays and processes sends them, and one that fails holds back those behind it and nobody else; a row is marked only
after a broker acknowledged it. A crash between the two sends it again under the same send id, which the inbox knows.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, Row
from sqlalchemy.exc import SQLAlchemyError

from dmq.clock import Clock, SystemClock
from dmq.errors import DMQError, InvalidSettings
from dmq.event_log import EventLog
from dmq.outbox.alerts import OnAlert, alert_with
from dmq.outbox.engines import sentence
from dmq.outbox.metrics import Counts
from dmq.outbox.schema import OutboxTables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.claims import Blocker, Blockers, Claims, Place
from dmq.outbox.sender.commit_hints import Hints
from dmq.outbox.sender.dispatch import Dispatch, Sent

if TYPE_CHECKING:
    from dmq.client.client import Client

__all__ = ["Relay", "make_owner"]

log = EventLog(__name__)

_PAUSE_SECONDS_MIN: Final = 0.2
_PAUSE_SECONDS_MAX: Final = 5.0
# A scan that finds only rows behind others that are just being sent looks again after this, then more and more seldom.
_BEHIND_SECONDS: Final = 0.05
_STUCK_SECONDS: Final = 1.0
_SEEN_MAX: Final = 10_000
_owners: Final = count(1)


def make_owner() -> str:
    """A name for one relay or one process's direct sends, as claims have it."""
    return f"{socket.gethostname()[:32]}-{os.getpid()}-{next(_owners)}-{os.urandom(4).hex()}"


class Relay:
    """Sends the rows of a sender table.

    Parameters:
        engine: the database; one that blocks.
        client: a connection to a broker.
        tables: the outbox's; with the default names if left out.
        batch: how many rows it claims at a time.
        poll: seconds between two looks for rows that were left behind.
        lease: seconds a claim lasts: after this time another relay takes over from one that died.
        result_after: seconds after sending at which a row without its results is the compensator's.
        timeout: seconds to wait for a broker's answer.
        alert_after: a message that was refused this often is an alert.
        on_alert: called with an `Alert`.
        scan: whether it looks for rows that were left behind; without, it follows hints alone.
    """

    def __init__(
        self,
        engine: Engine,
        client: Client,
        *,
        tables: OutboxTables | None = None,
        batch: int = 1000,
        poll: float = 0.5,
        lease: float = 20.0,
        result_after: float = 600.0,
        timeout: float = 5.0,
        alert_after: int = 10,
        on_alert: OnAlert | None = None,
        scan: bool = True,
        owner: str | None = None,
        counts: Counts | None = None,
        clock: Clock | None = None,
    ) -> None:
        for name, value in (("batch", batch), ("poll", poll), ("timeout", timeout), ("alert_after", alert_after)):
            if value <= 0:
                raise InvalidSettings(f"{name}= is above 0, not {value!r}")
        if lease < 2 * timeout:
            raise InvalidSettings(f"lease= must be at least twice timeout=, which is {timeout:g} s: not {lease:g} s")
        self.owner: Final = owner or make_owner()
        self.counts: Final = counts or Counts()
        self._engine = engine
        self._clock = clock or SystemClock()
        send = (tables or default_tables()).send
        self._claims = Claims(engine, send)
        self._blockers = Blockers(engine, send)
        self._dispatch = Dispatch(client, timeout, alert_after, alert_with(on_alert, self.counts), counts=self.counts)
        self._hints = Hints(self._clock)
        self._batch = batch
        self._poll = poll
        self._lease_ms = round(lease * 1000)
        self._timeout_ms = round(timeout * 1000)
        self._result_ms = round(result_after * 1000)
        self._scan = scan
        self._next_scan = 0.0
        self._pause = 0.0
        self._trouble: DMQError | None = None
        self._fruitless = 0
        self._seen: dict[Place, tuple[int, float]] = {}
        self._unmarked: list[Sent] = []
        self._wake = threading.Condition()
        self._is_idle = True
        self._is_closing = False
        self._thread: threading.Thread | None = None

    # --- from other threads -------------------------------------------------------------------------------------------

    def hint(self, send_ids: Sequence[str]) -> None:
        """These rows were perhaps just committed: look now. Never waits, never fails."""
        with self._wake:
            self._hints.add(send_ids)
            self._is_idle = False
            self._wake.notify_all()

    def start(self) -> None:
        """Run in a thread of its own. Safe to call twice."""
        with self._wake:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self.run, name="dmq-outbox-relay", daemon=True)
                self._thread.start()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until every hint was followed; whether that came in time."""
        with self._wake:
            return self._wake.wait_for(lambda: self._is_idle and not self._hints, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Follow the hints that are left, as long as that goes well, and stop. What is not sent stays in the table."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and self._pause == 0.0:
            self.flush(timeout)
        with self._wake:
            self._is_closing = True
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout + self._timeout_ms / 1000)
        self._dispatch.close()

    def stop(self) -> None:
        """Have `run` return soon. Safe in a signal handler."""
        self._is_closing = True

    # --- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Relay until closed."""
        while not self._is_closing:
            try:
                is_busy = self.step()
            except SQLAlchemyError as error:
                self.counts.add("database_errors")
                reason = sentence(error, self._engine)
                log.warning("the database of the outbox is gone: the relay tries again", once_for="sql", reason=reason)
                self._slow_down()
                is_busy = False
            except Exception:
                log.exception("the relay failed; it tries again", once_for=())
                self._slow_down()
                is_busy = False
            if not is_busy:
                self._rest()

    def _rest(self) -> None:
        now = self._clock.monotonic()
        with self._wake:
            if self._is_closing:
                return
            if self._pause:
                self._wake.wait(self._pause)
                return
            moments = [moment for moment in (self._hints.next_at, self._next_scan if self._scan else None) if moment]
            self._is_idle = not self._hints
            self._wake.notify_all()
            if self._hints.has_new:
                return
            self._wake.wait(min([max(0.0, moment - now) for moment in moments], default=self._poll))

    def _slow_down(self) -> None:
        self._pause = min(max(_PAUSE_SECONDS_MIN, self._pause * 2), _PAUSE_SECONDS_MAX)

    def step(self) -> bool:
        """Follow the hints that are due, and look for what was left behind if it is time; whether there is more.

        Raises:
            SQLAlchemyError: the database cannot be used now.
        """
        self._mark()
        went = self._follow()
        if self._scan and self._clock.monotonic() >= self._next_scan:
            went += self._look()
        trouble, self._trouble = self._trouble, None
        if trouble is None:
            if self._pause:
                log.warning("the outbox goes on")
            self._pause = 0.0
            return bool(went)
        log.warning("the outbox waits for a broker", once_for=(), code=trouble.code, reason=trouble)
        self._slow_down()
        return False

    def _look(self) -> int:
        """Send what was left behind."""
        now = self._clock.monotonic()
        self._next_scan = now + self._poll
        until_ms = self._clock.now_ms() + self._lease_ms
        rows = self._claims.claim(self._batch, self.owner, self._clock.now_ms(), until_ms)
        went = self._go(rows, until_ms)
        self.counts.add("relayed", went)
        self._fruitless = 0 if went or not rows else self._fruitless + 1
        if self._fruitless:
            wait = min(_STUCK_SECONDS, _BEHIND_SECONDS * 2 ** min(self._fruitless - 1, 8))
            self._next_scan = self._clock.monotonic() + wait
        elif len(rows) == self._batch:
            self._next_scan = now
        return went

    def _follow(self) -> int:
        """Send what hints tell of."""
        with self._wake:
            asked = self._hints.take(self._batch)
        if not asked:
            return 0
        found = self._claims.look([*asked])
        self._hints.missed({send_id: asked[send_id] for send_id in asked.keys() - {row.send_id for row in found}})
        ours = [row for row in found if row.state == "NEW" and row.claimed_by == self.owner]
        until_ms = min((row.due_at_ms for row in ours), default=0)
        if ours and until_ms < self._clock.now_ms() + self._timeout_ms:
            # The transaction took long: the claim of its rows may be over, or end while we send.
            until_ms = self._clock.now_ms() + self._lease_ms
            kept = {*self._claims.keep([row.number for row in ours], self.owner, until_ms)}
            ours = [row for row in ours if row.number in kept]
        went = self._go(ours, until_ms)
        if went < len(ours):
            self._next_scan = min(self._next_scan, self._clock.monotonic() + _BEHIND_SECONDS)
        self.counts.add("sent_directly", went)
        return went

    def _go(self, rows: Sequence[Row[Any]], until_ms: int) -> int:
        """Send rows that are ours until a moment; how many were."""
        ready = self._free(rows)
        by_topic: dict[str, list[Row[Any]]] = {}
        for row in ready:
            by_topic.setdefault(row.topic, []).append(row)
        went = 0
        for topic, group in by_topic.items():
            if self._clock.now_ms() + self._timeout_ms > until_ms:
                self._claims.release([row.number for row in group])
                continue
            sent = self._dispatch.send(topic, group)
            self._unmarked.append(sent)
            self._mark()
            went += sent.count
            self._trouble = sent.trouble or self._trouble
        return went

    def _free(self, rows: Sequence[Row[Any]]) -> list[Row[Any]]:
        """Those that nobody holds back; the others are given back until their turn has come."""
        blockers = self._blockers.of(rows)
        if not blockers:
            return [*rows]
        now_ms = self._clock.now_ms()
        free: list[Row[Any]] = []
        held: dict[Place, list[int]] = {}
        for row in rows:
            place = (row.topic, row.business_id or "")
            blocker = blockers.get(place) if row.is_ordered else None
            if blocker is None or row.number < blocker.number:
                free.append(row)
            else:
                held.setdefault(place, []).append(row.number)
        for place, numbers in held.items():
            self._claims.release(numbers, self._until(place, blockers[place], now_ms))
            self.counts.add("held_back", len(numbers))
        return free

    def _until(self, place: Place, blocker: Blocker, now_ms: int) -> int | None:
        """When to look again at rows that are behind another one; None is at once, in their turn."""
        if not blocker.is_claimed:
            return blocker.due_at_ms if blocker.due_at_ms > now_ms else None
        # Another relay is sending it. One that does not get on for a second may be dead: let other rows come first.
        number, since = self._seen.get(place, (0, 0.0))
        now = self._clock.monotonic()
        if number != blocker.number:
            if len(self._seen) >= _SEEN_MAX:
                self._seen.clear()
            self._seen[place] = (blocker.number, now)
            return None
        return None if now - since < _STUCK_SECONDS else min(blocker.due_at_ms, now_ms + round(_STUCK_SECONDS * 1000))

    def _mark(self) -> None:
        """Write down what became of rows; kept and tried again first of all if the database does not take it."""
        while self._unmarked:
            sent = self._unmarked[0]
            now_ms = self._clock.now_ms()
            if sent.rows:
                self._claims.sent(sent.rows, now_ms, now_ms + self._result_ms)
                sent.rows_marked()
            if sent.refused:
                self._claims.failed(sent.refused, sent.reason, now_ms + sent.wait_ms)
                sent.refused_marked()
            if sent.given_back:
                until_ms = now_ms + sent.wait_ms if sent.wait_ms else None
                self._claims.release([row.number for row in sent.given_back], until_ms)
            self._unmarked.pop(0)
            self.counts.add("sent", sent.count)
