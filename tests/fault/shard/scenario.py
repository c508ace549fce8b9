"""Scenarios: courses of events that need one rule of the shard each, where chance rarely brings them about.

Each gets a shard of three that runs, and must leave it as a shard that keeps its word: with the rule taken away, the
checker, or a wait for progress, finds that it did not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dmq.registry.contents import ShardContent, decode_content
from dmq.registry.memory import Fate
from dmq.registry.registry import Create, Operation, Put
from tests.fault.shard.cluster import Cluster
from tests.fault.shard.process import Process

__all__ = ["SCENARIOS", "Scenario", "run"]

Scenario = Callable[[Cluster], None]


# --- steps ------------------------------------------------------------------------------------------------------------


def roles(cluster: Cluster) -> tuple[Process, Process, Process]:
    """The leader and the two others."""
    leader = cluster.leader
    assert leader is not None
    one, other = (process for process in cluster.processes if process is not leader)
    return leader, one, other


def cut(cluster: Cluster, one: Process, other: Process) -> None:
    cluster.network.cut(one.name, other.name)
    cluster.network.cut(other.name, one.name)
    cluster.note("!", f"{one} and {other} do not reach each other")


def mend(cluster: Cluster, one: Process, other: Process) -> None:
    cluster.network.mend(one.name, other.name)
    cluster.network.mend(other.name, one.name)


def quiet(cluster: Cluster) -> None:
    """Producers rest, and all that was written is committed and known to be."""
    cluster.clients.pause_seconds = 1e9
    cluster.await_progress("quiet", lambda: cluster.clients.unanswered == 0)
    cluster.await_progress("level", cluster.is_level)
    cluster.pass_time(1.5)


def in_sync(cluster: Cluster, *processes: Process) -> bool:
    record = cluster.record
    return record is not None and {*record.in_sync} == {cluster.replica_of(process) for process in processes}


def leave(cluster: Cluster, process: Process, leader: Process) -> None:
    """A member is cut off from its leader until it has left the set."""
    cut(cluster, leader, process)
    others = [one for one in cluster.processes if one is not process]
    cluster.await_progress(f"without {process}", lambda: in_sync(cluster, *others))


def must_lead(cluster: Cluster, what: str, *candidates: Process) -> None:
    """One of these leads, and commits, before long."""
    committed = cluster.checker.committed
    cluster.await_progress(what, lambda: cluster.leader in candidates and cluster.checker.committed > committed)


def sets(fate: Fate) -> Callable[[Sequence[Operation]], Fate | None]:
    """The fate of writes of the shard's record."""

    def fate_of(operations: Sequence[Operation]) -> Fate | None:
        return fate if any(isinstance(one, Put) and one.path.endswith("/s") for one in operations) else None

    return fate_of


def stands_alone(cluster: Cluster, process: Process, seconds: float = 30.0) -> None:
    """Only this one runs for a while."""
    process.start()
    cluster.pass_time(seconds)


def power_all(cluster: Cluster) -> None:
    for process in cluster.processes:
        process.wanted = False
        process.crash(power=True)


def loses_session(cluster: Cluster, leader: Process) -> None:
    """The leader serves by promises alone: its session is over."""
    leader.line.loses_requests = leader.line.loses_answers = True
    cluster.note("!", f"{leader} loses its registry")
    cluster.pass_time(2 * cluster.registry.session_seconds)


# --- scenarios --------------------------------------------------------------------------------------------------------


def a_follower_loses_its_leader(cluster: Cluster) -> None:
    """Its promise keeps the leader serving, though nothing else does."""
    leader, one, _ = roles(cluster)
    loses_session(cluster, leader)
    cut(cluster, leader, one)
    for connection in cluster.network.connections:
        if connection.near.host is one.host:
            cluster.network.reset(connection)
    cluster.pass_time(12)


def a_follower_starts_again(cluster: Cluster) -> None:
    """It does not know any more what it promised."""
    leader, one, _ = roles(cluster)
    loses_session(cluster, leader)
    one.crash()
    cut(cluster, leader, one)
    cluster.pass_time(0.1)
    one.start()
    cluster.pass_time(12)


