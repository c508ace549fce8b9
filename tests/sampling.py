"""How much of a large sampling a run takes, and from which seed.

`./scripts/test` takes a share from a fixed seed, so that every run is the same. `./scripts/soak` takes the whole
from another seed each time, and prints it; with `DMQ_SOAK=0.1` it goes a tenth of the way from the share to the whole.
A test that uses this carries the marker `sampled`, else ./scripts/soak does not run it.
"""

from __future__ import annotations

import os

__all__ = ["IS_SOAK", "SEED", "sample_size"]

SOAK = float(os.environ.get("DMQ_SOAK", "0"))
IS_SOAK = SOAK > 0
SEED = int(os.environ.get("DMQ_SEED", "1"))


def sample_size(*, share: int, whole: int) -> int:
    """How many samples to take in this run."""
    return round(share + (whole - share) * SOAK)
