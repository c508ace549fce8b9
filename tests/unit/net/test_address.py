"""Addresses as people write them."""

from __future__ import annotations

import pytest

from dmq.errors import InvalidSettings
from dmq.net.address import ServerAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("b1:9613", ServerAddress("b1", 9613)),
        (" 127.0.0.1:1 ", ServerAddress("127.0.0.1", 1)),
        ("[::1]:9613", ServerAddress("::1", 9613)),
        ("b1.example.com:65535", ServerAddress("b1.example.com", 65_535)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: ServerAddress) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "b1", ":9613", "b1:", "b1:0", "b1:65536", "b1:x", "::1:9613", "[::1]", "[]:1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidSettings, match=r"write host:port"):
        parse_address(text)


@pytest.mark.parametrize(("text", "host"), [("b1", "b1"), ("[::1]", "::1")])
def test_a_port_may_be_left_out_where_there_is_a_usual_one(text: str, host: str) -> None:
    assert parse_address(text, 9610) == ServerAddress(host, 9610)
