"""Turns: which thread of a blocking program reads a connection.

There is no thread between a lone request and its answer. A thread that waits leads: it reads, hands other threads
their answers, and when it has its own it leaves, and wakes another that waits. Only when nobody waits and something is
attended (an asynchronous send, a subscription), or output was kept, a background thread reads.

A thread that leaves for a moment, to run a handler of what it read, only lends the lead: no other thread is woken to
read in its place, since a change of threads costs more than most handlers do. Any thread that needs an answer meanwhile
takes the lead as if it were free. Another one that waits watches: it looks every few milliseconds, without being woken
for it, and reads on once the lender does not come back. It sleeps again when nothing is lent.

What always holds: at most one thread leads; as long as anybody waits or anything is attended, somebody leads, or has
been woken to do so, or watches while the lead is lent; once it is over, nobody does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from dmq.client.connection.threads import FOREVER, Waiter

__all__ = ["WATCH_SECONDS", "Turns"]

_READ_SECONDS: Final = 1.0  # how long the background thread reads before it lets others have a turn
WATCH_SECONDS: Final = 0.004
"""A lender that does not come back within this long, or twice as long, loses the lead to the thread that watches."""


class Turns:
    """The turns of one connection.

    Parameters:
        name: of the background thread.
        receive: wait so many seconds for bytes, and do what they ask.
        is_over: whether there is nothing to read any more.
        has_output: whether output was kept that the reader must write.
        on_left: called without the lead after each turn.
    """

    def __init__(
        self,
        name: str,
        receive: Callable[[float], None],
        is_over: Callable[[], bool],
        has_output: Callable[[], object],
        on_left: Callable[[], None],
    ) -> None:
        self._name = name
        self._receive = receive
        self._is_over = is_over
        self._has_output = has_output
        self._on_left = on_left
        self._lock = threading.Lock()
        self._leader = 0
        self._lender = 0  # the thread that lent the lead, and has not come back
        self._loans = 0
        self._watched = 0  # how many loans there were when the watcher looked
        self._watcher: Waiter | None = None
        self._impatient = 0  # followers that wait for answers
        self._followers: deque[Waiter] = deque()
        self._background = Waiter()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self.attention = 0
        """How many things must be read though nobody waits. Changed under the owner's lock."""

    @property
    def is_mine(self) -> bool:
        """Whether this thread leads."""
        return self._leader == threading.get_ident()

    @property
    def is_taken(self) -> bool:
        """Whether any thread leads."""
        return self._leader != 0

    # --- leading ----------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Lead from now on, until `leave`; False if another thread does, or it is over."""
        if self._is_over() or not self._lock.acquire(False):
            return False
        self._leader = threading.get_ident()
        return True

    def leave(self) -> None:
        """Lead no more, and let another one."""
        self._leader = 0
        self._lock.release()
        self._on_left()
        if self._followers or self.attention or self._has_output():
            self._pass_on()

    def end(self) -> bool:
        """Nobody will lead any more; False if somebody does now, who then calls this again."""
        return self._lock.acquire(False)  # and never released

    def _lead(self, is_done: Callable[[], object], deadline: float) -> bool | None:
        """Lead until `is_done`, and in any case read once; None if another thread does, or it is over.

        Returns:
            Whether `is_done`, as far as is known.
        """
        if not self.take():
            return None
        has_ended = False
        try:
            while not (has_ended := bool(is_done())):
                left = deadline - time.monotonic()
                self._receive(max(0.0, left))
                if left <= 0 or self._is_over():
                    break
        finally:
            self._leader = 0
            self._lock.release()
            self._on_left()
        return has_ended

    def take_ready(self) -> None:
        """Read what is here, without waiting for more; nothing if another thread reads."""
        if self._lead(lambda: False, 0.0) is not None:
            self._pass_on()

    # --- following --------------------------------------------------------------------------------------------------

    def until(
        self,
        waiter: Waiter,
        is_done: Callable[[], object],
        deadline: float,
        *,
        is_patient: bool = False,
        is_lender: bool = False,
    ) -> None:
        """Wait until `is_done`, which somebody follows with `waiter.wake()`; read for all meanwhile if nobody does.

        Parameters:
            is_patient: what is waited for is no answer: it may come some milliseconds later.
            is_lender: this thread will be back in a moment, to wait for more.
        """
        me, has_led = threading.get_ident(), False
        if is_patient and self._lender == me:
            self._lender = 0
        self._followers.append(waiter)
        self._impatient += not is_patient
        try:
            while not is_done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                pause = self._patience(waiter) if is_patient else 0.0
                if pause:
                    waiter.wait(min(left, pause))
                    continue
                has_ended = self._lead(is_done, deadline)
                if has_ended is None:
                    waiter.wait(left)
                else:
                    has_led = True
                    if has_ended:
                        break
        finally:
            self._followers.remove(waiter)
            self._impatient -= not is_patient
            if self._watcher is waiter:
                self._watcher = None
            if is_lender and has_led and not self._impatient and (self._followers or self.attention):
                self._loans += 1
                self._lender = me
            self._pass_on()

    def _patience(self, waiter: Waiter) -> float:
        """How long a thread that is patient waits before it tries to lead."""
        if self._watcher is waiter:
            if self._watched != self._loans:
                self._watched = self._loans
                return WATCH_SECONDS
            # Nothing was lent since the last look: the lender is late, or there is nothing to watch.
            self._watcher = None
            self._lender = 0
            return 0.0
        if not self._lender:
            return 0.0
        if self._watcher is not None:
            return FOREVER  # the watcher passes on when it leaves
        self._watcher, self._watched = waiter, self._loans
        return WATCH_SECONDS

    def wake_followers(self) -> None:
        """Have all who wait look again."""
        for follower in tuple(self._followers):
            follower.wake()

    def wake_all(self) -> None:
        """Have everybody look again, the background thread too."""
        self._background.wake()
        self.wake_followers()

    def _pass_on(self) -> None:
        if self._leader or (self._lender and self._watcher is not None):
            return  # the leader passes on when it leaves; the lender is back in a moment, or else the watcher leads
        for follower in tuple(self._followers):
            follower.wake()
            return
        if self.attention or self._has_output():
            self.start_background()

    # --- in the background ------------------------------------------------------------------------------------------

    def attend(self) -> None:
        """One more thing must be read though nobody waits."""
        self.attention += 1
        if self.attention == 1 and not self._leader:  # the leader passes on, and looks at this first
            self._pass_on()

    def start_background(self) -> None:
        """Have the background thread look whether it is needed."""
        with self._starting:
            if self._thread is None and not self._is_over():
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._background.wake()

    def _serve(self) -> None:
        mine = self._background
        while not self._is_over():
            is_needed = self._is_needed()
            pause = self._patience(mine) if is_needed or self._watcher is mine else FOREVER
            if pause:
                mine.wait(pause)
            elif is_needed and self._read_for_all():
                self._pass_on()
            else:
                mine.wait(FOREVER)

    def _read_for_all(self) -> bool:
        return self._lead(lambda: not self._is_needed(), time.monotonic() + _READ_SECONDS) is not None

    def _is_needed(self) -> bool:
        """Whether the background thread is to read: a thread that waits does so itself."""
        return bool((self.attention or self._has_output()) and not self._followers)
