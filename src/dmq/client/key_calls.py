"""The key-value space as conversations. See `dmq.client.calls`.

What always holds: what can be seen to be wrong is refused here, before anything is asked.
"""

from __future__ import annotations

from typing import Final

from dmq.client.calls import Call
from dmq.errors import InvalidName, InvalidSettings
from dmq.protocol import Command, decode_response
from dmq.protocol.keys import (
    VALUE_BYTES_MAX,
    KeyDelete,
    KeyDeleteReply,
    KeyGet,
    KeyList,
    KeyListReply,
    KeyPut,
    KeyReply,
)

__all__ = ["delete", "entries", "get", "put"]

_NAME_MAX: Final = 255
_TTL_SECONDS_MAX: Final = 10 * 365 * 86_400


def put(namespace: str, key: str, value: bytes | str, ttl: float | None) -> Call[None]:
    raw = value.encode() if isinstance(value, str) else bytes(value)
    if len(raw) > VALUE_BYTES_MAX:
        raise InvalidSettings(f"a value has at most {VALUE_BYTES_MAX} bytes, not {len(raw)}: keep it elsewhere")
    if ttl is not None and not 0.001 <= ttl <= _TTL_SECONDS_MAX:
        raise InvalidSettings(f"ttl is in seconds, above 0 and at most ten years, or None, not {ttl!r}")
    asked = KeyPut(_checked(namespace, "namespace"), _checked(key, "key"), raw, 0 if ttl is None else round(ttl * 1000))
    decode_response((yield Command.KEY_PUT, asked))


def get(namespace: str, key: str) -> Call[bytes | None]:
    asked = KeyGet(_checked(namespace, "namespace"), _checked(key, "key"))
    reply: KeyReply = decode_response((yield Command.KEY_GET, asked))
    return None if reply.found is None else reply.found.value


def entries(namespace: str, prefix: str) -> Call[dict[str, bytes]]:
    found: dict[str, bytes] = {}
    after, more = "", True
    while more:
        asked = KeyList(_checked(namespace, "namespace"), prefix, after)
        reply: KeyListReply = decode_response((yield Command.KEY_LIST, asked))
        found |= {entry.key: entry.value for entry in reply.keys}
        more = reply.more and bool(reply.keys)
        after = reply.keys[-1].key if reply.keys else ""
    return found


def delete(namespace: str, key: str) -> Call[bool]:
    asked = KeyDelete(_checked(namespace, "namespace"), _checked(key, "key"))
    reply: KeyDeleteReply = decode_response((yield Command.KEY_DELETE, asked))
    return reply.was_there


def _checked(name: str, what: str) -> str:
    if not 0 < len(name) <= _NAME_MAX:
        raise InvalidName(f"a {what} is a text of 1 to {_NAME_MAX} characters, not {name!r}")
    return name
