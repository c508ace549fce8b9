"""Records that come damaged over a link without a checksum: no user sees them, and the broker is told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pytest

from dmq.client.consumer.delivery import packed_flags
from dmq.model import Message
from dmq.protocol.consume import Lease, Outcome
from dmq.records.layout import BODY_AT, COMPRESSED, FLAGS_AT, ORDERED, RECORD_BYTES_MIN
from tests.unit.client.deliveries import bodies, book, core, frame, said, taken


def spoilt(number: int, names: str, bad: str, **options: Any) -> tuple[Sequence[Lease], bytes]:
    """A frame in which some bodies changed on the way."""
    leases, body = frame(number, bodies(*names), **options)
    raw = bytearray(body)
    size = (len(raw) - 4 * len(names)) // len(names)
    for name in bad:
        raw[4 * len(names) + names.index(name) * size + BODY_AT] ^= 1
    return leases, bytes(raw)


@pytest.mark.parametrize("names", ["abcde", "abcdefghijklmnopqrstuvwxyz"])
def test_a_damaged_message_goes_back_and_the_others_are_handed_out(names: str) -> None:
    made = core()
    made.received(book(made), *spoilt(1, names, "bd"))
    assert taken(made) == [name.encode() for name in names if name not in "bd"]
    (report,) = made.reports(book(made))
    (settlement,) = report.settlements
    assert (settlement.outcome, settlement.ranges) == (Outcome.NACK, [(1, 1), (3, 1)])
    assert settlement.reason.startswith("RECORD_CORRUPT: the body")


def test_one_that_was_pulled_goes_back_as_well() -> None:
    made = core()
    ((delivery, chosen),) = made.pulled(book(made), *spoilt(1, "abc", "a"))
    assert list(chosen) == [1, 2]
    assert said(made.reports(book(made))) == [(1, "NACK", [(0, 1)])]
    assert delivery.left == 2


def test_one_that_comes_damaged_again_and_again_is_rejected() -> None:
    made = core()
    made.received(book(made), *spoilt(1, "a", "a", attempt=7))
    assert said(made.reports(book(made))) == [(1, "NACK", [(0, 1)])]
    made.received(book(made), *spoilt(2, "a", "a", attempt=8))
    assert said(made.reports(book(made))) == [(2, "REJECT", [(0, 1)])]


def test_in_order_what_lies_before_it_is_handled_first_and_what_lies_behind_goes_back() -> None:
    made = core(ordered=True)
    made.received(book(made), *spoilt(1, "abcd", "c"))
    assert taken(made) == [b"a", b"b"]
    assert said(made.reports(book(made))) == [(1, "RELEASE", [(2, 2)])]
    again = core(ordered=True)
    again.received(book(again), *spoilt(1, "cd", "c", first=2))
    assert taken(again) == []
    assert sorted(said(again.reports(book(again)))) == [(1, "NACK", [(2, 1)]), (1, "RELEASE", [(3, 1)])]


@pytest.mark.parametrize("names", ["abc", "abcdefghijklmnopqrstuvwxyz"])
def test_over_a_link_with_a_checksum_bodies_are_looked_at_before_a_handler_gets_them(names: str) -> None:
    made = core()
    book(made).is_vouched = True
    made.received(book(made), *spoilt(1, names, "b"), is_for_handlers=True)
    assert taken(made) == [name.encode() for name in names if name != "b"]
    assert said(made.reports(book(made))) == [(1, "NACK", [(1, 1)])]


def test_over_a_link_with_a_checksum_nothing_is_looked_at_twice() -> None:
    made = core()
    book(made).is_vouched = True
    leases, body = frame(1, [Message(b"a")])
    made.received(book(made), leases, body)
    assert taken(made) == [b"a"]


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("packed", [0, -1, None])
def test_a_compressed_body_is_seen_among_few_and_among_many(count: int, packed: int | None) -> None:
    """Both ways of looking find the same."""
    made = [bytearray(RECORD_BYTES_MIN + number) for number in range(count)]
    for one in made:
        one[FLAGS_AT] = ORDERED
    if packed is not None:
        made[packed][FLAGS_AT] |= COMPRESSED
    buffer, bounds = b"".join(made), [0, *accumulate(map(len, made))]
    flags = packed_flags(buffer, bounds)
    assert flags == packed_flags(buffer, np.array(bounds)) == (0 if packed is None else COMPRESSED)
