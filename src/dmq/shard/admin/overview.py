"""The overview of a shard: what the registry has of it, what its members say, and what a person should know. Pure code.

What always holds: the first finding is the most important one, and each says what to do; what a member alone knows is
told only if it answered; a member that does not run is not in sync, though the record may keep it in the set, so that
it can be elected when it is back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Final

import msgspec

from dmq.protocol.cluster import shard as headers
from dmq.protocol.cluster.replication import StandingReply
from dmq.protocol.cluster.shard import Severity
from dmq.registry.contents import LeaderContent, NodeContent, ShardContent, ShardState, hex_id
from dmq.shard.election import Obstacle

__all__ = ["Finding", "MemberView", "Overview", "Sighting", "finding_header", "overview_of", "shard_header"]

SKEW_MS: Final = 500  # of two clocks, from which on delays are late or early enough to be told
_SILENT_MS: Final = 1500  # three signs of a leader that has nothing to send
_STALLED_MS: Final = 2000
_ROLES: Final = {"leading": "leader", "following": "follower"}
_LEADING: Final = "leading"
_FOLLOWING: Final = "following"
_PARKED: Final = "parked"
_DOWN: Final = "down"
_UNKNOWN: Final = "unknown"
_NONE: Final = "none"
_PASSING: Final = (Obstacle.FOLLOWING, Obstacle.LED, Obstacle.UNSETTLED)  # what ends by itself


class Finding(msgspec.Struct, frozen=True):
    """What is to be known, and what to do about it."""

    severity: Severity
    what: str
    advice: str = ""


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A shard as it was seen at one moment, as far as it was.

    Attributes:
        version: of the record's entry.
        leader: the entry `/leader`.
        nodes: those that are registered, by the names of brokers.
        said: what members answered, by name.
        skews: by how many milliseconds a member's clock is ahead of ours.
        registry_down: why the registry does not answer; then its part is what it said last. Empty if it does.
        own_obstacle: why the member that is asked has not joined yet.
        session_seconds: of a session with the registry; 0 if that is not known.
    """

    name: str
    record: ShardContent
    version: int
    leader: LeaderContent | None
    nodes: Mapping[str, NodeContent]
    said: Mapping[str, StandingReply] = {}
    skews: Mapping[str, int] = {}
    registry_down: str = ""
    own_obstacle: str = ""
    session_seconds: float = 0.0


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """One member.

    Attributes:
        role: leader, follower, or what else it does; down if it is not registered, unknown if it does not answer.
        is_recorded: it stands in the in-sync set of the record.
        node: what it registered; None if it does not run.
        said: what it answered; None if it did not.
        lag: bytes of the leader's journal that it has not; None if that is not known.
        keeps_up: its leader says that it follows and keeps up: it runs, whether it is registered or not.
        is_heard: it leads, as its followers hear, though the registry knows nothing of it and it cannot be asked.
    """

    name: str
    replica: str
    role: str
    is_recorded: bool
    node: NodeContent | None
    said: StandingReply | None
    lag: int | None
    skew_ms: int | None
    keeps_up: bool = False
    is_heard: bool = False

    @property
    def is_in_sync(self) -> bool:
        return self.is_recorded and self.runs

    @property
    def runs(self) -> bool:
        return self.node is not None or self.keeps_up or self.is_heard

    @property
    def is_replaced(self) -> bool:
        """Whether the broker runs with another data directory than the one that the record knows."""
        return self.node is not None and self.node.replica not in (None, self.replica)

    @property
    def is_silent(self) -> bool:
        """Whether it runs, as far as the registry knows, and did not answer."""
        return self.node is not None and not self.is_replaced and self.said is None

    @property
    def claims_to_lead(self) -> bool:
        return self.said is not None and self.said.role == _LEADING

    @property
    def hears_leader(self) -> bool:
        """Whether it follows, and a sign of its leader has come of late."""
        return self.said is not None and hears_leader(self.said)

    @property
    def obstacle(self) -> str:
        """Why it does not stand, as it says."""
        return "" if self.said is None or self.said.obstacle == _NONE else self.said.obstacle


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """A shard, its members by name, and what is to be known of it."""

    name: str
    record: ShardContent
    leader: str
    members: Sequence[MemberView]
    findings: Sequence[Finding] = ()

    def member(self, name: str) -> MemberView | None:
        return next((member for member in self.members if member.name == name), None)

    @property
    def in_set(self) -> list[MemberView]:
        return [member for member in self.members if member.is_recorded]

    @property
    def is_unseen(self) -> bool:
        """Whether no member has answered."""
        return all(member.said is None for member in self.members)

    @property
    def heard(self) -> MemberView | None:
        """The leader that is only heard by its followers."""
        return next((member for member in self.members if member.is_heard), None)

    @property
    def is_stale(self) -> bool:
        """Whether a member has seen a newer record: the registry is an old copy."""
        return self.revision_seen > self.record.revision

    @property
    def revision_seen(self) -> int:
        return max((member.said.revision for member in self.members if member.said is not None), default=0)

    @property
    def furthest(self) -> MemberView | None:
        """Of the members that answer, the one whose journal goes furthest."""
        reached = [member for member in self.members if member.said is not None and not member.is_replaced]
        return max(reached, key=_reach, default=None)


