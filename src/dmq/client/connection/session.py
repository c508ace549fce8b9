"""The session: one connection's conversation, without the connection. Bytes in, bytes out.

Both shells, the blocking one and the asyncio one, own a session, hand it what they receive and write what it gives.

What always holds:
- Every request that was taken is answered exactly once: by its response, or by the error that ended the session.
- At most `outstanding_max` requests wait for an answer; one more is refused with `Busy`.
- Nothing is sent before the hello but the hello; nothing is asked of a session that ended.
- A response to nobody is dropped (D-23): the caller has given up on it.
- A request of the broker is answered: a heartbeat with a heartbeat, anything else with UNKNOWN_COMMAND.
- A push says since when at the latest it can have been on its way: what comes behind the answer to a request was sent
  after that request, however long it then lay unread, since the broker's frames come in order.

The session is not thread-safe. The blocking shell guards `request`, `forget`, `fail` and `receive` with one lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from dmq.clock import Clock
from dmq.errors import (
    Busy,
    DMQError,
    FrameCorrupt,
    InvalidRequest,
    MessageTooLarge,
    NotConnected,
    ProtocolError,
    VersionMismatch,
)
from dmq.model import check_name
from dmq.protocol import (
    CORRELATION_MAX,
    Buffer,
    Command,
    Frame,
    FrameParser,
    Header,
    Kind,
    decode_request,
    decode_response,
    error_frame,
    error_from_status,
    one_way_head,
    request_head,
    response_head,
    seal_frame,
)
from dmq.protocol.frame import WIRE_FORMAT
from dmq.protocol.session import FEATURES, FRAME_CRC, PROTOCOL_VERSION_MIN, Heartbeat, Hello, HelloReply, Limits
from dmq.version import __version__

__all__ = ["OnAnswer", "Pending", "Push", "Received", "Session", "make_hello"]

OUTSTANDING_MAX: Final = 65_536
# As plain numbers: to name a member of an enum costs as much as a call.
_RESPONSE: Final = int(Kind.RESPONSE)
_ONE_WAY: Final = int(Kind.ONE_WAY)
_HEARTBEAT: Final = int(Command.HEARTBEAT)
_OURS: Final = CORRELATION_MAX  # the correlation of what the session itself asks: hello and heartbeats
SILENCE_FACTOR: Final = 3  # so many heartbeats in a row may be missed
HEARTBEAT_MARGIN: Final = 0.5  # sent this early, so that a late timer does not make us silent
# Bytes a second. A frame whose length was damaged takes later frames for its own, and waits on: a few answers and
# heartbeats now and then are not progress.
PARTIAL_RATE_MIN: Final = 32 << 10

OnAnswer: TypeAlias = Callable[[Frame | DMQError], None]


def make_hello(app: str, client_id: str | None) -> Hello:
    """The hello of a client.

    Raises:
        InvalidName: a name is not allowed.
    """
    if client_id is not None:
        check_name(client_id, "client id")
    check_name(app, "app")
    return Hello(app, client_id or "", software=f"dmq-python {__version__}", features=sorted(FEATURES))


def _refused_hello(error: DMQError) -> DMQError:
    """What an error in answer to the hello means. Every broker can read our hello, so one that cannot got another."""
    is_other_wire = error.detail.get("theirs", WIRE_FORMAT & 0x0F) != WIRE_FORMAT & 0x0F
    if isinstance(error, ProtocolError) and (is_other_wire or not isinstance(error, VersionMismatch)):
        return FrameCorrupt(f"the broker could not read the hello, which was damaged on its way ({error.message})")
    return error


class Pending:
    """A request that waits for its answer. `on_answer` is called once, with the response or what ended the session."""

    __slots__ = ("attended", "correlation", "on_answer", "sent_at")

    def __init__(self, on_answer: OnAnswer, correlation: int, attended: bool, sent_at: float = 0.0) -> None:
        self.on_answer = on_answer
        self.correlation = correlation
        self.attended = attended
        self.sent_at = sent_at


class Push(NamedTuple):
    """A one-way frame of the broker, its header decoded.

    Attributes:
        since: the broker sent it later than this, by our clock since boot.
    """

    command: int
    header: Header
    body: bytes | memoryview
    since: float


class Received(NamedTuple):
    """What some bytes meant: answers for those who asked, pushes, and bytes to write."""

    answers: list[tuple[Pending, Frame]]
    pushes: list[Push]
    output: list[Buffer]


class Session:
    """One conversation with a broker.

    Parameters:
        hello: who we are.
        clock: for heartbeats and silence.
        outstanding_max: how many requests may wait at a time.
    """

    def __init__(self, hello: Hello, clock: Clock, *, outstanding_max: int = OUTSTANDING_MAX) -> None:
        self._hello = hello
        self._clock = clock
        self._outstanding_max = outstanding_max
        self._outstanding: dict[int, Pending] = {}
        self._next_correlation = 1
        self._parser = FrameParser(clock=clock)
        self.get_buffer: Final = self._parser.get_buffer
        self._sent_at = self._heard_at = self._beaten_at = clock.monotonic()
        self._answered_since = clock.boottime()  # when the newest request was sent that is answered
        self._beats: deque[float] = deque()  # when the heartbeats were sent that are not answered
        self._frame_bytes_max = 0  # before the hello
        self._received = Received([], [], [])  # at last; who hands its answers over takes them out
        self.reply: HelloReply | None = None
        self.features: frozenset[str] = frozenset()
        """In force on the connection, by the names of `dmq.protocol.session`; known once the hello was answered."""
        self.closed_by: DMQError | None = None
        """Why the session ended; None while it goes on."""

    # --- asking -----------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the hello was answered and nothing ended the session."""
        return self.reply is not None and self.closed_by is None

    @property
    def limits(self) -> Limits:
        """What the broker takes; only once the session is ready."""
        assert self.reply is not None
        return self.reply.limits

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    def greet(self) -> bytes:
        """The hello, first of all."""
        self._sent_at = self._clock.monotonic()
        frame = request_head(Command.HELLO, self._hello, _OURS)
        return b"".join(seal_frame(frame)) if FRAME_CRC in self._hello.features else frame

    def request(
        self,
        command: int,
        header: Header,
        body: Sequence[Buffer] = (),
        *,
        on_answer: OnAnswer,
        flags: int = 0,
        attended: bool = False,
    ) -> tuple[Pending, Sequence[Buffer]]:
        """Ask something: what to write, and the request under which the answer will come.

        Raises:
            NotConnected: the session is not ready, or has ended.
            Busy: too many requests are waiting.
            MessageTooLarge: the broker takes no frame of this size.
        """
        if self.closed_by is not None or self.reply is None:
            self._check_ready()
        outstanding = self._outstanding
        if len(outstanding) >= self._outstanding_max:
            raise Busy(f"{self._outstanding_max} requests wait for their answers: wait for some of them first")
        correlation = self._next_correlation
        while correlation in outstanding:
            correlation = correlation % (_OURS - 1) + 1
        body_bytes = sum(map(len, body))
        head = request_head(command, header, correlation, body_bytes, flags=flags)
        if len(head) + body_bytes > self._frame_bytes_max:
            raise self._too_large(len(head) + body_bytes)
        self._next_correlation = correlation % (_OURS - 1) + 1
        pending = outstanding[correlation] = Pending(on_answer, correlation, attended, self._clock.boottime())
        return pending, self._output(head, *body)

    def claim(self) -> int:
        """The correlation of a request that is sent without being registered, with the checksum of its frame; 0 if it
        has to be registered, or cannot be sent."""
        outstanding, parser = self._outstanding, self._parser
        if self.closed_by is not None or self.reply is None or not parser.is_checked or parser.has_partial:
            return 0
        correlation = self._next_correlation
        if correlation in outstanding or len(outstanding) >= self._outstanding_max:
            return 0
        self._next_correlation = correlation % (_OURS - 1) + 1
        return correlation

    def expect(self, correlation: int, on_answer: OnAnswer, *, attended: bool = False) -> Pending:
        """Register a request that was claimed, and sent or about to be.

        Raises:
            DMQError: what ended the session.
        """
        if self.closed_by is not None:
            raise self.closed_by
        pending = self._outstanding[correlation] = Pending(on_answer, correlation, attended)
        return pending

    @property
    def answered_since(self) -> float:
        """When the newest request was sent that is answered, by the clock since boot: what was sent before arrived."""
        return self._answered_since

    def note_exchange(self) -> None:
        """A frame was sent, and something came."""
        self._sent_at = self._heard_at = self._clock.monotonic()

    def one_way(self, command: int, header: Header, body: Sequence[Buffer] = ()) -> Sequence[Buffer]:
        """Say something that is not answered.

        Raises:
            NotConnected, MessageTooLarge: as `request`.
        """
        self._check_ready()
        body_bytes = sum(map(len, body))
        head = one_way_head(command, header, body_bytes)
        if len(head) + body_bytes > self._frame_bytes_max:
            raise self._too_large(len(head) + body_bytes)
        return self._output(head, *body)

    def _output(self, *frame: Buffer) -> Sequence[Buffer]:
        """What to write for a frame that is sent now."""
        self._sent_at = self._clock.monotonic()
        return seal_frame(*frame) if self._parser.is_checked else frame

    def forget(self, pending: Pending) -> bool:
        """Give up on an answer; False if it is here already, or the session has ended."""
        return self._outstanding.pop(pending.correlation, None) is not None

    def is_waiting(self, pending: Pending) -> bool:
        """Whether its answer is still to come."""
        return self._outstanding.get(pending.correlation) is pending

    def _check_ready(self) -> None:
        if self.closed_by is not None:
            raise NotConnected(f"the connection is closed: {self.closed_by.message}")
        if self.reply is None:
            raise NotConnected("the broker has not answered the hello yet")

    def _too_large(self, size: int) -> MessageTooLarge:
        limit = self._frame_bytes_max
        return MessageTooLarge(
            f"a request of {size} bytes is over the broker's limit of {limit}: send less at a time",
            size=size,
            limit=limit,
        )

    # --- hearing ----------------------------------------------------------------------------------------------------

    def receive(self, nbytes: int) -> Received:
        """What the bytes meant that were written into the last `get_buffer`. Look at `closed_by` afterwards."""
        return self._hear(self._parser.buffer_updated, nbytes)

    def feed(self, data: bytes) -> Received:
        """`receive` for bytes that somebody has."""
        return self._hear(self._parser.feed, data)

    def _hear(self, parse: Callable[[Any], list[Frame]], what: Any) -> Received:
        self._heard_at = self._clock.monotonic()
        received = self._received = Received([], [], [])
        try:
            for frame in parse(what):
                self._take(frame, received)
        except DMQError as error:
            self.closed_by = self.closed_by or error
        if self._parser.error is not None:
            self.closed_by = self.closed_by or self._parser.error
        return received

    def _take(self, frame: Frame, received: Received) -> None:
        kind = frame.kind
        if kind == _RESPONSE:
            pending = self._outstanding.get(frame.correlation)
            if pending is not None:
                received.answers.append((pending, frame))
                del self._outstanding[frame.correlation]
                if pending.sent_at > self._answered_since:
                    self._answered_since = pending.sent_at
            elif frame.correlation in (0, _OURS):
                self._take_own(frame)
        elif kind == _ONE_WAY:
            if frame.command == _HEARTBEAT:
                return
            try:
                header = decode_request(frame)
                received.pushes.append(Push(frame.command, header, frame.body, self._answered_since))
            except InvalidRequest as error:
                raise ProtocolError(f"the broker pushed something that cannot be read: {error.message}") from error
            except DMQError:
                return  # a newer broker's push that nobody here asked for
        else:
            received.output.extend(self._output(self._answer(frame)))

    def _take_own(self, frame: Frame) -> None:
        """An answer to the session itself, or the broker's last word to somebody it does not understand."""
        if frame.command == Command.HELLO and self.reply is None:
            if frame.status:
                raise _refused_hello(error_from_status(frame.status, frame.header))
            reply: HelloReply = decode_response(frame)
            if (FRAME_CRC in reply.features) != self._parser.is_checked:
                raise FrameCorrupt(
                    "the answer to the hello says one thing of checksums and does another: connect again"
                )
            if not PROTOCOL_VERSION_MIN <= reply.version <= self._hello.version_max:
                raise VersionMismatch(
                    f"the broker chose version {reply.version} of the protocol, and this client speaks "
                    f"{self._hello.version_min} to {self._hello.version_max}: upgrade the older side",
                    theirs=reply.version,
                )
            self.reply = reply
            self.features = frozenset(reply.features) & frozenset(self._hello.features)
            self._frame_bytes_max = reply.limits.frame_bytes_max
            self._parser.frame_bytes_max = max(self._parser.frame_bytes_max, reply.limits.frame_bytes_max)
        elif frame.command == Command.HEARTBEAT and self._beats:
            self._answered_since = max(self._answered_since, self._beats.popleft())
        elif frame.command == Command.NONE and frame.status:
            error = error_from_status(frame.status, frame.header)
            raise error if self.reply else _refused_hello(error)

    def _answer(self, frame: Frame) -> bytes:
        try:
            header = decode_request(frame)
            if frame.command == Command.HEARTBEAT:
                return response_head(Command.HEARTBEAT, header, frame.correlation)
            raise InvalidRequest("a broker does not ask this of a client")
        except DMQError as error:
            return error_frame(error, frame.command, frame.correlation)

    # --- time -------------------------------------------------------------------------------------------------------

    def tick(self) -> Sequence[Buffer]:
        """To be called now and then: a heartbeat if one is due.

        Raises:
            NotConnected: the broker was silent for too long, or stopped in the middle of a frame.
        """
        if not self.is_ready:
            return []
        now = self._clock.monotonic()
        heartbeat = self.limits.heartbeat_ms / 1000
        if heartbeat and now - self._heard_at > SILENCE_FACTOR * heartbeat:
            raise NotConnected(
                f"the broker has been silent for {now - self._heard_at:.1f} s, longer than {SILENCE_FACTOR} heartbeats"
            )
        partial = self.limits.partial_ms / 1000
        since = self._parser.pending_since
        if partial and since is not None:
            if now - max(since, self._heard_at) > partial:
                raise NotConnected(f"the broker stopped in the middle of a frame for more than {partial:.1f} s")
            if now - since > partial and self._parser.pending_bytes < PARTIAL_RATE_MIN * (now - since):
                raise NotConnected(
                    f"a frame of the broker is not complete after {now - since:.1f} s: its length is wrong"
                )
        due = heartbeat * HEARTBEAT_MARGIN
        if heartbeat and now - min(self._sent_at, self._heard_at) >= due and now - self._beaten_at >= due:
            self._beaten_at = now
            self._beats.append(self._clock.boottime())
            # A request, not a one-way: its answer is what tells a living broker from a dead one.
            return self._output(request_head(Command.HEARTBEAT, Heartbeat(self._clock.now_ms()), _OURS))
        return []

    # --- the end ----------------------------------------------------------------------------------------------------

    def unheard(self) -> list[Pending]:
        """Whose answers came, and were not handed over to the end."""
        return [pending for pending, _ in self._received.answers]

    def fail(self, reason: DMQError) -> list[Pending]:
        """End the session: the requests that will never be answered, oldest first."""
        self.closed_by = self.closed_by or reason
        waiting = [*self._outstanding.values()]
        self._outstanding.clear()
        return waiting
