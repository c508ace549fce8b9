"""What is made when it is first needed: topics, and the places where groups begin.

Both are written like any change, so whoever needs them waits: the request is put off (`Later`), and served once what it
needs is durable.

What always holds: no more topics and groups are made than the settings allow; a group has durable positions in all
queues before any member joins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dmq.broker.catalog.changes import Change, Later
from dmq.errors import DMQError, NotAllowed, ServerError
from dmq.model import TopicConfig, check_name, check_target, topic_of_results
from dmq.storage.state.events import PositionSet
from dmq.storage.state.state import Topic

if TYPE_CHECKING:
    from dmq.broker.broker import Broker

__all__ = ["begin_group", "create_topic", "make_result_topic", "make_topic"]


def make_topic(broker: Broker, name: str) -> Later:
    """A topic is used that is not there: begin to create it.

    Raises:
        BrokerStopping, InvalidName: it cannot be.
    """
    check_name(name, "topic")
    return _make(broker, name, TopicConfig(queues=broker.settings.auto_create_queues), system=False)


def make_result_topic(broker: Broker, name: str) -> Later:
    """A results topic is named for the first time: it is there with its topic, so begin to create it (T-04).

    Raises:
        Later: its topic is being changed, or made.
        UnknownTopic: there is no such topic, and none is made by itself.
        BrokerStopping, InvalidName: it cannot be.
    """
    of = topic_of_results(check_target(name)) or ""
    broker.changes.check(("topic", of))  # it may be about to go
    broker.topic(of)
    return _make(broker, name, TopicConfig(queues=1), system=True)


def _make(broker: Broker, name: str, config: TopicConfig, *, system: bool) -> Later:
    broker.check_running()
    change = broker.changes.begin(("topic", name))

    async def make() -> None:
        await create_topic(broker, name, config, system=system)
        broker.changes.end(change)

    broker.run(make(), lambda error: _failed(broker, change, error))
    return Later(change)


async def create_topic(broker: Broker, name: str, config: TopicConfig, *, system: bool = False) -> Topic:
    """Make a topic; durable when this is over. The caller sees that nobody else makes one of that name.

    Raises:
        NotAllowed: there are too many.
        TopicExists, InvalidName, StorageError.
    """
    store = broker.store
    event = store.creation(name, config, system=system)
    if not system and store.queries.topic_count >= broker.settings.topics_max:
        raise NotAllowed(
            f"this broker has {store.queries.topic_count} topics, and broker.topics_max allows no more: "
            "delete some, or raise the setting"
        )
    await broker.write([event])
    return store.queries.topic(name)


def begin_group(broker: Broker, topic: Topic, group: str, name: str, offset: Callable[[int], int]) -> None:
    """See that a group has a position in every queue.

    Parameters:
        group: what its positions are kept under.
        name: what requests call it.
        offset: where it begins in a queue; may need the disk.

    Raises:
        Later: it gets its first positions now.
        NotAllowed: there are too many groups.
    """
    queries = broker.store.queries
    queues = [queue for queue in range(topic.config.queues) if queries.position(group, topic.name, queue) is None]
    if not queues:
        return
    if queries.group_count >= broker.settings.groups_max and not queries.positions_of(group):
        raise NotAllowed(
            f"this broker keeps {queries.group_count} groups, and broker.groups_max allows no more: delete some, or "
            "raise the setting"
        )
    change = broker.changes.begin(("group", name))

    async def begin() -> None:
        offsets = await broker.reads.ask(lambda: [offset(queue) for queue in queues])
        places = zip(queues, offsets, strict=True)
        await broker.write([PositionSet(group, topic.id, queue, place) for queue, place in places])
        broker.changes.end(change)

    broker.run(begin(), lambda error: _failed(broker, change, error))
    raise Later(change)


def _failed(broker: Broker, change: Change, error: BaseException) -> None:
    """Those who waited for it are told why."""
    told = error if isinstance(error, DMQError) else ServerError(f"{error}: the broker's log has more")
    broker.changes.end(change, told)
