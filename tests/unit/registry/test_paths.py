"""Where things stand in the registry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmq.errors import InvalidName
from dmq.registry.paths import Paths, name_of
from dmq.registry.registry import check_path, parent_of


def test_the_paths_of_the_design() -> None:
    paths = Paths()
    assert paths.cluster == "/dmq/cluster"
    assert paths.node("b1") == "/dmq/node/b1"
    assert paths.shard("s1") == "/dmq/shard/s1"
    assert paths.leader("s1") == "/dmq/shard/s1/leader"
    assert paths.topic("orders") == "/dmq/topic/orders"
    assert paths.consumer("orders", "billing") == "/dmq/topic/orders/billing"
    assert paths.limit("shop") == "/dmq/limit/shop"
    assert paths.key_value("app", "key") == "/dmq/kv/app/key"
    assert parent_of(paths.key_value("app", "key")) == paths.namespace("app")
    assert paths.change == "/dmq/change"


def test_folders_come_before_what_is_in_them() -> None:
    made = [create.path for create in Paths("/prod/dmq").folders()]
    assert made[:3] == ["/prod", "/prod/dmq", "/prod/dmq/node"]
    assert all(parent_of(path) in ["/", *made[:index]] for index, path in enumerate(made))


@pytest.mark.parametrize("root", ["/", "dmq", "/dmq/", ""])
def test_a_root_is_a_path(root: str) -> None:
    with pytest.raises(InvalidName):
        Paths(root)


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40))
def test_any_key_is_one_part_of_a_path(key: str) -> None:
    path = Paths().key_value("space", key)
    assert check_path(path) == path
    assert parent_of(path) == "/dmq/kv/space"
    assert name_of(path) == key


def test_different_keys_have_different_paths() -> None:
    keys = ["a/b", "a%2Fb", "a b", ".", "..", "%2E", "é", "%C3%A9", "a\nb"]
    assert len({Paths().key_value("s", key) for key in keys}) == len(keys)


def test_a_key_that_is_too_long_is_refused() -> None:
    with pytest.raises(InvalidName):
        Paths().key_value("space", "漢" * 255)
    with pytest.raises(InvalidName):
        Paths().key_value("space", "")
