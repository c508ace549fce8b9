"""Batches a spool had accepted and every broker refused for good: kept aside, until somebody decides.

They lie in the folder `refused` of the spool, each in a file of its own:

    u8     version, 1
    u32    length of the note
    bytes  note         `Refusal`, in MessagePack
    bytes  parcel       as the spool had it, see `dmq.client.spool.parcel`

What always holds: a batch is here, flushed, before the spool forgets it, under the number it had there, so that one
which is set aside twice is here once; nothing here is dropped or sent by itself; no more than `bytes_max` is kept.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from dmq.client.spool.parcel import Kept, pack_parcel, unpack_parcel
from dmq.errors import DMQError, LimitReached, RecordCorrupt, WrongFormat
from dmq.model import Durability, place_queue
from dmq.protocol import Command, decode_response
from dmq.protocol.produce import Produce, ProduceFlag, ProduceReply
from dmq.records import ANY_QUEUE
from dmq.storage.files import Files

if TYPE_CHECKING:
    from dmq.client.connection.connection import Connection

__all__ = ["Refusal", "RefusedBatch", "RefusedFolder", "send_refused"]

FOLDER: Final = "refused"
_VERSION: Final = 1
_PREFIX: Final = struct.Struct(">BI")
_NAME: Final = re.compile(r"(\d{20})\.batch")


class Refusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Why a batch is here. Stored: fields may be added at the end."""

    code: str
    message: str
    at_ms: int


class RefusedBatch(NamedTuple):
    """A batch that was set aside."""

    number: int
    refusal: Refusal
    kept: Kept


_decoder = msgspec.msgpack.Decoder(Refusal)


class RefusedFolder:
    """The folder of one spool. Its owner calls it from one thread at a time.

    Parameters:
        files: the spool's directory.
        bytes_max: how much is kept at most.
    """

    def __init__(self, files: Files, bytes_max: int) -> None:
        self._files = files
        self._bytes_max = bytes_max

    def numbers(self) -> list[int]:
        """All batches, the oldest first."""
        return [int(found[1]) for name in self._files.listdir(FOLDER) if (found := _NAME.fullmatch(name))]

    def add(self, kept: Kept, error: DMQError, at_ms: int) -> None:
        """Set a batch aside; it would survive a power cut when this returns.

        Raises:
            LimitReached: as much is kept as may be.
            StorageError: the disk refused.
        """
        note = msgspec.msgpack.encode(Refusal(error.code, error.message, at_ms))
        data = _PREFIX.pack(_VERSION, len(note)) + note + pack_parcel(kept.head, kept.body)
        used = sum(self._files.size(_path(number)) for number in self.numbers() if number != kept.offset)
        if used + len(data) > self._bytes_max:
            raise LimitReached(
                f"{self._files.describe(FOLDER)} has {used} bytes of refused batches, which is all that is kept: send "
                "them again or drop them with `dmq spool`"
            )
        self._files.mkdir(FOLDER)
        path = _path(kept.offset)
        file = self._files.open(f"{path}.new", create=True, write=True)
        try:
            file.truncate(0)
            file.write(0, (data,))
            file.sync()
        finally:
            file.close()
        self._files.rename(f"{path}.new", path)
        self._files.sync_dir(FOLDER)
        self._files.sync_dir("")

    def read(self, number: int) -> RefusedBatch:
        """One of them.

        Raises:
            FileNotFoundError: there is none of that number.
            WrongFormat, RecordCorrupt: it cannot be read.
        """
        file = self._files.open(_path(number))
        try:
            raw = file.read(0, file.size())
        finally:
            file.close()
        try:
            version, length = _PREFIX.unpack_from(raw)
            if version != _VERSION:
                raise WrongFormat(f"{self._files.describe(_path(number))} is of another version of DMQ ({version})")
            parcel_at = _PREFIX.size + length
            refusal = _decoder.decode(raw[_PREFIX.size : parcel_at])
        except (struct.error, msgspec.MsgspecError) as error:
            raise RecordCorrupt(f"{self._files.describe(_path(number))} cannot be read: {error}") from error
        return RefusedBatch(number, refusal, unpack_parcel(number, raw[parcel_at:]))

    def __iter__(self) -> Iterator[RefusedBatch]:
        for number in self.numbers():
            yield self.read(number)

    def drop(self, number: int) -> None:
        """Forget one."""
        self._files.unlink(_path(number))
        self._files.sync_dir(FOLDER)


def send_refused(connection: Connection, batch: RefusedBatch, timeout: float) -> ProduceReply:
    """Send a batch after all. Its messages get new ids: others of the spool have overtaken the numbers they had.

    Raises:
        DMQError: it is refused again, or no answer came.
    """
    head = batch.kept.head
    header = Produce(
        head.topic,
        place_queue(head.queue) if head.is_pinned else ANY_QUEUE,
        head.count,
        head.keys,
        producer_id=secrets.randbits(64) or 1,
        producer_epoch=0,
        first_sequence=0,
        durability=Durability(head.durability),
        flags=(ProduceFlag.DUES if head.is_delayed else 0) | (ProduceFlag.EXPIRING if head.is_expiring else 0),
    )
    reply: ProduceReply = decode_response(connection.request(Command.PRODUCE, header, batch.kept.body, timeout=timeout))
    return reply


def _path(number: int) -> str:
    return f"{FOLDER}/{number:020d}.batch"
