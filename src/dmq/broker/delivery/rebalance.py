"""Rebalance: members that divide the queues of a topic among themselves are told who they are (R-08).

Each computes its share by the strategy all of them have, and says which queues it takes. Until two that heard of a
change at different times agree, a queue may have two takers or none; two do no harm, since a message is leased to one
of them, and none lasts no longer than the news is on its way.

What always holds: after the last of some changes every member is told; changes that come together are told together, so
that many members that start at once do not hear of each one.
"""

from __future__ import annotations

import asyncio
from typing import Final

from dmq.broker.delivery.channel import Channel
from dmq.broker.delivery.group import MemberState
from dmq.protocol.header import LIST_MAX

__all__ = ["Rebalance"]

_TOGETHER_SECONDS: Final = 0.02
_AGAIN_SECONDS: Final = 0.2  # for one that does not read: what waits for it must not pile up


class Rebalance:
    """The news of all groups of one broker; made on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed: set[Channel] = set()

    def changed(self, channel: Channel, seconds: float = _TOGETHER_SECONDS) -> None:
        """A member came or went, or the topic has more queues; nothing if the broker shares out its messages."""
        subscription = channel.group.subscription
        if subscription is None or not subscription.strategy:
            return
        if not self._changed:
            self._loop.call_later(seconds, self._tell)
        self._changed.add(channel)

    def _tell(self) -> None:
        changed, self._changed = self._changed, set()
        for channel in changed:
            members = channel.group.members.values()
            names = sorted(member.name for member in members if member.state is MemberState.ACTIVE)[:LIST_MAX]
            for subscriber in channel.subscribers.values():
                if not subscriber.sink.is_ready:
                    self.changed(channel, _AGAIN_SECONDS)
                else:
                    subscriber.sink.tell_members(channel.topic.config.queues, names)