def shard_header(shard: Overview) -> headers.ShardShowReply:
    """A shard as commands tell of it."""
    record = shard.record
    return headers.ShardShowReply(
        name=shard.name,
        number=record.number,
        revision=record.revision,
        epoch=record.epoch,
        leader=shard.leader,
        members=[_member_header(member, record) for member in shard.members],
        min_in_sync=record.min_in_sync,
        replicas=record.replicas,
        state=record.state,
        unsafe=record.unsafe,
        findings=[finding_header(found) for found in shard.findings],
        weight=record.weight,
        is_asynchronous=record.asynchronous,
    )


def finding_header(found: Finding) -> headers.ShardFinding:
    return headers.ShardFinding(headers.Severity[found.severity.name], found.what, found.advice)


def _member_header(member: MemberView, record: ShardContent) -> headers.ShardMember:
    node, said = member.node, member.said
    return headers.ShardMember(
        name=member.name,
        replica=member.replica,
        role=member.role,
        is_recorded=member.is_recorded,
        is_in_sync=member.is_in_sync,
        is_registered=node is not None,
        is_reached=said is not None,
        address="" if node is None else node.address,
        replication_address="" if node is None else node.replication_address,
        zone="" if node is None else node.zone,
        version="" if node is None else node.version,
        epoch=None if said is None else said.last_epoch,
        end=None if said is None else said.end,
        committed=None if said is None else said.committed,
        lag=member.lag,
        promise_ms=None if said is None else said.promise_ms,
        clock_skew_ms=_bounded(member.skew_ms),
        obstacle="" if said is None else said.obstacle,
        damaged=0 if said is None else said.damaged,
        is_drained=member.name in record.drained,
        is_doubtful=said is not None and said.is_doubtful,
    )


def _bounded(skew_ms: int | None) -> int | None:
    return None if skew_ms is None else max(-headers.SKEW_MS_MAX, min(headers.SKEW_MS_MAX, skew_ms))


def _reach(member: MemberView) -> tuple[int, int]:
    return (0, 0) if member.said is None else (member.said.last_epoch, member.said.end)


