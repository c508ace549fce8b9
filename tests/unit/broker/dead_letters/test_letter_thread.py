"""What the log tells of a database of dead letters that goes and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from dmq.broker.dead_letters.letter_thread import LetterThread
from dmq.errors import DatabaseDown


class Letters:
    """A store that is down when told so."""

    def __init__(self) -> None:
        self.is_down = False

    def open(self) -> None: ...

    def close(self) -> None: ...


def test_the_log_tells_once_that_the_database_is_gone_and_once_that_it_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    letters: Any = Letters()

    def work(store: Any) -> None:
        if store.is_down:
            raise DatabaseDown("the database does not answer: start it")

    async def run() -> None:
        thread = LetterThread(lambda: letters)
        for is_down in (False, True, True, True, False, False):
            letters.is_down = is_down
            with contextlib.suppress(DatabaseDown):
                await thread.call(work)
        await thread.close()

    asyncio.run(run())
    assert caplog.messages == [
        "the database of dead letters is gone: they wait in the journal error='the database does not answer: start it'",
        "the database of dead letters is back seconds=0 failures=3",
    ]


def test_a_database_that_nobody_set_up_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        raise DatabaseDown("set broker.dead_letters_url")

    async def run() -> None:
        thread = LetterThread(make)
        for _ in range(2):
            with contextlib.suppress(DatabaseDown):
                await thread.call(lambda store: None)
        await thread.close()

    asyncio.run(run())
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "dead letters wait in the journal: no database takes them error='set broker.dead_letters_url'")
    ]
