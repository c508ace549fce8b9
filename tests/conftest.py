"""What all tests share."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

import dmq.deadletters.store  # noqa: F401  first by the main thread: CPython 3.11 breaks when two threads parse at once
from dmq.testing.fixtures import dmq_broker
from tests.databases import database_servers
from tests.sampling import IS_SOAK, SEED

__all__ = ["database_servers", "dmq_broker"]

ROOT = Path(__file__).resolve().parent.parent

# Hypothesis keeps tables of characters on disk; they belong with the other caches.
set_hypothesis_home_dir(ROOT / ".venv" / "cache" / "hypothesis")
hypothesis.settings.register_profile("share", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile("soak", deadline=None, database=None, print_blob=True, max_examples=1000)
hypothesis.settings.load_profile("soak" if IS_SOAK else "share")


def pytest_report_header() -> str:
    return f"dmq: {'whole' if IS_SOAK else 'share of the'} sampling, DMQ_SEED={SEED}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT
