"""Outbox and inbox: an effect exactly once between two databases, over a queue that delivers at least once.

In reading order: `states` and `schema` are the tables of both sides; `sender` is the side that sends, `inbox` the side
that consumes, `repair` mends what got lost between them; `engines` opens databases, `metrics` and `alerts` tell how it
goes. Loaded when first used, since SQLAlchemy comes with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmq.outbox.alerts import Alert, AlertKind
    from dmq.outbox.inbox.aio_inbox import AioInbox
    from dmq.outbox.inbox.consumption import GapPolicy, Rollback
    from dmq.outbox.inbox.decorator import consumes_messages
    from dmq.outbox.inbox.inbox import Inbox
    from dmq.outbox.repair.compensator import Compensation, Compensator
    from dmq.outbox.repair.confirm_service import ConfirmOptions
    from dmq.outbox.repair.purge import Purged, purge
    from dmq.outbox.schema import OutboxTables, create_tables, tables
    from dmq.outbox.sender.envelope import Result
    from dmq.outbox.sender.message_row import OutboxMessage
    from dmq.outbox.sender.relay import Relay
    from dmq.outbox.sender.service import MessageService, sends_messages
    from dmq.outbox.states import BusinessState, SendState

__all__ = [
    "AioInbox",
    "Alert",
    "AlertKind",
    "BusinessState",
    "Compensation",
    "Compensator",
    "ConfirmOptions",
    "GapPolicy",
    "Inbox",
    "MessageService",
    "OutboxMessage",
    "OutboxTables",
    "Purged",
    "Relay",
    "Result",
    "Rollback",
    "SendState",
    "consumes_messages",
    "create_tables",
    "purge",
    "sends_messages",
    "tables",
]

_LATER = {
    "AioInbox": "dmq.outbox.inbox.aio_inbox",
    "Alert": "dmq.outbox.alerts",
    "AlertKind": "dmq.outbox.alerts",
    "BusinessState": "dmq.outbox.states",
    "Compensation": "dmq.outbox.repair.compensator",
    "Compensator": "dmq.outbox.repair.compensator",
    "ConfirmOptions": "dmq.outbox.repair.confirm_service",
    "GapPolicy": "dmq.outbox.inbox.consumption",
    "Inbox": "dmq.outbox.inbox.inbox",
    "MessageService": "dmq.outbox.sender.service",
    "OutboxMessage": "dmq.outbox.sender.message_row",
    "OutboxTables": "dmq.outbox.schema",
    "Purged": "dmq.outbox.repair.purge",
    "Relay": "dmq.outbox.sender.relay",
    "Result": "dmq.outbox.sender.envelope",
    "Rollback": "dmq.outbox.inbox.consumption",
    "SendState": "dmq.outbox.states",
    "consumes_messages": "dmq.outbox.inbox.decorator",
    "create_tables": "dmq.outbox.schema",
    "purge": "dmq.outbox.repair.purge",
    "sends_messages": "dmq.outbox.sender.service",
    "tables": "dmq.outbox.schema",
}


def __getattr__(name: str) -> Any:
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module 'dmq.outbox' has no attribute {name!r}")
    return getattr(import_module(home), name)
