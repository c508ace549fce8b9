"""Drafts out of the arguments of a send, as a producer makes them."""

from __future__ import annotations

from typing import Any

from dmq.client.producer.accumulator import Draft
from dmq.client.producer.core import Core
from dmq.client.producer.message import SendOptions
from dmq.client.producer.routes import Route
from dmq.model import Message

OPTIONS = frozenset(SendOptions.__struct_fields__)


def draft_of(core: Core, route: Route, topic: str, body: bytes, **arguments: Any) -> Draft:
    options = {name: value for name, value in arguments.items() if name in OPTIONS}
    fields = {name: value for name, value in arguments.items() if name not in OPTIONS}
    return core.draft(route, Message(body, **fields), SendOptions(topic, **options))
