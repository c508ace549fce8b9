"""The mender: fetches what is damaged in our journal from other members, and puts it back.

What always holds: only what is committed is mended, and only with bytes that check out (`storage.upkeep.damage`); a
range that no member can give stays damaged and is named, and is given up only after every other member has answered
that it does not have it; memory is bounded, however much is damaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from dmq.errors import Damaged, DMQError, OffsetGone, RecordCorrupt
from dmq.protocol.cluster.replication import Repair
from dmq.shard.peers import Peers
from dmq.shard.place import OnDisk
from dmq.shard.repair.answer import CommittedJournal
from dmq.storage.journal.unit import whole_units
from dmq.storage.upkeep.damage import Mending
from dmq.storage.upkeep.scrub import Range

__all__ = ["Mended", "Mender"]

_STEP_BYTES: Final = 16 << 20
_PART_BYTES: Final = 8 << 20
_PART_BYTES_MAX: Final = 256 << 20  # of one unit
_UNITS_MAX: Final = 1 << 20
_NOBODY: Final = "no other member is registered: start one that has it"


class Mended(NamedTuple):
    """Ranges of the journal that were damaged; why some are left."""

    mended: Sequence[Range]
    left: Sequence[Range] = ()
    reason: str = ""


class Mender:
    """Mends the journal of one member.

    Parameters:
        addresses: of the other members that run, the leader's first.
        are_all: no other member is missing among them.
    """

    def __init__(self, peers: Peers, on_disk: OnDisk, addresses: Sequence[str], *, are_all: bool) -> None:
        self._peers = peers
        self._on_disk = on_disk
        self._addresses = addresses
        self._are_all = are_all

    async def scrub(self, journal: Callable[[], CommittedJournal]) -> None:
        """Look through all that is committed; what cannot be read is known to be damaged afterwards."""
        end, scrub = journal().committed, journal().source.damage.scrub()
        while (piece := scrub.next(end, _STEP_BYTES)) is not None:
            seen = await self._on_disk(piece.run)
            for start, stop in scrub.saw(piece, seen):
                journal().source.damage.add(start, stop)

    async def mend(self, journal: Callable[[], CommittedJournal]) -> Mended:
        """Mend what is known to be damaged.

        Parameters:
            journal: asked for again after each wait; what it raises ends the repair.

        Raises:
            StorageError: the disk does not take it.
        """
        mended: list[Range] = []
        reason = ""
        is_passed_over = False
        for start, end in journal().source.damage.ranges:
            at, stop = start, min(end, journal().committed)
            try:
                while at < stop:
                    mending = await self._fetch(journal(), at, stop)
                    with contextlib.suppress(FileNotFoundError):  # retention took the segment: nothing is to be mended
                        await self._on_disk(mending.write)
                        is_passed_over |= journal().source.damage.finish(mending)
                    at = mending.end
            except _NotToBeHad as error:
                reason = str(error)
                if error.is_final:
                    journal().source.damage.give_up(at, end)
            if at > start:
                mended.append((start, at))
        if is_passed_over:
            await self._rebuild(journal())
        return Mended(mended, journal().source.damage.ranges, reason)

    async def _rebuild(self, journal: CommittedJournal) -> None:
        """What is derived lacks what was passed over."""
        if journal.is_led:
            journal.source.damage.rebuild()  # nobody may write meanwhile
        else:
            await self._on_disk(journal.source.damage.rebuild)

    async def _fetch(self, journal: CommittedJournal, start: int, end: int) -> Mending:
        """The first units of a range, from the first member that has them.

        Raises:
            _NotToBeHad: none has.
        """
        reasons, is_final = [], self._are_all
        for address in self._addresses:
            try:
                raw = await self._fetch_from(address, journal, start, end)
                return journal.source.damage.begin(start, end, raw)
            except DMQError as error:
                reasons.append(f"{address}: {error.message}")
                is_final &= _says_never(error, start)
        raise _NotToBeHad("; ".join(reasons) or _NOBODY, is_final)

    async def _fetch_from(self, address: str, journal: CommittedJournal, start: int, end: int) -> memoryview:
        """Whole units from one member."""
        member = journal.member
        raw = bytearray()
        while start + len(raw) < end:
            asked = Repair(member.cluster, member.shard, journal.journal_id, start=start + len(raw), end=end)
            reply, body = await self._peers.repair(address, asked)
            if reply.start != asked.start or not 0 < len(body) <= end - asked.start:
                raise RecordCorrupt(f"bytes {asked.start}-{end} were asked for, and {len(body)} came", start=start)
            raw += body
            if len(raw) >= _PART_BYTES and whole_units(raw, start, _UNITS_MAX):
                break
            if len(raw) > _PART_BYTES_MAX:
                raise RecordCorrupt(f"no unit ends within {_PART_BYTES_MAX} bytes from {start} on", start=start)
        whole = whole_units(raw, start, _UNITS_MAX)
        if not whole:
            raise RecordCorrupt(f"what came for journal offset {start} is not a unit", offset=start)
        return memoryview(raw)[:whole]


def _says_never(error: DMQError, start: int) -> bool:
    """Whether a member that could not give bytes from an offset on will not have them later either."""
    if isinstance(error, OffsetGone):
        return int(error.detail.get("first", 0)) > start  # else it may not know yet that they are committed
    return isinstance(error, Damaged | RecordCorrupt)


class _NotToBeHad(Exception):
    """No member can give the bytes now; with `is_final`, every member has said that it never will."""

    def __init__(self, reason: str, is_final: bool) -> None:
        super().__init__(reason)
        self.is_final = is_final
