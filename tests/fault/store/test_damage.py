"""Bits turn at rest in the journals of a shard's members: another member gives back what was lost, byte for byte.

Or, where no member has it, it is said which bytes are lost, and nothing is changed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

import pytest
from crc32c import crc32c

from dmq.errors import DMQError, NotConnected
from dmq.protocol.cluster.replication import Repair, RepairReply
from dmq.shard.repair.answer import CommittedJournal, answer_repair
from dmq.shard.repair.mender import Mended, Mender
from dmq.storage.files import Buffer
from dmq.storage.journal.journal import list_segments
from dmq.storage.journal.unit import HEADER_BYTES, SNAPSHOT, read_header
from dmq.storage.replica import Replica
from dmq.storage.upkeep.identity import Membership
from dmq.testing import CrashNow, MemoryFiles
from tests.fault.store.shard_rig import MEMBERS, SMALL, ShardRig
from tests.sampling import SEED, sample_size

pytestmark = [pytest.mark.sampled, pytest.mark.uncounted]  # so many samples of what other tests cover too

FLIPS = sample_size(share=60, whole=2000)
REGIONS = ("header", "body", "snapshot", "segment head", "page", "cut", "segment")


async def inline(work: Callable[[], object]) -> object:
    return work()


class Shard:
    """Three members that have the same journal of several segments, all of it committed; number 0 leads."""

    def __init__(self, seed: int = 5) -> None:
        self.rig = rig = ShardRig(seed)
        rig.elect()
        while len(self.segments(0)) < 5:
            rig.append(5)
            rig.settle()
            rig.replicate_all()
            rig.commit()
            rig.quiet()
        rig.settle_down()
        for number in range(MEMBERS):
            rig.checkpoint(number)
        assert rig.store is not None
        assert rig.leader is not None
        self.leader = rig.leader
        self.followers = [number for number in range(MEMBERS) if number != rig.leader]
        self.whole = self.journal(self.leader)
        self.units = [*self._units()]

    def segments(self, number: int) -> list[str]:
        return [segment.path for segment in list_segments(self.rig.files[number])]

    def journal(self, number: int) -> dict[str, bytes]:
        files = self.rig.files[number]
        return {path: files.read_file(path) for path in self.segments(number)}

    def _units(self) -> Iterable[tuple[str, int, int, bool]]:
        """Path, position, length, and whether it is a snapshot."""
        for path, raw in self.whole.items():
            at = 0
            while (header := read_header(raw, at)) is not None:
                yield path, at, header.length, bool(header.flags & SNAPSHOT)
                at += header.length

    def committed(self, number: int) -> CommittedJournal:
        rig = self.rig
        replica = rig.replicas[number]
        if replica is not None:
            return CommittedJournal.of_follower(replica)
        assert rig.store is not None
        member = Membership(cluster="c", shard="s", replica_id=1)
        return CommittedJournal.of_leader(rig.store, member)

    async def repair(self, address: str, asked: Repair) -> tuple[RepairReply, Buffer]:
        """As `Peers.repair`; addresses are numbers of members."""
        if address == "down":
            raise NotConnected("nobody answers")
        return await answer_repair(self.committed(int(address)), asked, inline)  # type: ignore[arg-type]

    def mend(self, number: int, *addresses: str) -> Mended:
        """Look through all of a member's journal, and mend it from the others."""
        others = addresses or tuple(str(other) for other in range(MEMBERS) if other != number)
        mender = Mender(self, inline, others, are_all=len(others) == MEMBERS - 1)  # type: ignore[arg-type]

        async def run() -> Mended:
            await mender.scrub(lambda: self.committed(number))
            return await mender.mend(lambda: self.committed(number))

        return asyncio.run(run())

    def harm(self, number: int, region: str, rng: random.Random) -> None:
        """Damage something, but not the last segment's end, which is a torn tail."""
        files = self.rig.files[number]
        path, at, length, _ = rng.choice(self.units[:-1])
        if region == "header":
            files.flip_bit(path, at + rng.randrange(HEADER_BYTES), rng.randrange(8))
        elif region == "body":
            files.flip_bit(path, at + rng.randrange(HEADER_BYTES, length), rng.randrange(8))
        elif region == "snapshot":
            path, at, length, _ = rng.choice([unit for unit in self.units if unit[3]])
            files.flip_bit(path, at + rng.randrange(length), rng.randrange(8))
        elif region == "segment head":
            files.flip_bit(rng.choice([*self.whole]), rng.randrange(HEADER_BYTES), rng.randrange(8))
        elif region == "page":
            raw = bytearray(self.whole[path])
            page = rng.randrange(len(raw)) & ~4095
            raw[page : page + 4096] = bytes(len(raw[page : page + 4096]))
            files.write_file(path, bytes(raw))
        elif region == "cut":
            path = rng.choice([*self.whole][:-1])
            files.cut(path, rng.randrange(len(self.whole[path])))
        else:
            files.remove(rng.choice([*self.whole][1:-1]))


