"""Runs seeds of the simulation by hand.

python -m tests.fault.shard.simulate 17             one seed, with its whole history
python -m tests.fault.shard.simulate 1 200          seeds 1 to 200; those that fail are told
"""

from __future__ import annotations

import random
import sys
import time

from tests.fault.shard.adversary import Adversary
from tests.fault.shard.cluster import Cluster, Violation

__all__ = ["simulate"]


def simulate(seed: int, only: tuple[str, ...] = ()) -> Cluster:
    """One run: a shard comes up, a storm goes over it, and it settles.

    Raises:
        Violation: it broke its word.
    """
    with Cluster(seed) as cluster:
        cluster.start()
        cluster.await_progress("whole", cluster.is_whole)
        Adversary(cluster, random.Random(seed), only).storm()
        cluster.settle()
    return cluster


def main() -> None:
    first, *rest = map(int, sys.argv[1:])
    if not rest:
        cluster = simulate(first)
        for at, who, what in cluster.history:
            print(f"{at:10.3f} {who:>2} {what}")
        return
    failed = []
    began = time.process_time()
    for seed in range(first, rest[0] + 1):
        try:
            simulate(seed)
        except Violation as violation:
            failed.append(seed)
            print("\n".join(str(violation).splitlines()[:1]), flush=True)
    count = rest[0] + 1 - first
    print(f"{count} seeds, {len(failed)} failed: {failed}; {(time.process_time() - began) / count:.2f} s of CPU each")


if __name__ == "__main__":
    main()