def overview_of(seen: Sighting) -> Overview:
    """Put together what was seen."""
    record = seen.record
    leader = _leader_of(seen)
    heard = "" if leader else _heard_leader_of(seen)
    led_by = seen.said.get(leader)
    keeping_up = set() if led_by is None else {hex_id(replica) for replica in led_by.keeping_up}
    skews = _skews_of(seen)
    members = []
    for name, replica in sorted(record.members.items()):
        node, said = seen.nodes.get(name), seen.said.get(name)
        members.append(
            MemberView(
                name=name,
                replica=replica,
                role=_UNKNOWN if name == heard else _role(leader == name, node, said, keeps_up=replica in keeping_up),
                is_recorded=replica in record.in_sync,
                node=node,
                said=said,
                lag=None if led_by is None or said is None else max(0, led_by.end - said.end),
                skew_ms=skews.get(name),
                keeps_up=replica in keeping_up,
                is_heard=name == heard,
            )
        )
    view = Overview(name=seen.name, record=record, leader=leader, members=members)
    found = sorted(_findings(view, seen), key=lambda finding: -finding.severity)
    return msgspec.structs.replace(view, findings=[*(found or [_fine(view)]), *_notes(view)])


def _leader_of(seen: Sighting) -> str:
    """The name of the member that holds `/leader`; or that leads by promises alone, while its session is lost."""
    record = seen.record
    if seen.leader is not None:
        return next((name for name, one in record.members.items() if one == seen.leader.replica), seen.leader.replica)
    claims = (
        name
        for name, said in seen.said.items()
        if said.role == _LEADING and said.last_epoch >= record.epoch and said.right != _NONE
    )
    return next(claims, "")


def _skews_of(seen: Sighting) -> Mapping[str, int]:
    """By how much clocks are ahead of the middle one. They were compared with that of the member that was asked, which
    may itself be the wrong one; with fewer than three nobody can tell."""
    asked = [name for name in seen.said if name not in seen.skews]
    if len(asked) != 1 or len(seen.skews) < 2:
        return seen.skews
    ahead = {**seen.skews, asked[0]: 0}
    middle = median_low(ahead.values())
    return {name: skew - middle for name, skew in ahead.items()}


def _heard_leader_of(seen: Sighting) -> str:
    """The name of a leader that lost its session and serves by promises, while we cannot ask it."""
    record, replica = seen.record, seen.record.leader
    name = next((name for name, one in record.members.items() if one == replica), "")
    followers = (said for said in seen.said.values() if hears_leader(said) and said.last_epoch >= record.epoch)
    return name if name not in seen.nodes and any(followers) else ""


def hears_leader(said: StandingReply) -> bool:
    """Whether a member follows, and a sign of its leader has come of late."""
    return said.role == _FOLLOWING and said.silent_ms < _SILENT_MS


def _role(is_leader: bool, node: NodeContent | None, said: StandingReply | None, *, keeps_up: bool) -> str:
    if is_leader:
        return "leader"
    if said is not None and said.role:
        return _ROLES.get(said.role, said.role)
    if keeps_up:
        return _ROLES[_FOLLOWING]
    return _DOWN if node is None else _UNKNOWN


# --- what is to be known ----------------------------------------------------------------------------------------------


def _fine(view: Overview) -> Finding:
    in_sync = sum(member.is_in_sync for member in view.members)
    return Finding(
        Severity.OK, f"{view.leader} leads in epoch {view.record.epoch}; {in_sync} of {len(view.members)} are in sync"
    )


def _notes(view: Overview) -> Iterator[Finding]:
    """What is as it was asked for, and should not be forgotten."""
    if view.record.asynchronous:
        lags = [member.lag for member in view.members if member.lag is not None and member.name != view.leader]
        behind = f"; they are {max(lags):,} bytes behind" if lags else ""
        yield Finding(
            Severity.OK,
            f"the shard is asynchronous: what {view.leader or 'its leader'} acknowledges may not have reached the "
            f"others{behind}",
            f"dmq shard set {view.name} --no-async waits for them again",
        )


