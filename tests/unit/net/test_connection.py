"""The outbox: what is sent in a turn goes out at its end, or when it is released."""

from __future__ import annotations

import asyncio

import pytest

from dmq.net.connection import WriteCoalescer


class Line:
    def __init__(self, *, fails: bool = False) -> None:
        self.flushes = 0
        self._fails = fails

    def flush(self) -> None:
        self.flushes += 1
        if self._fails:
            raise RuntimeError("gone")


def test_what_is_sent_in_a_turn_goes_out_at_its_end() -> None:
    async def run() -> None:
        outbox, one, other = WriteCoalescer(), Line(), Line()
        outbox.add(one)
        outbox.add(other)
        assert (one.flushes, other.flushes) == (0, 0)
        await asyncio.sleep(0)
        assert (one.flushes, other.flushes) == (1, 1)
        await asyncio.sleep(0)
        assert (one.flushes, other.flushes) == (1, 1)

    asyncio.run(run())


def test_what_is_sent_while_it_is_held_goes_out_when_it_is_released() -> None:
    async def run() -> None:
        outbox, one = WriteCoalescer(), Line()
        outbox.hold()
        outbox.add(one)
        await asyncio.sleep(0)
        assert one.flushes == 0
        outbox.release()
        assert one.flushes == 1
        outbox.add(one)
        await asyncio.sleep(0)
        assert one.flushes == 2

    asyncio.run(run())


def test_one_connection_that_fails_does_not_keep_the_answers_of_others(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        outbox, bad, good = WriteCoalescer(), Line(fails=True), Line()
        outbox.add(bad)
        outbox.add(good)
        await asyncio.sleep(0)
        assert good.flushes == 1

    asyncio.run(run())
    assert "sending failed" in caplog.text
