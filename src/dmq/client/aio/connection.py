"""A connection on an event loop: the asyncio shell around a session.

What always holds: everything happens on the loop's thread; the socket writes straight into the parser's buffer;
`submit` either raises, and nothing was sent, or `on_answer` is called exactly once; output beyond the transport's
high-water mark makes `drain` wait, and senders wait there before they add more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import cast

from dmq.client.connection.link import ConnectionOwner, Peer, call_with
from dmq.client.connection.session import OnAnswer, Pending, Session
from dmq.client.connection.socket import JOIN_BYTES_MAX, OUT_BYTES_MAX
from dmq.client.connection.url import Address
from dmq.clock import Clock
from dmq.errors import DMQError, NotConnected, TimedOut
from dmq.protocol import Buffer, Frame, Header
from dmq.protocol.session import Hello

__all__ = ["AioConnection", "check_loop"]


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Refuse to wait on another event loop than one's own: nothing would end the waiting.

    Raises:
        NotConnected: the running loop is another one.
    """
    if asyncio.get_running_loop() is not loop:
        raise NotConnected(
            "this client belongs to another event loop than the running one: an asyncio client works on the loop that "
            "connected it; connect again on this one, or keep one loop for the whole program"
        )


class AioConnection(Peer["AioConnection"], asyncio.BufferedProtocol):
    """One connection to one broker. Made by `AioConnection.open`."""

    def __init__(self, address: Address, session: Session, owner: ConnectionOwner[AioConnection]) -> None:
        super().__init__(address, session, owner)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._writable = asyncio.Event()
        self._writable.set()

    @classmethod
    async def open(
        cls, address: Address, hello: Hello, owner: ConnectionOwner[AioConnection], *, timeout: float, clock: Clock
    ) -> AioConnection:
        """Connect and exchange the hello. The owner hears nothing of the end of one that never came to be.

        Raises:
            NotConnected: nobody answers there, or not in time.
            DMQError: what the broker answered to the hello.
        """
        loop = asyncio.get_running_loop()
        session = Session(hello, clock)
        connection = cls(address, session, owner)
        try:
            async with asyncio.timeout(timeout):
                await loop.create_connection(lambda: connection, address.host, address.port)
                await connection._ready
        except (OSError, TimeoutError) as error:
            reason = getattr(error, "strerror", None) or str(error) or f"no answer within {timeout:g} s"
            connection.close(NotConnected(reason))
            raise NotConnected(f"no broker answers at {address} ({reason})", address=str(address)) from error
        except NotConnected as error:
            raise NotConnected(f"no broker answers at {address} ({error.message})", address=str(address)) from error
        connection._is_open = True
        return connection

    # --- the loop's side --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport = transport
        transport.set_write_buffer_limits(high=OUT_BYTES_MAX)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.write(self._session.greet())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._session.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        if self.is_closed:
            return
        answers, pushes, output = self._session.receive(nbytes)
        if output:
            self._write(output)
        self._hand_out(answers, pushes)
        if self._session.closed_by is not None:
            self.close(self._session.closed_by)
        elif self._session.is_ready and not self._ready.done():
            self._ready.set_result(None)

    def eof_received(self) -> None:
        self.close(NotConnected(f"the broker at {self.address} closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        why = f" ({exc})" if exc is not None else ""
        self.close(NotConnected(f"the connection to {self.address} broke{why}"))

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

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

        Raises:
            NotConnected, Busy, MessageTooLarge: nothing was sent.
        """
        pending, output = self._session.request(command, header, body, on_answer=on_answer, flags=flags)
        self._write(output)
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
        first = [buffer for said in told for buffer in self._session.one_way(*said)]
        pending, output = self._session.request(command, header, (), on_answer=on_answer)
        self._write([*first, *output])
        return pending

    def claim(self) -> int:
        """The correlation of a request for `ask`; 0 if it has to be submitted, or cannot be sent."""
        return self._session.claim() if not self.is_closed else 0

    def ask(self, correlation: int, frame: bytes, on_answer: OnAnswer) -> Pending:
        """Send a whole frame, with a correlation that was just claimed, and have its answer handed over."""
        pending = self._session.expect(correlation, on_answer)
        assert self._transport is not None
        self._transport.write(frame)
        return pending

    def tell(self, command: int, header: Header, body: Sequence[Buffer] = ()) -> None:
        """Send something that is not answered.

        Raises:
            NotConnected, MessageTooLarge: nothing was sent.
        """
        self._write(self._session.one_way(command, header, body))

    async def request(
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
            on_late: gets the answer, or what ended the connection, if nobody waits for it any more: the time was over,
                or the task was cancelled.

        Raises:
            TimedOut: no answer in time.
            DMQError: what ended the connection meanwhile.
        """
        await self.drain()
        check_loop(self._loop)
        future: asyncio.Future[Frame] = self._loop.create_future()

        def on_answer(answer: Frame | DMQError) -> None:
            if future.done():  # the task was cancelled in this turn, and does not know yet
                if on_late is not None:
                    on_late(answer)
            elif isinstance(answer, DMQError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

        pending = self.submit(command, header, body, on_answer=on_answer, flags=flags)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except BaseException as error:
            if on_late is None:
                self.forget(pending)
            elif self._session.is_waiting(pending):
                pending.on_answer = on_late
            elif future.done() and not future.cancelled() and future.exception() is None:
                on_late(future.result())  # it came, and the task was cancelled before it went on
            if isinstance(error, TimeoutError):
                raise TimedOut(f"the broker at {self.address} did not answer within {timeout:g} s") from None
            raise

    def forget(self, pending: Pending) -> bool:
        """Give up on an answer; False if it came."""
        return self._session.forget(pending)

    async def drain(self) -> None:
        """Wait until output may be added."""
        await self._writable.wait()

    def _write(self, buffers: Sequence[Buffer]) -> None:
        assert self._transport is not None
        if sum(map(len, buffers)) <= JOIN_BYTES_MAX:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)

    # --- time and the end -------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Beat the heart if it is time, and notice a broker that is silent."""
        try:
            output = self._session.tick()
        except NotConnected as error:
            self.close(error)
            return
        if output:
            self._write(output)

    def close(self, reason: DMQError) -> None:
        """End the connection: all that wait get the reason. Does nothing the second time."""
        if self.is_closed:
            return
        self.is_closed = True
        waiting = self._session.fail(reason)
        self._writable.set()
        if self._transport is not None:
            self._transport.abort()
        for pending in waiting:
            call_with(pending.on_answer, reason)
        if not self._ready.done():
            self._ready.set_exception(self._session.closed_by or reason)
            self._ready.exception()  # retrieved, though nobody may have waited for it
        if self._is_open:
            self._owner.lost(self, reason)
