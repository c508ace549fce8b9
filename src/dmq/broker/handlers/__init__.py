"""One function per command: read the header, decide, answer. The table shows where each one is."""

from __future__ import annotations

from dmq.broker.broker import Handler
from dmq.broker.handlers import consume, groups, produce, reading, session, settle, topics
from dmq.protocol.commands import Command

__all__ = ["HANDLERS"]

HANDLERS: dict[int, Handler] = {
    Command.HEARTBEAT: session.heartbeat,
    Command.STATS: session.stats,
    Command.CLUSTER: session.cluster,
    Command.PRODUCE: produce.produce,
    Command.PULL: consume.pull,
    Command.SUBSCRIBE: consume.subscribe,
    Command.UNSUBSCRIBE: consume.unsubscribe,
    Command.CREDIT: consume.credit,
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
    Command.TOPIC_CREATE: topics.create_topic,
    Command.TOPIC_UPDATE: topics.update_topic,
    Command.TOPIC_DELETE: topics.delete_topic,
    Command.TOPIC_LIST: topics.list_topics,
    Command.TOPIC_DESCRIBE: topics.describe_topic,
}
