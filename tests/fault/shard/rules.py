"""The rules of a shard, each with a way to take it away and with what notices that it is gone.

A rule is taken away by one small change of one function. What notices is a scenario, where chance rarely brings its
moment about, or a storm of few kinds of faults with a known seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
import pytest

from dmq.errors import RegistryConflict
from dmq.protocol.cluster.replication import Confirm, Follow
from dmq.registry.contents import LeaderContent, encode_content, hex_id
from dmq.registry.registry import UNAVAILABLE, Create
from dmq.shard.election import Obstacle, Situation, Standing, obstacle
from dmq.shard.follower import Follower
from dmq.shard.heart import Heart
from dmq.shard.in_sync import InSyncSet
from dmq.shard.leader import Leader
from dmq.shard.record import enrolment
from dmq.shard.record.enrolment import Enrolment
from dmq.shard.roles import candidacy
from dmq.shard.roles.candidacy import Candidacy, Victory
from dmq.shard.roles.term import Term
from dmq.shard.serving_right import Promise
from dmq.storage import store
from dmq.storage.replica import Replica
from tests.fault.shard import scenario
from tests.fault.shard.clock import MachineClock
from tests.fault.shard.process import Process
from tests.fault.shard.scenario import Scenario
from tests.fault.shard.service import SimulatedService

__all__ = ["RULES", "Rule", "Storm"]

Removal = Callable[[pytest.MonkeyPatch], None]


class Storm(NamedTuple):
    """What notices, by chance: a seed, and the kinds of faults that matter."""

    seed: int
    only: tuple[str, ...] = ()


class Rule(NamedTuple):
    """Attributes:
    removal: takes it away.
    notices: what finds that it is gone.
    """

    sentence: str
    removal: Removal
    notices: Scenario | Storm


# --- promises, and the right to serve ---------------------------------------------------------------------------------


def stand_without_promise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promise, "is_over", lambda promise, now: True)


def forget_promises(patch: pytest.MonkeyPatch) -> None:
    """As if each start were the first of its replica."""
    patch.setattr(Enrolment, "is_new", property(lambda enrolment: True, lambda enrolment, is_new: None), raising=False)


def serve_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Term, "may_serve", lambda term: not term.is_over)


def ask_now_and_then(patch: pytest.MonkeyPatch) -> None:
    """Its right to serve is asked with each beat of the term, and not before each answer."""
    may_serve, reckon = Term.may_serve, Term._reckon_writes
    found: dict[int, bool] = {}

    def ask(term: Term) -> None:
        reckon(term)
        found[id(term)] = may_serve(term)

    patch.setattr(Term, "_reckon_writes", ask)
    patch.setattr(Term, "may_serve", lambda term: not term.is_over and found.get(id(term), False))


def sleep_uncounted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MachineClock, "boottime", MachineClock.monotonic)


def never_stuck(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heart, "is_beating", property(lambda heart: True))


def never_stuck_in_a_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Heart, "is_flush_stuck", property(lambda heart: False))


def give_way_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """Cease for a flush that does not end, whether or not somebody can be elected."""

    async def give_way(term: Term) -> None:
        term.cease("a flush of its disk does not end")

    patch.setattr(Term, "_give_way", give_way)


def never_deaf(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leader, "is_deaf", lambda leader, now, registered: False)


# --- the set ----------------------------------------------------------------------------------------------------------


def shrink_before_the_answer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InSyncSet, "begin_write", InSyncSet.written)
    patch.setattr(InSyncSet, "withdraw", lambda in_sync: None)


def commit_by_the_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InSyncSet, "union", InSyncSet.recorded)


def take_unanswered_for_lost(patch: pytest.MonkeyPatch) -> None:
    """A write of the set that was not answered counts as not carried out, as soon as the next one is thought of."""
    propose = InSyncSet.proposal

    def proposal(in_sync: InSyncSet, *asked: Any) -> frozenset[int] | None:
        in_sync._unsettled = []
        return propose(in_sync, *asked)

    patch.setattr(InSyncSet, "proposal", proposal)


def settle_by_reading(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InSyncSet, "found", InSyncSet.refused)


def shrink_without_end(patch: pytest.MonkeyPatch) -> None:
    propose = InSyncSet.proposal

    def proposal(in_sync: InSyncSet, *asked: Any) -> frozenset[int] | None:
        least, in_sync.min_in_sync = in_sync.min_in_sync, 1
        try:
            return propose(in_sync, *asked)
        finally:
            in_sync.min_in_sync = least

    patch.setattr(InSyncSet, "proposal", proposal)
    patch.setattr(InSyncSet, "is_enough", property(lambda in_sync: True))


def join_by_known_commit(patch: pytest.MonkeyPatch) -> None:
    def may_join(in_sync: InSyncSet, replica: int, now: float) -> bool:
        return in_sync.flushed_of(replica) >= in_sync.committed and not in_sync.lags(replica, now)

    patch.setattr(InSyncSet, "_may_join", may_join)


def confirm_unflushed(patch: pytest.MonkeyPatch) -> None:
    confirm = Follower.confirm

    def confirmed(follower: Follower, now: float, now_ms: int = 0) -> Confirm:
        told = confirm(follower, now, now_ms)
        return msgspec.structs.replace(told, flushed=told.end)

    patch.setattr(Follower, "confirm", confirmed)


# --- journals ---------------------------------------------------------------------------------------------------------


def cut_to_known_commit(patch: pytest.MonkeyPatch) -> None:
    request = Follower.request

    def cut(follower: Follower) -> Follow:
        follower._replica.cut(follower._replica.applied)
        return request(follower)

    patch.setattr(Follower, "request", cut)


def load_no_tail(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(store, "units_from", lambda scanner, start: iter(()))


def serve_before_commit(patch: pytest.MonkeyPatch) -> None:
    begin = Term.__init__

    def start(term: Term, *arguments: Any, **named: Any) -> None:
        begin(term, *arguments, **named)
        term._epoch_end = 0

    patch.setattr(Term, "__init__", start)


def answer_when_it_ceases(patch: pytest.MonkeyPatch) -> None:
    """Who waits for a commit is told that all is well when the broker is dropped."""
    drop = SimulatedService.drop

    async def dropped(service: SimulatedService) -> None:
        for one in service._waiting:
            service._checker.confirmed(service._name, one.request.queue, one.request.bodies[0])
        await drop(service)

    patch.setattr(SimulatedService, "drop", dropped)


def lead_an_epoch_again(patch: pytest.MonkeyPatch) -> None:
    """Who led the last epoch goes on in it: nobody has led since."""
    stand = Candidacy.stand

    async def go_on(standing: Candidacy, replica: Replica, **how: Any) -> Victory | None:
        view = standing._post.view
        record = view.record
        if record is None or record.leader != hex_id(replica.membership.replica_id) or not record.epoch:
            return await stand(standing, replica, **how)
        content = LeaderContent(replica=record.leader, epoch=record.epoch)
        session = view.registry.session
        try:
            await view.write([Create(view.paths.leader(view.shard), encode_content(content), ephemeral=True)])
        except (RegistryConflict, *UNAVAILABLE):
            return None
        return Victory(record, session)

    patch.setattr(Candidacy, "stand", go_on)


# --- who is who -------------------------------------------------------------------------------------------------------


def same_id_after_a_wipe(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Process, "draw", lambda process: 1000 + ord(process.name))


def trust_old_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(enrolment, "_is_old_copy", lambda member, record, mark: False)


def trust_old_registries(patch: pytest.MonkeyPatch) -> None:
    def trusting(situation: Situation) -> Obstacle:
        return obstacle(msgspec.structs.replace(situation, revision_seen=0))

    patch.setattr(candidacy, "obstacle", trusting)


def stand_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(candidacy, "has_compared", lambda own, others, record: True)


def compare_with_the_doubtful(patch: pytest.MonkeyPatch) -> None:
    def compared(own: Standing, others: Iterable[Standing], record: Any) -> bool:
        ends = [(other.last_epoch, other.end) for other in others if hex_id(other.replica) in record.in_sync]
        return bool(ends) and max(ends) <= (own.last_epoch, own.end)

    patch.setattr(candidacy, "has_compared", compared)


def leave_the_entry(patch: pytest.MonkeyPatch) -> None:
    async def settle(standing: Candidacy, replica: Any) -> None:
        standing.is_unsettled = False

    patch.setattr(Candidacy, "settle", settle)


RULES = {
    rule.removal.__name__: rule
    for rule in (
        Rule("who has promised does not stand", stand_without_promise, scenario.a_follower_loses_its_leader),
        Rule("who starts keeps a promise it forgot", forget_promises, scenario.a_follower_starts_again),
        Rule("a leader serves by its session or by promises", serve_always, Storm(3, ("pause", "isolate"))),
        Rule("the right to serve is asked before each answer", ask_now_and_then, Storm(1, ("pause", "isolate"))),
        Rule("the clock of promises counts suspended time", sleep_uncounted, Storm(1, ("suspend",))),
        Rule("a leader whose loop hangs gives way", never_stuck, scenario.a_loop_hangs),
        Rule("a leader whose flush hangs gives way", never_stuck_in_a_flush, scenario.a_flush_hangs),
        Rule(
            "a leader whose flush hangs gives way to somebody",
            give_way_to_nobody,
            scenario.a_flush_is_slow_without_a_registry,
        ),
        Rule("a leader that hears no member gives way", never_deaf, scenario.a_port_is_blocked),
        Rule("a member leaves the union after the answer", shrink_before_the_answer, scenario.a_set_shrinks_unheard),
        Rule("commit counts the union of all sets", commit_by_the_recorded, scenario.a_set_grows_unanswered),
        Rule("a write without an answer may be in force", take_unanswered_for_lost, scenario.a_set_grows_much_later),
        Rule("a read settles no write", settle_by_reading, scenario.a_set_grows_late),
        Rule("the set is never below min_in_sync", shrink_without_end, scenario.a_leader_is_alone),
        Rule("a member joins past the start of the epoch", join_by_known_commit, scenario.a_leader_knows_less),
        Rule("a member confirms what it has flushed", confirm_unflushed, Storm(1, ("power", "power_all", "fall"))),
        Rule("a follower cuts where the journals part", cut_to_known_commit, scenario.a_follower_changes_leaders),
        Rule("a winner loads its tail before it writes", load_no_tail, Storm(1, ("kill", "power"))),
        Rule("nothing is served before the epoch is committed", serve_before_commit, Storm(1, ("kill", "power"))),
        Rule("what is not committed is not answered", answer_when_it_ceases, Storm(1, ("isolate", "blocked_port"))),
        Rule("nobody writes in an epoch it did not win in this life", lead_an_epoch_again, scenario.a_start_is_lost),
        Rule("a wiped disk is another replica", same_id_after_a_wipe, scenario.a_member_is_wiped),
        Rule("an old copy of a directory is another replica", trust_old_copies, scenario.a_copy_is_put_back),
        Rule("nobody stands by an old copy of the registry", trust_old_registries, scenario.a_registry_is_put_back),
        Rule("a doubtful member compares first", stand_in_doubt, scenario.a_tail_is_damaged),
        Rule("it compares with one that has no doubts", compare_with_the_doubtful, scenario.two_tails_are_damaged),
        Rule("a lost election's /leader is deleted first", leave_the_entry, scenario.an_election_is_unanswered),
    )
}
