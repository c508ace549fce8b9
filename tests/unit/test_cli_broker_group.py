"""The processes of `dmq broker --shards`: which member of which shard each is."""

from __future__ import annotations

import pytest

from dmq.cli.process.broker_group import GroupOptions
from dmq.errors import InvalidSettings
from dmq.settings import BrokerSettings, Settings, ShardSettings


def options(**shard: object) -> GroupOptions:
    settings = Settings(
        broker=BrokerSettings(name="left", data="data"),
        shard=ShardSettings(registry_url="dmq://127.0.0.1:9610", name="s", **shard),  # type: ignore[arg-type]
    )
    return GroupOptions(settings, 3, None, ("--insecure",))


def test_each_process_has_a_name_a_shard_a_directory_and_ports_of_its_own() -> None:
    assert options().member(2, 9631) == (
        "broker", "--insecure", "--name=left-3", "--shard=s-3", "--data=data/s-3", "--port=9631", "--metrics-port=9692",
        "--telnet-port=9632", "--replication-port=9633",
    )  # fmt: skip


def test_advertised_ports_go_along() -> None:
    command = options(address="mq1.example:9611", replication_address="[::1]:9613").member(1, 9621)
    assert "--set=shard.address=mq1.example:9621" in command
    assert "--set=shard.replication_address=[::1]:9623" in command


def test_without_a_registry_there_is_nothing_to_be_a_member_of() -> None:
    with pytest.raises(InvalidSettings, match="--registry and --shard"):
        GroupOptions(Settings(), 2)
