"""How much of a large sampling a run takes, and from which seed.

`./scripts/test` takes a share from a fixed seed, so that every run is the same. `./scripts/soak` takes the whole
from another seed each time, and prints it. A test that uses this carries the marker `sampled`.
"""

from __future__ import annotations

import os

__all__ = ["IS_SOAK", "SEED", "sample_size"]

IS_SOAK = os.environ.get("DMQ_SOAK") == "1"
SEED = int(os.environ.get("DMQ_SEED", "1"))


def sample_size(*, share: int, whole: int) -> int:
    """How many samples to take in this run."""
    return whole if IS_SOAK else share
