"""What the compiled loops save: `python -m bench.compiled [--json FILE]`, in microseconds of CPU a message.

Each compiled function stands beside its plain twin, turn by turn in one process, over the same bytes: distinct bodies
of 200 bytes, each message with a key and a tag.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import _dmq_speed as speed
import numpy as np

from bench.records import make_messages
from dmq.client.producer.core import simple_size_plain
from dmq.model import Message
from dmq.records import batch_rules, encode_batch
from dmq.records.check import are_right_plain, checked_bodies
from dmq.records.columns import find_spans
from dmq.records.encoder import (
    ENCODE_MANY_MIN,
    _Batch,
    _encode_few,
    encode_alike_compiled,
    encode_alike_plain,
    plain_columns_plain,
)
from dmq.storage.journal.unit import NO_ADDRESS, Part, Row
from dmq.storage.journal.unit_draft import stamp_parts, stamp_parts_few, stamp_parts_many
from dmq.storage.journal.unit_writer import Lone, Sender, UnitHead, lay_out_compiled, lay_out_plain

ROUNDS = 15
COUNTS = (1, 8, 500, 2000)


class Twins(NamedTuple):
    """Two ways to do the same."""

    plain: Callable[[], object]
    compiled: Callable[[], object]


def twins(count: int) -> dict[str, Twins]:
    encoded = encode_batch("orders", "shop", make_messages(count, "random"), sent_at_ms=1)
    data, lengths = bytes(encoded.data), encoded.lengths
    sizes = lengths if count >= 16 else tuple(lengths.tolist())
    rules, with_crc = batch_rules("orders"), batch_rules("orders", check_crc=True)
    messages = make_messages(count, "random")
    bodies, keys = [message.body for message in messages], [message.key for message in messages]
    mixed = [key[: 6 + number % 9] if key else key for number, key in enumerate(keys)]
    bare = [Message(message.body, message.key) for message in messages]
    body_sizes, like = [*map(len, bodies)], messages[0]

    def plain(keys: list[str | None]) -> object:
        batch = _Batch("orders", "shop", 1, 0, extras=b"")
        if count < ENCODE_MANY_MIN:
            return _encode_few(batch, messages, bodies, None)
        return encode_alike_plain(batch, like, bodies, body_sizes, keys=keys)

    def compiled(keys: list[str | None]) -> object:
        batch = _Batch("orders", "shop", 1, 0, extras=b"")
        return encode_alike_compiled(speed.assemble_alike, batch, like, bodies, keys=keys)

    def simple_sizes(size_of: Callable[[object, object, int, int], int]) -> list[int]:
        return [size_of(body, key, 4 << 20, 255) for body, key in zip(bodies, keys, strict=True)]

    stamped, places = bytearray(data), (np.cumsum(lengths, dtype=np.int64) - lengths).tolist()
    row = Row(1, 0, 0, count, 1, 2, 0, 0, 77, NO_ADDRESS, 0)
    parts, origin = [Part(row, data, sizes, 5)], (bytes(6), 6)
    offsets = places if count < 16 else np.array(places)
    sender = Sender(NO_ADDRESS, 1, bytes(6), False)
    lones: list[Lone] = [
        ("orders", 1, data[at : at + size], 77, 5, 0, 9, 3, sender)
        for at, size in zip(places, lengths.tolist(), strict=True)
    ]
    rows = [Row(5, 0, 9, 1, 1, 1, 0, 0, 4, NO_ADDRESS, 1)] * count
    head = UnitHead(2, 1, 100, 5, 0, 7, bytes(6))
    stamp_plain = stamp_parts_few if count < 16 else stamp_parts_many
    starts = [*places, len(data)]
    bounds = np.array(starts)

    def opened() -> object:
        checked_bodies(data, bounds)
        spans = find_spans(data, bounds)
        return [data[at:end].decode() for at, end in zip(spans.key_starts, spans.key_ends, strict=True)]

    return {
        "open, checked": Twins(opened, lambda: speed.open_records(data, starts, 0, count, None, True)),
        "encode, keys of one size": Twins(lambda: plain(keys), lambda: compiled(keys)),
        "encode, keys of any size": Twins(lambda: plain(mixed), lambda: compiled(mixed)),
        "columns of messages": Twins(lambda: plain_columns_plain(bare), lambda: speed.plain_columns(bare)),
        "size of a simple message": Twins(
            lambda: simple_sizes(simple_size_plain), lambda: simple_sizes(speed.simple_size)
        ),
        "unit of lone messages": Twins(
            lambda: lay_out_plain(lones, rows, head),
            lambda: lay_out_compiled(speed.lone_bytes, lones, rows, head),
        ),
        "stamp": Twins(
            lambda: stamp_plain(stamped, parts, offsets, 0, origin=origin),
            lambda: stamp_parts(speed.stamp_run, stamped, parts, offsets, start=0, origin=origin),
        ),
        "check": Twins(lambda: are_right_plain(data, sizes, rules), lambda: speed.are_right(data, sizes, rules)),
        "check with CRC": Twins(
            lambda: are_right_plain(data, sizes, with_crc), lambda: speed.are_right(data, sizes, with_crc)
        ),
    }


def measure(count: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved rounds, in µs a message."""
    repeats = max(1, 4000 // count)
    found: dict[str, dict[str, float]] = {}
    for name, ways in twins(count).items():
        taken: dict[str, list[float]] = {"plain": [], "compiled": []}
        for turn in range(ROUNDS + 1):
            for way, run in zip(taken, ways, strict=True):
                before = time.thread_time()
                for _ in range(repeats):
                    run()
                if turn:  # the first turn warms up
                    taken[way].append((time.thread_time() - before) / repeats / count * 1e6)
        found[name] = {way: statistics.median(times) for way, times in taken.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    figures = {count: measure(count) for count in COUNTS}
    print("µs of CPU a message, plain > compiled")
    print(f"{'messages a batch':26}" + "".join(f"{count:>18}" for count in COUNTS))
    for name in figures[COUNTS[0]]:
        cells = [f"{figures[count][name]['plain']:.3f} > {figures[count][name]['compiled']:.3f}" for count in COUNTS]
        print(f"{name:26}" + "".join(f"{cell:>18}" for cell in cells))
    if options.json:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.platform()}
        options.json.write_text(json.dumps({**machine, "rounds": ROUNDS, "us_per_message": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
