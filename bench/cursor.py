"""How much a cursor costs per lease: propose, grant and ack, with few and with thousands of leases out.

python -m bench.cursor [--leases N]
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections import deque

from dmq.broker.delivery.cursor import WINDOW, Cursor, LeaseNumbers, Looked
from dmq.broker.delivery.lease import CursorKey, Holder, Lease
from dmq.storage.state.positions import Position

FAR = 1 << 60
LEASE_MS = 30_000


def cursor() -> Cursor:
    return Cursor(CursorKey("group", 16, 0), Position(0), LeaseNumbers(1, itertools.count(1)), visible_next=FAR)


def measure(leases: int, size: int, out: int, *, shuffled: bool, every: int = 1) -> float:
    """Microseconds of processor time per lease of `size` messages, with `out` leases out all the time.

    Parameters:
        shuffled: ack in random order among what is out, not in the order of hand-out.
        every: a filter lets one message in so many through.
    """
    subject, holder, rng = cursor(), Holder("member"), random.Random(1)
    held: deque[Lease] = deque()
    reach = size * every
    began, done_count = time.process_time(), 0
    for now_ms in itertools.count():
        proposal = subject.propose(size, now_ms, FAR, reach)
        if proposal is not None:
            matched = range(proposal.start, proposal.stop, every) if every > 1 else None
            lease = subject.grant(proposal, holder, now_ms, LEASE_MS, Looked(matched=matched, size=size * 200))
            if lease is not None:
                held.append(lease)
        if len(held) >= out or proposal is None:
            if shuffled:
                held.rotate(-rng.randrange(len(held)))
            done = held.popleft()
            subject.ack(1, done.number, [(done.start, done.stop)], now_ms)
            done_count += 1
            if done_count == leases:
                break
    return (time.process_time() - began) / leases * 1e6


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leases", type=int, default=200_000)
    leases = parser.parse_args().leases
    full_100, full_10 = WINDOW // 100, WINDOW // 10
    cases = [
        ("100 messages, 1 out", measure(leases, 100, 1, shuffled=False)),
        (f"100 messages, {full_100} out", measure(leases, 100, full_100, shuffled=False)),
        (f"100 messages, {full_100} out, any order", measure(leases, 100, full_100, shuffled=True)),
        (f"10 messages, {full_10} out", measure(leases, 10, full_10, shuffled=False)),
        (f"10 messages, {full_10} out, any order", measure(leases, 10, full_10, shuffled=True)),
        ("100 messages, every 2nd matches, 1 out", measure(leases // 10, 100, 1, shuffled=False, every=2)),
        ("100 messages, every 100th matches, 1 out", measure(leases // 10, 100, 1, shuffled=False, every=100)),
    ]
    for name, micros in cases:
        print(f"{name:<45} {micros:6.2f} µs of processor time per lease")


if __name__ == "__main__":
    main()
