"""One function per command: read the header, decide, answer. The table shows where each one is."""

from __future__ import annotations

from dmq.broker.broker import Handler
from dmq.broker.wire import (
    connection,
    consume,
    dead_letters,
    delays,
    groups,
    key_values,
    message_history,
    produce,
    rate_limits,
    read,
    topics,
    transactions,
)
from dmq.protocol.commands import Command

__all__ = ["HANDLERS"]

HANDLERS: dict[int, Handler] = {
    Command.HEARTBEAT: connection.heartbeat,
    Command.STATS: connection.stats,
    Command.CLUSTER: connection.cluster,
    Command.DRAIN: connection.drain,
    Command.PRODUCE: produce.produce,
    Command.TRANSACTION_END: transactions.end_transactions,
    Command.TRANSACTION_LIST: transactions.list_transactions,
    Command.TRANSACTION_JOIN: transactions.join_transactions,
    Command.PRODUCER_STATES: produce.producer_states,
    Command.PULL: consume.pull,
    Command.SUBSCRIBE: consume.subscribe,
    Command.UNSUBSCRIBE: consume.unsubscribe,
    Command.CREDIT: consume.credit,
    Command.ASSIGN: consume.assign,
    Command.SETTLE: consume.settle,
    Command.SEEK: groups.seek,
    Command.POSITION: groups.position,
    Command.GROUP_CREATE: groups.create_group,
    Command.GROUP_DELETE: groups.delete_group,
    Command.GROUP_LIST: groups.list_groups,
    Command.GROUP_DESCRIBE: groups.describe_group,
    Command.OFFSETS: read.offsets,
    Command.PEEK: read.peek,
    Command.FIND: read.find,
    Command.FETCH: read.fetch,
    Command.ARCHIVED: read.archived,
    Command.DELAY_LIST: delays.list_delays,
    Command.DELAY_CANCEL: delays.cancel_delay,
    Command.TOPIC_CREATE: topics.create_topic,
    Command.TOPIC_UPDATE: topics.update_topic,
    Command.TOPIC_DELETE: topics.delete_topic,
    Command.TOPIC_LIST: topics.list_topics,
    Command.TOPIC_DESCRIBE: topics.describe_topic,
    Command.DEAD_LETTER_LIST: dead_letters.list_dead_letters,
    Command.DEAD_LETTER_RESEND: dead_letters.resend_dead_letters,
    Command.DEAD_LETTER_DELETE: dead_letters.delete_dead_letters,
    Command.LIMIT_GET: rate_limits.get_limits,
    Command.LIMIT_SET: rate_limits.set_limit,
    Command.KEY_PUT: key_values.put_key,
    Command.KEY_GET: key_values.get_key,
    Command.KEY_LIST: key_values.list_keys,
    Command.KEY_DELETE: key_values.delete_key,
    Command.TRACE: message_history.trace,
    Command.WHY: message_history.why,
}
