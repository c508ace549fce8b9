"""A connection over the socket of a blocking program: a thread that waits for an answer reads, for itself and for all.

The bytes go over a `Wire`, and `Turns` say which thread reads it. A thread that reads may converse: send one request
and take what comes, without being registered as one that waits.

What always holds:
- `submit` either raises, and nothing was sent, or `on_answer` is called exactly once, by the thread that reads, with no
  lock held that a request needs: it may submit the next one.
- At most one thread reads; a reader never blocks in writing, so that two full sockets cannot hold each other.
- Output that the socket does not take is kept, up to `OUT_BYTES_MAX` beyond what the reader itself adds; others wait.
- The socket is closed by a thread that may read, never while another thread polls it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from dmq.client.connection.link import ConnectionOwner, Peer, call_with
from dmq.client.connection.reader_turns import Turns
from dmq.client.connection.session import OnAnswer, Pending, Session
from dmq.client.connection.socket import OUT_BYTES_MAX, Wire, why
from dmq.client.connection.threads import FOREVER, Waiter
from dmq.client.connection.url import Address
from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected, TimedOut
from dmq.protocol import Buffer, Frame, Header
from dmq.protocol.session import Hello

__all__ = ["Connection"]


T = TypeVar("T")


class Connection(Peer["Connection"]):
    """One connection to one broker. Made by `Connection.open`."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        session: Session,
        owner: ConnectionOwner[Connection],
    ) -> None:
        super().__init__(address, session, owner)
        self._wire = Wire(sock)
        self._state = threading.Lock()  # guards the session and the attention
        self._turns: Final = Turns(
            f"dmq-{address}",
            self._receive,
            lambda: self.is_closed,
            lambda: self._wire.out_bytes,
            on_left=self._left,
        )
        self.until: Final = self._turns.until
        self.take_ready: Final = self._turns.take_ready
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
        connection._turns.take()
        try:
            connection._write([session.greet()])
            while session.reply is None and not connection.is_closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    connection.close(NotConnected(f"no answer to the hello within {timeout:g} s"))
                else:
                    connection._receive(left)
        finally:
            connection._turns.leave()
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
                self._turns.attend()
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
                self._turns.attend()
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
        self.until(waiter, answers.__len__, FOREVER if timeout is None else time.monotonic() + timeout)
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
        if not self._turns.take():
            return 0
        with self._state:
            correlation = self._session.claim()
        if not correlation:
            self._turns.leave()
        return correlation

    def leave(self) -> None:
        """Let another thread read."""
        self._turns.leave()

    def converse(self, frame: Buffer, *more: Buffer) -> bytes | None:
        """Send a whole frame, and read once: what came; None if nothing came for `LONE_SECONDS`, or it is closed.

        Nobody else hears of what came, unless it is heard. Output of others that the socket did not take waits until
        then.
        """
        wire = self._wire
        if not (
            wire.write((frame, *more), len(frame) + sum(map(len, more))) if more else wire.write((frame,), len(frame))
        ):
            self.close(NotConnected(f"the connection to {self.address} broke while sending"))
        if wire.out_bytes:
            return None  # the frame is not whole on its way: it needs a thread that polls
        data = self._take(wire.answer)
        if data is not None:
            self._session.note_exchange()
        return data

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
                self._turns.attend()
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
                self._turns.attend()

    def forget(self, pending: Pending) -> bool:
        """Give up on an answer; False if it came, or is about to be handed over."""
        with self._state:
            forgotten = self._session.forget(pending)
            if forgotten and pending.attended:
                self._turns.attention -= 1
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
            self._turns.attend()

    def let_go(self) -> None:
        with self._state:
            self._turns.attention -= 1

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> None:
        """Wait so long for bytes, and do what they ask. Only for the thread that leads."""
        is_readable, is_writable = self._wire.poll(seconds)
        if is_writable:
            self._flush()
        if is_readable and not self.is_closed:
            self._read()

    def _take(self, receive: Callable[..., T], *arguments: Any) -> T | None:
        """What the socket gives; None if that is nothing. If it never will again, the connection is closed."""
        try:
            got = receive(*arguments)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError as error:
            self.close(NotConnected(f"the connection to {self.address} broke ({why(error)})"))
            return None
        if not got:
            self.close(NotConnected(f"the broker at {self.address} closed the connection"))
            return None
        return got

    def _read(self, data: bytes | None = None) -> None:
        """Take what is there off the wire, if it is not here already, and do what it asks."""
        size = self._take(self._wire.recv_into, self._session.get_buffer()) if data is None else 0
        if size is None:
            return
        with self._state:
            answers, pushes, output = self._session.receive(size) if data is None else self._session.feed(data)
            for pending, _ in answers:
                self._turns.attention -= pending.attended
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
        wire, turns = self._wire, self._turns
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
            self._turns.wake_followers()

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
            waiting = self._session.fail(reason)
        self._wire.shutdown()
        self._wire.wake()
        for pending in waiting:
            call_with(pending.on_answer, reason)
        self._turns.wake_all()
        self._left()
        if self._is_open:
            self._owner.lost(self, reason)

    def abandon(self) -> None:
        """Let go of the descriptors without a word: this is a child, and the connection the parent's."""
        self.is_closed = True
        self._wire.abandon()

    def _left(self) -> None:
        """Close the descriptors of a closed connection, once, when nobody reads."""
        if self.is_closed and self._turns.end():
            self._wire.dispose()
