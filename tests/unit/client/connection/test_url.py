"""Addresses, as users write them."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from dmq.client.connection.url import Address, OneBroker, check_url, names_registry, parse_url
from dmq.errors import InvalidSettings, NotConnected


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


def test_a_registry_is_told_from_brokers_and_checked_without_asking_it() -> None:
    assert names_registry("ZK://h1:2181,h2:2181/dmq")
    assert not names_registry("dmq://zk:1")
    check_url("zk://h1:2181,h2:2181/dmq")
    check_url("dmq://a:1")
    for url in ("zk://", "zk://h1", "zk://h1:x/dmq", "dmq://"):
        with pytest.raises(InvalidSettings):
            check_url(url)


def test_a_registry_needs_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "kazoo" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    with pytest.raises(InvalidSettings, match=r"pip install 'dmq\[zookeeper\]'"):
        OneBroker.at("zk://h1/dmq")


def test_a_registry_that_is_away_leaves_what_was_known() -> None:
    url = "zk://user:secret@127.0.0.1:1/dmq?session=1s"
    assert OneBroker([Address("a", 1)], url).look_up() == (("a", 1),)
    with pytest.raises(NotConnected) as caught:
        OneBroker.at(url)
    assert "secret" not in caught.value.message


def test_an_address_prints_as_it_is_written() -> None:
    assert str(Address("a", 1)) == "a:1"
    assert str(Address("::1", 1)) == "[::1]:1"
