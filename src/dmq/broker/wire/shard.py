"""SHARD_LIST to CLUSTER_REBUILD, about shards and the whole cluster: members answer them without a Broker."""

from __future__ import annotations

from dmq.broker.wire.dispatcher import Dispatcher
from dmq.broker.wire.session import Session
from dmq.errors import InvalidSettings, NotInCluster, RegistryDown
from dmq.protocol.cluster import cluster as cluster_headers
from dmq.protocol.cluster import shard as headers
from dmq.protocol.cluster.member import MemberQuery
from dmq.protocol.frame import Frame
from dmq.registry.contents import ShardState
from dmq.registry.url import shown_url
from dmq.shard.admin.cluster_operations import ClusterOperations, Outcome
from dmq.shard.admin.operations import Done, Operations
from dmq.shard.admin.overview import shard_header
from dmq.shard.admin.record_change import RecordChange

__all__ = [
    "add_member",
    "create_shard",
    "drain_member",
    "export_entries",
    "finalize_format",
    "hand_over",
    "import_entries",
    "list_shards",
    "member_state",
    "promote_member",
    "rebuild_records",
    "remove_member",
    "repair_member",
    "set_shard",
    "show_cluster",
    "show_shard",
]


async def list_shards(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardList) -> None:
    found, following = await _shards(dispatcher).shards(asked.after, asked.limit)
    session.answer(frame, headers.ShardListReply([shard_header(one) for one in found], following))


async def show_shard(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardShow) -> None:
    session.answer(frame, shard_header(await _shards(dispatcher).shard(asked.shard)))


async def set_shard(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardSet) -> None:
    change = RecordChange(
        min_in_sync=asked.min_in_sync,
        replicas=asked.replicas,
        remove=asked.remove,
        asynchronous=asked.is_asynchronous,
        state=_state(asked.state),
        weight=asked.weight,
    )
    session.answer(frame, _change(await _shards(dispatcher).change(asked.shard, change, by=session.who)))


async def create_shard(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardCreate) -> None:
    done = await _shards(dispatcher).create(
        asked.shard, replicas=asked.replicas, min_in_sync=asked.min_in_sync, by=session.who
    )
    session.answer(frame, _change(done))


async def add_member(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardAdd) -> None:
    session.answer(frame, _change(await _shards(dispatcher).add(asked.shard, asked.member, by=session.who)))


async def remove_member(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardRemove) -> None:
    session.answer(frame, _change(await _shards(dispatcher).remove(asked.member, asked.shard, by=session.who)))


async def drain_member(dispatcher: Dispatcher, session: Session, frame: Frame, asked: headers.ShardDrain) -> None:
    done = await _shards(dispatcher).drain(asked.member, asked.shard, undo=asked.undo, by=session.who)
    session.answer(frame, _change(done))


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


async def member_state(dispatcher: Dispatcher, session: Session, frame: Frame, asked: MemberQuery) -> None:
    session.answer(frame, await _shards(dispatcher).state())


async def show_cluster(
    dispatcher: Dispatcher, session: Session, frame: Frame, asked: cluster_headers.ClusterShow
) -> None:
    seen = await _cluster(dispatcher).show()
    session.answer(frame, seen.header(shown_url(dispatcher.settings.shard.registry_url or "")))


async def finalize_format(
    dispatcher: Dispatcher, session: Session, frame: Frame, asked: cluster_headers.ClusterFinalize
) -> None:
    number, done = await _cluster(dispatcher).finalize(by=session.who)
    session.answer(frame, cluster_headers.ClusterFinalizeReply(number, done))


async def export_entries(
    dispatcher: Dispatcher, session: Session, frame: Frame, asked: cluster_headers.ClusterExport
) -> None:
    session.answer(frame, cluster_headers.ClusterExportReply(*await _cluster(dispatcher).export(asked.after)))


async def import_entries(
    dispatcher: Dispatcher, session: Session, frame: Frame, asked: cluster_headers.ClusterImport
) -> None:
    outcomes = await _cluster(dispatcher).take_in(
        asked.cluster, asked.entries, dry_run=asked.dry_run, foreign=asked.foreign, by=session.who
    )
    session.answer(frame, _reply(outcomes))


async def rebuild_records(
    dispatcher: Dispatcher, session: Session, frame: Frame, asked: cluster_headers.ClusterRebuild
) -> None:
    outcomes = await _cluster(dispatcher).rebuild(
        asked.states, dry_run=asked.dry_run, accept_loss=asked.accept_loss, by=session.who
    )
    session.answer(frame, _reply(outcomes))


def _shards(dispatcher: Dispatcher) -> Operations:
    """What this member can do to shards.

    Raises:
        NotInCluster, RegistryDown: it is not a member, or has not reached the registry yet.
    """
    if dispatcher.shards is None:
        if dispatcher.face is not None:
            registry = shown_url(dispatcher.settings.shard.registry_url or "")
            raise RegistryDown(
                f"this member has not reached the registry at {registry} since it was started: bring the registry "
                "back, and ask again"
            )
        raise NotInCluster(
            "this broker belongs to no shard: it is alone, and keeps its journal by itself; start it with --registry "
            "and --shard to make it the first member of one, or ask a member"
        )
    return dispatcher.shards


def _state(said: str) -> ShardState | None:
    try:
        return ShardState(said) if said else None
    except ValueError:
        known = ", ".join(ShardState)
        raise InvalidSettings(f"{said!r} is not a state of a shard: choose one of {known}", state=said) from None


def _change(done: Done) -> headers.ShardChange:
    return headers.ShardChange(done.what, shard_header(done.shard))


def _cluster(dispatcher: Dispatcher) -> ClusterOperations:
    return ClusterOperations(_shards(dispatcher))


def _reply(outcomes: list[Outcome]) -> cluster_headers.ClusterImportReply:
    rows = [(outcome.path, outcome.what) for outcome in outcomes]
    return cluster_headers.ClusterImportReply(rows, sum(outcome.is_written for outcome in outcomes))
