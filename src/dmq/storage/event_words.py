"""Events in words, for a person who looks into a journal."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from dmq.model import TopicConfig
from dmq.storage.events import (
    Archived,
    DelaysDone,
    EpochStarted,
    Event,
    KeyPut,
    LimitPut,
    Outcome,
    PositionDropped,
    PositionSet,
    Settled,
    SnapshotTaken,
    SubscriptionPut,
    TopicDropped,
    TopicPut,
    TransactionEnded,
    TransactionGroup,
    TransactionsEnded,
    TransactionsJoined,
    unpack_offsets,
)

__all__ = ["config_words", "event_words"]

_OUTCOMES: Final = frozenset(map(int, Outcome))


def event_words(event: Event) -> str:
    """What an event says, in words."""
    match event:
        case TopicPut(topic_id, name, config):
            return f"topic {name} (id {topic_id}) was created or changed: {config_words(config)}"
        case TopicDropped(topic_id):
            return f"topic {topic_id} was deleted"
        case Settled(group, topic_id, queue, start, count, outcome):
            some = "some of " if event.bitmap else ""
            who = f" by {event.member}" if event.member else ""
            why = f": {event.error}" if event.error else ""
            what = Outcome(outcome).name.lower() if outcome in _OUTCOMES else f"outcome {outcome}"
            where = f"{some}{start}-{start + count - 1} of queue {queue} of topic {topic_id}"
            return f"group {group} settled {where} as {what}{who}, attempt {event.attempt}{why}"
        case PositionSet(group, topic_id, queue, offset):
            return f"group {group} was put at {offset} in queue {queue} of topic {topic_id}"
        case PositionDropped(group, topic_id):
            return f"group {group} was forgotten" + ("" if topic_id is None else f" in topic {topic_id}")
        case DelaysDone(offsets, reason):
            done = unpack_offsets(offsets).tolist()
            return f"{len(done)} delayed ({reason}), at " + ", ".join(map(str, done[:8])) + ", …" * (len(done) > 8)
        case TransactionEnded(message_id, outcome):
            return f"transaction {message_id.hex()} ended: {outcome}"
        case TransactionGroup(producer_id, group):
            return f"transactions of producer {producer_id:016x} belong to producer group {group}"
        case TransactionsEnded(message_ids, outcome):
            count = len(message_ids) // 16
            return f"{count} transactions ended ({outcome}), the first {message_ids[:16].hex()}"
        case TransactionsJoined(pairs):
            one, first = pairs[:16].hex(), pairs[16:32].hex()
            return f"{len(pairs) // 32} half messages joined transactions, {one} that of {first}"
        case SubscriptionPut(group, topic_id, tags, version):
            order = "ordered" if event.is_ordered else "unordered"
            return f"group {group} consumes topic {topic_id} with tags {tags or '*'}, {order}, version {version}"
        case LimitPut(topic_id, app, messages, size):
            whose = f"topic {topic_id}" if topic_id else f"app {app}"
            if messages is None and size is None:
                return f"{whose} has no limit any more"
            amounts = [f"{n} {unit}" for n, unit in ((messages, "messages"), (size, "bytes")) if n is not None]
            rest = "become dead letters" if event.policy else "are refused"
            return f"{whose} takes {' and '.join(amounts)} a second, others {rest}"
        case KeyPut(namespace, key, value, expires_at_ms):
            if value is None:
                return f"key {key} of {namespace} is gone"
            until = f" until {expires_at_ms} ms" if expires_at_ms else ""
            return f"key {key} of {namespace} holds {len(value)} bytes{until}"
        case EpochStarted(epoch):
            return f"epoch {epoch} began"
        case SnapshotTaken(part, parts, state):
            return f"snapshot of the state, part {part + 1} of {parts}, {len(state)} bytes"
        case Archived(offset):
            return f"the archive has everything below {offset}"


def config_words(config: TopicConfig) -> str:
    """A topic's settings that are not the default, and how many queues it has."""
    set_fields: dict[str, Any] = msgspec.to_builtins(config)
    return ", ".join(f"{name} {value}" for name, value in {"queues": config.queues, **set_fields}.items())
