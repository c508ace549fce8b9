"""A connection over a blocking program's socket: whoever waits for an answer reads, for itself and for everybody.

There is no thread between a lone request and its answer. A thread that waits takes the read lock and becomes the
reader; it hands other threads their answers, and when it has its own it leaves, and wakes another that waits. Only
when nobody waits and something is attended (an asynchronous send, a subscription) a background thread reads.

What always holds:
- `submit` either raises, and nothing was sent, or `on_answer` is called exactly once, by whichever thread reads, with
  no lock of ours held that a request needs: it may submit the next one.
- At most one thread reads; a reader never blocks in writing, so that two full sockets cannot hold each other.
- Output that the socket does not take is kept, up to `OUT_BYTES_MAX` beyond what the reader itself adds; others wait.
- The socket is closed by whoever holds the read lock, never under the hands of a thread that polls it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from dmq.client.session import OnAnswer, Pending, Push, Session
from dmq.client.url import Address
from dmq.client.waiting import FOREVER, Waiter
from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected, TimedOut
from dmq.protocol import Buffer, Frame, Header
from dmq.protocol.session import Hello, HelloReply, Limits

__all__ = ["Connection"]

log = logging.getLogger(__name__)

OUT_BYTES_MAX: Final = 4 << 20
_READ_SECONDS: Final = 1.0  # how long the background thread reads before it lets others have a turn


class Connection:
    """One connection to one broker. Made by `Connection.open`."""

    def __init__(
        self,
        sock: socket.socket,
        address: Address,
        session: Session,
        on_push: Callable[[Connection, Push], None],
        on_closed: Callable[[Connection, DMQError], None],
    ) -> None:
        self.address: Final = address
        self._sock = sock
        self._session = session
        self._on_push = on_push
        self._on_closed = on_closed
        self._state = threading.Lock()  # guards the session and the attention
        self._reading = threading.Lock()
        self._writing = threading.Lock()
        self._reader = 0
        self._followers: deque[Waiter] = deque()
        self._out: deque[memoryview] = deque()
        self._out_bytes = 0
        self._attention = 0
        self._background = Waiter()
        self._thread: threading.Thread | None = None
        self.is_closed = False
        self._is_disposed = False
        self._wake_in, self._wake_out = os.pipe()
        os.set_blocking(self._wake_in, False)
        os.set_blocking(self._wake_out, False)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._wake_in, select.POLLIN)

    @classmethod
    def open(
        cls,
        address: Address,
        hello: Hello,
        *,
        timeout: float,
        clock: Clock,
        on_push: Callable[[Connection, Push], None],
        on_closed: Callable[[Connection, DMQError], None],
    ) -> Connection:
        """Connect and exchange the hello. `on_closed` is not called for a connection that never came to be.

        Raises:
            NotConnected: nobody answers there, or not in time.
            DMQError: what the broker answered to the hello.
        """
        deadline = time.monotonic() + timeout
        try:
            sock = socket.create_connection(address, timeout)
        except OSError as error:
            raise NotConnected(f"no broker answers at {address} ({_why(error)})", address=str(address)) from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        session = Session(hello, clock)
        connection = cls(sock, address, session, on_push, lambda *_: None)
        with connection._reading:
            connection._reader = threading.get_ident()
            connection._write([session.greet()])
            while session.reply is None and not connection.is_closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    connection.close(NotConnected(f"no answer to the hello within {timeout:g} s"))
                else:
                    connection._receive(left)
            connection._reader = 0
        if session.closed_by is not None:
            connection._dispose()
            reason = session.closed_by
            if isinstance(reason, NotConnected):
                raise NotConnected(f"no broker answers at {address} ({reason.message})", address=str(address))
            raise reason
        connection._on_closed = on_closed
        return connection

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def reply(self) -> HelloReply:
        """What the broker answered to the hello."""
        assert self._session.reply is not None
        return self._session.reply

    @property
    def broker(self) -> str:
        """The broker's name."""
        assert self._session.reply is not None
        return self._session.reply.broker

    @property
    def client_id(self) -> str:
        """Ours, as the broker knows it."""
        assert self._session.reply is not None
        return self._session.reply.client_id

    @property
    def limits(self) -> Limits:
        return self._session.limits

    @property
    def is_usable(self) -> bool:
        """Whether a request may still be submitted."""
        return self._session.is_ready and not self.is_closed

    @property
    def outstanding(self) -> int:
        return self._session.outstanding

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
                self._attend()
        self._write(output)
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
    ) -> Frame:
        """Send a request and wait for its response, which may carry an error status.

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
        if not answers and self.forget(pending):
            raise TimedOut(f"the broker at {self.address} did not answer within {timeout:g} s")
        while not answers:  # on its way: the reader has taken it off the session
            waiter.wait(FOREVER)
        answer = answers[0]
        if isinstance(answer, DMQError):
            raise answer
        return answer

    def forget(self, pending: Pending) -> bool:
        """Give up on an answer; False if it came, or is about to be handed over."""
        with self._state:
            forgotten = self._session.forget(pending)
            if forgotten and pending.attended:
                self._attention -= 1
        return forgotten

    def hold(self) -> None:
        """Have pushes read from now on, even if nobody waits for an answer. Ended by as many calls of `let_go`."""
        with self._state:
            self._attend()

    def let_go(self) -> None:
        with self._state:
            self._attention -= 1

    # --- waiting ----------------------------------------------------------------------------------------------------

    def until(self, waiter: Waiter, is_done: Callable[[], object], deadline: float) -> None:
        """Wait until `is_done`, which somebody follows with `waiter.wake()`; read for all meanwhile if nobody does."""
        if is_done():
            return
        self._followers.append(waiter)
        try:
            while not is_done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if not self._lead(is_done, deadline):
                    waiter.wait(left)
        finally:
            self._followers.remove(waiter)
            self._pass_on()

    def nudge(self) -> None:
        """Have whoever reads look again whether what it waits for is there."""
        self._wake_reader()

    def take_ready(self) -> None:
        """Read what is here, without waiting for more; nothing if another thread reads."""
        if self._lead(lambda: False, 0.0):
            self._pass_on()

    def _lead(self, is_done: Callable[[], object], deadline: float) -> bool:
        """Become the reader until `is_done`, and in any case read once; False if another thread is, or it is over."""
        if self.is_closed or not self._reading.acquire(False):
            return False
        self._reader = threading.get_ident()
        try:
            while not is_done():
                left = deadline - time.monotonic()
                self._receive(max(0.0, left))
                if left <= 0 or not self._session.is_ready:
                    break
        finally:
            self._reader = 0
            self._reading.release()
            self._dispose()
        return True

    def _pass_on(self) -> None:
        """The reader leaves: let another one read."""
        for follower in tuple(self._followers):
            follower.wake()
            return
        if self._attention or self._out:
            self._background.wake()

    def _attend(self) -> None:
        self._attention += 1
        if self._attention == 1:
            self._start_background()

    def _start_background(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=f"dmq-{self.address}", daemon=True)
            self._thread.start()
        else:
            self._background.wake()

    def _serve(self) -> None:
        while not self.is_closed:
            is_needed = self._attention or self._out
            if is_needed and self._lead(self._is_unneeded, time.monotonic() + _READ_SECONDS):
                self._pass_on()
            else:
                self._background.wait(FOREVER)

    def _is_unneeded(self) -> bool:
        return not self._attention and not self._out

    # --- bytes ------------------------------------------------------------------------------------------------------

    def _receive(self, seconds: float) -> None:
        """Wait so long for bytes, and do what they ask. Only with the read lock."""
        for descriptor, events in self._poll.poll(min(seconds, 3600.0) * 1000):
            if descriptor == self._wake_in:
                self._take_wakes()
                continue
            if events & select.POLLOUT:
                self._flush()
            if events & ~select.POLLOUT and not self.is_closed:
                self._read()

    def _read(self) -> None:
        try:
            size = self._sock.recv_into(self._session.get_buffer())
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(NotConnected(f"the connection to {self.address} broke ({_why(error)})"))
            return
        if size == 0:
            self.close(NotConnected(f"the broker at {self.address} closed the connection"))
            return
        with self._state:
            answers, pushes, output = self._session.receive(size)
            for pending, _ in answers:
                self._attention -= pending.attended
        if output:
            self._write(output)
        for pending, frame in answers:
            _call(pending.on_answer, frame)
        for push in pushes:
            try:
                self._on_push(self, push)
            except Exception:
                log.exception("a push was not taken", extra={"command": push.command})
        if self._session.closed_by is not None:
            self.close(self._session.closed_by)

    def _write(self, buffers: Sequence[Buffer]) -> None:
        sent = 0
        with self._writing:
            if self.is_closed:
                return
            if self._out:
                self._keep(buffers, 0)
            else:
                try:
                    sent = self._sock.sendmsg(buffers)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError:
                    sent = -1
                if sent >= 0 and sent < sum(map(len, buffers)):
                    self._keep(buffers, sent)
            out_bytes = self._out_bytes
        if not out_bytes:
            if sent < 0:
                self.close(NotConnected(f"the connection to {self.address} broke while sending"))
            return
        if self._reader != threading.get_ident():
            self._wake_reader()
            with self._state:
                self._start_background()
            if out_bytes > OUT_BYTES_MAX:
                self.until(Waiter(), lambda: self._out_bytes <= OUT_BYTES_MAX or self.is_closed, FOREVER)

    def _keep(self, buffers: Sequence[Buffer], sent: int) -> None:
        """Keep what was not sent, to be written by the reader; with the write lock."""
        for buffer in buffers:
            if sent >= len(buffer):
                sent -= len(buffer)
                continue
            rest = memoryview(buffer)[sent:]
            sent = 0
            self._out.append(rest)
            self._out_bytes += len(rest)
        if self._out and self._reader == threading.get_ident():
            self._poll.modify(self._sock, select.POLLIN | select.POLLOUT)

    def _flush(self) -> None:
        broken: OSError | None = None
        with self._writing:
            try:
                while self._out:
                    sent = self._sock.sendmsg([self._out[index] for index in range(min(len(self._out), 64))])
                    self._out_bytes -= sent
                    while self._out and sent >= len(self._out[0]):
                        sent -= len(self._out.popleft())
                    if sent:
                        self._out[0] = self._out[0][sent:]
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                broken = error
            if not self._out:
                self._poll.modify(self._sock, select.POLLIN)
        if broken is not None:
            self.close(NotConnected(f"the connection to {self.address} broke ({_why(broken)})"))
        elif self._out_bytes <= OUT_BYTES_MAX:
            for follower in tuple(self._followers):
                follower.wake()

    def _wake_reader(self) -> None:
        with self._writing:
            if not self._is_disposed:
                try:
                    os.write(self._wake_out, b"\0")
                except BlockingIOError:
                    pass  # full, so it wakes anyway

    def _take_wakes(self) -> None:
        try:
            os.read(self._wake_in, 4096)
        except OSError:
            pass
        with self._writing:
            if self._out:
                self._poll.modify(self._sock, select.POLLIN | select.POLLOUT)

    # --- time and the end -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Beat the heart if it is time, notice a broker that is silent, and read if nobody else does."""
        try:
            with self._state:
                output = self._session.tick()
        except NotConnected as error:
            self.close(error)
            return
        if output:
            self._write(output)
        self.take_ready()

    def close(self, reason: DMQError) -> None:
        """End the connection: all that wait get the reason. Does nothing the second time."""
        with self._state:
            if self.is_closed:
                return
            self.is_closed = True
            waiting = self._session.fail(reason)
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was first
        self._wake_reader()
        for pending in waiting:
            _call(pending.on_answer, reason)
        self._background.wake()
        for follower in tuple(self._followers):
            follower.wake()
        self._dispose()
        self._on_closed(self, reason)

    def _dispose(self) -> None:
        """Close the descriptors of a closed connection, once, when nobody reads."""
        if self.is_closed and self._reading.acquire(False):  # and never released: nobody reads any more
            with self._writing:
                self._is_disposed = True
                self._out.clear()
                self._out_bytes = 0
                self._sock.close()
                os.close(self._wake_in)
                os.close(self._wake_out)


def _call(on_answer: OnAnswer, answer: Frame | DMQError) -> None:
    try:
        on_answer(answer)
    except Exception:
        log.exception("an answer was not taken")


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
