"""Members that fall silent: who gets their messages, what counts as an attempt, and what an operator sees."""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any

import pytest

from dmq.broker.delivery.client import Client
from dmq.broker.delivery.group import PATIENCE_MS, MemberState
from dmq.protocol.consume import Outcome, SubscribeFlag
from tests.integration.broker_door.doors import Basket, Door, bodies_of, with_a_door

LEASE_MS = 10_000
LEASE, PATIENCE = LEASE_MS / 1000, PATIENCE_MS / 1000


class Whisper:
    """A client that answers while it lives."""

    def __init__(self, *, lives: bool = True) -> None:
        self.lives = lives
        self.heard = 0
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1
        self.heard += self.lives

    def wake(self) -> None:
        """It is no longer stopped, and answers what it was asked."""
        self.lives = True
        self.heard += self.asked


def client_of(door: Door, name: str, voice: Whisper) -> Client:
    return Client(door.broker.channels, name, "gateway", "here", voice=voice)


async def joined(door: Door, name: str, voice: Whisper, number: int = 1, **how: Any) -> Basket:
    basket = Basket()
    await door.subscribe(client_of(door, name, voice), basket, lease_ms=LEASE_MS, number=number, **how)
    return basket


async def run_out(door: Door, voice: Whisper) -> None:
    """Let the leases of a stopped member run out."""
    door.clock.advance(LEASE)
    await door.until(lambda: voice.asked)
    door.clock.advance(PATIENCE)


def test_a_silent_member_gets_nothing_until_it_speaks_and_others_get_what_it_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "dmq.broker.delivery.client")

    async def run(door: Door) -> None:
        voice = Whisper(lives=False)
        stopped = await joined(door, "stopped", voice, max_attempts=1)
        await door.publish(b"a", b"b")
        await door.until(lambda: stopped.bodies)
        other = await joined(door, "other", Whisper(), max_attempts=1)
        await run_out(door, voice)
        await door.until(lambda: other.bodies == [b"a", b"b"])
        assert {handed.lease.attempt for handed in other.handed} == {1}, "nobody began it"
        for body in (b"c", b"d", b"e"):
            await door.publish(body)
        await door.until(lambda: len(other.bodies) == 5)
        assert len(stopped.bodies) == 2
        (row,) = (row for row in door.broker.groups.members("billing") if row.is_silent)
        assert (row.member, row.is_connected) == ("stopped", True)
        assert len(door.broker.channels.silent) == 1
        voice.wake()
        await door.until(lambda: not door.broker.channels.silent)
        for body in (b"f", b"g"):
            await door.publish(body)
        await door.until(lambda: len(stopped.bodies) > 2)

    with_a_door(run)
    silent, back = (record for record in caplog.records if record.name == "dmq.broker.delivery.client")
    assert (silent.levelno, back.levelno) == (logging.WARNING, logging.INFO)
    for word in ("billing", "stopped", "orders", "here"):
        assert word in silent.getMessage()
        assert word in back.getMessage()


def test_messages_wait_while_all_members_are_silent_and_go_on_at_once() -> None:
    async def run(door: Door) -> None:
        voice = Whisper(lives=False)
        basket = await joined(door, "lone", voice)
        await door.publish(b"a")
        await door.until(lambda: basket.bodies)
        await run_out(door, voice)
        await door.until(lambda: door.broker.channels.silent)
        door.clock.advance(100 * LEASE)
        await asyncio.sleep(0.2)
        assert basket.bodies == [b"a"]
        voice.wake()
        await door.until(lambda: basket.bodies == [b"a", b"a"])
        assert basket.handed[-1].lease.attempt == 1

    with_a_door(run)


def test_a_member_that_lives_and_lets_its_lease_run_out_has_made_an_attempt_and_others_come_first() -> None:
    async def run(door: Door) -> None:
        slow = await joined(door, "slow", Whisper())
        await door.publish(b"a")
        await door.until(lambda: slow.bodies)
        other = await joined(door, "other", Whisper())
        door.clock.advance(LEASE)
        await door.until(lambda: other.bodies)
        assert other.handed[0].lease.attempt == 2
        assert slow.bodies == [b"a"]

    with_a_door(run)


def test_a_message_that_kills_every_process_becomes_a_dead_letter() -> None:
    async def run(door: Door) -> None:
        await door.publish(b"poison")
        for name in ("one", "two", "three"):
            client, basket = client_of(door, name, Whisper()), Basket()
            await door.subscribe(client, basket, max_attempts=3)
            await door.until(functools.partial(getattr, basket, "bodies"))
            client.leave(1000)
            door.clock.advance(2.0)
        last = await joined(door, "last", Whisper(), max_attempts=3)
        await door.until(lambda: door.bodies("%DLQ%billing") == [b"poison"])
        assert last.bodies == []

    with_a_door(run)


