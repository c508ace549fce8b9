"""What records cost: encode, stamp, verify and decode, in microseconds of CPU a message.

Run it with `python -m bench.records [--json FILE]`. Every row stands beside a baseline measured in the same run, turn
by turn: copying the same bodies with one join. Bodies are distinct, of 200 random bytes or of JSON, and made before the
timed part; every message has a key and a tag.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dmq.model import Message
from dmq.records import (
    Compressor,
    EncodeOptions,
    batch_rules,
    check_batch,
    decode_columns,
    encode_batch,
    iter_records,
    stamp_few,
)
from dmq.records.check import VERIFY_MANY_MIN
from dmq.records.encoder import ENCODE_MANY_MIN
from dmq.records.layout import ADDRESSES_DTYPE, Stamp, StampColumns, stamp_columns

SEED = 7
ROUNDS = 15
ADDRESS = bytes(6)
COUNTS = (1, 8, 16, 32, 64, 500)


def make_messages(count: int, kind: str) -> list[Message]:
    rng = random.Random(SEED)
    bodies = [
        rng.randbytes(200)
        if kind == "random"
        else json.dumps(
            {"order": rng.getrandbits(32), "state": "paid", "lines": [rng.random() for _ in range(6)]}
        ).encode()
        for _ in range(count)
    ]
    return [Message(body, key=f"order-{rng.getrandbits(48):012x}", tag="paid") for body in bodies]


def cases(count: int, kind: str) -> dict[str, Callable[[], object]]:
    messages = make_messages(count, kind)
    bodies = [message.body for message in messages]
    compressor = Compressor()
    encoded = encode_batch("orders", "shop", messages, sent_at_ms=1)
    data, lengths = encoded.data, encoded.lengths
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    rules, with_crc = batch_rules("orders"), batch_rules("orders", check_crc=True)
    places = starts.tolist()
    stamp = Stamp(3, 9, ADDRESS, ADDRESS, 5, 6)
    addresses = np.frombuffer(ADDRESS + ADDRESS, ADDRESSES_DTYPE)
    columns = StampColumns(3, np.arange(9, 9 + len(starts)), addresses, 5, 6)

    def consume() -> None:
        for record in iter_records(data):
            _ = record.body, record.key

    return {
        "baseline: join bodies": lambda: b"".join(bodies),
        "encode": lambda: encode_batch("orders", "shop", messages, sent_at_ms=1),
        "encode, compression auto": lambda: encode_batch(
            "orders", "shop", messages, sent_at_ms=1, options=EncodeOptions(compressor=compressor)
        ),
        "stamp": lambda: stamp_few(data, places, places, stamp),
        "stamp, columns": lambda: stamp_columns(data, starts, starts, columns),
        "verify": lambda: check_batch(data, lengths, rules),
        "verify with CRC": lambda: check_batch(data, lengths, with_crc),
        "decode columns": lambda: decode_columns(data, starts, lengths),
        "view: body and key": consume,
    }


def measure(count: int, kind: str) -> dict[str, dict[str, float]]:
    """Median and spread of each case in µs a message, over interleaved rounds."""
    todo = cases(count, kind)
    repeats = max(1, 4000 // count)
    taken: dict[str, list[float]] = {name: [] for name in todo}
    for turn in range(ROUNDS + 1):
        for name, run in todo.items():
            before = time.thread_time()
            for _ in range(repeats):
                run()
            if turn:  # the first turn warms up
                taken[name].append((time.thread_time() - before) / repeats / count * 1e6)
    return {
        name: {"median": statistics.median(times), "min": min(times), "max": max(times)}
        for name, times in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    figures: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for kind in ("random", "json"):
        figures[kind] = {str(count): measure(count, kind) for count in COUNTS}
        print(f"\nµs a message, median (min), {kind} bodies of about 200 bytes")
        print(f"{'messages a batch':28}" + "".join(f"{count:>16}" for count in COUNTS))
        for name in figures[kind][str(COUNTS[0])]:
            row = [figures[kind][str(count)][name] for count in COUNTS]
            print(f"{name:28}" + "".join(f"{cell['median']:>8.2f} ({cell['min']:>5.2f})" for cell in row))
    thresholds = {"encode": ENCODE_MANY_MIN, "verify": VERIFY_MANY_MIN}
    if options.json:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.platform()}
        settings = {"seed": SEED, "rounds": ROUNDS, "numpy_from": thresholds}
        options.json.write_text(json.dumps({**machine, **settings, "us_per_message": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