def a_loop_hangs(cluster: Cluster) -> None:
    leader, one, other = roles(cluster)
    leader.wedge()
    must_lead(cluster, "led by another one while a loop hangs", one, other)


def a_flush_hangs(cluster: Cluster) -> None:
    leader, one, other = roles(cluster)
    leader.disk_seconds = (500.0, 500.0)
    must_lead(cluster, "led by another one while a flush hangs", one, other)
    leader.crash()


def a_flush_is_slow_without_a_registry(cluster: Cluster) -> None:
    """Nobody can be elected: who leads goes on when its disk does."""
    leader, _, _ = roles(cluster)
    for process in cluster.processes:
        process.line.loses_requests = process.line.loses_answers = True
    cluster.note("!", "the registry is down")
    cluster.pass_time(2 * cluster.registry.session_seconds)
    leader.disk_seconds = (8.0, 8.0)
    cluster.pass_time(12)
    leader.disk_seconds = (0.0005, 0.006)
    must_lead(cluster, "led on without a registry, after a flush that was slow", leader)
    for process in cluster.processes:
        process.line.mend()


def a_port_is_blocked(cluster: Cluster) -> None:
    leader, one, other = roles(cluster)
    cut(cluster, leader, one)
    cut(cluster, leader, other)
    must_lead(cluster, "led by another one while a port is blocked", one, other)


def a_leader_is_alone(cluster: Cluster) -> None:
    """What it writes is on one disk only."""
    leader, one, other = roles(cluster)
    cut(cluster, leader, one)
    cut(cluster, leader, other)
    cluster.pass_time(1.5 * cluster.member_settings.lag_seconds)


def a_set_shrinks_unheard(cluster: Cluster) -> None:
    """The record still has a member that the leader wants to leave out."""
    leader, one, other = roles(cluster)
    leader.line.fate_of = sets(Fate.LOST)
    cut(cluster, leader, other)
    cut(cluster, one, other)
    cluster.pass_time(2 * cluster.member_settings.lag_seconds)
    left_to(cluster, other, leader, one)


def a_set_grows_unanswered(cluster: Cluster) -> None:
    """The record has a member of which the leader does not know that it has."""
    _grows(cluster, Fate.UNANSWERED)


def a_set_grows_late(cluster: Cluster) -> None:
    """The record gets a member after the leader has looked at it."""
    _grows(cluster, Fate.LATE)


def a_set_grows_much_later(cluster: Cluster) -> None:
    """The record gets a member after the leader has no more reason to want it there."""
    _grows(cluster, Fate.LATE, 2 * cluster.member_settings.lag_seconds)


def _grows(cluster: Cluster, fate: Fate, seconds: float = 6.0) -> None:
    leader, one, other = roles(cluster)
    leave(cluster, other, leader)
    written: list[bool] = []

    def fate_of(operations: Sequence[Operation]) -> Fate | None:
        if is_growing(operations):
            written.append(True)
        return fate if written else None

    leader.line.fate_of, leader.line.late_seconds = fate_of, (100.0, 100.0)
    mend(cluster, leader, other)
    cluster.pass_time(30, lambda: bool(written), at_once=True)
    cut(cluster, leader, other)
    cut(cluster, one, other)
    cluster.pass_time(seconds)
    cluster.registry.land_late()
    cluster.pass_time(0.5)
    left_to(cluster, other, leader, one)


