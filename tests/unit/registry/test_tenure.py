"""Until when a session surely lives."""

from __future__ import annotations

from dmq.registry.registry import NO_DEADLINE, Check, Create, Delete, Put
from dmq.registry.tenure import Tenure

OURS = Create("/ours", b"", ephemeral=True)


def begun() -> Tenure:
    tenure = Tenure(6.0)
    tenure.begin(7)
    return tenure


def test_only_a_write_to_our_ephemeral_entry_counts() -> None:
    tenure = begun()
    tenure.answered([Check("/a", 0), Create("/a", b""), Put("/a", b"", None), Put("/b", b"", 3)], 7, 100.0)
    assert tenure.deadline == NO_DEADLINE
    tenure.answered([OURS], 7, 101.0)
    assert tenure.deadline == 104.0
    tenure.answered([Put("/a", b"", None)], 7, 102.0)
    assert tenure.deadline == 104.0
    tenure.answered([Check("/a", 0), Put("/ours", b"", 0)], 7, 103.0)
    assert tenure.deadline == 106.0


def test_an_answer_that_comes_late_moves_nothing_back() -> None:
    tenure = begun()
    tenure.answered([OURS], 7, 101.0)
    tenure.answered([Put("/ours", b"", None)], 7, 105.0)
    tenure.answered([Put("/ours", b"", None)], 7, 103.0)
    assert tenure.deadline == 108.0


def test_an_entry_that_was_deleted_is_not_ours() -> None:
    tenure = begun()
    tenure.answered([OURS], 7, 101.0)
    tenure.answered([Delete("/ours", None)], 7, 102.0)
    tenure.answered([Create("/ours", b""), Put("/ours", b"", None)], 7, 103.0)
    assert tenure.deadline == 104.0


def test_another_session_has_no_deadline_and_takes_none_of_the_one_before() -> None:
    tenure = begun()
    tenure.answered([OURS], 7, 101.0)
    tenure.begin(7)
    assert tenure.deadline == 104.0, "the same session goes on"
    tenure.begin(8)
    assert tenure.deadline == NO_DEADLINE
    tenure.answered([OURS], 7, 102.0)
    tenure.answered([Put("/ours", b"", None)], 8, 103.0)
    assert tenure.deadline == NO_DEADLINE
    tenure.answered([OURS], 8, 104.0)
    tenure.end()
    assert (tenure.session, tenure.deadline) == (0, NO_DEADLINE)


def test_a_session_that_is_granted_anew_for_a_shorter_time_is_believed_in_for_a_shorter_time() -> None:
    tenure = Tenure(6.0)
    tenure.begin(1)
    tenure.answered([Create("/e", b"", ephemeral=True)], 1, sent_at=10.0)
    assert tenure.deadline == 13.0
    tenure.grant(4.0)
    assert tenure.deadline == 12.0
    tenure.grant(8.0)
    assert tenure.deadline == 12.0, "what was sent before was answered by the old one"
    tenure.answered([Put("/e", b"", 0)], 1, sent_at=11.0)
    assert tenure.deadline == 15.0
