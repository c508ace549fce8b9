"""The checkpointer takes checkpoints in three steps: set aside (owner), write (any thread), put in use (owner).

What always holds: what is written is the state at `offset`, where everything before was applied and durable; old files
are removed only after the new checkpoint is in force; if writing fails, nothing has changed.
"""

from __future__ import annotations

import threading
from typing import Final

from dmq.errors import StorageError
from dmq.storage.delay import wheel as wheel_module
from dmq.storage.file_pool import FilePool, remove_tree
from dmq.storage.files import Files
from dmq.storage.index import lookup, queue_index
from dmq.storage.journal.journal import FlushTicket
from dmq.storage.state.derived import (
    POSITIONS_FOLDER,
    Checkpoint,
    Derived,
    Positions,
    write_checkpoint,
    write_positions,
)
from dmq.storage.state.events import pack_offsets

__all__ = ["FOLDERS", "CheckpointPlan", "Checkpointer"]

# Everything in these can be deleted while the store is closed; opening builds it anew.
FOLDERS: Final = (queue_index.FOLDER, queue_index.RUNS_FOLDER, lookup.FOLDER, wheel_module.FOLDER, POSITIONS_FOLDER)


class CheckpointPlan:
    """What was set aside for one checkpoint; `write` does the I/O and may run in another thread.

    Parameters:
        checkpoint: as far as it is known before the derived files are written.
        covered: the journal offset up to which the lookup files of the checkpoint in force reach.
        flush: what makes the journal durable up to the checkpoint.
    """

    def __init__(
        self,
        files: Files,
        derived: Derived,
        checkpoint: Checkpoint,
        covered: int,
        flush: FlushTicket | None,
    ) -> None:
        self.flush = flush
        self.is_flushed = False
        self.flush_error: StorageError | None = None
        self._files = files
        self._derived = derived
        self._written = threading.Event()
        self.is_stale = False
        self._covered = covered
        self._positions: Positions = derived.state.positions.dump()
        self._state = derived.state.set_aside(derived.applied, with_positions=False)
        self._filed = dict(derived.queues.filed)
        self.checkpoint = checkpoint
        self._wheel = derived.wheel.freeze(checkpoint.sequence, derived.applied)
        derived.queues.freeze()
        derived.lookup.freeze()

    def write(self) -> None:
        """Write all derived files and then the checkpoint that names them."""
        try:
            self._write()
        finally:
            self._written.set()

    def give_up(self) -> None:
        """What this plan is about is being built anew: wait until it touches no file any more, and forget it."""
        self.is_stale = True
        self._written.wait()

    def _write(self) -> None:
        self._flush()
        derived, files, sequence = self._derived, self._files, self.checkpoint.sequence
        run = derived.queues.write_frozen(sequence)
        paths = [r.path for r in derived.queues.runs] + ([] if run is None else [run])
        self._merged = derived.queues.merge(sequence, paths, derived.first_kept)
        self._index = derived.lookup.write_frozen(self._covered, self.checkpoint.offset, self.checkpoint.journal_start)
        self._wheel.write(derived.wheel.files)
        positions = write_positions(files, sequence, self._positions)
        for folder in (queue_index.RUNS_FOLDER, lookup.FOLDER, wheel_module.FOLDER, POSITIONS_FOLDER):
            files.sync_dir(folder)
        self._filed.update(self._merged.filed)
        self.checkpoint = _replaced(
            self.checkpoint,
            state=self._state.encode(),
            positions=positions,
            runs=[r.path for r in self._merged.runs],
            filed=sorted(self._filed.items()),
            index=[file.path for file in self._index],
            wheel=self._wheel.as_files(),
            wheel_done=pack_offsets(sorted(self._wheel.done)),
        )
        write_checkpoint(files, self.checkpoint)

    def _flush(self) -> None:
        """Make the part of the journal durable that the checkpoint speaks of."""
        if self.flush is not None:
            try:
                self.flush.run()
            except StorageError as error:
                self.flush_error = error
                raise
            self.is_flushed = True

    def adopt(self) -> None:
        """Use the new files; they are open already, so nothing here can fail half-way."""
        self._derived.queues.adopt(self._merged)
        self._derived.lookup.adopt(self._index)
        self._derived.wheel.adopt(self._wheel)

    def abandon(self) -> None:
        """Writing failed: keep what was set aside for the next checkpoint."""
        self._derived.queues.unfreeze()
        self._derived.lookup.unfreeze()
        self._derived.wheel.unfreeze()


def _replaced(checkpoint: Checkpoint, **changes: object) -> Checkpoint:
    fields = {name: getattr(checkpoint, name) for name in Checkpoint.__struct_fields__}
    return Checkpoint(**{**fields, **changes})


class Checkpointer:
    """Knows the checkpoint in force and which files it needs."""

    def __init__(self, files: Files, pool: FilePool, journal_id: int, in_force: Checkpoint | None) -> None:
        self._files = files
        self._pool = pool
        self._journal_id = journal_id
        self.in_force = in_force
        self._sequence = 0 if in_force is None else in_force.sequence

    def begin(
        self,
        derived: Derived,
        journal_start: int,
        epoch: int,
        stored_at_ms: int,
        flush: FlushTicket | None = None,
    ) -> CheckpointPlan:
        """Set aside what is to be written. Everything applied must be durable, or become so with `flush`."""
        self._sequence += 1
        checkpoint = Checkpoint(
            sequence=self._sequence,
            journal_id=self._journal_id,
            journal_start=journal_start,
            offset=derived.applied,
            epoch=epoch,
            stored_at_ms=stored_at_ms,
            state=b"",
            positions="",
            runs=[],
            filed=[],
            index=[],
            wheel=[],
            wheel_done=b"",
            damage=derived.damage,
        )
        covered = journal_start if self.in_force is None else self.in_force.offset
        return CheckpointPlan(self._files, derived, checkpoint, covered, flush=flush)

    def finish(self, plan: CheckpointPlan, derived: Derived) -> None:
        """The plan was written: use it, and remove what it replaces."""
        plan.adopt()
        self.in_force = plan.checkpoint
        self.remove_strays(derived)

    def remove_strays(self, derived: Derived) -> None:
        """Delete derived files the checkpoint in force does not need."""
        needed = set() if self.in_force is None else self.in_force.paths()
        for folder in (queue_index.RUNS_FOLDER, lookup.FOLDER, wheel_module.FOLDER, POSITIONS_FOLDER):
            for name in self._files.listdir(folder):
                path = f"{folder}/{name}"
                if path not in needed:
                    self._pool.drop(path)
                    self._files.unlink(path)
        derived.queues.remove_old(derived.first_kept, derived.folders())

    def forget_all(self) -> None:
        """Before a rebuild: no checkpoint, no derived files."""
        self._files.unlink("checkpoint")
        self._files.sync_dir("")
        for folder in FOLDERS:
            remove_tree(self._files, self._pool, folder)
            self._files.mkdir(folder)
        self.in_force = None
