"""Whom a connection tells of what a broker sends by itself."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from dmq.client.connection.link import Peer
from dmq.client.connection.session import Push
from dmq.client.connection.url import Address
from dmq.errors import DMQError, InvalidRequest, NotLeader
from dmq.protocol import Command, Header
from dmq.protocol.consume import GroupMembers
from dmq.protocol.consume import Push as MessagePush
from dmq.protocol.session import ServerHealth


class Taker:
    """Keeps what it is told, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.told: list[Header] = []

    def pushed(self, connection: Any, push: Push) -> None:
        self.told.append(push.header)
        if self.error is not None:
            raise self.error


class Owner(Taker):
    """An owner with the consumers 1 and 2, of which the first raises this."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.consumers = {1: Taker(error), 2: Taker()}

    def lost(self, connection: Any, reason: DMQError) -> None:
        raise AssertionError

    def deposed(self, connection: Any, error: NotLeader) -> None:
        raise AssertionError


def push(header: Header, command: Command = Command.CONSUMER_PUSH) -> Push:
    return Push(command, header, b"", 0.0)


def hand_out(owner: Owner, *pushes: Push, is_interruptible: bool = True) -> None:
    peer: Peer[Any] = Peer(Address("one", 9611), None, owner, is_interruptible=is_interruptible)  # type: ignore[arg-type]
    peer._hand_out([], pushes)


def test_messages_go_to_their_subscription_alone() -> None:
    owner = Owner()
    first, second, third = (MessagePush(number, []) for number in (1, 2, 1))
    hand_out(owner, push(first), push(second), push(third))
    assert owner.consumers[1].told == [first, third]
    assert owner.consumers[2].told == [second]
    assert owner.told == []


def test_messages_of_a_subscription_that_ended_are_dropped() -> None:
    owner = Owner()
    last = MessagePush(2, [])
    hand_out(owner, push(MessagePush(3, [])), push(last))
    assert (owner.told, owner.consumers[1].told, owner.consumers[2].told) == ([], [], [last])


def test_everything_else_goes_to_the_owner_who_tells_all() -> None:
    owner = Owner()
    members, health = GroupMembers(1, 4, ["me"]), ServerHealth("one", "one:9611")
    hand_out(owner, push(members, Command.GROUP_MEMBERS), push(health, Command.SERVER_HEALTH))
    assert owner.told == [members, health]
    assert owner.consumers[1].told == []


@pytest.mark.parametrize("error", [InvalidRequest("the frame does not add up"), KeyError("of a handler")])
def test_a_consumer_that_raises_keeps_no_other_from_its_messages(error: Exception) -> None:
    """What a signal's handler may have raised, in the thread where these run, goes on to the program."""
    owner = Owner(error)
    hand_out(owner, push(MessagePush(1, [])), push(MessagePush(2, [])), is_interruptible=False)
    assert len(owner.consumers[2].told) == 1
    is_ours = isinstance(error, DMQError)
    with contextlib.nullcontext() if is_ours else pytest.raises(KeyError):
        hand_out(owner, push(MessagePush(1, [])), push(MessagePush(2, [])))
    assert len(owner.consumers[2].told) == 1 + is_ours
