"""Which half messages end together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.storage.state.state import JoinedTransactions


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_members_are_known_by_the_first_and_it_by_them() -> None:
    joined = JoinedTransactions()
    joined.join(name(2) + name(1) + name(3) + name(1) + name(9) + name(8))
    assert [joined.first_of(name(n)) for n in (1, 2, 3, 9)] == [name(1), name(1), name(1), name(8)]
    assert [*joined.members_of(name(1))] == [name(2), name(3)]
    assert [*joined.members_of(name(2))] == []


def test_one_that_is_still_open_when_its_first_ends_is_not_forgotten() -> None:
    joined = JoinedTransactions()
    joined.join(name(2) + name(1) + name(3) + name(1))
    joined.ended([name(1)], {name(3)})
    assert joined.first_of(name(2)) == name(2), "it never was stored"
    assert joined.first_of(name(3)) == name(1)
    joined.ended([name(3)], ())
    assert joined.dump() == []


numbers = st.integers(0, 20)


@given(st.lists(st.one_of(st.tuples(numbers, numbers), st.lists(numbers, min_size=1))))
def test_it_is_what_a_plain_dictionary_says(steps: list[tuple[int, int] | list[int]]) -> None:
    joined = JoinedTransactions()
    model: dict[int, int] = {}
    for step in steps:
        if isinstance(step, tuple):
            member, first = step
            joined.join(name(member) + name(first))
            if member != first:
                model.setdefault(member, first)
        else:
            joined.ended(map(name, step), ())
            gone = {*step}
            model = {member: first for member, first in model.items() if not {member, first} & gone}
        assert {(m, f) for m, f in joined.dump()} == {(name(m), name(f)) for m, f in model.items()}
        for first in range(21):
            assert {*joined.members_of(name(first))} == {name(m) for m, f in model.items() if f == first}
    copy = JoinedTransactions()
    copy.load(joined.dump())
    assert copy.dump() == joined.dump()
