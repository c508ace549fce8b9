"""The simulation is tested: each rule of a shard, taken away, is noticed; and nothing is noticed while it holds."""

from __future__ import annotations

import re

import pytest

from tests.fault.shard.cluster import Cluster, Violation
from tests.fault.shard.rules import RULES, Storm
from tests.fault.shard.scenario import SCENARIOS, Scenario, must_lead, roles, run
from tests.fault.shard.simulate import simulate

SEEDS_MAX = 20
MISTAKE = re.compile(r"\b(Type|Attribute|Name|Assertion)Error\b")


def check_rules(notices: Scenario | Storm) -> None:
    if isinstance(notices, Storm):
        simulate(notices.seed, notices.only)
    else:
        run(notices)


def check_several(notices: Scenario | Storm) -> None:
    """Of a storm, some seeds: which of them brings the moment about changes with whatever a member does."""
    for number in range(SEEDS_MAX if isinstance(notices, Storm) else 1):
        check_rules(notices._replace(seed=notices.seed + number) if isinstance(notices, Storm) else notices)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_gone_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[name].removal(monkeypatch)
    with pytest.raises(Violation) as noticed:
        check_several(RULES[name].notices)
    # What is noticed is the shard without its rule, not a removal that does not fit the function it replaces any more.
    assert not MISTAKE.search(noticed.value.sentences), noticed.value.sentences


STORMS = {rule.notices for rule in RULES.values() if isinstance(rule.notices, Storm)}


@pytest.mark.parametrize(
    "notices", [*SCENARIOS, *sorted(STORMS)], ids=lambda notices: getattr(notices, "__name__", str(notices))
)
def test_nothing_is_noticed_while_all_rules_hold(notices: Scenario | Storm) -> None:
    check_rules(notices)


def test_a_leader_that_stood_still_tells_that_another_one_leads() -> None:
    def freeze(cluster: Cluster) -> None:
        leader, one, other = roles(cluster)
        leader.pause()
        must_lead(cluster, "led by another one while a leader stands still", one, other)
        cluster.pass_time(3 * cluster.member_settings.lag_seconds)
        leader.resume()
        cluster.pass_time(3)

    ceased = [what for _, _, what in run(freeze).history if what.startswith("ceased to lead")]
    whys = [what.partition("why=")[2] for what in ceased]
    assert [re.fullmatch(r"'epoch 2 was won by [a-z]\d*'", why) is not None for why in whys] == [True], whys
