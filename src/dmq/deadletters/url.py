"""Where the database of dead letters is: a URL as SQLAlchemy writes it, checked before anything is opened.

What always holds: a URL that cannot work whatever the database does (not a URL, an unknown kind, a driver that is not
installed) is one sentence that says what to do; a password never shows in a message.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from dmq.errors import InvalidSettings

__all__ = ["FOLDER", "MEMORY", "check_url", "default_url", "is_file", "shown"]

FOLDER: Final = "deadletters"
FILE: Final = "letters.db"
MEMORY: Final = "sqlite://"
KEY: Final = "broker.dead_letters_url"

# scheme -> the driver's module, and the extra that brings it
_DRIVERS: Final[dict[str, tuple[str, str]]] = {
    "sqlite": ("sqlite3", ""),
    "sqlite+pysqlite": ("sqlite3", ""),
    "mysql+pymysql": ("pymysql", "mysql"),
    "mariadb+pymysql": ("pymysql", "mysql"),
    "postgresql+psycopg": ("psycopg", "postgresql"),
    "postgresql+pg8000": ("pg8000", ""),
}
# What people write who do not know of drivers.
_SHORT: Final = {
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
}
_EXAMPLE: Final = "sqlite:////var/lib/dmq-dead/letters.db, mysql://user:password@host/dmq or postgresql://user@host/dmq"


def is_file(url: str) -> bool:
    """Whether a database is a file, or memory, of one machine."""
    return url.lower().startswith("sqlite")


def default_url(folder: str | Path) -> str:
    """SQLite in a data directory."""
    return f"sqlite:///{Path(folder).absolute() / FOLDER / FILE}"


def check_url(url: str, key: str = KEY) -> str:
    """The URL with its driver named.

    Parameters:
        key: what the user calls it, for the messages.

    Raises:
        InvalidSettings: it can never work.
    """
    scheme, colon, rest = url.partition("://")
    if not colon or not scheme:
        raise InvalidSettings(f"{key} is not a database URL: write something like {_EXAMPLE}", keys=[key])
    scheme = _SHORT.get(scheme.lower(), scheme.lower())
    if scheme not in _DRIVERS:
        what = "dead letters" if key == KEY else "our tables"
        raise InvalidSettings(
            f"{key} names {scheme!r}, which {what} cannot be kept in: use sqlite, mysql, mariadb or postgresql, as in "
            f"{_EXAMPLE}",
            keys=[key],
        )
    module, extra = _DRIVERS[scheme]
    if importlib.util.find_spec(module) is None:
        package = f"'dmq[{extra}]'" if extra else module
        raise InvalidSettings(f"{key} needs the driver {module}, which is not installed: pip install {package}")
    full = f"{scheme}://{rest}"
    _parse(full, key)
    return full


def _parse(url: str, key: str) -> None:
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InvalidSettings(f"{key} is not a database URL: write something like {_EXAMPLE}", keys=[key]) from None
    if parsed.get_backend_name() != "sqlite" and not parsed.database:
        raise InvalidSettings(f"{key} names no database: write its name at the end, as in {_EXAMPLE}", keys=[key])


def shown(url: str) -> str:
    """The URL without its password, for logs and messages."""
    scheme, _, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    return f"{scheme}://{account.partition(':')[0]}{at}{place.partition('?')[0]}"
