"""Tasks that wait for the same are all woken, each gives up when its own time is over, and turns keep their order."""

from __future__ import annotations

import asyncio

from dmq.client.aio.waiter import SharedWaiter, TaskTurns


def test_all_are_woken_at_once_and_a_second_time_does_nothing() -> None:
    async def main() -> list[bool]:
        waiter = SharedWaiter()
        waits = [waiter.wait(60.0), waiter.wait(None), waiter.wait(30.0)]
        waiter.wake()
        waiter.wake()
        return list(await asyncio.gather(*waits))

    assert asyncio.run(main()) == [True, True, True]


def test_each_gives_up_in_its_own_time_whatever_the_order() -> None:
    async def main() -> None:
        waiter = SharedWaiter()
        later, sooner, never = waiter.wait(0.02), waiter.wait(0.0), waiter.wait(None)
        assert await sooner is False
        assert not later.done()
        assert await later is False
        assert not never.done()
        more = waiter.wait(0.01)
        assert await more is False
        waiter.wake()
        assert await never is True

    asyncio.run(main())


def test_a_task_that_was_cancelled_is_left_alone() -> None:
    async def main() -> None:
        waiter = SharedWaiter()
        cancelled, late, woken = waiter.wait(0.0), waiter.wait(0.01), waiter.wait(60.0)
        cancelled.cancel()
        assert await late is False
        other = waiter.wait(60.0)
        other.cancel()
        waiter.wake()
        assert await woken is True
        assert cancelled.cancelled()
        assert other.cancelled()

    asyncio.run(main())


def test_turns_come_in_the_order_of_the_calls_also_past_tasks_that_give_up() -> None:
    async def main() -> list[str]:
        turns, passed = TaskTurns(), []

        async def walk(name: str, seconds: float | None = None) -> None:
            if await turns.enter("door", seconds):
                passed.append(name)
                turns.leave("door")

        assert turns.is_free("door")
        assert await turns.enter("door", None)
        assert not turns.is_free("door")
        assert turns.is_free("another door")
        tasks = {name: asyncio.create_task(walk(name)) for name in "abcd"}
        hasty = asyncio.create_task(walk("hasty", 0.0))
        await hasty
        tasks["b"].cancel()
        await asyncio.sleep(0)
        turns.leave("door")
        tasks["a"].cancel()  # whose turn it is, and who does not know yet
        late = asyncio.create_task(walk("late"))
        await asyncio.gather(*tasks.values(), late, return_exceptions=True)
        assert turns.is_free("door")
        return passed

    assert asyncio.run(main()) == ["c", "d", "late"]
