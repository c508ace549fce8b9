"""One function per command: read the header, decide, answer. The table shows where each one is."""

from __future__ import annotations

from dmq.broker.broker import Handler
from dmq.broker.handlers import (
    consume,
    deadletters,
    delays,
    groups,
    life,
    limits,
    produce,
    reading,
    session,
    settle,
    topics,
    transactions,
)
from dmq.protocol.commands import Command

__all__ = ["HANDLERS"]

HANDLERS: dict[int, Handler] = {
    Command.HEARTBEAT: session.heartbeat,
    Command.STATS: session.stats,
    Command.CLUSTER: session.cluster,
    Command.DRAIN: session.drain,
    Command.PRODUCE: produce.produce,
    Command.TRANSACTION_END: transactions.end_transactions,
    Command.TRANSACTION_LIST: transactions.list_transactions,
    Command.TRANSACTION_JOIN: transactions.join_transactions,
    Command.PULL: consume.pull,
    Command.SUBSCRIBE: consume.subscribe,
    Command.UNSUBSCRIBE: consume.unsubscribe,
    Command.CREDIT: consume.credit,
    Command.ASSIGN: consume.assign,
    Command.SETTLE: settle.settle,
    Command.SEEK: groups.seek,
    Command.POSITION: groups.position,
    Command.GROUP_CREATE: groups.create_group,
    Command.GROUP_DELETE: groups.delete_group,
    Command.GROUP_LIST: groups.list_groups,
    Command.GROUP_DESCRIBE: groups.describe_group,
    Command.OFFSETS: reading.offsets,
    Command.PEEK: reading.peek,
    Command.FIND: reading.find,
    Command.FETCH: reading.fetch,
    Command.DELAY_LIST: delays.list_delays,
    Command.DELAY_CANCEL: delays.cancel_delay,
    Command.TOPIC_CREATE: topics.create_topic,
    Command.TOPIC_UPDATE: topics.update_topic,
    Command.TOPIC_DELETE: topics.delete_topic,
    Command.TOPIC_LIST: topics.list_topics,
    Command.TOPIC_DESCRIBE: topics.describe_topic,
    Command.DEAD_LETTER_LIST: deadletters.list_dead_letters,
    Command.DEAD_LETTER_RESEND: deadletters.resend_dead_letters,
    Command.DEAD_LETTER_DELETE: deadletters.delete_dead_letters,
    Command.LIMIT_GET: limits.get_limits,
    Command.LIMIT_SET: limits.set_limit,
    Command.TRACE: life.trace,
    Command.WHY: life.why,
}
