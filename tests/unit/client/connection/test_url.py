"""Addresses, as users write them."""

from __future__ import annotations

import pytest

from dmq.client.connection.url import Address, parse_url
from dmq.errors import InvalidSettings, Unsupported


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("dmq://127.0.0.1:9611", [("127.0.0.1", 9611)]),
        ("dmq://broker", [("broker", 9611)]),
        ("DMQ://broker:1/", [("broker", 1)]),
        ("dmq://a:1,b:2, c", [("a", 1), ("b", 2), ("c", 9611)]),
        ("dmq://a:1,a:1", [("a", 1)]),
        ("dmq://[::1]:9000,[fe80::1]", [("::1", 9000), ("fe80::1", 9611)]),
    ],
)
def test_urls_name_addresses_in_their_order(url: str, addresses: list[tuple[str, int]]) -> None:
    assert parse_url(url) == [Address(*address) for address in addresses]


@pytest.mark.parametrize(
    "url",
    [
        "", "127.0.0.1:9611", "http://a:1", "dmq://", "dmq://a:", "dmq://a:0", "dmq://a:65536", "dmq://a:x",
        "dmq://:9611", "dmq://a:1,,b:2", "dmq://::1", "dmq://[::1", "dmq://[::1]x", "dmq://a b:1", "dmq://a:1/path",
        "dmq://user@a:1", "dmq://a:²",
    ],
)  # fmt: skip
def test_a_wrong_url_is_told_in_one_sentence(url: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        parse_url(url)
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 250


def test_a_registry_is_not_asked_yet() -> None:
    with pytest.raises(Unsupported, match="ZooKeeper"):
        parse_url("zk://h1:2181,h2:2181/dmq")


def test_an_address_prints_as_it_is_written() -> None:
    assert str(Address("a", 1)) == "a:1"
    assert str(Address("::1", 1)) == "[::1]:1"