def _findings(view: Overview, seen: Sighting) -> Iterator[Finding]:
    if seen.own_obstacle:
        yield Finding(Severity.PROBLEM, f"the member that was asked cannot join: {seen.own_obstacle}")
    if seen.registry_down:
        yield Finding(
            Severity.PROBLEM,
            "the registry does not answer: nobody can be elected, and no in-sync set changes; what is shown of "
            f"members is what it said last ({seen.registry_down})",
            "bring it back; the shard goes on as long as its members reach each other",
        )
    if view.is_stale:
        yield Finding(
            Severity.PROBLEM,
            f"the registry is an old copy: it has revision {view.record.revision} of the record, and a member has seen "
            f"{view.revision_seen}; no member stands for election, and no in-sync set changes",
            "bring the newest data of the registry back, or have it rebuilt by dmq cluster import --from-members",
        )
    yield from _with_leader(view, seen) if view.leader else _without_leader(view)
    yield from _about_members(view)
    yield from _about_record(view)


def _without_leader(view: Overview) -> Iterator[Finding]:
    name, in_set = view.name, view.in_set
    running = [member for member in in_set if member.node is not None and not member.is_replaced]
    if not view.members:
        yield Finding(Severity.PROBLEM, "the shard has no members", f"dmq broker --registry … --shard {name} adds one")
        return
    if not running:
        best = view.furthest
        otherwise = (
            "nobody else runs who could take over"
            if best is None
            else f"if they are gone for good, dmq shard promote {best.name} --accept-loss lets {best.name} lead, "
            "without what was acknowledged and has not reached it"
        )
        yield Finding(
            Severity.PROBLEM,
            f"there is no leader: no member of the in-sync set runs ({_names(in_set) or _ghosts(view)})",
            f"start one of them; {otherwise}",
        )
        return
    if view.heard is not None:
        hearers = _names(member for member in view.members if member.hears_leader)
        yield Finding(
            Severity.WARNING,
            f"{view.heard.name} leads without its entry in the registry, as {hearers} hear: its session was lost, and "
            "it serves by the promises of its followers",
            f"it comes back with its next session; check the network between {view.heard.name} and the registry",
        )
        return
    blocked = [member for member in running if member.obstacle]
    for member in blocked:
        promise = 0 if member.said is None else member.said.promise_ms
        if promise and member.obstacle == Obstacle.PROMISED:
            what = f"there is no leader; {member.name} stands in {promise / 1000:.1f} s, when its promise is over"
            yield Finding(Severity.PROBLEM, what, "wait, and ask again")
        else:
            what = f"there is no leader; {member.name} does not stand: {member.obstacle}"
            yield Finding(Severity.PROBLEM, what, _way_out(view, member))
    if len(blocked) < len(running):
        others = [member for member in running if member not in blocked]
        what = f"there is no leader; an election is due among {_names(others)}"
        advice = "ask again in a few seconds; if it lasts, look into their logs, and whether they reach the registry"
        yield Finding(Severity.PROBLEM, what, advice)


def _way_out(view: Overview, member: MemberView) -> str:
    """What helps a member of the set that does not stand."""
    others = [other.name for other in view.in_set if other.node is None]
    if member.obstacle in _PASSING:
        return f"wait, and ask again in a few seconds; if it lasts, look into the log of {member.name}"
    if member.obstacle == Obstacle.DRAINED:
        return f"dmq shard drain {member.name} --undo lets it lead again"
    if member.role == _PARKED:
        return f"look into its log; when its data is wrong, empty its directory and start {member.name} again"
    start = f"start {', '.join(others)}, to compare with; " if others else ""
    return f"{start}or, if what it lacks may be lost, dmq shard promote {member.name} --accept-loss"


def _ghosts(view: Overview) -> str:
    """Replicas of the set that belong to no member: a disk was replaced before another one had everything."""
    known = {member.replica for member in view.members}
    return ", ".join(f"replica {replica}" for replica in view.record.in_sync if replica not in known)