def a_start_is_lost(cluster: Cluster) -> None:
    """A leader loses the start of its epoch with its power, when its follower has it already."""
    before, *others = roles(cluster)
    pause_seconds = cluster.clients.pause_seconds
    quiet(cluster)
    before.wanted = False
    before.crash(power=True)

    def is_elected(process: Process) -> bool:
        record = cluster.record
        return record is not None and record.epoch == 2 and record.leader == cluster.replica_of(process)

    def has_start() -> bool:
        replica = None if follower.member is None else follower.member._replica
        return replica is not None and replica.last is not None and replica.last.epoch == 2

    cluster.pass_time(60, lambda: any(map(is_elected, others)), at_once=True)
    leader, follower = sorted(others, key=is_elected, reverse=True)
    leader.disk_seconds = (2.5, 2.5)
    cluster.pass_time(10, has_start, at_once=True)
    follower.line.loses_requests = follower.line.loses_answers = True
    leader.crash(power=True, keep="nothing")
    leader.disk_seconds = (0.0005, 0.006)
    cluster.pass_time(1)
    leader.start()
    cluster.pass_time(20)
    follower.line.mend()
    cluster.clients.pause_seconds = pause_seconds
    must_lead(cluster, "led after the start of an epoch was lost", leader, follower)
    before.start()


def is_growing(operations: Sequence[Operation]) -> bool:
    """Whether a write is one of the record with all three in the set."""
    return any(
        isinstance(one, Put)
        and one.path.endswith("/s")
        and len(decode_content(ShardContent, one.value, one.path).in_sync) == 3
        for one in operations
    )


def left_to(cluster: Cluster, last: Process, *others: Process) -> None:
    """Two lose their power, and the third one has its chance; then one of the two comes back."""
    for process in others:
        process.wanted = False
        process.crash(power=True)
    cluster.network.mend_all()
    cluster.pass_time(20)
    others[-1].start()
    cluster.pass_time(20)


def a_member_is_wiped(cluster: Cluster) -> None:
    """Its empty disk is not what the set knows of it."""
    leader, one, other = roles(cluster)
    power_all(cluster)
    one.wipe()
    stands_alone(cluster, one)
    other.start()
    cluster.pass_time(15)
    leader.start()


def a_copy_is_put_back(cluster: Cluster) -> None:
    """It lacks what the member has confirmed since."""
    leader, one, other = roles(cluster)
    one.keep_copy()
    one.crash()
    cluster.pass_time(0.5)
    one.start()
    cluster.await_progress("whole again", cluster.is_whole)
    cluster.pass_time(5)
    power_all(cluster)
    one.restore_copy()
    stands_alone(cluster, one)
    other.start()
    cluster.pass_time(15)
    leader.start()


def a_registry_is_put_back(cluster: Cluster) -> None:
    """Its record has a set that is not in force any more: nobody may stand by it."""
    leader, one, other = roles(cluster)
    old = cluster.copy_registry()
    cut(cluster, leader, other)
    cut(cluster, one, other)
    cluster.await_progress("without one", lambda: in_sync(cluster, leader, one))
    cluster.pass_time(5)
    leader.wanted = one.wanted = False
    leader.crash()
    one.crash()
    new = cluster.copy_registry()
    cluster.restore_registry(old)
    cluster.pass_time(30)
    if cluster.registry.read(f"{cluster.path}/leader") is not None:
        cluster.fail(f"{other} stands by an old copy of the registry")
    cluster.restore_registry(new)


def a_tail_is_damaged(cluster: Cluster) -> None:
    """What was cut had been confirmed: the one that lost it asks the other before it stands."""
    leader, one, other = roles(cluster)
    leave(cluster, other, leader)
    quiet_two(cluster, leader, one)
    power_all(cluster)
    one.turn(one.tail[1] - 30)
    cluster.network.mend_all()
    stands_alone(cluster, one, 15)
    other.start()
    cluster.pass_time(30)
    leader.start()


def two_tails_are_damaged(cluster: Cluster) -> None:
    """The one that lost less is content with the one that lost more, while the one that lost nothing is not heard."""
    leader, one, other = roles(cluster)
    quiet(cluster)
    power_all(cluster)
    one.turn(one.tail[1] - 30)
    other.turn(other.tail[0] + 30)
    one.start()
    other.start()
    cluster.pass_time(30)
    leader.start()


