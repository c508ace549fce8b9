"""Headers of the key-value space: KEY_PUT, KEY_GET, KEY_LIST, KEY_DELETE.

What always holds: an entry is small, and a listing comes in pages, so an answer fits a header however much there is.
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from dmq.protocol.header import Amount, Header, Name, OptionalName

__all__ = [
    "PAGE_MAX",
    "VALUE_BYTES_MAX",
    "KeyDelete",
    "KeyDeleteReply",
    "KeyGet",
    "KeyInfo",
    "KeyList",
    "KeyListReply",
    "KeyPut",
    "KeyReply",
]

VALUE_BYTES_MAX: Final = 4096
PAGE_MAX: Final = 100

Value = Annotated[bytes, Meta(max_length=VALUE_BYTES_MAX)]


class KeyPut(Header, frozen=True):
    """Let a key hold this, in place of what it held; put again before the time is over, it lives on."""

    namespace: Name
    key: Name
    value: Value
    ttl_ms: Amount = 0  # from now, by the broker's clock; 0: for ever


class KeyGet(Header, frozen=True):
    """Ask what a key holds."""

    namespace: Name
    key: Name


class KeyInfo(Header, frozen=True):
    """One key."""

    key: Name
    value: Value
    left_ms: Amount = 0  # until it expires; 0: it does not


class KeyReply(Header, frozen=True):
    """The key, if it exists."""

    found: KeyInfo | None = None


class KeyList(Header, frozen=True):
    """Ask for keys of a namespace in the order of their names, after one of them."""

    namespace: Name
    prefix: OptionalName = ""
    after: OptionalName = ""
    limit: Annotated[int, Meta(ge=1, le=PAGE_MAX)] = PAGE_MAX


class KeyListReply(Header, frozen=True):
    """One page. `more` says that another follows after the last one here."""

    keys: Annotated[list[KeyInfo], Meta(max_length=PAGE_MAX)]
    more: bool = False


class KeyDelete(Header, frozen=True):
    """Take a key out."""

    namespace: Name
    key: Name


class KeyDeleteReply(Header, frozen=True):
    """Whether it was there."""

    was_there: bool = False
