"""Ids and names: the text form of an id sorts like its bytes, and a name fits where it has to go."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dmq.errors import InvalidName
from dmq.model import (
    NAME_BYTES_MAX,
    MessageId,
    broadcast_name,
    check_name,
    parse_broadcast_name,
    retry_topic_name,
    retry_topic_parts,
)

u64 = st.integers(0, 2**64 - 1)
ids = st.builds(MessageId, u64, u64)
names = st.text(st.characters(categories=("L", "N"), include_characters="._-"), min_size=1, max_size=40)


def test_an_id_has_a_fixed_form_that_never_changes() -> None:
    message_id = MessageId(1, 2)
    assert message_id.to_bytes() == bytes.fromhex("0000000000000001 0000000000000002")
    assert str(message_id) == "00000000000020000000000008"
    assert str(MessageId(2**64 - 1, 2**64 - 1)) == "v" * 25 + "s"


@given(ids)
def test_an_id_survives_text_and_bytes(message_id: MessageId) -> None:
    assert MessageId.from_bytes(message_id.to_bytes()) == message_id
    assert MessageId.parse(str(message_id)) == message_id
    assert re.fullmatch("[0-9a-v]{26}", str(message_id))


@given(ids, ids)
@example(MessageId(0, 2**63), MessageId(1, 0))
def test_ids_their_bytes_and_their_texts_sort_alike(a: MessageId, b: MessageId) -> None:
    assert (a < b) == (a.to_bytes() < b.to_bytes()) == (str(a) < str(b))


@pytest.mark.parametrize(
    "text", ["", "0" * 25, "0" * 27, "0" * 32, "w" + "0" * 25, "0" * 24 + "==", "é" * 26, "0" * 10**5]
)
def test_a_text_that_is_no_id_says_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a message id: 26 characters 0-9 a-v are expected"):
        MessageId.parse(text)


@given(st.text(max_size=40))
def test_any_text_is_an_id_or_a_value_error(text: str) -> None:
    try:
        message_id = MessageId.parse(text)
    except ValueError:
        return
    assert MessageId.from_bytes(message_id.to_bytes()) == message_id


@pytest.mark.parametrize("raw", [b"", b"x" * 15, b"x" * 17])
def test_bytes_of_another_length_are_no_id(raw: bytes) -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        MessageId.from_bytes(raw)


@pytest.mark.parametrize("name", ["orders", "a", "a.b-c_d", "订单", "x" * 255, "é" * 127])
def test_a_good_name_comes_back(name: str) -> None:
    assert check_name(name, "topic") == name


@pytest.mark.parametrize("name", ["", " ", "a b", "a/b", "a\n", "a\0", "%RETRY%g", "a%", "\ud800"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match=r"topic name .* is not allowed"):
        check_name(name, "topic")


@pytest.mark.parametrize("name", ["x" * 256, "é" * 128, "订" * 86])
def test_a_name_is_measured_in_bytes(name: str) -> None:
    with pytest.raises(InvalidName, match=f"topic name is too long: at most {NAME_BYTES_MAX} bytes"):
        check_name(name, "topic")


def test_a_groups_name_leaves_room_for_the_topics_named_after_it() -> None:
    assert check_name("x" * 230, "group") == "x" * 230
    with pytest.raises(InvalidName, match="group name is too long: at most 230 bytes"):
        check_name("x" * 231, "group")


def test_our_own_names_need_to_be_asked_for() -> None:
    assert check_name("%RETRY%billing", "topic", system=True) == "%RETRY%billing"
    with pytest.raises(InvalidName):
        check_name("%retry%billing", "topic", system=True)


@given(st.text(max_size=300))
def test_a_name_that_passed_fits_its_length_byte_and_a_file_name(name: str) -> None:
    try:
        check_name(name, "topic")
    except InvalidName:
        return
    assert 1 <= len(name.encode()) <= 255
    assert not set(name) & {"/", "\0", "\n", "%"}


@given(names, st.integers(0, 1 << 32))
def test_a_retry_topic_tells_group_and_topic(group: str, topic_id: int) -> None:
    assert retry_topic_parts(retry_topic_name(group, topic_id)) == (group, topic_id)


@pytest.mark.parametrize("name", ["orders", "%RETRY%", "%RETRY%g", "%RETRY%g%x", "%RETRY%%5", "%DLQ%g%5"])
def test_other_names_are_no_retry_topics(name: str) -> None:
    assert retry_topic_parts(name) is None


def test_each_member_of_a_broadcast_group_has_positions_under_its_own_name() -> None:
    name = broadcast_name("billing", "shop-1")
    assert check_name(name, "group", system=True) == name
    assert parse_broadcast_name(name) == ("billing", "shop-1")
    assert parse_broadcast_name("billing") is None
    assert parse_broadcast_name("%BROADCAST%billing") is None
