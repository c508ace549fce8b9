"""Options of `format("dmq")` as Spark hands them over: texts by name, in any case. Shared by source and sink.

What always holds: an option that is not known is an error that names it and the one it may have been meant to be.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from dmq.client.connection.url import parse_url
from dmq.errors import InvalidSettings
from dmq.pipeline.decode.journal_reader import server_url

__all__ = ["SERVERS", "flag", "known_options", "servers"]

SERVERS: Final = "dmq.bootstrap.servers"
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
    """
    known = {name.lower(): name for name in names}
    given = {name.lower(): value for name, value in options.items() if name.lower() not in of_spark}
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, [*known], 1, 0.5)
            hint = f"did you mean {known[near[0]]!r}?" if near else f"there are {', '.join(names)}"
            raise InvalidSettings(f"option {name!r} is unknown when {doing} dmq: {hint}")
    return given


def servers(given: Mapping[str, str]) -> str:
    """The address of the broker.

    Raises:
        InvalidSettings: it is missing, or not an address.
    """
    found = given.get(SERVERS, "").strip()
    if not found:
        raise InvalidSettings(f'option {SERVERS!r} is missing: give the broker\'s address, such as "127.0.0.1:9611"')
    parse_url(server_url(found))
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
