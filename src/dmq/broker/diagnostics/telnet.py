"""The telnet port (D-11): a person with `telnet` or `nc` sees how the broker is. Read only.

What always holds: no command changes anything; an answer has at most `ROWS_MAX` rows and says how many it left out; a
name that a client chose cannot steer the terminal. At most `connections_max` are served at a time; one that types
nothing for `idle_seconds`, sends a line without an end, or does not take its answer in time is closed, and so is one
that talks HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from heapq import nsmallest
from typing import Final

from dmq import __version__
from dmq.broker.broker import Broker
from dmq.broker.diagnostics.explanation import moment, until
from dmq.broker.diagnostics.metrics import lags, numbers
from dmq.broker.schedule.transactions import half_target
from dmq.errors import DMQError, UnknownTopic
from dmq.event_log import EventLog
from dmq.model import SYSTEM_PREFIX, TopicConfig
from dmq.net.lines import LineReader, LineTooLong
from dmq.net.server import translate_listen_error

__all__ = ["QUIT", "ROWS_MAX", "TelnetServer", "answer", "greeting"]

log = EventLog(__name__)


ROWS_MAX: Final = 200
QUIT: Final = frozenset(("quit", "exit", "bye", "q"))
_CELL_MAX: Final = 80


def greeting(broker: Broker) -> str:
    """What a person who connects sees first."""
    return (
        f"DMQ {__version__} broker {_plain(broker.settings.name)} at {broker.audience.address}. Type help, or quit.\n"
    )


async def answer(broker: Broker, line: str) -> str:
    """The answer to one line."""
    words = line.split()
    if not words:
        return ""
    command = _COMMANDS.get(words[0].lower())
    if command is None:
        return f"There is no command {_plain(words[0])}: help shows those there are.\n"
    try:
        return await command[0](broker, words[1] if len(words) > 1 else "")
    except DMQError as error:
        return f"{_plain(error.message, 500)}\n"


# --- commands ---------------------------------------------------------------------------------------------------------


async def _help(broker: Broker, argument: str) -> str:
    return _table(("command", "shows"), [(name, what) for name, (_, what) in _COMMANDS.items()] + [("quit", "ends")])


async def _stats(broker: Broker, prefix: str) -> str:
    values = {
        name: value for name, value in sorted(numbers(broker.audience, broker).items()) if name.startswith(prefix)
    }
    return _table(("number", "value"), [(name, f"{value:g}") for name, value in values.items()])


async def _status(broker: Broker, argument: str) -> str:
    facts = [
        ("broker", broker.settings.name),
        ("state", broker.readiness.state),
        ("address", broker.audience.address),
        ("epoch", broker.store.queries.epoch),
        ("clients", len(broker.audience)),
        ("topics", broker.store.queries.topic_count),
        ("groups", broker.store.queries.group_count),
        ("messages out", broker.channels.out),
        ("bytes waiting to be written", broker.writer.waiting_bytes),
        ("time", moment(broker.clock.wall.now_ms())),
    ]
    return _table(("what", "value"), facts)


async def _topics(broker: Broker, prefix: str) -> str:
    rows = []
    for topic in broker.store.queries.topics():
        if topic.name.startswith(prefix) and (prefix or not topic.name.startswith(SYSTEM_PREFIX)):
            bounds = [broker.store.queries.bounds(topic.name, queue) for queue in range(topic.config.queues)]
            kept, ever = sum(following - first for first, following in bounds), sum(end for _, end in bounds)
            rows.append((topic.name, topic.config.queues, kept, ever, _switches(topic.config)))
    return _table(("topic", "queues", "kept", "ever", "off"), rows)


def _switches(config: TopicConfig) -> str:
    off = [name for name, is_on in (("produce", config.can_produce), ("consume", config.can_consume)) if not is_on]
    return " ".join(off) or "-"


async def _topic(broker: Broker, name: str) -> str:
    if not name:
        raise UnknownTopic("say which: topic NAME")
    topic = broker.store.queries.topic(name)
    rows = []
    for queue in range(topic.config.queues):
        first, following = broker.store.queries.bounds(name, queue)
        rows.append((queue, first, following, following - first))
    groups = [(group, lag) for (of, group), lag in sorted(lags(broker).items()) if of == name]
    return _table(("queue", "first", "next", "kept"), rows) + "\n" + _table(("group", "lag"), groups)


async def _groups(broker: Broker, name: str) -> str:
    rows = []
    for (topic, group), lag in sorted(lags(broker).items(), key=lambda item: (item[0][1], item[0][0])):
        if group.startswith(SYSTEM_PREFIX) or topic.startswith(SYSTEM_PREFIX) or name not in ("", group):
            continue
        live = broker.channels.open.get((topic, group))
        members = 0 if live is None else len(live.group.members)
        out = 0 if live is None else live.out
        rows.append((group, topic, members, out, lag))
    return _table(("group", "topic", "members", "out", "lag"), rows)


async def _lag(broker: Broker, group: str) -> str:
    rows = [
        (lag, of, topic)
        for (topic, of), lag in lags(broker).items()
        if lag and not of.startswith(SYSTEM_PREFIX) and group in ("", of)
    ]
    rows.sort(key=lambda row: (-row[0], row[1:]))
    return _table(("lag", "group", "topic"), rows)


async def _clients(broker: Broker, prefix: str) -> str:
    rows = sorted(row for row in broker.audience.rows() if row.client_id.startswith(prefix))
    return _table(("client", "app", "address", "consumes", "silent s"), rows)


async def _delays(broker: Broker, topic: str) -> str:
    _, infos = await broker.reads.ask(partial(broker.delays.page, (0, 0), 1000, topic))
    now_ms = broker.clock.now_ms
    rows = [(until(info.due_at_ms, now_ms), moment(info.due_at_ms), info.topic) for info in infos]
    total = f"{broker.store.queries.delays_pending} wait, retries among them.\n"
    return total + _table(("due", "at", "topic"), rows)


async def _transactions(broker: Broker, argument: str) -> str:
    open_ones = broker.store.queries.transactions().items()
    oldest = nsmallest(
        ROWS_MAX, ((half.stored_at_ms, half.journal_offset, str(mid), half.group) for mid, half in open_ones)
    )
    parts, _ = await broker.reads.ask(lambda: broker.store.queries.gather([key[1] for key in oldest]))
    topics = {offset: half_target(part, index) for part in parts for index, offset in enumerate(part.offsets.tolist())}
    rows = [(name, topics.get(offset, "-"), group, moment(since)) for since, offset, name, group in oldest]
    total = f"{broker.store.queries.transaction_count} are open.\n"
    return total + _table(("id", "topic", "producer group", "since"), rows)


async def _limits(broker: Broker, argument: str) -> str:
    rows = [
        (
            limit.topic or "-",
            limit.app or "-",
            "-" if limit.messages is None else limit.messages,
            "-" if limit.bytes is None else limit.bytes,
            "dead-letter" if limit.is_dead_letter else "refuse",
        )
        for limit in broker.limits.kept()
    ]
    return _table(("topic", "app", "messages/s", "bytes/s", "policy"), rows)


_COMMANDS: Final[dict[str, tuple[Callable[[Broker, str], Awaitable[str]], str]]] = {
    "help": (_help, "this"),
    "status": (_status, "how the broker is"),
    "stats": (_stats, "all numbers, or those that begin with PREFIX"),
    "topics": (_topics, "topics, or those that begin with PREFIX"),
    "topic": (_topic, "queues and groups of the topic NAME"),
    "groups": (_groups, "groups with members and lag, or the group NAME"),
    "lag": (_lag, "groups that have messages to consume, most first"),
    "clients": (_clients, "who is connected"),
    "delays": (_delays, "messages that wait for their time, or those of TOPIC"),
    "transactions": (_transactions, "transactions that are open"),
    "limits": (_limits, "limits on what producers may send a second"),
}


# --- text -------------------------------------------------------------------------------------------------------------


def _plain(text: object, most: int = _CELL_MAX) -> str:
    shown = "".join(char if char.isprintable() else "?" for char in str(text))
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    every = list(rows)
    if not every:
        return "none\n"
    shown = [[_plain(cell) for cell in row] for row in every[:ROWS_MAX]]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *shown, strict=True)]
    numeric = [all(isinstance(row[index], int | float) for row in every[:ROWS_MAX]) for index in range(len(heads))]
    lines = [
        "  ".join(
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in (list(heads), *shown)
    ]
    if len(every) > ROWS_MAX:
        lines.append(f"… and {len(every) - ROWS_MAX} more")
    return "\n".join(lines) + "\n"


_CONNECTIONS_MAX: Final = 16
_IDLE_SECONDS: Final = 300.0
_WRITE_SECONDS: Final = 10.0
_READ_BYTES: Final = 1024
_PROMPT: Final = "> "
_NO_BROKER: Final = "This server has no broker right now.\n"
# A page that a person's browser was lured to could ask, too, and would get an answer on their behalf.
_HTTP: Final = ("GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "CONNECT", "PATCH")


class TelnetServer:
    """The telnet port of one server.

    Parameters:
        broker: gives the Broker, if there is one now.
    """

    def __init__(
        self,
        broker: Callable[[], Broker | None],
        *,
        connections_max: int = _CONNECTIONS_MAX,
        idle_seconds: float = _IDLE_SECONDS,
    ) -> None:
        self._broker = broker
        self._connections_max = connections_max
        self._idle_seconds = idle_seconds
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> int:
        """Begin to serve; returns the port in force.

        Raises:
            PortTaken, CannotListen.
        """
        try:
            self._server = await asyncio.start_server(self._accept, host, port, limit=_READ_BYTES)
        except OSError as error:
            raise translate_listen_error(error, host, port) from error
        return int(self._server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            if len(self._serving) >= self._connections_max:
                await self._say(writer, f"{self._connections_max} connections are open here, which is the limit.\n")
                return
            self._serving.add(task)
            await self._serve(reader, writer)
        except (TimeoutError, OSError, LineTooLong):
            pass  # the person is gone or asleep, or it is not a person
        except asyncio.CancelledError:
            pass  # the broker stops
        except Exception:  # a defect here must harm nobody else
            log.exception("a telnet connection failed", once_for=())
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = LineReader()
        await self._say(writer, self._greeting() + _PROMPT)
        while True:
            async with asyncio.timeout(self._idle_seconds):
                data = await reader.read(_READ_BYTES)
            if not data:
                return
            found, replies = lines.feed(data)
            writer.write(replies)
            for line in found:
                word = line.split(maxsplit=1)[0] if line.split() else ""
                if word.lower() in QUIT or word in _HTTP:
                    return
                broker = self._broker()
                said = _NO_BROKER if broker is None else await answer(broker, line)
                await self._say(writer, said + _PROMPT)
            if lines.is_over:
                return

    def _greeting(self) -> str:
        broker = self._broker()
        return _NO_BROKER if broker is None else greeting(broker)

    async def _say(self, writer: asyncio.StreamWriter, text: str) -> None:
        async with asyncio.timeout(_WRITE_SECONDS):
            writer.write(text.replace("\n", "\r\n").encode())
            await writer.drain()

    async def close(self) -> None:
        """Serve nobody any more."""
        if self._server is not None:
            self._server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        if self._server is not None:
            await self._server.wait_closed()
