"""The table of commands: which handler serves each, and whether it needs a Broker."""

from __future__ import annotations

from typing import Final

from dmq.broker.wire import (
    connection,
    consume,
    dead_letters,
    groups,
    key_values,
    message_history,
    produce,
    rate_limits,
    read,
    schedule,
    shard,
    topics,
)
from dmq.broker.wire.dispatcher import CommandEntry
from dmq.protocol.commands import Command

__all__ = ["COMMANDS"]

COMMANDS: Final[dict[int, CommandEntry]] = {
    Command.HEARTBEAT: CommandEntry(connection.heartbeat, needs_broker=False),
    Command.STATS: CommandEntry(connection.stats, needs_broker=False),
    Command.CLUSTER: CommandEntry(connection.cluster, needs_broker=False),
    Command.DRAIN: CommandEntry(connection.drain),
    Command.ROUTE: CommandEntry(connection.route, needs_broker=False),
    Command.PRODUCE: CommandEntry(produce.produce),
    Command.TRANSACTION_END: CommandEntry(schedule.end_transactions),
    Command.TRANSACTION_LIST: CommandEntry(schedule.list_transactions),
    Command.TRANSACTION_JOIN: CommandEntry(schedule.join_transactions),
    Command.PRODUCER_STATES: CommandEntry(produce.producer_states),
    Command.PULL: CommandEntry(consume.pull),
    Command.SUBSCRIBE: CommandEntry(consume.subscribe),
    Command.UNSUBSCRIBE: CommandEntry(consume.unsubscribe),
    Command.CREDIT: CommandEntry(consume.credit),
    Command.ASSIGN: CommandEntry(consume.assign),
    Command.SETTLE: CommandEntry(consume.settle),
    Command.SEEK: CommandEntry(groups.seek),
    Command.POSITION: CommandEntry(groups.position),
    Command.GROUP_CREATE: CommandEntry(groups.create_group),
    Command.GROUP_DELETE: CommandEntry(groups.delete_group),
    Command.GROUP_LIST: CommandEntry(groups.list_groups),
    Command.GROUP_DESCRIBE: CommandEntry(groups.describe_group),
    Command.OFFSETS: CommandEntry(read.offsets),
    Command.PEEK: CommandEntry(read.peek),
    Command.FIND: CommandEntry(read.find),
    Command.FETCH: CommandEntry(read.fetch),
    Command.ARCHIVED: CommandEntry(read.archived),
    Command.DELAY_LIST: CommandEntry(schedule.list_delays),
    Command.DELAY_CANCEL: CommandEntry(schedule.cancel_delay),
    Command.TOPIC_CREATE: CommandEntry(topics.create_topic),
    Command.TOPIC_UPDATE: CommandEntry(topics.update_topic),
    Command.TOPIC_DELETE: CommandEntry(topics.delete_topic),
    Command.TOPIC_LIST: CommandEntry(topics.list_topics),
    Command.TOPIC_DESCRIBE: CommandEntry(topics.describe_topic),
    Command.DEAD_LETTER_LIST: CommandEntry(dead_letters.list_dead_letters),
    Command.DEAD_LETTER_RESEND: CommandEntry(dead_letters.resend_dead_letters),
    Command.DEAD_LETTER_DELETE: CommandEntry(dead_letters.delete_dead_letters),
    Command.LIMIT_GET: CommandEntry(rate_limits.get_limits),
    Command.LIMIT_SET: CommandEntry(rate_limits.set_limit),
    Command.KEY_PUT: CommandEntry(key_values.put_key),
    Command.KEY_GET: CommandEntry(key_values.get_key),
    Command.KEY_LIST: CommandEntry(key_values.list_keys),
    Command.KEY_DELETE: CommandEntry(key_values.delete_key),
    Command.SHARD_LIST: CommandEntry(shard.list_shards, needs_broker=False),
    Command.SHARD_SHOW: CommandEntry(shard.show_shard, needs_broker=False),
    Command.SHARD_SET: CommandEntry(shard.set_shard, needs_broker=False),
    Command.SHARD_PROMOTE: CommandEntry(shard.promote_member, needs_broker=False),
    Command.SHARD_HANDOVER: CommandEntry(shard.hand_over, needs_broker=False),
    Command.SHARD_REPAIR: CommandEntry(shard.repair_member, needs_broker=False),
    Command.TRACE: CommandEntry(message_history.trace),
    Command.WHY: CommandEntry(message_history.why),
}
