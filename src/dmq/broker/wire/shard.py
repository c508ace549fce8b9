"""SHARD_LIST, _SHOW, _SET, _PROMOTE, _HANDOVER and _REPAIR: members answer them without a Broker."""

from __future__ import annotations

from dmq.broker.wire.dispatcher import Dispatcher
from dmq.broker.wire.session import Session
from dmq.errors import NotInCluster, ShardConflict
from dmq.protocol.cluster import shard as headers
from dmq.protocol.frame import Frame
from dmq.shard.admin.operations import Done, Operations, RecordChange
from dmq.shard.admin.overview import MemberView, Overview

__all__ = ["hand_over", "list_shards", "promote_member", "repair_member", "set_shard", "show_shard"]


async def list_shards(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardList) -> None:
    found, following = await _shards(dispatcher).shards(asked.after, asked.limit)
    session.answer(frame, headers.ShardListReply([_info(one) for one in found], following))


async def show_shard(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardShow) -> None:
    session.answer(frame, _info(await _shards(dispatcher).shard(asked.shard)))


async def set_shard(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardSet) -> None:
    change = RecordChange(asked.min_in_sync, asked.replicas, asked.remove)
    session.answer(frame, _change(await _shards(dispatcher).change(asked.shard, change, by=session.who)))


async def promote_member(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardPromote) -> None:
    done = await _shards(dispatcher).promote(asked.shard, asked.member, accept_loss=asked.accept_loss, by=session.who)
    session.answer(frame, _change(done))


async def hand_over(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardHandover) -> None:
    session.answer(frame, _change(await _shards(dispatcher).hand_over(asked.shard, asked.to, by=session.who)))


async def repair_member(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardRepair) -> None:
    shards = _shards(dispatcher)
    found = await shards.mend(by=session.who)
    if found is None:
        reply = headers.ShardRepairReply(shards.broker, [], is_under_way=True)
    else:
        ranges = [*found.mended][: headers.RANGES_MAX], [*found.left][: headers.RANGES_MAX]
        reply = headers.ShardRepairReply(shards.broker, *ranges, found.reason)
    session.answer(frame, reply)


def _shards(dispatcher: Dispatcher) -> Operations:
    if dispatcher.shards is None:
        if dispatcher.face is not None:
            raise ShardConflict(
                "this member has not reached the registry since it was started: bring the registry back, and ask again"
            )
        raise NotInCluster(
            "this broker belongs to no shard: it is alone, and keeps its journal by itself; start it with --registry "
            "and --shard to make it the first member of one, or ask a member"
        )
    return dispatcher.shards


def _change(done: Done) -> headers.ShardChange:
    return headers.ShardChange(done.what, _info(done.shard))


def _info(shard: Overview) -> headers.ShardShowReply:
    record = shard.record
    return headers.ShardShowReply(
        name=shard.name,
        number=record.number,
        revision=record.revision,
        epoch=record.epoch,
        leader=shard.leader,
        members=[_member(member) for member in shard.members],
        min_in_sync=record.min_in_sync,
        replicas=record.replicas,
        state=record.state,
        unsafe=record.unsafe,
        findings=[
            headers.ShardFinding(headers.Severity[found.severity.name], found.what, found.advice)
            for found in shard.findings
        ],
    )


def _member(member: MemberView) -> headers.ShardMember:
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
    )


def _bounded(skew_ms: int | None) -> int | None:
    return None if skew_ms is None else max(-headers.SKEW_MS_MAX, min(headers.SKEW_MS_MAX, skew_ms))
