"""Where two journals part, against journals that are written out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.shard.divergence import common_end
from dmq.storage.state.state import ROWS_MAX, EpochRow, EpochTable


def rows(*spans: tuple[int, int, int]) -> list[EpochRow]:
    return [EpochRow(*span) for span in spans]


def test_a_follower_that_is_behind_has_all_it_has_in_common() -> None:
    leader = rows((1, 7, 0), (2, 8, 100))
    assert common_end(leader, 500, rows((1, 7, 0)), 60) == 60
    assert common_end(leader, 500, rows((1, 7, 0)), 100) == 100


def test_a_deposed_leader_wrote_on_in_its_own_epoch() -> None:
    assert common_end(rows((1, 7, 0), (2, 8, 100)), 500, rows((1, 7, 0)), 240) == 100


def test_a_lost_election_left_an_epoch_that_nobody_shares() -> None:
    assert common_end(rows((1, 7, 0), (3, 8, 100)), 500, rows((1, 7, 0), (2, 9, 80)), 300) == 80


def test_the_same_number_of_another_leader_is_another_epoch() -> None:
    assert common_end(rows((1, 7, 0), (2, 8, 100)), 500, rows((1, 7, 0), (2, 9, 100)), 300) == 100


def test_nothing_shared_is_told() -> None:
    assert common_end(rows((5, 7, 900)), 1000, rows((1, 7, 0)), 800) is None
    assert common_end([], 0, rows((1, 7, 0)), 800) is None


# A journal is a list of bytes, each with the epoch that wrote it; histories fork at any place.
@st.composite
def forked(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two journals as lists of epochs, byte by byte: a shared part, then epochs that only one of them has."""
    shared = sorted(draw(st.lists(st.integers(1, 4), max_size=30)))
    last = shared[-1] if shared else 0
    longer = sorted(draw(st.lists(st.integers(max(last, 1), 6), max_size=20)))
    # The other one follows the same leader for a while, or goes on with epochs of its own.
    same = longer[: draw(st.integers(0, len(longer)))]
    after = max(same[-1] if same else last, 0)
    own = sorted(draw(st.lists(st.integers(after + 10, after + 12), max_size=20)))
    return shared + longer, shared + same + own


def table(journal: list[int]) -> EpochTable:
    found = EpochTable()
    for at, epoch in enumerate(journal):
        found.began(EpochRow(epoch, epoch * 3, at))
    return found


@given(forked())
def test_what_is_common_is_the_longest_equal_part_but_for_what_no_epoch_tells(
    pair: tuple[list[int], list[int]],
) -> None:
    mine, theirs = pair
    equal = next(
        (at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
    )
    found = common_end([*table(mine)], len(mine), [*table(theirs)], len(theirs))
    assert found == common_end([*table(theirs)], len(theirs), [*table(mine)], len(mine))
    assert (found or 0) <= equal
    assert (found or 0) == equal


def test_a_table_keeps_its_newest_rows() -> None:
    found = EpochTable()
    for number in range(1, 3 * ROWS_MAX):
        found.began(EpochRow(number, 1, number * 10))
        found.began(EpochRow(number, 2, number * 10))
        found.began(EpochRow(number - 1, 2, number * 10 + 1))
    assert [row.epoch for row in found] == [*range(2 * ROWS_MAX, 3 * ROWS_MAX)]
    assert {row.leader for row in found} == {1}
    found.cut(2 * ROWS_MAX * 10 + 1)
    assert [row.epoch for row in found] == [2 * ROWS_MAX]
    assert EpochTable(found.dump()).last == found.last