def test_a_client_that_is_given_up_in_silence_has_made_no_attempt() -> None:
    async def run(door: Door) -> None:
        client, basket = client_of(door, "stopped", Whisper(lives=False)), Basket()
        await door.subscribe(client, basket)
        await door.publish(b"a")
        await door.until(lambda: basket.bodies)
        client.leave(1000, is_silent=True)
        door.clock.advance(2.0)
        other = await joined(door, "other", Whisper())
        await door.until(lambda: other.bodies)
        assert other.handed[0].lease.attempt == 1

    with_a_door(run)


def test_no_member_of_a_stopped_client_gets_what_another_of_its_members_had() -> None:
    async def run(door: Door) -> None:
        voice, first, second = Whisper(lives=False), Basket(), Basket()
        client = client_of(door, "stopped", voice)
        await door.subscribe(client, first, lease_ms=LEASE_MS)
        await door.publish(b"a")
        await door.until(lambda: first.bodies)
        await door.subscribe(client, second, lease_ms=LEASE_MS, number=2, member="stopped.2")
        await run_out(door, voice)
        await door.until(lambda: len(door.broker.channels.silent) == 2)
        other = await joined(door, "other", Whisper())
        await door.until(lambda: other.bodies)
        assert second.bodies == []

    with_a_door(run)


@pytest.mark.parametrize("flags", [SubscribeFlag.ORDERED, SubscribeFlag.BROADCAST])
def test_order_and_broadcast_keep_their_promises_when_a_member_falls_silent(flags: SubscribeFlag) -> None:
    async def run(door: Door) -> None:
        voice = Whisper(lives=False)
        how: dict[str, Any] = {"flags": int(flags), "batch": 1, "max_attempts": 1}
        stopped = await joined(door, "stopped", voice, member="stopped", **how)
        await door.publish(b"a", b"b")
        await door.until(lambda: stopped.bodies)
        client, other = client_of(door, "other", Whisper()), Basket()
        await door.subscribe(client, other, lease_ms=LEASE_MS, member="other", **how)
        if flags == SubscribeFlag.BROADCAST:
            await door.publish(b"c")
            await door.until(lambda: b"c" in other.bodies)
        await run_out(door, voice)
        await door.until(lambda: door.broker.channels.silent)
        if flags == SubscribeFlag.ORDERED:
            await door.until(lambda: other.bodies == [b"a"])
            door.settle(client, other.handed[0], Outcome.ACK)
            await door.until(lambda: other.bodies == [b"a", b"b"])
        before = len(stopped.handed)
        voice.wake()
        if flags == SubscribeFlag.BROADCAST:
            await door.until(lambda: len(stopped.handed) > before)
            assert {handed.lease.attempt for handed in stopped.handed} == {1}

    with_a_door(run)


def test_a_pull_of_a_silent_member_waits_no_longer_than_it_wanted_and_gets_nothing() -> None:
    async def run(door: Door) -> None:
        voice = Whisper(lives=False)
        client = client_of(door, "stopped", voice)
        await door.publish(b"a")
        assert await door.pull(client, lease_ms=LEASE_MS) is not None
        waiting = asyncio.ensure_future(door.pull(client, lease_ms=LEASE_MS, wait_ms=60_000))
        await asyncio.sleep(0)
        await run_out(door, voice)
        await door.until(lambda: door.broker.channels.silent)
        await door.publish(b"b")
        other = await joined(door, "other", Whisper())
        await door.until(lambda: sorted(other.bodies) == [b"a", b"b"])
        assert not waiting.done()
        door.clock.advance(60.0)
        assert await waiting is None
        again = await door.pull(client, lease_ms=LEASE_MS, wait_ms=60_000)  # a client that asks lives
        assert again is None or bodies_of(again)

    with_a_door(run)


def test_members_that_divide_the_queues_leave_out_a_silent_one() -> None:
    async def run(door: Door) -> None:
        voice = Whisper(lives=False)
        stopped = await joined(door, "stopped", voice, strategy="average", queues=[0])
        await door.publish(b"a")
        await door.until(lambda: stopped.bodies)
        other = await joined(door, "other", Whisper(), strategy="average")
        await door.until(lambda: other.members == [["other", "stopped"]])
        await run_out(door, voice)
        await door.until(lambda: other.members[-1] == ["other"])
        voice.wake()
        await door.until(lambda: other.members[-1] == ["other", "stopped"])

    with_a_door(run)


def test_a_member_is_shown_as_silent() -> None:
    async def run(door: Door) -> None:
        voice = Whisper(lives=False)
        basket = await joined(door, "lone", voice)
        await door.publish(b"a")
        await door.until(lambda: basket.bodies)
        await run_out(door, voice)
        await door.until(lambda: door.broker.channels.silent)
        (channel,) = (one for (_, group), one in door.broker.channels.open.items() if group == "billing")
        assert [member.state for member in channel.group.members.values()] == [MemberState.SILENT]

    with_a_door(run)