def _with_leader(view: Overview, seen: Sighting) -> Iterator[Finding]:
    record, leader = view.record, view.member(view.leader)
    if seen.leader is None:
        yield Finding(
            Severity.WARNING,
            f"{view.leader} leads without its entry in the registry: its session was lost, and it serves by the "
            "promises of its followers",
            "it comes back with its next session; check the registry if this lasts",
        )
    if leader is not None and leader.said is None:
        yield _silent_leader(view, leader, seen.session_seconds)
    if leader is not None and leader.said is not None and leader.said.right == _NONE:
        yield Finding(
            Severity.PROBLEM,
            f"{view.leader} leads and may not answer: its session in the registry is lost, and a member of the set is "
            "silent",
            "bring the registry back, or that member",
        )
    if leader is not None and leader.said is not None and leader.said.is_full:
        yield Finding(
            Severity.PROBLEM,
            f"sends are refused (DISK_FULL): the disk of the leader {view.leader} is too full",
            f"free some space there, or have a member lead whose disk has some: dmq shard handover {view.name}",
        )
    live = [member for member in view.members if member.is_in_sync and not member.is_replaced]
    stalled_ms = 0 if leader is None or leader.said is None else leader.said.stalled_ms
    if leader is not None and stalled_ms >= _STALLED_MS and len(live) >= record.least:
        yield _stalled_leader(view, leader, stalled_ms / 1000)
    if len(live) < record.least:
        missing = _names(member for member in view.members if member not in live)
        yield Finding(
            Severity.PROBLEM,
            f"sends are refused (NOT_ENOUGH_REPLICAS): {_names(live) or 'nobody'} in sync, and min_in_sync is "
            f"{record.min_in_sync}",
            f"bring {missing or 'another member'} back, or let them catch up; dmq shard set {view.name} --min-in-sync "
            f"{max(1, len(live))} goes on with fewer copies",
        )
    elif len(live) == record.least < record.replicas and not record.asynchronous:
        rest = "there is no other copy" if len(live) == 1 else "with one less, sends are refused"
        what = f"only {len(live)} of {record.replicas} are in sync: {rest}"
        yield Finding(Severity.WARNING, what, "bring the others back")


def _stalled_leader(view: Overview, leader: MemberView, seconds: float) -> Finding:
    """A leader writes, and those that must have it do not confirm it."""
    others = [member for member in view.in_set if member is not leader]
    missing = [member for member in others if member.said is None or member.lag]
    return Finding(
        Severity.PROBLEM,
        f"what {leader.name} writes has not been committed for {seconds:.0f} s: sends wait for "
        f"{_names(missing) or _names(others) or 'other members'}",
        "look at their logs and disks, and at the network between the members: one that lags leaves the in-sync "
        "set after 10 s, and a leader that reaches none of them gives way after 20 s",
    )


def _silent_leader(view: Overview, leader: MemberView, session_seconds: float) -> Finding:
    """A leader does not answer us; if the others do not hear it either, it may be dead."""
    others = [member for member in view.in_set if member is not leader and member.said is not None]
    silent = [member for member in others if not member.hears_leader]
    if not silent or len(silent) < len(others):
        where = "" if leader.node is None else f" at {leader.node.replication_address}"
        return Finding(
            Severity.WARNING,
            f"the leader {leader.name} does not answer on its port for members{where}",
            "check the network between the members: a leader that reaches no in-sync member gives way after 20 s",
        )
    heard = f"{_names(silent)} {'has' if len(silent) == 1 else 'have'} heard"
    since = min(0 if member.said is None else member.said.silent_ms for member in silent) / 1000
    within = f" within {session_seconds:g} s of its end" if session_seconds else ""
    return Finding(
        Severity.PROBLEM,
        f"the leader {leader.name} does not answer, and {heard} nothing of it for {since:.0f} s: sends wait",
        f"if it has ended, so does its session in the registry{within}, and an election follows: ask again then. If "
        "this lasts, it hangs, or the network between the members is cut: see its log",
    )


