"""The confirm service: answers at the consumer what messages came to, by send id (T-07).

A small server of its own: a question has a group and send ids, the answer what each came to, or nothing for one that
was not consumed.

What always holds: it listens on loopback unless another address is meant; at most `thread_num` questions are answered
at a time, a few more wait, others are turned away; no peer is waited for longer than `_TALK_SECONDS`. Its address is in
the registry while it lives, and goes soon after it died. It reads the table and changes nothing.

The confirm service of an inbox on an event loop: a `ConfirmService` whose address a task publishes.

What always holds: the service has threads of its own and an engine that blocks, so that a question is answered while
the loop is busy; the address is in the registry while the task runs.

The bytes between a confirm service and the side that asks.

One question per connection. The bytes, both ways:

    magic "dc" (2) · version u16 · length u32 · MessagePack: `Question`, then `Reply`

What always holds: a frame is bounded; no side waits for the other beyond a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from dmq.errors import DMQError, InvalidSettings, NotAllowed, NotConnected
from dmq.event_log import EventLog
from dmq.outbox.engines import sync_engine as engine_of
from dmq.outbox.inbox.recorder import Recorder, run
from dmq.outbox.states import BusinessState

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from dmq.client.aio.registry import AioRegistry

__all__ = [
    "IDS_MAX",
    "NAMESPACE",
    "RENEW_SECONDS",
    "TTL_SECONDS",
    "AioConfirmService",
    "ConfirmOptions",
    "ConfirmServer",
    "ConfirmService",
    "Confirmed",
    "ask_address",
]

IDS_MAX: Final = 200
REASON_CHARS: Final = 1024

_HEAD: Final = struct.Struct(">2sHI")
_MAGIC: Final = b"dc"
_VERSION: Final = 1
_FRAME_BYTES_MAX: Final = 512 << 10

Id = Annotated[str, Meta(min_length=1, max_length=64)]


class Question(msgspec.Struct, frozen=True, array_like=True):
    """What did these messages come to in this group?"""

    group: Annotated[str, Meta(min_length=1, max_length=255)]
    send_ids: Annotated[list[Id], Meta(max_length=IDS_MAX)]


class Confirmed(msgspec.Struct, frozen=True, array_like=True):
    """What one message came to."""

    send_id: str
    state: BusinessState
    consumer_id: str
    at_ms: int = 0
    reason: str = ""


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Those that were consumed; the others were not. With an error, nothing is known."""

    found: Annotated[list[Confirmed], Meta(max_length=IDS_MAX)] = []
    error: str = ""


_encode: Final = msgspec.msgpack.Encoder().encode
_questions: Final = msgspec.msgpack.Decoder(Question)
_replies: Final = msgspec.msgpack.Decoder(Reply)


def receive_question(connection: socket.socket, deadline: float) -> Question:
    """What somebody asks.

    Raises:
        OSError, ValueError: it does not come in time, or is none.
    """
    return _questions.decode(_receive(connection, deadline))


def send_reply(connection: socket.socket, reply: Reply, deadline: float) -> None:
    """Answer."""
    _send(connection, _encode(reply), deadline)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """One frame.

    Raises:
        OSError: it does not come in time.
        ValueError: it is not one.
    """
    magic, version, length = _HEAD.unpack(_receive_exactly(connection, _HEAD.size, deadline))
    if magic != _MAGIC or version != _VERSION or length > _FRAME_BYTES_MAX:
        raise ValueError("these bytes are neither a question nor an answer of a confirm service")
    return _receive_exactly(connection, length, deadline)


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        got = connection.recv(count - len(parts))
        if not got:
            raise ConnectionError("the other side closed the connection")
        parts += got
    return bytes(parts)


def _send(connection: socket.socket, body: bytes, deadline: float) -> None:
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.sendall(_HEAD.pack(_MAGIC, _VERSION, len(body)) + body)


def ask_address(address: str, group: str, send_ids: list[str], timeout: float) -> dict[str, Confirmed]:
    """Ask one confirm service; those that are missing in the answer were not consumed.

    Raises:
        NotConnected: it gave no answer.
    """
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            _send(connection, _encode(Question(group, send_ids)), deadline)
            reply = _replies.decode(_receive(connection, deadline))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise NotConnected(f"the confirm service at {address} did not answer: {error}", address=address) from error
    if reply.error:
        raise NotConnected(f"the confirm service at {address} cannot look: {reply.error}", address=address)
    asked = set(send_ids)
    return {found.send_id: found for found in reply.found if found.send_id in asked}


