"""What the URL of a registry in ZooKeeper says."""

from __future__ import annotations

import pytest

from dmq.errors import InvalidSettings
from dmq.net.address import ServerAddress
from dmq.registry.url import check_registry_url
from dmq.registry.zookeeper.ensemble import parse_ensemble, shown_url


def test_a_url_names_servers_a_root_and_how_long_a_session_lives() -> None:
    found = parse_ensemble("zk://h1:2181,h2,[::1]:2182,h2/prod/dmq/?session=2500ms")
    servers = (ServerAddress("h1", 2181), ServerAddress("h2", 2181), ServerAddress("::1", 2182))
    assert found == (servers, "/prod/dmq", 2.5, None)
    assert check_registry_url("zk://h1/dmq") == "/dmq"
    assert check_registry_url("dmq://h1") == "/dmq"


def test_a_url_names_a_user_and_a_password() -> None:
    found = parse_ensemble("zk://broker:s%40fe%3A%2F:x@h1,h2/dmq")
    assert found.credentials == "broker:s@fe:/:x"
    assert [address.host for address in found.addresses] == ["h1", "h2"]


@pytest.mark.parametrize(
    "url",
    [
        "zk://",
        "zk://h1",
        "zk://h1/",
        "zk:///dmq",
        "zk://h1:0/dmq",
        "zk://h1:x/dmq",
        "zk://h1/a//b",
        "zk://h1/dmq?session=1h",
        "zk://h1/dmq?session=",
        "zk://h1/dmq?timeout=4s",
        "zookeeper://h1/dmq",
        "zk://user@h1/dmq",
        "zk://user:@h1/dmq",
        "zk://:secret@h1/dmq",
        "zk://a%3Ab:secret@h1/dmq",
        "zk://user:sec@ret@h1/dmq",
        "zk://user:secret@h1:x/dmq",
        "zk://user:secret@/dmq",
        "zk://user:secret@h1",
        "zk://user:secret@h1/dmq?secret=x",
    ],
)
def test_a_url_that_can_never_work_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidSettings) as caught:
        check_registry_url(url)
    assert ":secret" not in str(caught.value)
    assert ":secret" not in str(caught.value.detail)


def test_a_url_is_shown_without_its_password() -> None:
    assert shown_url("zk://user:se@cret@h1,h2/dmq?session=2s") == "zk://user:***@h1,h2/dmq?session=2s"
    assert shown_url("zk://h1/dmq") == "zk://h1/dmq"
    assert shown_url("dmq://h1") == "dmq://h1"
