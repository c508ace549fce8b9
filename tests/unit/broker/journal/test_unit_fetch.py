"""The units of one answer: as much as there is room for, and what does not concern the reader is left out."""

from __future__ import annotations

import asyncio

import pytest

from dmq.broker.journal.unit_fetch import LOOKED_MAX, UnitFetch, fetch_units
from dmq.model import Message
from dmq.protocol.read import Fetch
from dmq.storage.journal.unit import read_header, whole_units
from tests.unit.pipeline.journals import batch_of, journal, new_store

SIZE = 200_000


class Units:
    """A journal whose units are of two topics in turn."""

    def __init__(self, count: int, sizes: tuple[int, int]) -> None:
        store = new_store("orders", "mails")
        for number in range(count):
            topic = ("orders", "mails")[number % 2]
            store.append([batch_of([Message(b"x" * sizes[number % 2])], topic=topic, first_sequence=number)])
        self.body = journal(store)
        self.start = store.queries.start
        self.visible = store.queries.visible
        self.orders = store.queries.topic("orders").id
        self.asked: list[tuple[int, int]] = []

    async def read(self, offset: int, room: int) -> tuple[bytes, int]:
        self.asked.append((offset, room))
        at = offset - self.start
        header = read_header(self.body, at)
        if header is None:
            return b"", offset
        size = whole_units(self.body[at : at + max(room, header.length)], offset, 1 << 20)
        return self.body[at : at + size], offset + size

    def fetch(self, asked: Fetch, size: int = SIZE) -> UnitFetch:
        return asyncio.run(fetch_units(asked, size, self.visible, self.read))

    def all_of(self, topic_ids: list[int], size: int = SIZE) -> list[UnitFetch]:
        found = [self.fetch(Fetch(self.start, topic_ids=topic_ids), size)]
        while found[-1].end < self.visible:
            found.append(self.fetch(Fetch(found[-1].end, topic_ids=topic_ids), size))
        return found


def test_without_topics_there_is_one_read_and_its_units_are_verbatim() -> None:
    units = Units(400, (1000, 1000))
    found = units.all_of([])
    assert b"".join(piece for part in found for piece in part.pieces) == units.body
    assert len(units.asked) == len(found)


@pytest.mark.parametrize("sizes", [(1000, 1000), (100, 5000), (5000, 100)])
def test_answers_follow_each_other_and_have_no_more_than_a_frame_has_room_for(sizes: tuple[int, int]) -> None:
    units = Units(1200, sizes)
    found = units.all_of([units.orders])
    assert [part.start for part in found[1:]] == [part.end for part in found[:-1]]
    taken = [sum(map(len, part.pieces)) for part in found]
    assert max(taken) < 2 * SIZE
    assert min(taken[:-1], default=SIZE) > 0.9 * SIZE, "an answer is filled, though little of the journal is wanted"
    assert len({offset for offset, _ in units.asked}) == len(units.asked), "nothing is read twice"
    assert sum(taken) < len(units.body)


def unit_places(body: bytes) -> list[int]:
    places, at = [], 0
    while header := read_header(body, at):
        places.append(at)
        at += header.length
    return places


def test_an_answer_without_a_unit_says_how_far_it_has_looked() -> None:
    units = Units(200, (1000, 1000))
    (found,) = units.all_of([99])
    assert (found.end, b"".join(found.pieces)) == (units.visible, b"")


def test_it_looks_at_so_much_of_the_journal_and_no_more() -> None:
    units = Units(60, (1 << 20, 1 << 20))
    found = units.all_of([99], 4 << 20)
    assert len(found) >= 2
    assert all(part.end - part.start <= LOOKED_MAX + (8 << 20) for part in found)


def test_an_end_is_kept_to() -> None:
    units = Units(100, (1000, 1000))
    places = [units.start + at for at in unit_places(units.body)]
    found = units.fetch(Fetch(units.start, end=places[20], topic_ids=[units.orders]), 5000)
    assert found.end <= places[20]
    whole = units.fetch(Fetch(places[10], end=places[20] + 1, topic_ids=[units.orders]), 1 << 20)
    assert (whole.start, whole.end) == (places[10], places[21]), "the unit that begins before the end comes, too"
