"""Large stores for `bench.store`, made, killed and looked at in processes of their own.

`python -m bench.large JSON` is such a process; `filled`, `open_after_kills` and `ask` start it. Each prints one line of
JSON when it is done or, if it is to be killed, ready for that.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.loads import PRODUCER, Load, make_topics, queue_of, rss_mb, status_mb
from dmq.model import SCHEDULE_TOPIC, Durability
from dmq.storage.files import OsFiles
from dmq.storage.store import MessageStore

__all__ = ["Sizes", "ask", "filled", "grow", "open_after_kills"]

ROOT: Final = Path(__file__).resolve().parents[1]
STORED: Final = Durability.STORED
_DELAYS_A_BATCH: Final = 2000
_FRAGMENTS: Final = 8
_YEAR_MS: Final = 365 * 24 * 3_600_000


class Sizes(msgspec.Struct, frozen=True):
    """How much of everything."""

    large_bytes: int = 10_000_000_000
    small_bytes: int = 1_000_000_000
    queues: int = 10_000
    delays: int = 5_000_000
    messages: int = 400_000  # a round of a comparison
    read_messages: int = 400_000
    flushes: int = 6400
    lookups: int = 400

    @classmethod
    def small(cls) -> Sizes:
        return cls(200_000_000, 100_000_000, 1000, 100_000, 40_000, 40_000, 1280, 80)


# --- the callers' side ----------------------------------------------------------------------------------------------


def _start(what: str, path: Path, seed: int, **more: object) -> subprocess.Popen[str]:
    order = json.dumps({"what": what, "path": str(path), "seed": seed, **more})
    return subprocess.Popen(
        [sys.executable, "-m", "bench.large", order], cwd=ROOT, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    )


def _answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process of the benchmark ended with status {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def ask(what: str, path: Path, seed: int, **more: object) -> dict[str, Any]:
    """Let a process do something with a store, and wait for its answer."""
    with _start(what, path, seed, **more) as process:
        try:
            return _answer(process)
        finally:
            process.communicate()


def filled(path: Path, size: int, sizes: Sizes, seed: int) -> Path:
    """Make a store of that size."""
    shutil.rmtree(path, ignore_errors=True)
    began = time.perf_counter()
    answer = ask("fill", path, seed, size=size, queues=sizes.queues, delays=sizes.delays)
    print(f"     made {answer['stored'] / 1e9:.2f} GB in {time.perf_counter() - began:.0f} s", flush=True)
    return path


def open_after_kills(paths: dict[str, Path], rounds: int, seed: int) -> dict[str, list[dict[str, float]]]:
    """Open each store in turn, write until just before a checkpoint, and kill -9; the first round only kills."""
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
    for turn in range(rounds + 1):
        for name, path in paths.items():
            with _start("cycle", path, seed, first_sequence=(turn + 2) << 40) as process:
                try:
                    answer = _answer(process)
                finally:
                    process.kill()
                    process.communicate()
            if turn:
                taken[name].append(answer)
    return taken


# --- the processes --------------------------------------------------------------------------------------------------


def fill(path: str, seed: int, size: int, queues: int, delays: int) -> dict[str, Any]:
    """Delays, then something in every queue, then a backlog of 1 KB messages in one queue."""
    store = MessageStore(OsFiles(path))
    make_topics(store, queues)
    load = Load(seed, 60)
    due = time.time_ns() // 1_000_000
    for number in range(delays // _DELAYS_A_BATCH):
        # Due over the next year, in no order; a few are due already.
        dues = [due + (index * 7_919 + number) % delays * (_YEAR_MS // delays) for index in range(_DELAYS_A_BATCH)]
        store.append([load.batch(SCHEDULE_TOPIC, number % _FRAGMENTS, _DELAYS_A_BATCH, keys=False, dues=dues)], STORED)
    load = Load(seed + 1, 200, load.sequence)
    for start in range(0, queues, 50):
        store.append([load.batch(*queue_of(number), 10) for number in range(start, min(start + 50, queues))], STORED)
    grow(store, Load(seed + 2, 1000, load.sequence), size)
    store.close()
    return {"stored": store.queries.end - store.queries.start}


def grow(store: MessageStore, load: Load, end: int) -> None:
    """Write 1 KB messages until the journal ends about there."""
    while store.queries.end < end:
        store.append([load.batch("orders", 0, 500)], STORED)


def cycle(path: str, seed: int, first_sequence: int) -> dict[str, Any]:
    """Open, and write until the next batch would bring a checkpoint."""
    imported = time.process_time()
    began = time.perf_counter()
    store = MessageStore(OsFiles(path))
    wall, cpu = time.perf_counter() - began, time.process_time() - imported
    checkpointed = store.queries.end
    grow(store, Load(seed, 1000, first_sequence), checkpointed + store.settings.checkpoint_bytes - (2 << 20))
    return {
        "wall": wall,
        "cpu": cpu,
        "units": store.recovered.units,
        "left": store.queries.end - checkpointed,  # for the next one to replay
        "stored": store.queries.end - store.queries.start,
    }


def memory(path: str, seed: int, queues: int) -> dict[str, Any]:
    """Open, and do some of everything."""
    imports = rss_mb()
    store = MessageStore(OsFiles(path))
    opened = rss_mb()
    for number in range(0, queues, 7):
        list(store.queries.read(*queue_of(number), 0).records())
    offset = store.queries.bounds("orders", 0)[0]
    for _ in range(200):
        offset = store.queries.read("orders", 0, offset).next_offset
    load = Load(seed, 200, 1 << 60)
    for _ in range(200):
        store.append([load.batch("orders", 1, 500)], STORED)
    store.checkpoint()
    taken = store.take_due(time.time_ns() // 1_000_000 + _YEAR_MS // 100, 10_000)
    store.release_due([delay.offset for delay in taken])
    stats = store.stats()
    answer = {
        "imports_mb": imports,
        "opened_mb": opened,
        "rss_mb": rss_mb(),
        "peak_mb": status_mb("VmHWM"),
        "stored": store.queries.end - store.queries.start,
        "queues": stats["queues"],
        "delays": stats["delays"],
        "taken": len(taken),
        "producer": PRODUCER,
    }
    store.close()
    return answer


def main() -> None:
    order = json.loads(sys.argv[1])
    tasks: dict[str, Callable[..., dict[str, Any]]] = {"fill": fill, "cycle": cycle, "memory": memory}
    what = tasks[order.pop("what")]
    print(json.dumps(what(**order)), flush=True)
    if what is cycle:
        sys.stdin.read()  # until we are killed


if __name__ == "__main__":
    main()