log = EventLog(__name__)

NAMESPACE: Final = "dmq.confirm"  # in the registry: group/instance -> host:port
TTL_SECONDS: Final = 30.0
RENEW_SECONDS: Final = 10.0
_TALK_SECONDS: Final = 5.0
_WAITING_MAX: Final = 64


class ConfirmOptions(NamedTuple):
    """How a confirm service listens.

    Attributes:
        host, port: where; port 0 takes one that is free.
        advertise: the host that is published, if others reach it by another name.
        thread_num: how many questions are answered at a time.
        insecure: listen on another address than loopback, though anybody who reaches it may ask.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    thread_num: int = 2
    insecure: bool = False

    def check(self) -> ConfirmOptions:
        """Itself.

        Raises:
            NotAllowed: the address is not loopback.
            InvalidSettings: another value makes no sense.
        """
        try:
            is_loopback = self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            is_loopback = False
        if not is_loopback and not self.insecure:
            raise NotAllowed(
                f"{self.host} is not loopback, and the confirm service knows no authentication: anybody who reaches it "
                "could ask what messages came to; say insecure=True if that is meant",
                host=self.host,
            )
        if not 1 <= self.thread_num <= 64 or not 0 <= self.port <= 0xFFFF:
            raise InvalidSettings("thread_num is from 1 to 64, and port from 0 to 65535")
        return self


Find = Callable[[str, list[str]], list[Confirmed]]


class ConfirmServer:
    """The listening part.

    Parameters:
        find: what was consumed of these, in this group; may raise `SQLAlchemyError` or `DMQError`.
    """

    def __init__(self, find: Find, options: ConfirmOptions) -> None:
        options.check()
        self._find = find
        self._waiting: queue.Queue[socket.socket | None] = queue.Queue(_WAITING_MAX)
        self._ended = threading.Event()
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        try:
            self._listener = socket.create_server((options.host, options.port), family=family, backlog=_WAITING_MAX)
        except OSError as error:
            raise InvalidSettings(
                f"the confirm service cannot listen on {options.host} port {options.port}: {error.strerror}; choose "
                "another port, or 0 for one that is free"
            ) from error
        host = options.advertise or options.host
        port = self._listener.getsockname()[1]
        self.address: Final = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._threads = [
            threading.Thread(target=self._accept, name="dmq-confirm", daemon=True),
            *(
                threading.Thread(target=self._work, name=f"dmq-confirm-{number}", daemon=True)
                for number in range(options.thread_num)
            ),
        ]
        for thread in self._threads:
            thread.start()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                self._ended.wait(0.1)  # it ends, or is out of files
                continue
            try:
                self._waiting.put_nowait(connection)
            except queue.Full:
                connection.close()

    def _work(self) -> None:
        while (connection := self._waiting.get()) is not None:
            with connection:
                try:
                    self._serve(connection)
                except (OSError, ValueError, msgspec.MsgspecError) as error:
                    log.debug("a question was not answered", error=error)
                except Exception:
                    log.exception("a question was not answered", once_for=())

    def _serve(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + _TALK_SECONDS
        question = receive_question(connection, deadline)
        try:
            reply = Reply(self._find(question.group, question.send_ids))
        except (SQLAlchemyError, DMQError) as error:
            log.warning("the confirm service cannot look", once_for=(), exc_info=error)
            reply = Reply(error=str(error)[:REASON_CHARS])
        send_reply(connection, reply, time.monotonic() + _TALK_SECONDS)

    def close(self) -> None:
        """Answer nothing more."""
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else a thread in accept() would stay there
        self._listener.close()
        self._threads[0].join(_TALK_SECONDS)
        for _ in self._threads[1:]:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_TALK_SECONDS)
        for thread in self._threads[1:]:
            thread.join(2 * _TALK_SECONDS)


class Publishing(Protocol):
    """The registry, as far as it is needed here."""

    def put(self, namespace: str, key: str, value: bytes | str, *, ttl: float | None = None) -> None: ...

    def delete(self, namespace: str, key: str) -> bool: ...


class ConfirmService:
    """A server that starts with the first consumer, and its address in the registry under every group it answers for.

    Parameters:
        registry: None where somebody else publishes; see `keys`.
    """

    def __init__(
        self, engine: Engine, recorder: Recorder, registry: Publishing | None, options: ConfirmOptions
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        self._registry = registry
        self._options = options.check()
        self._groups: set[str] = set()
        self._mutex = threading.Lock()
        self._server: ConfirmServer | None = None
        self._news = threading.Event()
        self._is_closed = False
        self._instance = uuid.uuid4().hex[:12]
        self._publisher: threading.Thread | None = None

    @property
    def address(self) -> str:
        """Where it listens; empty before it starts."""
        return "" if self._server is None else self._server.address

    @property
    def keys(self) -> list[str]:
        """What stands for it in the registry."""
        return [f"{group}/{self._instance}" for group in sorted(self._groups)]

    def begin(self, group: str) -> bool:
        """Answer for a group; whether that is news."""
        if group in self._groups:
            return False
        with self._mutex:
            if self._is_closed or group in self._groups:
                return False
            if self._server is None:
                self._server = ConfirmServer(self.find, self._options)
            self._groups = {*self._groups, group}
            if self._registry is not None and self._publisher is None:
                self._publisher = threading.Thread(
                    target=self._publish, args=(self._registry,), name="dmq-confirm-publish", daemon=True
                )
                self._publisher.start()
        self._news.set()
        return True

    def find(self, group: str, send_ids: list[str]) -> list[Confirmed]:
        """What was consumed of these.

        Raises:
            NotAllowed: the group is not ours.
            SQLAlchemyError: the database cannot be asked.
        """
        if group not in self._groups:
            raise NotAllowed(f"group {group!r} does not consume here: ask one that the registry names", group=group)
        if not send_ids:
            return []
        with self._engine.connect() as connection:
            found = run(self._recorder.find_many(send_ids, group), connection.execute)
        return [
            Confirmed(send_id, one.state, one.consumer_id, one.at_ms, reason=one.reason[:REASON_CHARS])
            for send_id, one in found.items()
        ]

    def _publish(self, registry: Publishing) -> None:
        while not self._is_closed:
            self._news.clear()
            try:
                for key in self.keys:
                    registry.put(NAMESPACE, key, self.address, ttl=TTL_SECONDS)
            except DMQError as error:
                log.warning("the confirm service could not be published", once_for=(), error=error)
            self._news.wait(RENEW_SECONDS)

    def close(self) -> None:
        """Answer nothing more, and take the address back. Safe to call twice."""
        with self._mutex:
            if self._is_closed:
                return
            self._is_closed = True
        self._news.set()
        if self._registry is not None and self._publisher is not None:
            self._publisher.join(_TALK_SECONDS)
            with contextlib.suppress(DMQError):
                for key in self.keys:
                    self._registry.delete(NAMESPACE, key)
        if self._server is not None:
            self._server.close()


class AioConfirmService:
    """A service, and the task that publishes it.

    Parameters:
        engine: of the inbox; one that blocks is made beside it.
        sync_engine: an engine that blocks, to be used instead.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        recorder: Recorder,
        registry: AioRegistry,
        options: ConfirmOptions,
        *,
        sync_engine: Engine | None = None,
    ) -> None:
        self._engine = sync_engine or engine_of(engine)
        self._owns_engine = sync_engine is None
        self._registry = registry
        self._publisher: asyncio.Task[None] | None = None
        self.service: Final = ConfirmService(self._engine, recorder, None, options)

    def begin(self, group: str) -> None:
        """Answer for a group, and publish the address for it at once if the group is new."""
        if self.service.begin(group):
            if self._publisher is not None:
                self._publisher.cancel()
            self._publisher = asyncio.get_running_loop().create_task(self._publish())

    async def _publish(self) -> None:
        """Keep the address in the registry."""
        while True:
            try:
                for key in self.service.keys:
                    await self._registry.put(NAMESPACE, key, self.service.address, ttl=TTL_SECONDS)
            except DMQError as error:
                log.warning("the confirm service could not be published", once_for=(), error=error)
            await asyncio.sleep(RENEW_SECONDS)

    async def close(self) -> None:
        """Answer nothing more, and take the address out of the registry."""
        if self._publisher is not None:
            self._publisher.cancel()
            await asyncio.wait([self._publisher])
        with contextlib.suppress(DMQError):
            for key in self.service.keys:
                await self._registry.delete(NAMESPACE, key)
        await asyncio.to_thread(self.service.close)
        if self._owns_engine:
            await asyncio.to_thread(self._engine.dispose)
