"""Every status has one exception class, and both ways lead back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq import errors
from dmq.errors import Busy, DMQError, ForeignFile, ServerError
from dmq.protocol import CLASSES, ErrorHeader, Status, error_from_status, status_of
from dmq.protocol.header import encode_header
from dmq.protocol.status import ERROR_BYTES_MAX

# Errors that never cross a connection: found on the client's side of it, or before a broker listens.
LOCAL = {
    "ArchiveConflict",
    "CannotListen",
    "DMQError",
    "DirectoryInUse",
    "Diverged",
    "ForeignFile",
    "NoPermission",
    "NotConnected",
    "OutOfRetries",
    "PortTaken",
    "RegistryDown",
    "StoreClosed",
    "TimedOut",
    "WrongFormat",
}


def test_every_status_has_exactly_one_class() -> None:
    assert set(CLASSES) == set(Status) - {Status.OK}
    assert len(set(CLASSES.values())) == len(CLASSES)
    assert all(cls.code == status.name for status, cls in CLASSES.items())


def test_every_class_has_a_status_or_never_crosses_a_connection() -> None:
    assert {cls.__name__ for cls in CLASSES.values()} | LOCAL == set(errors.__all__)


def test_a_group_of_numbers_tells_whether_trying_again_can_help() -> None:
    for status, cls in CLASSES.items():
        assert cls.retriable == (status & 0xFF00 == 0x0300), status.name
        assert status & 0xFF00 in (0x0100, 0x0200, 0x0300, 0x0400)


def test_what_must_not_be_sent_again_is_not_retriable() -> None:
    for status in (Status.CONSUME_TIMEOUT, Status.DEAD_LETTERED, Status.LEASE_LOST, Status.INVALID_MESSAGE):
        assert not CLASSES[status].retriable
    for status in (Status.BUSY, Status.RATE_LIMITED, Status.BROKER_STOPPING, Status.SERVER_ERROR):
        assert CLASSES[status].retriable


@pytest.mark.parametrize("status", CLASSES, ids=lambda status: status.name)
def test_an_error_comes_back_as_it_was(status: Status) -> None:
    error = CLASSES[status]("what happened: what to do", queue=3, names=["a"], retry_after_ms=20)
    answered, header = status_of(error)
    back = error_from_status(answered, encode_header(header))
    assert answered is status
    assert (type(back), back.message, back.detail) == (type(error), error.message, error.detail)
    assert back.retry_after == 0.02


def test_a_class_without_a_status_is_answered_as_its_base() -> None:
    assert status_of(ForeignFile("x"))[0] is Status.STORAGE_ERROR
    assert status_of(DMQError("x"))[0] is Status.SERVER_ERROR


def test_the_text_of_an_unexpected_error_stays_inside() -> None:
    status, header = status_of(RuntimeError("password=hunter2"))
    assert status is Status.SERVER_ERROR
    assert "hunter2" not in repr(header)


def test_a_status_newer_than_we_are_is_still_an_error() -> None:
    back = error_from_status(0x03FF, ErrorHeader("later", {}, 9))
    assert (type(back), back.detail) == (ServerError, {"status": 0x03FF, "retry_after_ms": 9})
    back = error_from_status(0x02FF, ErrorHeader("no", {}))
    assert (type(back), back.retriable, back.detail) == (DMQError, False, {"status": 0x02FF})


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x91" * 100_000, b"\x93\x01\x02\x03"])
def test_an_error_that_cannot_be_read_is_still_an_error(raw: bytes) -> None:
    back = error_from_status(Status.BUSY, raw)
    assert isinstance(back, Busy)
    assert "cannot be read" in back.message


def test_an_error_without_a_word_says_which_it_was() -> None:
    assert "BUSY" in error_from_status(Status.BUSY, b"\x90").message
    assert "0x7777" in error_from_status(0x7777, b"\x90").message


def test_names_in_a_detail_cannot_get_in_the_way() -> None:
    back = error_from_status(Status.BUSY, ErrorHeader("x", {"message": "y", "self": 1}))
    assert (back.message, back.detail) == ("x", {"message": "y", "self": 1})


def endless() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "value", [Path("/x"), 1 << 80, -(1 << 70), endless(), "x" * 100_000, {1: {2: object()}}, {3}, "\ud800", b"\xff"]
)
def test_an_error_gets_through_whatever_its_detail_holds(value: Any) -> None:
    status, header = status_of(Busy("wait", fact=value, retry_after_ms=1.5))
    raw = encode_header(header)
    assert len(raw) <= ERROR_BYTES_MAX
    back = error_from_status(status, raw)
    assert (type(back), back.message, back.retry_after) == (Busy, "wait", 0.001)


@given(st.text(st.characters(exclude_categories=[]), max_size=6000))
def test_an_error_gets_through_whatever_its_message_is(message: str) -> None:
    status, header = status_of(Busy(message))
    assert isinstance(error_from_status(status, encode_header(header)), Busy)
