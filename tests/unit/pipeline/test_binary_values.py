"""Keys and headers of any kind, as texts and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dmq.pipeline.binary_values import (
    HEADERS_MARK,
    KEY_MARK,
    Pair,
    as_key,
    as_properties,
    binary_key,
    given_headers,
)


@given(st.binary(max_size=40))
def test_a_key_comes_back(raw: bytes) -> None:
    text, is_binary = as_key(raw)
    assert (binary_key(text.encode()) if is_binary else text.encode()) == raw


names = st.sampled_from(["a", "b", "trace"])
values = st.one_of(st.binary(max_size=9), st.text(max_size=9).map(str.encode))


@given(st.lists(st.tuples(names, values), max_size=5))
def test_headers_come_back(pairs: list[Pair]) -> None:
    properties = as_properties(pairs)
    stored: list[Pair] = [(name, text.encode()) for name, text in properties.items()]
    assert given_headers(stored) == (pairs or None)
    assert given_headers([*stored, (KEY_MARK, b"base64")]) == (pairs or None)


def test_plain_headers_are_plain_properties() -> None:
    assert as_properties([("a", b"1"), ("b", None)]) == {"a": "1", "b": ""}
    twice = as_properties([("a", b"1"), ("a", b"2"), ("c", b"\xff")])
    assert twice.keys() == {"a", HEADERS_MARK}
    assert twice["a"] == "2"


def test_what_another_producer_called_so_is_left_as_it_is() -> None:
    assert given_headers([(HEADERS_MARK, b"hello")]) == [(HEADERS_MARK, b"hello")]
    assert binary_key(b"base64:?") == b"base64:?"