def _about_members(view: Overview) -> Iterator[Finding]:
    for member in view.members:
        name = member.name
        if member.is_heard:
            continue
        if member.node is None and member.keeps_up:
            yield Finding(
                Severity.WARNING,
                f"{name} follows and is not registered: its session with the registry is lost",
                "it is back with its next session; if this lasts, check the network between it and the registry",
            )
        elif member.node is None:
            yield Finding(
                Severity.WARNING,
                f"{name} does not run",
                f"start it; if it is gone for good, dmq shard set {view.name} --remove {name}",
            )
        elif member.role == _PARKED:
            what = f"{name} does not take part: {member.obstacle or 'its log says why'}"
            yield Finding(Severity.PROBLEM, what, "its log says what to do")
        elif member.is_replaced:
            what = f"{name} runs with another data directory, in the place of replica {member.replica}"
            yield Finding(Severity.WARNING, what, "it joins by itself once it has caught up with a leader")
        elif member.said is not None and member.said.is_full and not member.claims_to_lead:
            what = f"the disk of {name} is full: it cannot follow"
            yield Finding(Severity.WARNING, what, "free some space there; it goes on by itself then")
        elif member.obstacle == Obstacle.LEADER_DAMAGED and view.leader:
            damage = f"the journal of {view.leader} is damaged, and no member has given what is missing"
            advice = "start a member that has it, or restore that range from a backup"
            yield Finding(Severity.WARNING, f"{name} cannot follow: {damage}", advice)
        elif not member.is_recorded and view.leader and not view.record.asynchronous:
            behind = "" if member.lag is None else f", {member.lag:,} bytes behind"
            what = f"{name} runs and is not in sync{behind}"
            yield Finding(Severity.WARNING, what, "it joins by itself once it keeps up; if not, see its log and disk")
        if member.said is not None and member.said.is_doubtful and not member.claims_to_lead:
            yield Finding(
                Severity.WARNING,
                f"{name} is doubtful: its journal lost its end or was damaged, and it has not caught up since",
                "it catches up with a leader by itself; if not, see its log and check its disk",
            )
        if member.is_silent and name != view.leader and not view.is_unseen:
            where = "" if member.node is None else f" at {member.node.replication_address}"
            what = f"{name} does not answer on its port for members{where}"
            yield Finding(Severity.WARNING, what, "look at the process, and at the network between the members")
        if name in view.record.drained:
            what = f"{name} is drained: it does not lead"
            yield Finding(Severity.WARNING, what, f"dmq shard drain {name} --undo puts it back in use")
        if member.said is not None and member.said.damaged:
            yield Finding(
                Severity.WARNING,
                f"the journal of {name} has {member.said.damaged} damaged ranges",
                f"dmq shard repair {name} fetches them from another member; then check its disk",
            )
        if member.skew_ms is not None and abs(member.skew_ms) > SKEW_MS:
            what = f"the clock of {name} is {abs(member.skew_ms)} ms {'ahead' if member.skew_ms > 0 else 'behind'}"
            yield Finding(
                Severity.WARNING, what, "have all machines keep time with NTP: delays go by the leader's clock"
            )


def _about_record(view: Overview) -> Iterator[Finding]:
    record = view.record
    if len(view.members) < record.replicas:
        yield Finding(
            Severity.WARNING,
            f"{len(view.members)} of {record.replicas} members have joined",
            f"dmq broker --registry … --shard {view.name} adds one, on another machine"
            + (
                f"; dmq shard set {view.name} --replicas {len(view.members)} if none is to come" if view.members else ""
            ),
        )
    zones: dict[str, list[str]] = defaultdict(list)
    for member in view.members:
        if member.node is not None and member.node.zone:
            zones[member.node.zone].append(member.name)
    for zone, names in zones.items():
        if len(names) > 1:
            what = f"{', '.join(names)} are in one zone, {zone}, and would be lost together"
            yield Finding(Severity.WARNING, what, "move one of them")
    if record.state is not ShardState.OPEN:
        what = f"the shard is {record.state}: it takes no messages"
        yield Finding(
            Severity.WARNING, what, f"dmq shard set {view.name} --state open, when it is to take messages again"
        )


def _names(members: Iterable[MemberView]) -> str:
    return ", ".join(member.name for member in members)
