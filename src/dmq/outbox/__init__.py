"""Outbox and inbox: an effect exactly once between two databases, over a queue that delivers at least once.

`service` is the sender's side, `inbox` the consumer's; `schema` has the tables of both. Loaded when first used, since
SQLAlchemy comes with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmq.outbox.aio_inbox import AioInbox
    from dmq.outbox.alerts import Alert, AlertKind
    from dmq.outbox.compensator import Compensation, Compensator
    from dmq.outbox.confirming import ConfirmOptions
    from dmq.outbox.consumption import Rollback
    from dmq.outbox.decorating import consumes_messages
    from dmq.outbox.envelope import Result
    from dmq.outbox.gaps import GapPolicy
    from dmq.outbox.inbox import Inbox
    from dmq.outbox.purging import Purged, purge
    from dmq.outbox.relay import Relay
    from dmq.outbox.rows import OutboxMessage
    from dmq.outbox.schema import OutboxTables, create_tables, tables
    from dmq.outbox.sending import sends_messages
    from dmq.outbox.service import MessageService
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
    "AioInbox": "dmq.outbox.aio_inbox",
    "Alert": "dmq.outbox.alerts",
    "AlertKind": "dmq.outbox.alerts",
    "BusinessState": "dmq.outbox.states",
    "Compensation": "dmq.outbox.compensator",
    "Compensator": "dmq.outbox.compensator",
    "ConfirmOptions": "dmq.outbox.confirming",
    "GapPolicy": "dmq.outbox.gaps",
    "Inbox": "dmq.outbox.inbox",
    "MessageService": "dmq.outbox.service",
    "OutboxMessage": "dmq.outbox.rows",
    "OutboxTables": "dmq.outbox.schema",
    "Purged": "dmq.outbox.purging",
    "Relay": "dmq.outbox.relay",
    "Result": "dmq.outbox.envelope",
    "Rollback": "dmq.outbox.consumption",
    "SendState": "dmq.outbox.states",
    "consumes_messages": "dmq.outbox.decorating",
    "create_tables": "dmq.outbox.schema",
    "purge": "dmq.outbox.purging",
    "sends_messages": "dmq.outbox.sending",
    "tables": "dmq.outbox.schema",
}


def __getattr__(name: str) -> Any:
    home = _LATER.get(name)
    if home is None:
        raise AttributeError(f"module 'dmq.outbox' has no attribute {name!r}")
    return getattr(import_module(home), name)
