"""A connection over the socket of a blocking program: a thread that waits for an answer reads, for itself and for all.

The bytes go over a `Wire`, and `Turns` say which thread reads it. A thread that reads may converse: send one request
and take what comes, without being registered as one that waits.

What always holds:
- `submit` either raises, and nothing was sent, or `on_answer` is called exactly once, by the thread that reads, with no
  lock held that a request needs: it may submit the next one.
- At most one thread reads; a reader never blocks in writing, so that two full sockets cannot hold each other.
- Output that the socket does not take is kept, up to `OUT_BYTES_MAX` beyond what the reader itself adds; others wait.
- The socket is closed by a thread that may read, never while another thread polls it.
- An exception out of a signal's handler that ends a wait changes nothing. One that hits while the connection works
  breaks it, since nobody knows what was written or taken: who waits is told, and what may be sent again is (`mend`).

Turns: which thread of a blocking program reads a connection.

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

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from dmq.client.connection.link import ConnectionOwner, Peer, call_with
from dmq.client.connection.session import OnAnswer, Pending, Session
from dmq.client.connection.socket import OUT_BYTES_MAX, Wire, why
from dmq.client.connection.threads import FOREVER, Trace, Waiter
from dmq.client.connection.url import Address
from dmq.clock import Clock
from dmq.compiled import find
from dmq.errors import DMQError, NotConnected, TimedOut
from dmq.protocol import Buffer, Frame, Header
from dmq.protocol.session import Hello

__all__ = ["Connection", "Turns"]

T = TypeVar("T")

_ask_now: Final = find("ask_now")


class Connection(Peer["Connection"]):
    """One connection to one broker. Made by `Connection.open`."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        session: Session,
        owner: ConnectionOwner[Connection],
    ) -> None:
        super().__init__(address, session, owner, is_interruptible=True)
        self._wire = Wire(sock)
        self._state = threading.Lock()  # guards the session and the attention
        self._untold: Sequence[Pending] = ()  # whose answers will never come, and who have not been told
        self.turns: Final = Turns(
            f"dmq-{address}",
            self._receive,
            lambda: self.is_closed,
            lambda: self._wire.out_bytes,
            on_left=self._left,
        )
        self.until: Final = self.turns.until
        self.take_ready: Final = self.turns.take_ready
        self.receive: Final = self._receive
        """Wait so many seconds for bytes, and do what they ask. Only for the thread that leads."""
        self.nudge: Final = self._wire.wake
        """Have the thread that reads look again whether what it waits for is there."""

    @classmethod
    def open(
        cls, address: Address, hello: Hello, owner: ConnectionOwner[Connection], *, timeout: float, clock: Clock
    ) -> Connection:
        """Connect and exchange the hello. The owner hears nothing of the end of one that never came to be.

        Raises:
            NotConnected: nobody answers there, or not in time.
            DMQError: what the broker answered to the hello.
        """
        deadline = time.monotonic() + timeout
        try:
            sock = socket.create_connection(address, timeout)
        except OSError as error:
            raise NotConnected(f"no broker answers at {address} ({why(error)})", address=str(address)) from error
        session = Session(hello, clock)
        connection = cls(sock, address, session, owner)
        connection.turns.take()
        try:
            connection._write([session.greet()])
            while session.reply is None and not connection.is_closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    connection.close(NotConnected(f"no answer to the hello within {timeout:g} s"))
                else:
                    connection._receive(left)
        finally:
            connection.turns.leave()
        if session.closed_by is not None:
            reason = session.closed_by
            if isinstance(reason, NotConnected):
                raise NotConnected(f"no broker answers at {address} ({reason.message})", address=str(address))
            raise reason
        connection._is_open = True
        return connection

    # --- asking -----------------------------------------------------------------------------------------------------

    def submit(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = (),
        *,
        on_answer: OnAnswer,
        flags: int = 0,
        attended: bool = True,
    ) -> Pending:
        """Send a request, and have `on_answer` called with the response or with the error that ended the connection.

        Parameters:
            attended: the answer must be read even if no thread waits for it.

        Raises:
            NotConnected, Busy, MessageTooLarge: nothing was sent.
        """
        with self._state:
            pending, output = self._session.request(
                command, header, body, on_answer=on_answer, flags=flags, attended=attended
            )
            if attended:
                self.turns.attend()
        self._write(output, is_waited_for=not attended)
        return pending

    def tell_and_submit(
        self,
        told: Sequence[tuple[int, Header]],
        command: int,
        header: Header,
        *,
        on_answer: OnAnswer,
        attended: bool = True,
    ) -> Pending:
        """Do as `tell` for each of what is told, then as `submit`, in one write."""
        with self._state:
            first = [buffer for said in told for buffer in self._session.one_way(*said)]
            pending, output = self._session.request(command, header, (), on_answer=on_answer, attended=attended)
            if attended:
                self.turns.attend()
        self._write([*first, *output], is_waited_for=not attended)
        return pending

    def tell(self, command: int, header: Header, body: Sequence[Buffer] = ()) -> None:
        """Send something that is not answered.

        Raises:
            NotConnected, MessageTooLarge: nothing was sent.
        """
        with self._state:
            output = self._session.one_way(command, header, body)
        self._write(output)

    def request(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = (),
        *,
        timeout: float | None = None,
        flags: int = 0,
        on_late: OnAnswer | None = None,
    ) -> Frame:
        """Send a request and wait for its response, which may carry an error status.

        Parameters:
            on_late: gets the answer, or what ended the connection, if it comes when the time is over.

        Raises:
            TimedOut: no answer in time.
            DMQError: what ended the connection meanwhile.
        """
        answers: list[Frame | DMQError] = []
        waiter = Waiter()

        def on_answer(answer: Frame | DMQError) -> None:
            answers.append(answer)
            waiter.wake()

        pending = self.submit(command, header, body, on_answer=on_answer, flags=flags, attended=False)
        try:
            self.until(waiter, answers.__len__, FOREVER if timeout is None else time.monotonic() + timeout)
        except BaseException:  # of a signal's handler
            self._give_up(pending, on_late)
            raise
        if not answers and self._give_up(pending, on_late):
            raise TimedOut(f"the broker at {self.address} did not answer within {timeout:g} s")
        while not answers:  # on its way: the reader has taken it off the session
            waiter.wait(FOREVER)
        answer = answers[0]
        if isinstance(answer, DMQError):
            raise answer
        return answer

    # --- one request, by the thread that reads ----------------------------------------------------------------------

    def lead(self) -> int:
        """Read from now on, for one request of this thread: its correlation. To be ended by `leave`.

        0 if another thread reads, or if a request has to be submitted.
        """
        # As `Turns.take`, without the calls: each lone send comes through here.
        lead_of, me = self.turns._lead_of, threading.get_ident()
        if lead_of or self.is_closed or lead_of.setdefault(0, me) != me:
            return 0
        with self._state:
            correlation = self._session.claim()
        if not correlation:
            self.turns.leave()
        return correlation

    def leave(self) -> None:
        """Let another thread read."""
        turns = self.turns  # as `Turns.leave`, without the calls
        del turns._lead_of[0]
        if self.is_closed or turns._followers or turns.attention or self._wire.out_bytes:
            turns._follow_up()

    def converse(self, frame: Buffer, *more: Buffer) -> bytes | None:
        """Send a whole frame, and read once: what came; None if nothing came for `LONE_SECONDS`, or it is closed.

        Nobody else hears of what came, unless it is heard. Output of others that the socket did not take waits until
        then.
        """
        try:
            data: bytes | None = None if more or _ask_now is None else _ask_now(self._wire, frame)
        except OSError as error:
            self._got_nothing(error)
            return None
        if data is None:
            data = self._ask((frame, *more))
        elif not data:
            self._got_nothing()
            return None
        if data is not None:
            self._session.note_exchange()
        return data

    def _ask(self, buffers: Sequence[Buffer]) -> bytes | None:
        """Send, and read once."""
        wire = self._wire
        if not wire.write(buffers, sum(map(len, buffers))):
            self.close(NotConnected(f"the connection to {self.address} broke while sending"))
        if wire.out_bytes:
            return None  # the frame is not whole on its way: it needs a thread that polls
        return self._take(wire.answer)

    def expect(self, correlation: int, on_answer: OnAnswer) -> Pending:
        """Have the answer to a request that was sent by `converse` handed over like any other.

        Raises:
            DMQError: what ended the connection.
        """
        with self._state:
            return self._session.expect(correlation, on_answer)

    # --- one request, while another thread reads ---------------------------------------------------------------------

    def claim(self) -> int:
        """The correlation of a request for `ask`; 0 if it has to be submitted, or cannot be sent."""
        with self._state:
            return self._session.claim()

    def ask(self, correlation: int, frame: bytes, on_answer: OnAnswer, *, attended: bool = False) -> Pending:
        """Send a whole frame, with a correlation that was just claimed, and have its answer handed over.

        Parameters:
            attended: the answer must be read even if no thread waits for it.

        Raises:
            DMQError: what ended the connection; nothing was sent.
        """
        with self._state:
            pending = self._session.expect(correlation, on_answer, attended=attended)
            if attended:
                self.turns.attend()
        self._write((frame,), is_waited_for=not attended)
        return pending

    def redirect(self, pending: Pending, make: Callable[[], OnAnswer]) -> bool:
        """Have the answer of a request handed to somebody else; False if it came, or is about to be handed over."""
        with self._state:
            if not self._session.is_waiting(pending):
                return False
            pending.on_answer = make()
            return True

    def hear(self, data: bytes) -> None:
        """Do what the bytes ask that came in `converse`."""
        self._read(data)

    def attend(self, pending: Pending) -> None:
        """Have the answer of a request read from now on though nobody waits for it."""
        with self._state:
            if not pending.attended and self._session.is_waiting(pending):
                pending.attended = True
                self.turns.attend()

    def forget(self, pending: Pending) -> bool:
        """Give up on an answer; False if it came, or is about to be handed over."""
        with self._state:
            forgotten = self._session.forget(pending)
            if forgotten and pending.attended:
                self.turns.attention -= 1
        return forgotten

    def _give_up(self, pending: Pending, on_late: OnAnswer | None) -> bool:
        """Wait no longer for an answer; False if it came, or is about to be handed over."""
        if on_late is None:
            return self.forget(pending)
        is_given_up = self.redirect(pending, lambda: on_late)
        if is_given_up:
            self.attend(pending)
        return is_given_up

    def hold(self) -> None:
        """Have pushes read from now on, even if nobody waits for an answer. Ended by as many calls of `let_go`."""
        with self._state:
            self.turns.attend()

    def let_go(self) -> None:
        with self._state:
            self.turns.attention -= 1

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> None:
        """Wait so long for bytes, and do what they ask. Only for the thread that leads."""
        is_readable, is_writable = self._wire.poll(seconds)
        if is_writable:
            self._flush()
        if is_readable and not self.is_closed:
            self._read()

    def register(self, poll: select.poll) -> tuple[int, int]:
        """Have a poll look at it as well: the descriptors by which. Only for the thread that leads, as the next."""
        return self._wire.register(poll)

    def happened(self, descriptor: int, events: int) -> None:
        """Do what that poll has found."""
        is_readable, is_writable = self._wire.meaning(descriptor, events)
        if is_writable:
            self._flush()
        if is_readable and not self.is_closed:
            self._read()

    def _take(self, receive: Callable[..., T], *arguments: Any) -> T | None:
        """What the socket gives; None if that is nothing. If it never will again, the connection is closed."""
        try:
            got = receive(*arguments)
        except OSError as error:
            self._got_nothing(error)
            return None
        if not got:
            self._got_nothing()
            return None
        return got

    def _got_nothing(self, error: OSError | None = None) -> None:
        """The socket gave nothing, for this reason, or because it has ended."""
        if error is None:
            self.close(NotConnected(f"the broker at {self.address} closed the connection"))
        elif not isinstance(error, BlockingIOError | InterruptedError):
            self.close(NotConnected(f"the connection to {self.address} broke ({why(error)})"))

    def _read(self, data: bytes | None = None) -> None:
        """Take what is there off the wire, if it is not here already, and do what it asks."""
        size = self._take(self._wire.recv_into, self._session.get_buffer()) if data is None else 0
        if size is None:
            return
        with self._state:
            answers, pushes, output = self._session.receive(size) if data is None else self._session.feed(data)
            for pending, _ in answers:
                self.turns.attention -= pending.attended
        if output:
            self._write(output)
        self._hand_out(answers, pushes)
        if self._session.closed_by is not None:
            self.close(self._session.closed_by)

    def _write(self, buffers: Sequence[Buffer], *, is_waited_for: bool = False) -> None:
        """Send. The thread that reads sends what the socket does not take.

        Parameters:
            is_waited_for: this thread will wait for the answer, and so read if nobody else does.
        """
        wire, turns = self._wire, self.turns
        if not wire.write(buffers, sum(map(len, buffers))):
            self.close(NotConnected(f"the connection to {self.address} broke while sending"))
        elif wire.out_bytes and not turns.is_mine:
            if turns.is_taken:
                wire.wake()
            elif not is_waited_for:
                turns.start_background()
            if wire.out_bytes > OUT_BYTES_MAX:
                self.until(Waiter(), lambda: wire.out_bytes <= OUT_BYTES_MAX or self.is_closed, FOREVER)

    def _flush(self) -> None:
        broken = self._wire.flush()
        if broken is not None:
            self.close(NotConnected(f"the connection to {self.address} broke ({why(broken)})"))
        elif self._wire.out_bytes <= OUT_BYTES_MAX:
            self.turns.wake_followers()

    # --- time and the end -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Beat the heart if it is time, notice a broker that is silent, and read if nobody else does."""
        self.take_ready()  # had we stood still ourselves, what came meanwhile must be read before it is called silent
        try:
            with self._state:
                output = self._session.tick()
        except NotConnected as error:
            self.close(error)
            return
        if output:
            self._write(output)

    def close(self, reason: DMQError) -> None:
        """End the connection: all that wait get the reason. Does nothing the second time."""
        with self._state:
            if self.is_closed:
                return
            self.is_closed = True
            self._untold = self._session.fail(reason)
        self._tell_end(reason)

    def _tell_end(self, reason: DMQError) -> None:
        """Tell all who wait, and the owner, that the connection is over."""
        self._wire.shutdown()
        self._wire.wake()
        for pending in self._untold:
            call_with(pending.on_answer, reason)
        self._untold = ()
        self.turns.wake_all()
        self._left()
        if self._is_open:
            self._owner.lost(self, reason)

    def mend(self, trace: Trace) -> None:
        """An exception out of a signal's handler ended a call of this thread: break off if it hit while we worked."""
        parts = (self, self.turns, self._wire, self._session)
        if not self.turns.is_mine and (trace.is_in_wait or not (trace.passed(*parts) or trace.passed_any("JointTurn"))):
            return
        reason = NotConnected(
            f"the connection to {self.address} was broken off: an exception of a signal's handler hit it"
        )
        self.turns.drop()
        with self._state:
            self.is_closed = True
            # Those whose answers were not handed over, or may not have been: they do no harm a second time.
            waiting = [*self._session.fail(reason), *self._untold, *self._session.unheard()]
            self._untold = [*dict.fromkeys(waiting)]
        self._tell_end(reason)

    def abandon(self) -> None:
        """Let go of the descriptors without a word: this is a child, and the connection the parent's."""
        self.is_closed = True
        self._wire.abandon()

    def _left(self) -> None:
        """Close the descriptors of a closed connection, once, when nobody reads."""
        if self.is_closed and self.turns.end():
            self._wire.dispose()


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
        self._lead_of: dict[int, object] = {}  # the thread that leads, at 0: taken in one step, which says whose it is
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
        return self._lead_of.get(0) == threading.get_ident()

    @property
    def is_taken(self) -> bool:
        """Whether any thread leads."""
        return bool(self._lead_of)

    # --- leading ----------------------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Lead from now on, until `leave`; False if another thread does, or it is over."""
        lead_of, me = self._lead_of, threading.get_ident()
        return not lead_of and not self._is_over() and lead_of.setdefault(0, me) == me

    def leave(self) -> None:
        """Lead no more, and let another one."""
        del self._lead_of[0]
        self._follow_up()

    def _follow_up(self) -> None:
        """This thread leads no more: let another one."""
        self._on_left()
        if self._followers or self.attention or self._has_output():
            self._pass_on()

    def end(self) -> bool:
        """Nobody will lead any more; False if somebody does now, who then calls this again."""
        end = object()
        return not self._lead_of and self._lead_of.setdefault(0, end) is end

    def drop(self) -> None:
        """Lead no more if this thread still does, which an exception kept from leaving."""
        if self.is_mine:
            del self._lead_of[0]

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
            self.release()
        return has_ended

    def release(self) -> None:
        """Lead no more, and see to it that another one does."""
        del self._lead_of[0]
        self._on_left()

    def resume(self) -> bool:
        """Lead from now on, until `lend`, as the thread that lent the lead, or where nobody has; False if another one
        leads, or has lent it."""
        if (self._lender and self._lender != threading.get_ident()) or not self.take():
            return False
        self._lender = 0
        return True

    def lend(self, *, is_lent: bool) -> None:
        """Lead no more.

        Parameters:
            is_lent: this thread will be back in a moment, to `resume`.
        """
        self.release()
        self._lend(is_lent)

    def _lend(self, is_lent: bool) -> None:
        if is_lent and not self._impatient and (self._followers or self.attention):
            self._loans += 1
            self._lender = threading.get_ident()
        self._pass_on()

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
            is_patient: what is waited for is not an answer: it may come some milliseconds later.
            is_lender: this thread will be back in a moment, to wait for more.
        """
        has_led = False
        self.join(waiter, is_patient=is_patient)
        try:
            while not is_done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                pause = self.patience(waiter) if is_patient else 0.0
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
            self.part(waiter, is_patient=is_patient, is_lent=is_lender and has_led)

    def join(self, waiter: Waiter, *, is_patient: bool) -> None:
        """A thread waits from now on, until `part`: it is woken when it is its turn to read."""
        if is_patient and self._lender == threading.get_ident():
            self._lender = 0
        self._followers.append(waiter)
        self._impatient += not is_patient

    def part(self, waiter: Waiter, *, is_patient: bool, is_lent: bool) -> None:
        """It does not wait any more.

        Parameters:
            is_lent: it has read, and will be back in a moment.
        """
        self._followers.remove(waiter)
        self._impatient -= not is_patient
        if self._watcher is waiter:
            self._watcher = None
        self._lend(is_lent)

    def patience(self, waiter: Waiter) -> float:
        """How long a thread that is patient waits before it tries to lead."""
        if not self._lender and not self._lead_of:
            if self._watcher is waiter:
                self._watcher = None
            return 0.0
        if self._watcher is waiter:
            if self._watched != self._loans:
                self._watched = self._loans
                return WATCH_SECONDS
            # Nothing was lent since the last look: the lender is late, or there is nothing to watch.
            self._watcher = None
            self._lender = 0
            return 0.0
        # A lender with a quick handler is back before the thread that it woke has had a look: what was lent since the
        # last one counts, too. Else each message would wake somebody for nothing.
        if not self._lender and self._watched == self._loans:
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
        if self._lead_of or (self._lender and self._watcher is not None):
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
        if self.attention == 1 and not self._lead_of:  # the leader passes on, and looks at this first
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
            pause = self.patience(mine) if is_needed or self._watcher is mine else FOREVER
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
