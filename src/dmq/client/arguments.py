"""Arguments of a user's call: numbers, times, names, reasons and functions, checked before anything is done. Pure.

What always holds: a value that makes no sense raises a `DMQError` with one sentence that names the argument, what is
expected, and what was given.
"""

from __future__ import annotations

from typing import Any, Final

from dmq.errors import InvalidRequest, InvalidSettings
from dmq.model import MessageId
from dmq.protocol.header import TEXT_MAX

__all__ = [
    "any_name",
    "check_function",
    "check_seconds",
    "check_tags",
    "check_timeout",
    "check_whole",
    "delay_ms",
    "parse_id",
    "reason_text",
]

_DELAY_MAX: Final = 2 * 366 * 86_400.0  # two years
_SECONDS_MAX: Final = 100 * 366 * 86_400.0  # for ever is None


def check_whole(name: str, value: Any, low: int, high: int) -> int:
    """A whole number within these bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidSettings(f"{name} is a whole number from {low} to {high}, not {value!r}")
    return value


def check_seconds(name: str, value: Any, *, above: bool = False) -> float:
    """A time in seconds, above 0 if so asked."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _SECONDS_MAX or (above and not value):
        raise InvalidSettings(f"{name} is a time in seconds {'above 0' if above else 'from 0 on'}, not {value!r}")
    return float(value)


def check_timeout(value: Any) -> float | None:
    """How long a client waits for a connection: a time in seconds, or None."""
    return None if value is None else check_seconds("timeout", value)


def delay_ms(value: Any) -> int:
    """The delay of a nack in milliseconds; one that is over already is none, and None is the broker's matter."""
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int | float) or not value <= _DELAY_MAX:
        raise InvalidSettings(f"delay is a time in seconds of two years at most, or None, not {value!r}")
    return max(0, round(max(value, 0) * 1000))


def check_tags(tags: Any) -> list[str]:
    """The tags of a filter such as "a || b", none of which is empty. An empty filter or None lets everything pass.

    Raises:
        InvalidSettings: it is not a filter.
    """
    if tags is None:
        return []
    if not isinstance(tags, str) or len(tags) > TEXT_MAX:
        raise InvalidSettings(f'tags are text such as "created || paid" of at most {TEXT_MAX} characters')
    if not tags.strip():
        return []
    found = [tag.strip() for tag in tags.split("||")]
    if not all(found) or any("&&" in tag or "|" in tag for tag in found):
        raise InvalidSettings(
            f'{tags!r} is not a filter by tags: write one tag, or several of which any will do, as in "created || paid"'
        )
    return found


def any_name(what: str, value: Any) -> str:
    """A name by which is chosen, or the empty text: None, as that, means any. Nothing else does: what is chosen may be
    deleted."""
    if value is not None and not isinstance(value, str):
        raise InvalidSettings(f"{what} is text, or None for any, not {value!r}")
    return value or ""


def reason_text(reason: object) -> str:
    """A reason in words: users give an exception or a dict as often as a text. An object that fails at that costs
    neither a worker nor what else is to be told."""
    if reason is None:
        return ""
    try:
        return str(reason)
    except Exception:
        return f"a {type(reason).__name__} that cannot be shown"


def check_function(name: str, value: Any) -> Any:
    """Something that can be called, or None."""
    if value is not None and not callable(value):
        raise InvalidSettings(f"{name} is a function, not {value!r}")
    return value


def parse_id(id: MessageId | str) -> MessageId:
    """A message's id, as users give it.

    Raises:
        InvalidRequest: it is not one.
    """
    if not isinstance(id, str | MessageId):
        raise InvalidRequest(f"{id!r} is not a message id: use the one of a receipt or a message, or its text")
    try:
        return MessageId.parse(id) if isinstance(id, str) else id
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
