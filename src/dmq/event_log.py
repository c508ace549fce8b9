"""Log lines that tell: an event and its facts, readable in the message and as fields.

A module has one `log = EventLog(__name__)`, and says `log.info("topic created", topic=name, queues=4)`. The standard
library's logger of that name gets the message `topic created topic=orders queues=4`, with the facts in `extra` too, so
that every handler and formatter shows them. Bodies of messages are never facts.

A line that may repeat is given `once_for=`: lines of the same event and the same `once_for` are written at most every
ten seconds, and the next one tells how many were left out (`suppressed=17`). If none comes, the last of them is written
when the ten seconds are over and any other line of that kind comes, or `tell_suppressed` is called; it then tells when
that was (`seconds_ago=8`), since what it says may be over.

What always holds: a fact never breaks a line in two, nor makes it longer than its bound; the memory for repeated lines
is bounded; no line is left out without being counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Final, NamedTuple, TypeAlias

from dmq.clock import Clock, SystemClock

__all__ = ["EventLine", "EventLog", "LineLimiter", "foreign_log", "keep_quiet", "tell_suppressed"]

_SUPPRESS_SECONDS: Final = 10.0
_KINDS_MAX: Final = 1024
_FACT_CHARACTERS_MAX: Final = 1000

# Attributes that a record has anyway: `extra` may not have them.
_RESERVED: Final = frozenset(logging.makeLogRecord({}).__dict__) | {
    "message",
    "asctime",
    "taskName",
}

Fact: TypeAlias = str | int | float | bool | None


class EventLine:
    """The message of a record: as text it is the event, then its facts as name=value."""

    __slots__ = ("event", "facts")

    def __init__(self, event: str, facts: Mapping[str, object]) -> None:
        self.event = event
        self.facts = facts

    def __str__(self) -> str:
        return " ".join((self.event, *(f"{name}={_shown(value)}" for name, value in self.facts.items())))


class _Kind(NamedTuple):
    logger: str
    event: str
    identity: Hashable


class _Repeated:
    """A kind of line within its ten seconds."""

    __slots__ = ("count", "ends_at", "last", "last_at", "level")

    def __init__(self, ends_at: float) -> None:
        self.ends_at = self.last_at = ends_at
        self.count = 0
        self.level = 0
        self.last: Mapping[str, Fact] = {}


class LineLimiter:
    """Which repeated lines are written. Threads may share it.

    Parameters:
        clock: its monotonic reading counts.
        kinds_max: kinds of lines remembered; beyond them the oldest is forgotten, and may be written again.
    """

    def __init__(self, clock: Clock | None = None, kinds_max: int = _KINDS_MAX) -> None:
        self._clock = clock or SystemClock()
        self._kinds_max = kinds_max
        self._kinds: OrderedDict[_Kind, _Repeated] = OrderedDict()  # oldest first
        self._lock = threading.Lock()

    def admit(self, kind: _Kind, level: int, facts: Mapping[str, Fact]) -> int | None:
        """How many lines of the kind were left out before this one; None if it is left out itself."""
        now = self._clock.monotonic()
        with self._lock:
            before = self._kinds.get(kind)
            if before is not None and before.ends_at > now:
                before.count += 1
                before.level, before.last, before.last_at = level, facts, now
                return None
            self._kinds.pop(kind, None)
            ended = list(self._ended(now))
            self._kinds[kind] = _Repeated(now + _SUPPRESS_SECONDS)
            if len(self._kinds) > self._kinds_max:
                ended.append(self._kinds.popitem(last=False))
        _write(ended, now)
        return before.count if before is not None else 0

    def settle(self) -> None:
        """Write what was left out and whose ten seconds are over."""
        if not self._kinds:
            return
        now = self._clock.monotonic()
        with self._lock:
            ended = list(self._ended(now))
        _write(ended, now)

    def forget(self) -> None:
        """Begin anew: in a process that was forked, the lock may be held by a thread that is not there."""
        self._lock = threading.Lock()
        self._kinds = OrderedDict()

    def _ended(self, now: float) -> Iterator[tuple[_Kind, _Repeated]]:
        while self._kinds:
            kind, repeated = next(iter(self._kinds.items()))
            if repeated.ends_at > now:
                return
            del self._kinds[kind]
            if repeated.count:
                # The line that is written for it counts for the next ten seconds as well.
                self._kinds[kind] = _Repeated(now + _SUPPRESS_SECONDS)
            yield kind, repeated


def _write(ended: list[tuple[_Kind, _Repeated]], now: float) -> None:
    for kind, repeated in ended:
        if repeated.count:
            facts = {**repeated.last, **({"suppressed": repeated.count - 1} if repeated.count > 1 else {})}
            if (age := round(now - repeated.last_at)) > 0:
                facts["seconds_ago"] = age
            _emit(logging.getLogger(kind.logger), repeated.level, kind.event, facts)


_LIMITER: Final = LineLimiter()
os.register_at_fork(after_in_child=_LIMITER.forget)


def tell_suppressed() -> None:
    """Write the repeated lines that were left out and whose time is over; a broker does it every second."""
    _LIMITER.settle()


class EventLog:
    """The log of one module.

    Parameters:
        name: of the module: `__name__`.
        limiter: shared by the whole process unless a test says otherwise.
    """

    __slots__ = ("_limiter", "_logger")

    def __init__(self, name: str, limiter: LineLimiter = _LIMITER) -> None:
        self._logger = logging.getLogger(name)
        self._limiter = limiter

    def debug(self, event: str, *, once_for: Hashable = None, **facts: object) -> None:
        self._log(logging.DEBUG, event, once_for, facts)

    def info(self, event: str, *, once_for: Hashable = None, **facts: object) -> None:
        self._log(logging.INFO, event, once_for, facts)

    def warning(
        self, event: str, *, once_for: Hashable = None, exc_info: BaseException | bool | None = None, **facts: object
    ) -> None:
        self._log(logging.WARNING, event, once_for, facts, exc_info=exc_info)

    def error(
        self, event: str, *, once_for: Hashable = None, exc_info: BaseException | bool | None = None, **facts: object
    ) -> None:
        self._log(logging.ERROR, event, once_for, facts, exc_info=exc_info)

    def critical(self, event: str, **facts: object) -> None:
        self._log(logging.CRITICAL, event, None, facts)

    def exception(self, event: str, *, once_for: Hashable = None, **facts: object) -> None:
        """An error, with the traceback of the exception that is being handled."""
        self._log(logging.ERROR, event, once_for, facts, exc_info=True)

    def _log(
        self,
        level: int,
        event: str,
        once_for: Hashable,
        given: Mapping[str, object],
        exc_info: BaseException | bool | None = None,
    ) -> None:
        if not self._logger.isEnabledFor(level):
            return
        facts = {name: _fact(value) for name, value in given.items()}
        if once_for is not None:
            left_out = self._limiter.admit(_Kind(self._logger.name, event, once_for), level, facts)
            if left_out is None:
                return
            if left_out:
                facts["suppressed"] = left_out
        _emit(self._logger, level, event, facts, exc_info=exc_info, stacklevel=4)


def _emit(
    logger: logging.Logger,
    level: int,
    event: str,
    facts: Mapping[str, Fact],
    exc_info: BaseException | bool | None = None,
    *,
    stacklevel: int = 1,
) -> None:
    extra = {f"{name}_" if name in _RESERVED else name: value for name, value in facts.items()}
    logger.log(level, EventLine(event, facts), exc_info=exc_info, extra=extra, stacklevel=stacklevel)


def _fact(value: object) -> Fact:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return text if len(text) <= _FACT_CHARACTERS_MAX else text[:_FACT_CHARACTERS_MAX] + "…"


def _shown(value: object) -> str:
    """A fact as a person reads it; quoted where it would not be one word otherwise."""
    value = _fact(value)
    if isinstance(value, str):
        is_plain = value and value.isprintable() and not (" " in value or '"' in value or "=" in value)
        return value if is_plain else repr(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def keep_quiet(name: str) -> None:
    """Lines below this name go only to handlers that somebody has set up: in a process without any, nowhere."""
    logging.getLogger(name).addHandler(logging.NullHandler())


def foreign_log(name: str) -> logging.Logger:
    """What to give to a library that writes lines of its own: only its errors are shown."""
    logger = logging.getLogger(name)
    logger.setLevel(logging.ERROR)
    return logger
