"""More requests in one turn than anybody could answer: each gets its answer, and only a bounded number is worked on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dmq.broker.catalog.changes import Changes
from dmq.broker.wire.dispatcher import WORKING_MAX
from dmq.broker.wire.session import Session
from dmq.errors import Busy
from dmq.protocol import Command, Status, request_head
from dmq.protocol.admin import DelayList, TopicCreate
from dmq.protocol.produce import TransactionList
from dmq.protocol.read import Fetch, Peek
from tests.unit.broker.turns import Peer, Rig, running

REQUESTS = 3000


def in_a_broker(test: Callable[[Rig], Awaitable[None]], **settings: Any) -> None:
    async def run() -> None:
        async with running(**settings) as rig:
            await test(rig)

    asyncio.run(run())


async def settled(rig: Rig) -> None:
    while rig.broker.runtime.tasks._tasks:
        await asyncio.sleep(0.001)
    await rig.turn()


def session_of(peer: Peer) -> Session:
    session = peer._connection.session
    assert isinstance(session, Session)
    return session


@pytest.mark.parametrize(
    ("command", "header"),
    [
        (Command.PEEK, Peek("orders", 0)),
        (Command.FETCH, Fetch(0, 1 << 20, 60_000)),
        (Command.DELAY_LIST, DelayList()),
        (Command.TRANSACTION_LIST, TransactionList()),
    ],
    ids=lambda value: value.name if isinstance(value, Command) else "",
)
def test_requests_that_go_on_by_themselves_are_bounded_for_each_client(command: Command, header: Any) -> None:
    async def run(rig: Rig) -> None:
        greedy, modest = await rig.connect(2)
        greedy.feed(b"".join(request_head(command, header, number + 1) for number in range(REQUESTS)))
        modest.feed(request_head(command, header, 1))
        assert len(rig.broker.runtime.tasks._tasks) == WORKING_MAX + 1
        await settled(rig)
        assert sorted(frame.correlation for frame in greedy.wire.frames) == [*range(1, REQUESTS + 1)]
        told = Counter(frame.status for frame in greedy.wire.frames)
        assert told[Status.BUSY] >= REQUESTS - WORKING_MAX
        assert told[0] > 0
        assert told[0] + told[Status.BUSY] == REQUESTS
        assert [frame.status for frame in modest.wire.frames] == [0]
        assert session_of(greedy).working == session_of(modest).working == 0

    in_a_broker(run)


def test_changes_under_way_are_bounded() -> None:
    async def run(rig: Rig) -> None:
        (peer,) = await rig.connect(1)
        heads = [request_head(Command.TOPIC_CREATE, TopicCreate(f"t{number}"), number + 1) for number in range(500)]
        peer.feed(b"".join(heads))
        assert len(rig.broker.changes.under_way) == 300
        await settled(rig)
        assert not rig.broker.changes.under_way
        assert Counter(frame.status for frame in peer.wire.frames) == {0: 300, Status.BUSY: 200}
        assert {topic.name for topic in rig.store.queries.topics()} >= {f"t{number}" for number in range(300)}

    in_a_broker(run, pulls_waiting_max=300)


def test_a_change_beyond_the_bound_is_refused_until_one_has_ended() -> None:
    changes = Changes(2, 1000)
    first = changes.begin(("topic", "a"))
    changes.begin(("topic", "b"))
    with pytest.raises(Busy):
        changes.begin(("topic", "c"))
    changes.end(first)
    changes.begin(("topic", "c"))


def test_what_a_client_asked_that_is_gone_is_not_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(rig: Rig) -> None:
        (peer,) = await rig.connect(1)
        looked = 0
        ask = rig.broker.reads.ask

        async def counted(question: Callable[[], Any]) -> Any:
            nonlocal looked
            looked += 1
            return await ask(question)

        monkeypatch.setattr(rig.broker.reads, "ask", counted)
        peer._connection.pause_writing()
        peer.feed(b"".join(request_head(Command.PEEK, Peek("orders", 0), number + 1) for number in range(20)))
        for _ in range(3):
            await rig.turn()
        assert (looked, rig.broker.reads.asked) == (0, 20)
        peer._connection.connection_lost(None)
        await settled(rig)
        assert (looked, rig.broker.reads.asked) == (0, 0)

    in_a_broker(run)