@pytest.fixture(scope="module")
def shard() -> Shard:
    return Shard()


# The files of an open store do not go.
WHERE = [("follower", region) for region in REGIONS] + [("leader", region) for region in REGIONS[:5]]


@pytest.mark.parametrize(("who", "region"), WHERE)
def test_what_a_member_lost_is_fetched_from_another(shard: Shard, who: str, region: str) -> None:
    rng = random.Random(f"{SEED} {who} {region}")
    number = shard.leader if who == "leader" else shard.followers[0]
    for _ in range(max(4, FLIPS // 10)):
        for _ in range(rng.choice((1, 1, 3))):
            shard.harm(number, region, rng)
        if region in ("cut", "segment"):
            reopen(shard, number)
        if shard.journal(number) == shard.whole:
            continue  # turned twice, or zeros that were zeros
        mended = shard.mend(number)
        assert shard.journal(number) == shard.whole
        assert mended.mended
        assert not mended.left
        assert not shard.committed(number).source.damage.ranges
    if region not in ("segment", "cut"):
        assert any(path.startswith("salvage/") for path in shard.rig.files[number].paths())


def reopen(shard: Shard, number: int) -> Replica:
    rig = shard.rig
    replica = rig.replicas[number]
    assert replica is not None
    replica.close()
    rig.replicas[number] = None
    rig.start(number)
    reopened = rig.replicas[number]
    assert reopened is not None
    return reopened


def test_reads_of_a_mended_leader_are_what_they_were(shard: Shard) -> None:
    rng = random.Random(SEED)
    before = [shard.rig.bodies(queue) for queue in range(2)]
    store = shard.rig.store
    assert store is not None
    for _ in range(10):
        shard.harm(shard.leader, "body", rng)
    store._reader.cache.clear()
    with pytest.raises(DMQError):  # what a read finds is known to be damaged
        before = [shard.rig.bodies(queue) for queue in range(2)]
    assert store.damage.ranges
    assert not store.damage.has_holes
    shard.mend(shard.leader)
    assert [shard.rig.bodies(queue) for queue in range(2)] == before


def test_what_no_member_has_is_named_and_the_rest_is_mended(shard: Shard) -> None:
    path, at, length, _ = shard.units[4]
    other_path, other_at, _, _ = shard.units[9]
    first, second = shard.followers
    for number in (first, second, shard.leader):
        shard.rig.files[number].flip_bit(path, at + 80)
    shard.rig.files[first].flip_bit(other_path, other_at + 90)
    harmed = shard.journal(first)[path]
    mended = shard.mend(first)
    lost = (int(path[-28:-8]) + at, int(path[-28:-8]) + at + length)
    assert mended.left == [lost]
    assert "fails its checksum" in mended.reason
    assert len(mended.mended) == 1
    assert shard.journal(first)[path][at : at + length] == harmed[at : at + length]
    for number in (first, second, shard.leader):  # as it was
        shard.rig.files[number].flip_bit(path, at + 80)
    for number in (first, second, shard.leader):
        shard.mend(number)
        assert not shard.committed(number).source.damage.ranges or number == first
    replica = reopen(shard, first)
    replica.derived.damage = []


def test_a_member_that_is_down_or_has_not_got_it_is_passed_by(shard: Shard) -> None:
    first, second = shard.followers
    shard.rig.files[first].flip_bit(shard.units[3][0], shard.units[3][1] + 100)
    shard.rig.files[second].flip_bit(shard.units[3][0], shard.units[3][1] + 101)
    mended = shard.mend(first, "down", str(second), str(shard.leader))
    assert len(mended.mended) == 1
    assert shard.journal(first) == shard.whole
    shard.mend(second)
    assert shard.journal(second) == shard.whole
    shard.rig.files[first].flip_bit(shard.units[3][0], shard.units[3][1] + 100)
    assert shard.mend(first, "down").reason == "down: nobody answers"
    shard.mend(first)


def test_a_range_is_given_up_when_every_member_has_said_that_it_does_not_have_it(shard: Shard) -> None:
    path, at, length, _ = shard.units[4]
    start = int(path[-28:-8]) + at
    first, second = shard.followers
    damage = shard.committed(first).source.damage
    assert not damage.may_be_mended(start, start + length), "nobody said that others have copies"
    damage.expect_mending()
    for number in (first, second, shard.leader):
        shard.rig.files[number].flip_bit(path, at + 80)
    for asked in (("down", str(shard.leader)), (str(second),)):
        assert shard.mend(first, *asked).left == [(start, start + length)]
        assert damage.may_be_mended(start, start + length), f"only {asked} were asked"
    shard.mend(first, str(second), str(shard.leader))
    assert not damage.may_be_mended(start, start + length)
    assert damage.may_be_mended(start + length, start + length + 1)
    for number in (first, second, shard.leader):  # as it was
        shard.rig.files[number].flip_bit(path, at + 80)
    shard.mend(first)
    damage._given_up = None


@pytest.mark.parametrize("lie", ["another unit", "another epoch", "too much", "nothing", "too little"])
def test_bytes_that_do_not_belong_there_are_refused(shard: Shard, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = shard.followers[0]
    path, at, length, _ = shard.units[6]
    start = int(path[-28:-8]) + at
    shard.rig.files[first].flip_bit(path, at + 75)
    right = shard.whole[path][at : at + length]

    async def wrong(address: str, asked: Repair) -> tuple[RepairReply, Buffer]:
        other = shard.units[7]
        raws = {
            "another unit": shard.whole[other[0]][other[1] : other[1] + length],
            "another epoch": _resealed(right, 99),
            "too much": right + bytes(8),
            "nothing": b"",
            "too little": right[: length // 2],
        }
        raw = raws[lie]
        if asked.start != start:
            raw = b""
        return RepairReply(asked.start, asked.start + len(raw)), raw

    monkeypatch.setattr(shard, "repair", wrong)
    harmed = shard.journal(first)
    assert shard.mend(first).left == [(start, start + length)]
    assert shard.journal(first) == harmed
    monkeypatch.undo()
    assert shard.mend(first).mended == [(start, start + length)]
    assert shard.journal(first) == shard.whole


def _resealed(unit: bytes, epoch: int) -> bytes:
    """The unit as a leader of another epoch would have written it."""
    changed = unit[:12] + epoch.to_bytes(4, "big") + unit[16:]
    return changed[:4] + crc32c(changed[8:]).to_bytes(4, "big") + changed[8:]


def test_a_crash_while_it_is_mended_leaves_nothing_worse(shard: Shard) -> None:
    first = shard.followers[0]
    rig = shard.rig
    path, at, _, _ = shard.units[5]
    rng = random.Random(SEED)
    crashed = 0
    for steps in range(1, 14):
        rig.files[first].flip_bit(path, at + 77, 3)
        files = rig.files[first]
        files.crash_at = files.operations + steps + 3
        try:
            shard.mend(first)
        except CrashNow:
            crashed += 1
        rig.crash(first, power=bool(rng.randrange(2)))
        shard.mend(first)
        assert shard.journal(first) == shard.whole
    assert crashed >= 5


@pytest.mark.parametrize("region", REGIONS)
def test_damage_that_opening_passes_over_is_mended_and_what_is_derived_is_whole(shard: Shard, region: str) -> None:
    rng = random.Random(f"{SEED} {region}")
    first = shard.followers[1]
    rig = shard.rig
    for _ in range(max(2, FLIPS // 30)):
        replica = rig.replicas[first]
        assert replica is not None
        replica.close()
        rig.replicas[first] = None
        shard.harm(first, region, rng)
        files = rig.files[first]
        assert isinstance(files, MemoryFiles)
        for derived in [one for one in files.paths() if one.partition("/")[0] in ("queue", "runs", "index")]:
            files.remove(derived)  # so that all of it is built anew from the journal
        rig.replicas[first] = Replica(files, SMALL, rig.clock)
        shard.mend(first)
        opened = rig.replicas[first]
        assert opened is not None
        assert not opened.damage.ranges
        assert not opened.damage.has_holes
        for _ in range(20):  # what lay above the committed mark was cut, and is fetched by following
            rig.replicate(first)
        assert shard.journal(first) == shard.whole
        rig.check_derived()
        rig.checkpoint(first)


def test_a_bad_unit_above_the_committed_mark_is_cut_and_fetched_by_following() -> None:
    shard = Shard(9)
    rig, first = shard.rig, shard.followers[0]
    for _ in range(6):
        rig.append(5)
    for number in range(MEMBERS):
        rig.replicate(number)
    replica = rig.replicas[first]
    assert replica is not None
    assert replica.applied < replica.end
    end, path = replica.applied, shard.segments(first)[-1]
    replica.close()
    rig.replicas[first] = None
    rig.files[first].flip_bit(path, end - int(path[-28:-8]) + 20)
    rig.start(first)
    replica = rig.replicas[first]
    assert replica is not None
    assert replica.membership.doubtful
    assert replica.end == end
    assert not replica.damage.ranges
    rig.settle_down()
    assert shard.journal(first) == shard.journal(shard.leader)
