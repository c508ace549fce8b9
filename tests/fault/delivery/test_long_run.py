"""All delivery features at once, kill -9 in between, and one checker that knows what must be true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.databases import DatabaseServers
from tests.fault.delivery import plan
from tests.fault.delivery.checker import check
from tests.fault.delivery.ledger import Ledger, lacks, report
from tests.fault.delivery.long_run import Life
from tests.fault.delivery.site import ClusterSite, LoneSite, Site
from tests.sampling import SEED, sample_size

ROUNDS = sample_size(share=6, whole=60)
LIVES = sample_size(share=1, whole=8)
CLUSTER_ROUNDS = sample_size(share=3, whole=40)
CLUSTER_LIVES = sample_size(share=1, whole=3)
CALM_S = sample_size(share=3, whole=6)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(LIVES))
def test_all_delivery_features_hold_while_processes_are_killed(tmp_path: Path, number: int) -> None:
    check_life(tmp_path, f"{SEED} delivery {number}", LoneSite(tmp_path / "data"), ROUNDS)


@pytest.mark.sampled
@pytest.mark.parametrize("number", range(CLUSTER_LIVES))
def test_all_delivery_features_hold_over_a_cluster(
    tmp_path: Path, number: int, database_servers: DatabaseServers
) -> None:
    """Three shards of two: leaders, followers and whole shards are killed, stopped, frozen, and slots come and go."""
    server = database_servers.get("postgresql")
    server.empty()
    site = ClusterSite(tmp_path / "cluster", server.url)
    check_life(tmp_path, f"{SEED} cluster {number}", site, CLUSTER_ROUNDS, is_replicated=True)


def check_life(folder: Path, seed: str, site: Site, rounds: int, *, is_replicated: bool = False) -> None:
    with Life(folder, seed, site) as life:
        try:
            life.trouble(rounds)
            life.calm(CALM_S)
            letters = life.settle()
        except BaseException as error:
            error.add_note(f"DMQ_SEED={SEED}, {seed}, last: {life.done[-8:]}")
            raise
    ledger = Ledger(life.events(), letters, is_replicated=is_replicated)
    try:
        check(ledger)
        assert not lacks(ledger), f"of this the run says nothing: {lacks(ledger)}"
    except AssertionError as error:
        error.add_note(f"DMQ_SEED={SEED}, {seed}, {life.done}\n{report(ledger)}\n{changes_of_leaders(folder)}")
        raise
    print(f"DMQ_SEED={SEED}, {seed}, {site.kills} kills of brokers:", report(ledger))


def changes_of_leaders(folder: Path) -> str:
    """What members logged of it: a busy machine brings one about that nobody wanted, and that nobody noted."""
    lines = [line for path in folder.glob("cluster/*.log") for line in path.read_text().splitlines()]
    return "\n".join(sorted(line for line in lines if " elected " in line or " ceased to lead " in line))


# --- the checker itself -----------------------------------------------------------------------------------------------

Events = dict[str, list[dict[str, Any]]]


def story() -> Events:
    """Two messages of one business id that everybody handled well; the second was due a second after it was sent."""
    names = [("stream", number) for number in range(100) if all(is_quiet(group, number) for group in plan.GROUPS)][:2]
    events: Events = {"life": [], "producer-0-1": []}
    for at, name in enumerate(names):
        facts = {"topic": plan.TOPIC, "business_id": "b", "durability": "flushed", "due": 1000.0 + at}
        id = f"id-{at}"
        events["producer-0-1"] += [
            {"event": "try", "at": 10.0 + at, "name": name, **facts},
            {"event": "ok", "at": 10.5 + at, "name": name, "id": id, "place": (0, at)},
        ]
        for group in plan.GROUPS.values():
            for member in range(group.members if group.name == "all" else 1):
                if group.topic == plan.TOPIC and group.name != "picky":
                    got = {
                        "event": "got", "at": 20.0 + at, "number": at, "group": group.name, "name": name, "id": id,
                        "member": f"{group.name}-{member}", "is_whole": True, "attempt": 1, "place": (0, at),
                        "said": (None, None, "b", 4), "stored": 1000.0 + at, "topic": plan.TOPIC,
                    }  # fmt: skip
                    end = {"event": "end", "at": 20.1 + at, "number": at, "word": "ack"}
                    events.setdefault(f"{group.name}-{member}-1", []).extend([got, end])
    return events


def is_quiet(group: str, number: int) -> bool:
    return plan.fate_of(group, ("stream", number)) == "done"


def lose(events: Events) -> None:
    del events["pull-0-1"][2:]


def double(events: Events) -> None:
    events["pull-0-1"] += [{**event, "at": 60.0, "number": 9} for event in events["pull-0-1"][:2]]


def store_twice(events: Events) -> None:
    events["pull-0-1"][0]["place"] = (1, 7)


def change(events: Events) -> None:
    events["all-1-1"][2]["is_whole"] = False


def be_early(events: Events) -> None:
    events["push-0-1"][2]["stored"] = 1000.9


def swap(events: Events) -> None:
    events["ledger-0-1"][1]["at"] = 30.0


def skip_attempts(events: Events) -> None:
    events["push-0-1"][0]["attempt"] = 3


def cancel(events: Events) -> None:
    events["producer-0-1"].append({"event": "cancelled", "at": 12.0, "name": events["producer-0-1"][0]["name"]})


def test_the_checker_finds_nothing_wrong_where_nothing_is() -> None:
    check(Ledger(story(), []))


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lose, "arrivals: .* is lost for pull"),
        (double, "again: .* for no reason"),
        (store_twice, "places: .* stored twice"),
        (change, "contents: "),
        (be_early, "early: .* before its time"),
        (swap, "order: .* was done after"),
        (skip_attempts, "attempts: .* as attempt 3"),
        (cancel, "unseen: .* was cancelled, and came"),
    ],
)
def test_the_checker_finds_what_is_wrong(spoil: Callable[[Events], None], what: str) -> None:
    events = story()
    spoil(events)
    with pytest.raises(AssertionError, match=what):
        check(Ledger(events, []))


def test_a_run_in_which_things_never_happened_says_so() -> None:
    missing = lacks(Ledger(story(), []))
    assert {"sending delayed", "handling by urgent", "a handler's reject", "a broker's kill"} <= {*missing}
    assert "handling by push" not in missing


def test_what_a_kill_explains_is_not_wrong() -> None:
    events = story()
    double(events)
    events["life"].append({"event": "break", "at": 20.6, "kind": "kill", "who": "*", "since": 20.05})
    check(Ledger(events, []))
