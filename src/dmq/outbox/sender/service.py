"""The sender's side of the outbox: `MessageService`, and how it hears of commits.

`send` inserts a row in the user's own transaction and nothing else; whatever has to do with brokers happens behind it,
in threads of the service's or in another process.

What always holds: a message goes out if and only if the transaction that inserted it was committed; the send id is
known, and can be stored with the business, before that; nothing that a broker does makes a business call fail or wait.

Noticing commits: which send ids were inserted in which session, and when its transaction has ended. Sessions tell by
their events, also those that the user made; a plain connection tells just before it commits. Nothing depends on it: the
relay reads each row before it sends, so a hint that comes too early, or for a savepoint that was rolled back, does no
harm, and one that never comes only costs time.

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
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Self, TypedDict, TypeVar, Unpack, cast
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, Engine, event, insert, select, update
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from dmq.clock import Clock, SystemClock
from dmq.errors import InvalidMessage, InvalidSettings
from dmq.event_log import EventLog
from dmq.model import DEFAULT_PRIORITY, check_name
from dmq.outbox.alerts import OnAlert, alert_with
from dmq.outbox.engines import sync_engine as engine_of
from dmq.outbox.inbox.inbox import Inbox
from dmq.outbox.metrics import SENDER_COUNTS, Counts, exposition, waiting
from dmq.outbox.schema import OutboxTables, check_tables
from dmq.outbox.schema import tables as default_tables
from dmq.outbox.sender.envelope import Result
from dmq.outbox.sender.message_row import (
    MessageDraft,
    Numbering,
    OutboxMessage,
    columns_of,
    groups_text,
    make_row,
    parse_row,
)
from dmq.outbox.sender.relay import Relay, make_owner
from dmq.outbox.sender.result_book import ResultBook, ResultConsumers, Reverse
from dmq.outbox.states import OPEN, BusinessState, SendState

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession

    from dmq.client.client import Client
    from dmq.client.consumer.message import ReceivedMessage

__all__ = ["Collected", "MessageOptions", "MessageService", "collect", "collected_by", "inserted", "sends_messages"]

P = ParamSpec("P")
R = TypeVar("R", bound=Callable[..., Any])
T = TypeVar("T")
_UNSET: Final[Any] = object()


class MessageOptions(TypedDict, total=False):
    """Options of `MessageService.send`."""

    business_id: str | None
    key: str | None
    tag: str | None
    priority: int
    properties: Mapping[str, str] | None
    ordered: bool | None
    strict: bool
    groups: Iterable[str] | None


class MessageService:
    """Sends messages with the business's own transactions. Thread-safe; a context manager that starts and closes.

    Parameters:
        engine: the database of the business; an asyncio engine, too.
        client: a connection to a broker. None: rows are only inserted, and a relay elsewhere sends them.
        tables: as `dmq.outbox.tables` gave them; those of the usual names if left out.
        app: whose messages these are: results come back by this name, so every database needs one of its own. The
            client's if left out.
        groups: by topic, the groups whose results make a message done. A topic without an entry is done with the
            first result; an empty list expects none.
        reverse: by topic, what takes the business back when a group refused: called with a session, the
            `OutboxMessage` and the `Result`, in the transaction that marks the row. `@service.reverse(topic)` too.
        relay: whether this process also sends what others left behind.
        results: whether this process takes results.
        grace: seconds that a row belongs to the process that inserted it, before a relay takes it.
        sync_engine: an engine that blocks, for background work, if it cannot be had from an asyncio `engine`.
        session_factory: makes the sessions of reverse businesses; a `sessionmaker` if left out.
        batch, poll, lease, result_after, timeout, alert_after, on_alert: as of `Relay`.
        clock: for tests; the machine's if left out.

    Raises:
        InvalidSettings, InvalidName: a value makes no sense.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        client: Client | None,
        *,
        tables: OutboxTables | None = None,
        app: str | None = None,
        groups: Mapping[str, Iterable[str]] | None = None,
        reverse: Mapping[str, Reverse] | None = None,
        relay: bool = True,
        results: bool = True,
        grace: float = 10.0,
        sync_engine: Engine | None = None,
        session_factory: Callable[[], Session] | None = None,
        batch: int = 1000,
        poll: float = 0.5,
        lease: float = 20.0,
        result_after: float = 600.0,
        timeout: float = 5.0,
        alert_after: int = 10,
        on_alert: OnAlert | None = None,
        clock: Clock | None = None,
    ) -> None:
        if app is None and client is None:
            raise InvalidSettings("app= is needed where there is no client: results come back by this name")
        if grace <= 0:
            raise InvalidSettings(f"grace= is a time in seconds above 0, not {grace!r}")
        self.app: Final = check_name(app if app is not None else getattr(client, "app", ""), "app")
        self.client: Final = client
        self.tables: Final = tables or default_tables()
        self.engine: Final = engine_of(sync_engine if sync_engine is not None else engine)
        self.counts: Final = Counts(SENDER_COUNTS)
        self.alert: Final = alert_with(on_alert, self.counts)
        self._owns_engine = self.engine is not engine and self.engine is not sync_engine
        self._numbering = Numbering(self.engine.dialect, self.tables.sequence)
        self._clock = clock or SystemClock()
        self._groups = {topic: groups_text(names) for topic, names in (groups or {}).items()}
        self._reverse: dict[str, Reverse] = dict(reverse or {})
        self._grace_ms = round(grace * 1000)
        self._insert = insert(self.tables.send).inline()
        self._owner = None if client is None else make_owner()
        self._known: set[str] = set()
        self._is_started = False
        self._making = threading.Lock()
        self._inbox: Inbox | None = None
        self._must_listen = results
        sessions = session_factory or sessionmaker(self.engine)
        self._book = ResultBook(
            self.engine, self.tables, sessions, self._reverse, counts=self.counts, clock=self._clock
        )
        self._relay: Relay | None = None
        self._consumers: ResultConsumers | None = None
        if client is not None:
            self._relay = Relay(
                self.engine, client, tables=self.tables, batch=batch, poll=poll, lease=lease,
                result_after=result_after, timeout=timeout, alert_after=alert_after, on_alert=on_alert, scan=relay,
                owner=self._owner, counts=self.counts, clock=clock,
            )  # fmt: skip
            if results:
                self._consumers = ResultConsumers(
                    client, self.app, self._book, alert_after, alert=self.alert, counts=self.counts
                )

    # --- in the business's transaction --------------------------------------------------------------------------------

    def send(
        self,
        session: Session | scoped_session[Any] | Connection,
        topic: str,
        body: object,
        *,
        business_id: str | None = None,
        key: str | None = None,
        tag: str | None = None,
        priority: int = DEFAULT_PRIORITY,
        properties: Mapping[str, str] | None = None,
        ordered: bool | None = None,
        strict: bool = False,
        groups: Iterable[str] | None = _UNSET,
    ) -> str:
        """Insert a message into the sender table, in the transaction of this session; it goes out after the commit.

        Parameters:
            session: the business's own session, or connection.
            topic: where it goes.
            body: bytes, text, a dict or list, a msgspec struct, a dataclass or a Pydantic model.
            business_id: what it belongs to; messages of one topic and business id stay in order.
            key: to find it by; its send id if left out.
            tag: to filter by.
            priority: 0 to 9.
            properties: names and values that travel with it.
            ordered: False gives up the order within a business id.
            strict: number it, so that the consumer notices a gap and waits.
            groups: whose results are expected, instead of what the service says of the topic.

        Returns:
            Its send id, to be stored with the business.

        Raises:
            InvalidMessage, InvalidName: it could never be sent; nothing was inserted.
            SQLAlchemyError: it could not be inserted.
        """
        plain: Session | Connection = _plain(session)
        now_ms = self._clock.now_ms()
        draft = MessageDraft(
            topic, body, business_id, key, tag=tag, priority=priority, properties=properties,
            ordered=True if strict else ordered,
            groups=self._groups.get(topic) if groups is _UNSET else groups_text(groups),
        )  # fmt: skip
        due_at_ms = now_ms if self._owner is None else now_ms + self._grace_ms
        row = make_row(self.app, draft, self._owner, now_ms, due_at_ms=due_at_ms)
        if strict and (ordered is False or not business_id):
            raise InvalidMessage("strict=True needs a business_id, and does not go with ordered=False")
        try:
            self._put(plain, row, strict)
        except UnboundExecutionError:
            # A session that knows its databases by the classes of the user's model, of which our table is none.
            assert isinstance(plain, Session)
            self._put(plain.connection(bind_arguments={"bind": self.engine}), row, strict)
        send_id: str = row["send_id"]
        if self._relay is not None:
            inserted(plain, send_id, self._committed)
            collect(send_id, self._committed)
        if topic not in self._known:
            self._learn(topic)
        return send_id

    async def send_async(
        self, session: AsyncSession | AsyncConnection, topic: str, body: object, **options: Unpack[MessageOptions]
    ) -> str:
        """`send` for sessions and connections of asyncio; takes the same options."""
        run_sync = getattr(session, "run_sync", None)
        if run_sync is None:
            raise InvalidSettings(f"send_async takes a session of asyncio, not {type(session).__name__}: use send")
        send_id: str = await run_sync(lambda plain: self.send(plain, topic, body, **options))
        return send_id

    def sends_messages(self, method: Callable[P, T]) -> Callable[P, T]:
        """`dmq.outbox.sends_messages`, for those who have the service at hand."""
        return sends_messages(method)

    def reverse(self, topic: str) -> Callable[[R], R]:
        """Register the reverse business of a topic: `@service.reverse("orders")`."""

        def register(function: R) -> R:
            if topic in self._reverse:
                raise InvalidSettings(f"topic {topic!r} has a reverse business already")
            self._reverse[check_name(topic, "topic")] = function
            return function

        return register

    def _put(self, session: Session | Connection, row: dict[str, Any], strict: bool) -> None:
        if strict:
            row["sequence"] = self._numbering.next(session, row["topic"], row["business_id"])
        session.execute(self._insert, row)

    def _committed(self, send_ids: Sequence[str]) -> None:
        if self._relay is not None:
            self._relay.start()
            self._relay.hint(send_ids)

    def _learn(self, topic: str) -> None:
        self._known.add(topic)
        if self._is_started and self._consumers is not None:
            self._consumers.listen([topic])

    # --- in the background --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start relaying, and listening for results. Safe to call twice.

        Raises:
            InvalidSettings: a table is missing.
            SQLAlchemyError: the database cannot be used.
        """
        tables = self.tables
        check_tables(self.engine, (tables.send, tables.result, tables.sequence))
        self._is_started = True
        if self._relay is not None:
            self._relay.start()
        if self._consumers is not None:
            self._consumers.listen({*self._known, *self._groups, *self._reverse, *self._open_topics()})

    def _open_topics(self) -> list[str]:
        """Topics whose results may still come, from before this process began."""
        columns = self.tables.send.c
        asked = select(columns.topic).where(columns.state.in_([*map(str, OPEN)]), columns.app == self.app).distinct()
        with self.engine.connect() as connection:
            return [*connection.scalars(asked)]

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all that was committed here has been tried to be sent; whether that came in time."""
        return self._relay is None or self._relay.flush(timeout)

    def close(self) -> None:
        """Send what was committed here, as long as that goes well, and stop. What is left stays in the table."""
        self._is_started = False
        if self._consumers is not None:
            self._consumers.close()
        if self._relay is not None:
            self._relay.close()
        if self._inbox is not None:
            self._inbox.close()
        if self._owns_engine:
            self.engine.dispose()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- the consumer's side ------------------------------------------------------------------------------------------

    @property
    def inbox(self) -> Inbox:
        """The inbox on the same database, made when first asked for."""
        with self._making:
            if self._inbox is None:
                self._inbox = Inbox(self.engine, self.client, tables=self.tables, clock=self._clock)
            return self._inbox

    def consumes_messages(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Make `function(session, message)` a handler; see `dmq.outbox.inbox.inbox.Inbox.consumes_messages`."""
        return self.inbox.consumes_messages(function)

    def prepare(self, session: Session, message: ReceivedMessage) -> ReceivedMessage | None:
        """Begin to consume a message; see `dmq.outbox.inbox.inbox.Inbox.prepare`."""
        return self.inbox.prepare(session, message)

    def consumed(self, session: Session, message: ReceivedMessage, result: BusinessState, reason: str = "") -> None:
        """Say what a prepared message came to; see `dmq.outbox.inbox.inbox.Inbox.consumed`."""
        self.inbox.consumed(session, message, result, reason)

    # --- looking, and mending -----------------------------------------------------------------------------------------

    def find(self, send_id: str) -> OutboxMessage | None:
        """A message of the sender table."""
        send = self.tables.send
        with self.engine.connect() as connection:
            row = connection.execute(select(*columns_of(send)).where(send.c.send_id == send_id)).first()
        return None if row is None else parse_row(row)

    def apply_result(self, result: Result) -> SendState | None:
        """Write a result down, as if it had come by its topic; runs the reverse business if it says ROLLBACK.

        Returns:
            What the row is now; None if there is none.

        Raises:
            Exception: whatever the reverse business raised; nothing was written.
        """
        return self._book.apply(result)

    def resend(self, send_ids: Sequence[str]) -> int:
        """Have messages that were sent, and have no result, sent again; how many that are."""
        send = self.tables.send
        waiting = (str(SendState.SENT), str(SendState.ALERTED))
        values = {"state": str(SendState.NEW), "due_at_ms": self._clock.now_ms(), "claimed_by": None}
        chosen = update(send).where(send.c.send_id.in_(send_ids), send.c.state.in_(waiting)).values(values)
        with self.engine.begin() as connection:
            count = connection.execute(chosen).rowcount
        self.counts.add("resent", count)
        return count

    def metrics(self) -> dict[str, float]:
        """What it has done since it began, and what waits in the table now."""
        return {**self.counts.all(), **waiting(self.engine, self.tables, self._clock.now_ms())}

    def metrics_text(self) -> str:
        """The same for Prometheus."""
        return exposition(self.counts.all(), waiting(self.engine, self.tables, self._clock.now_ms()), self.app)


def _plain(session: Any) -> Any:
    """The session itself, where something stands before it.

    Raises:
        InvalidSettings: it is not one that can be sent with.
    """
    if isinstance(session, Session | Connection):
        return session
    if isinstance(session, scoped_session):
        return session()
    if hasattr(session, "run_sync"):
        raise InvalidSettings("this session is one of asyncio: await send_async instead of send")
    raise InvalidSettings(
        f"send takes a Session or a Connection of SQLAlchemy that is in a transaction, not {type(session).__name__}"
    )


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
