"""Threads that wait for the disk: work is done in order, and its end is told on the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from dmq.broker.journal.disk import DiskThreads


async def done(
    threads: DiskThreads, work: list[str], name: str, hold: threading.Event | None = None
) -> BaseException | None:
    told: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    loop_thread = threading.current_thread()

    def run() -> None:
        assert threading.current_thread() is not loop_thread
        if hold is not None:
            assert hold.wait(30)
        work.append(name)
        if name == "bad":
            raise OSError("no")

    def finished(error: BaseException | None) -> None:
        assert threading.current_thread() is loop_thread
        told.set_result(error)

    threads.run(run, finished)
    return await told


def test_work_is_done_and_errors_are_told() -> None:
    async def run() -> None:
        threads = DiskThreads(asyncio.get_running_loop())
        work: list[str] = []
        assert await done(threads, work, "a") is None
        assert isinstance(await done(threads, work, "bad"), OSError)
        assert await done(threads, work, "b") is None
        assert work == ["a", "bad", "b"]
        threads.close()

    asyncio.run(run())


def test_one_that_takes_long_does_not_hold_up_the_other() -> None:
    async def run() -> None:
        threads = DiskThreads(asyncio.get_running_loop())
        work: list[str] = []
        hold = threading.Event()
        slow = asyncio.ensure_future(done(threads, work, "checkpoint", hold))
        await asyncio.sleep(0)
        assert await done(threads, work, "flush") is None
        assert work == ["flush"]
        hold.set()
        assert await slow is None
        assert work == ["flush", "checkpoint"]
        threads.close()

    asyncio.run(run())


def test_closing_waits_for_what_is_under_way() -> None:
    async def run() -> None:
        threads = DiskThreads(asyncio.get_running_loop())
        work: list[str] = []
        hold = threading.Event()
        slow = asyncio.ensure_future(done(threads, work, "flush", hold))
        await asyncio.sleep(0)
        hold.set()
        threads.close()
        assert work == ["flush"]
        assert await slow is None

    asyncio.run(run())


def test_what_work_returns_or_raises_is_waited_for() -> None:
    async def run() -> None:
        threads = DiskThreads(asyncio.get_running_loop(), 3)
        hold = threading.Event()
        slow = asyncio.ensure_future(threads.wait_for(lambda: hold.wait(30)))
        given_up = asyncio.ensure_future(threads.wait_for(lambda: hold.wait(30)))
        await asyncio.sleep(0)
        given_up.cancel()
        assert await threads.wait_for(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await threads.wait_for(lambda: 1 // 0)
        hold.set()
        assert await slow is True
        threads.end()
        threads.close()
        assert given_up.cancelled()

    asyncio.run(run())
