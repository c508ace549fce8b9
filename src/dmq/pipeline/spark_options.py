"""Options of `format("dmq")` as Spark hands them over: texts by name, in any case. Shared by source and sink.

What always holds: an option that is not known is an error that names it and the one it may have been meant to be.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dmq.client.connection.url import check_url
from dmq.duration import parse_duration
from dmq.errors import InvalidSettings, Unsupported
from dmq.pipeline.decode.journal_reader import Patience, server_url

__all__ = [
    "ANSWER_OPTION",
    "RETRIES_OPTION",
    "SERVERS",
    "TIMEOUT_OPTION",
    "flag",
    "known_options",
    "patience_option",
    "seconds_option",
    "servers",
]

SERVERS: Final = "dmq.bootstrap.servers"
TIMEOUT_OPTION: Final = "dmq.timeout"
ANSWER_OPTION: Final = "dmq.request.timeout"
RETRIES_OPTION: Final = "dmq.retries"
_SECURITY: Final = "dmq.security."
_SECONDS_MAX: Final = 366 * 86_400.0
_COUNT_MAX: Final = 1_000_000
_FLAGS: Final = {"true": True, "false": False}


def known_options(
    options: Mapping[str, str], names: Sequence[str], of_spark: Collection[str], doing: str
) -> dict[str, str]:
    """The options by their names in lower case.

    Parameters:
        names: of the options that are known.
        of_spark: names in lower case of those that Spark itself leaves among them; they are left out.
        doing: what the user does with them, for the message.

    Raises:
        InvalidSettings: one is unknown.
        Unsupported: one is of `dmq.security`, which is kept for authentication.
    """
    known = {name.lower(): name for name in names}
    given = {name.lower(): value for name, value in options.items() if name.lower() not in of_spark}
    for name in given:
        if name.startswith(_SECURITY):
            raise Unsupported(f"option {name!r} is not available yet: brokers know no users and no TLS; leave it out")
        if name not in known:
            near = difflib.get_close_matches(name, [*known], 1, 0.5)
            hint = f"did you mean {known[near[0]]!r}?" if near else f"there are {', '.join(names)}"
            raise InvalidSettings(f"option {name!r} is unknown when {doing} dmq: {hint}")
    return given


def servers(given: Mapping[str, str]) -> str:
    """The address of the broker.

    Raises:
        InvalidSettings: it is missing, or not an address.
        Unsupported: it asks for TLS.
    """
    found = given.get(SERVERS, "").strip()
    if not found:
        raise InvalidSettings(f'option {SERVERS!r} is missing: give the broker\'s address, such as "127.0.0.1:9611"')
    if found.lower().startswith("dmqs://"):
        raise Unsupported(f"{found!r} asks for TLS, which is not available yet: use dmq:// in a network that you trust")
    check_url(server_url(found))
    return found


def flag(name: str, given: Mapping[str, str], *, default: bool) -> bool:
    """An option that is true or false.

    Raises:
        InvalidSettings: it is neither.
    """
    value = given.get(name.lower())
    if value is None:
        return default
    found = _FLAGS.get(value.strip().lower())
    if found is None:
        raise InvalidSettings(f"option {name!r} is true or false, not {value!r}")
    return found


def seconds_option(name: str, given: Mapping[str, str], default: float) -> float:
    """An option that is a time: seconds as a number, or with a unit, as in `500ms`, `30s` or `15m`.

    Raises:
        InvalidSettings: it is not one, or not above 0.
    """
    value = given.get(name.lower())
    if value is None:
        return default
    try:
        found: float | None = float(value)
    except ValueError:
        found = parse_duration(value.strip().lower())
    if found is None or not 0 < found <= _SECONDS_MAX:
        raise InvalidSettings(f"option {name!r} is a time above 0, such as 30, 500ms or 15m, not {value!r}")
    return found


def patience_option(given: Mapping[str, str], default: Patience) -> Patience:
    """How long a broker is waited for: three options.

    Raises:
        InvalidSettings: one makes no sense, or an answer may take longer than the whole.
    """
    timeout = seconds_option(TIMEOUT_OPTION, given, default.timeout)
    answer_seconds = seconds_option(ANSWER_OPTION, given, min(default.answer_seconds, timeout))
    if answer_seconds > timeout:
        raise InvalidSettings(
            f"option {ANSWER_OPTION!r} is {answer_seconds:g} s, but {TIMEOUT_OPTION!r}, within which it lies, is "
            f"{timeout:g} s: make it less"
        )
    return Patience(timeout, answer_seconds, _count_option(RETRIES_OPTION, given, default.retries))


def _count_option(name: str, given: Mapping[str, str], default: int) -> int:
    """An option that is a whole number from 0 on.

    Raises:
        InvalidSettings: it is not one.
    """
    text = given.get(name.lower(), str(default)).strip()
    if not (text.isascii() and text.isdigit()) or int(text) > _COUNT_MAX:
        raise InvalidSettings(f"option {name!r} is a whole number from 0 to {_COUNT_MAX}, not {text!r}")
    return int(text)
