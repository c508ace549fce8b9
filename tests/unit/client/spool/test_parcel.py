"""Batches as a spool keeps them, and the line they stand in."""

from __future__ import annotations

import pytest

from dmq.client.connection.url import Address
from dmq.client.spool.parcel import UNPROVEN_MAX, Head, Kept, Parcel, Places, pack_parcel, unpack_parcel
from dmq.errors import RecordCorrupt, WrongFormat
from dmq.testing import FakeClock
from tests.unit.client.links import FakeLink, FakeLinks


def head(topic: str = "orders", queue: int = 0, *, is_delayed: bool = False, is_pinned: bool = False) -> Head:
    return Head(topic, queue, 1, 0, 2, is_delayed, is_pinned)


def entered(places: Places, offset: int, queue: int = 0, *, is_pinned: bool = False) -> None:
    places.enter(Kept(offset, head(queue=queue, is_pinned=is_pinned), (b"x",), 10), None, False)


def links(host: str = "one") -> FakeLinks:
    return FakeLinks(FakeClock(), FakeLink(host))


def taken(places: Places, host: str = "one") -> Parcel:
    found = places.take(links(host))
    assert found is not None
    return found[0]


def test_what_is_unpacked_is_what_was_packed() -> None:
    packed = pack_parcel(head(is_delayed=True), (b"columns", b"records"))
    kept = unpack_parcel(7, packed)
    assert kept.offset == 7
    assert kept.head == head(is_delayed=True)
    assert b"".join(kept.body) == b"columnsrecords"


def test_a_newer_version_is_refused() -> None:
    with pytest.raises(WrongFormat, match="version"):
        unpack_parcel(0, b"\2" + pack_parcel(head(), ())[1:])


@pytest.mark.parametrize("raw", [b"", b"\1\0", b"\1\0\5hello", b"\1\0\1\0"])
def test_what_is_no_parcel_is_corrupt(raw: bytes) -> None:
    with pytest.raises(RecordCorrupt):
        unpack_parcel(0, raw)


def test_delayed_batches_of_a_shard_share_one_place() -> None:
    assert head("a", 1, is_delayed=True).target(1) == head("b", 2, is_delayed=True).target(2)
    assert head("a", 1, is_delayed=True).target(257) != head("b", 2, is_delayed=True).target(2)
    assert head("a", 1).target(1) != head("a", 2).target(2)


def test_one_of_a_place_goes_after_the_other() -> None:
    places = Places()
    entered(places, 0)
    entered(places, 1)
    first = taken(places)
    assert first.kept.offset == 0
    assert places.take(links()) is None
    places.leave(first)
    assert taken(places).kept.offset == 1


def test_places_do_not_wait_for_each_other() -> None:
    places = Places()
    entered(places, 0, queue=0)
    entered(places, 1, queue=0)
    entered(places, 2, queue=1)
    assert [taken(places).kept.offset, taken(places).kept.offset] == [0, 2]


def test_a_place_waits_until_what_it_settled_is_proven() -> None:
    places = Places()
    for offset in range(UNPROVEN_MAX + 1):
        entered(places, offset)
    for _ in range(UNPROVEN_MAX):
        assert not places.is_stalled
        places.leave(taken(places))
    assert places.take(links()) is None
    assert places.is_stalled
    places.proven([0])
    assert taken(places).kept.offset == UNPROVEN_MAX


def test_what_may_be_stored_in_order_waits_for_its_broker() -> None:
    places = Places()
    entered(places, 0, is_pinned=True)
    parcel = taken(places)
    parcel.broker, parcel.is_unanswered = Address("one", 9611), True
    parcel.place.is_busy = False
    places.line_up(parcel.place)
    assert places.take(links("two")) is None
    places.line_up_all()
    assert taken(places, "one") is parcel


def test_the_bytes_in_memory_are_counted() -> None:
    places = Places()
    entered(places, 0)
    entered(places, 1, queue=3)
    assert places.bytes == 20
    places.leave(taken(places))
    assert places.bytes == 10


def test_one_whose_slot_is_gone_moves_behind_what_waits_at_the_other_place() -> None:
    places = Places()
    entered(places, 0, queue=0, is_pinned=True)
    entered(places, 1, queue=0, is_pinned=True)
    entered(places, 2, queue=256, is_pinned=True)
    size = places.bytes
    first = taken(places)
    first.is_unanswered = True
    places.move(first, 256)
    assert (first.origin, first.queue, first.is_unanswered) == (0, 256, False)
    assert [parcel.kept.offset for parcel in first.place.parcels] == [2, 0]
    assert places.bytes == size
    found = [taken(places) for _ in range(2)]
    assert sorted(parcel.kept.offset for parcel in found) == [1, 2], "both places go on, in their order"
    assert places.take(links()) is None
    places.leave(next(parcel for parcel in found if parcel.kept.offset == 2))
    assert taken(places) is first
