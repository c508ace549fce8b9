"""The checkpoint: how far the derived files are good, and which they are.

Written in this order: the derived files, flushed, then their folders, then this file under another name, flushed, then
the rename, then the data directory. So whichever checkpoint a crash leaves in force, everything it names is whole.
"""

from __future__ import annotations

from typing import Final

import msgspec

from dmq.storage.delay.wheel_files import WheelFile
from dmq.storage.file_pool import FilePool
from dmq.storage.files import Files
from dmq.storage.index.block_file import DerivedDamaged, read_framed, write_framed

__all__ = ["PATH", "POSITIONS_FOLDER", "Checkpoint", "read_checkpoint", "read_positions", "write_checkpoint"]

PATH: Final = "checkpoint"
_TEMPORARY: Final = "checkpoint.tmp"
_MAGIC: Final = b"DMQC"
POSITIONS_FOLDER: Final = "offset"
_POSITIONS_MAGIC: Final = b"DMQP"

Positions = list[tuple[str, list[tuple[int, int, int, list[tuple[int, int]]]]]]


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    """Everything needed to open without reading the journal before `offset`."""

    sequence: int
    journal_id: int
    journal_start: int
    offset: int
    epoch: int
    stored_at_ms: int
    state: bytes
    positions: str
    runs: list[str]
    filed: list[tuple[int, int]]
    index: list[str]
    wheel: list[WheelFile]
    wheel_done: bytes
    damage: list[tuple[int, int]]

    def paths(self) -> set[str]:
        """Every derived file it needs, but for queue files."""
        return {self.positions, *self.runs, *self.index, *(run.path for run in self.wheel)}


_decoder = msgspec.msgpack.Decoder(Checkpoint)
_positions_decoder = msgspec.msgpack.Decoder(Positions)


def write_checkpoint(files: Files, checkpoint: Checkpoint) -> None:
    """Put a checkpoint in force; what it names must be durable."""
    write_framed(files, _TEMPORARY, _MAGIC, msgspec.msgpack.encode(checkpoint))
    files.rename(_TEMPORARY, PATH)
    files.sync_dir("")


def read_checkpoint(files: Files, pool: FilePool) -> Checkpoint | None:
    """The checkpoint in force; None if there is none.

    Raises:
        DerivedDamaged: it cannot be read.
    """
    if not files.exists(PATH):
        return None
    try:
        checkpoint: Checkpoint = _decoder.decode(read_framed(pool, PATH, _MAGIC))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DerivedDamaged(f"{PATH} cannot be read: {error}") from error
    finally:
        pool.drop(PATH)
    return checkpoint


def write_positions(files: Files, sequence: int, positions: Positions) -> str:
    """Write all positions, flushed; returns the path."""
    path = f"{POSITIONS_FOLDER}/{sequence:020d}.positions"
    in_order = [(group, sorted(rows)) for group, rows in sorted(positions)]
    write_framed(files, path, _POSITIONS_MAGIC, msgspec.msgpack.encode(in_order))
    return path


def read_positions(pool: FilePool, path: str) -> Positions:
    """What `write_positions` wrote.

    Raises:
        DerivedDamaged: it is not that any more.
    """
    try:
        positions: Positions = _positions_decoder.decode(read_framed(pool, path, _POSITIONS_MAGIC))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DerivedDamaged(f"{path} cannot be read: {error}") from error
    return positions
