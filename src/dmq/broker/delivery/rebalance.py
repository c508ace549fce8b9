"""Dividing: members that divide the queues of a topic among themselves are told who they are (R-08).

Each computes its share by the strategy all of them have, and says with ASSIGN which queues it takes. Until two that
heard of a change at different times agree, a queue may have two takers or none; two do no harm, since a message is
leased to one of them, and none lasts no longer than the news is on its way.

What always holds: after the last of some changes every member is told; changes that come together are told together, so
that many that start at once do not hear of each one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dmq.broker.delivery.channel import Consumption
from dmq.broker.delivery.group import MemberState
from dmq.broker.wire.session import Pusher
from dmq.protocol.commands import Command, one_way_head
from dmq.protocol.consume import GroupMembers
from dmq.protocol.header import LIST_MAX

__all__ = ["Dividing"]

_TOGETHER_SECONDS: Final = 0.02
_AGAIN_SECONDS: Final = 0.2  # for one that does not read: what waits for it must not pile up


class Dividing:
    """See the module."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._changed: set[Consumption] = set()

    def changed(self, consumption: Consumption, seconds: float = _TOGETHER_SECONDS) -> None:
        """Somebody came or went, or the topic has more queues; nothing if the broker shares out its messages."""
        subscription = consumption.group.subscription
        if subscription is None or not subscription.strategy:
            return
        if not self._changed:
            self._loop.call_later(seconds, self._tell)
        self._changed.add(consumption)

    def _tell(self) -> None:
        changed, self._changed = self._changed, set()
        for consumption in changed:
            members = consumption.group.members.values()
            names = sorted(member.name for member in members if member.state is MemberState.ACTIVE)[:LIST_MAX]
            for sink in consumption.sinks.values():
                if not sink.is_ready:
                    self.changed(consumption, _AGAIN_SECONDS)
                elif isinstance(sink, Pusher):
                    told = GroupMembers(sink.number, consumption.topic.config.queues, names)
                    sink.session.connection.send(one_way_head(Command.GROUP_MEMBERS, told))