def an_election_is_unanswered(cluster: Cluster) -> None:
    """A member has won, and does not know."""
    leader, one, other = roles(cluster)

    def fate_of(operations: Sequence[Operation]) -> Fate | None:
        if not elections and any(isinstance(one, Create) and one.path.endswith("/leader") for one in operations):
            elections.append(True)
            return Fate.UNANSWERED
        return None

    elections: list[bool] = []
    one.line.fate_of = other.line.fate_of = fate_of
    leader.wanted = False
    leader.crash(power=True)
    must_lead(cluster, "led after an unanswered election", one, other)


def quiet_two(cluster: Cluster, leader: Process, one: Process) -> None:
    """More is committed by two of three; then all rest."""
    cluster.pass_time(3)
    cluster.clients.pause_seconds = 1e9
    cluster.pass_time(3)


def a_leader_knows_less(cluster: Cluster) -> None:
    """What the last leader committed, the next one has, and does not know as committed; a third one lacks it."""
    leader, one, other = roles(cluster)
    quiet(cluster)
    before = cluster.checker.committed
    leave(cluster, other, leader)
    cluster.network.cut(other.name, one.name)
    cluster.clients.send_one()
    cluster.pass_time(5, lambda: cluster.checker.committed > before, at_once=True)
    leader.wanted = False
    leader.crash(power=True)
    cluster.network.mend_all()
    other.disk_seconds = (6.0, 6.0)
    cluster.pass_time(60, lambda: in_sync_has(cluster, other), at_once=True)
    one.wanted = False
    one.crash(power=True)
    other.crash(power=True)
    other.disk_seconds = (0.001, 0.002)
    stands_alone(cluster, other, 20)
    one.start()
    cluster.pass_time(20)


def in_sync_has(cluster: Cluster, process: Process) -> bool:
    record = cluster.record
    return record is not None and cluster.replica_of(process) in record.in_sync


def a_follower_changes_leaders(cluster: Cluster) -> None:
    """What it has and does not know as committed is not to be cut."""
    leader, one, other = roles(cluster)
    quiet(cluster)
    before = cluster.checker.committed
    cluster.clients.send_one()
    cluster.pass_time(5, lambda: cluster.checker.committed > before, at_once=True)
    leader.wanted = False
    leader.crash(power=True)

    def has_asked() -> bool:
        return any(
            connection.near.host in (one.host, other.host) and connection.far.host in (one.host, other.host)
            for connection in cluster.network.connections
        )

    cluster.pass_time(60, has_asked, at_once=True)
    winner, follower = (one, other) if cluster.is_followed(one) else (other, one)
    cluster.network.wire(winner.name, follower.name).delay = (3.0, 3.0)
    cluster.pass_time(2.9)
    winner.wanted = False
    winner.crash(power=True)
    cluster.network.mend_all()
    cluster.pass_time(20)
    winner.start()
    cluster.pass_time(20)


SCENARIOS: tuple[Scenario, ...] = (
    a_follower_loses_its_leader,
    a_follower_starts_again,
    a_loop_hangs,
    a_flush_hangs,
    a_flush_is_slow_without_a_registry,
    a_port_is_blocked,
    a_leader_is_alone,
    a_set_shrinks_unheard,
    a_set_grows_unanswered,
    a_set_grows_late,
    a_set_grows_much_later,
    a_start_is_lost,
    a_member_is_wiped,
    a_copy_is_put_back,
    a_registry_is_put_back,
    a_tail_is_damaged,
    two_tails_are_damaged,
    an_election_is_unanswered,
    a_leader_knows_less,
    a_follower_changes_leaders,
)


def run(scenario: Scenario, seed: int = 1) -> Cluster:
    """A shard comes up, goes through a scenario, and settles.

    Raises:
        Violation: it broke its word.
    """
    with Cluster(seed, chances={}, scale=1.0) as cluster:
        cluster.start()
        cluster.await_progress("whole", cluster.is_whole)
        cluster.pass_time(3)
        scenario(cluster)
        cluster.settle()
    return cluster
