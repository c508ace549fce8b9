"""How fast the message store alone is: the measurement behind `dmq bench store`."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from dmq.model import Durability, TopicConfig
from dmq.records import encode_batch
from dmq.settings import StoreSettings
from dmq.storage.files import OsFiles
from dmq.storage.journal.unit_draft import Batch
from dmq.storage.store import MessageStore
from dmq.testing.benchmark.benchmark import APP, Figure, Load, Progress, Rates, measured

__all__ = ["store"]

_NO_ADDRESS = bytes(16)


def store(load: Load, folder: Path, progress: Progress) -> Figure:
    """The message store alone, without network: appends beside a plain write of the same bytes."""
    bodies = load.bodies()
    rates = Rates(load.messages, sum(map(len, bodies)))
    is_flushed = load.durability == "flushed"
    wanted = Durability.FLUSHED if is_flushed else Durability.STORED
    for number in range(load.rounds + 1):
        raw = _plain_write(folder, load, bodies, is_flushed)
        if number:
            rates.floor_seconds.append(raw)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            opened = MessageStore(OsFiles(Path(made) / "data"), StoreSettings(), checkpoint_inline=False)
            try:
                opened.create_topic("bench", TopicConfig(queues=4))

                def run(opened: MessageStore = opened) -> None:
                    _append(opened, load, bodies, wanted, progress=progress)

                measured(rates, run, lambda: 0.0, number > 0)
            finally:
                opened.close()
    return rates.figure(f"append by {load.batch}, {load.size} B, {load.durability}")


def _append(opened: MessageStore, load: Load, bodies: list[bytes], wanted: Durability, progress: Progress) -> None:
    first = 0
    for group in load.groups(bodies):
        encoded = encode_batch("bench", APP, load.made(group, first), sent_at_ms=int(time.time() * 1000))
        batch = Batch(
            topic="bench",
            queue=0,
            data=encoded.data,
            lengths=encoded.lengths,
            hash_index=encoded.hash_index,
            hashes=encoded.hashes,
            producer_id=1,
            producer_epoch=0,
            first_sequence=first,
            named=False,
            address=_NO_ADDRESS,
            port=0,
            received_at_ms=int(time.time() * 1000),
        )
        opened.append([batch], wanted)
        if wanted is Durability.FLUSHED:
            opened.flush()
        first += len(group)
        progress(len(group))


def _plain_write(folder: Path, load: Load, bodies: list[bytes], is_flushed: bool) -> float:
    with tempfile.TemporaryFile(dir=folder) as file:
        fd = file.fileno()
        began = time.perf_counter()
        for group in load.groups(bodies):
            os.write(fd, b"".join(group))
            if is_flushed:
                os.fdatasync(fd)
        return time.perf_counter() - began
