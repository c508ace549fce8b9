"""Streams of messages on their way out: for programs that publish what they read from somewhere else.

What always holds: a message leaves as soon as it was read; receipts come in the order of the messages; at most
`outstanding_max` messages wait for theirs.
"""

from __future__ import annotations

import base64
import binascii
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from dmq.client.producer.future import SendFuture
from dmq.client.producer.producer import Producer
from dmq.errors import DMQError
from dmq.model import Receipt

__all__ = ["parse_json_line", "send_stream"]

_NAMES: Final = frozenset({"key", "tag", "business_id", "ordered", "priority", "properties", "ttl"})
# What a message that was read has, and one that is sent gets anew.
_OLD: Final = frozenset({"id", "topic", "shard", "queue", "offset", "app", "sent_at_ms", "stored_at_ms", "damage"})


def send_stream(
    producer: Producer,
    topic: str,
    messages: Iterable[tuple[bytes, Mapping[str, Any]]],
    options: Mapping[str, Any],
    *,
    outstanding_max: int = 10_000,
) -> Iterator[tuple[Receipt, int]]:
    """Send messages as they come.

    Parameters:
        messages: bodies, and what is special about each, by the names of `Producer.send`.
        options: what holds for all.

    Returns:
        Receipts, and the size of each body.

    Raises:
        DMQError: the first message that was not stored; what came before it is.
    """
    waiting: deque[tuple[SendFuture, int]] = deque()
    problem: DMQError | None = None
    try:
        for body, special in messages:
            waiting.append((producer.send_async(topic, body, **{**options, **special}), len(body)))
            while waiting and (len(waiting) > outstanding_max or waiting[0][0].done()):
                future, size = waiting.popleft()
                yield future.result(), size
    except DMQError as error:
        problem = error
    for future, size in waiting:  # those before one that cannot be sent or read are on their way
        yield future.result(), size
    if problem is not None:
        raise problem


def parse_json_line(line: bytes) -> tuple[bytes, dict[str, Any]]:
    """One message of a file of JSON lines: its body, and what is special about it.

    Raises:
        ValueError: it is not an object, or one with names or values that are not known.
    """
    try:
        found = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError('each line is an object, as in {"body": "hello", "key": "k-1"}')
    special = {name: found[name] for name in found.keys() & _NAMES if found[name] is not None}
    unknown = found.keys() - _NAMES - _OLD - {"body", "body_base64"}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]!r} is not known: use body, body_base64, {', '.join(sorted(_NAMES))}")
    if ("body" in found) == ("body_base64" in found):
        raise ValueError("give body or body_base64, one of them")
    if "body" in found:
        body = found["body"]
        return body.encode() if isinstance(body, str) else msgspec.json.encode(body), special
    try:
        return base64.b64decode(found["body_base64"], validate=True), special
    except (binascii.Error, TypeError, ValueError):
        raise ValueError("body_base64 is not base64") from None
