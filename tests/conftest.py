"""What all tests share."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
from hypothesis.configuration import set_hypothesis_home_dir

import dmq.deadletters.store  # noqa: F401  first by the main thread: CPython 3.11 breaks when two threads parse at once
from dmq.event_log import _LIMITER
from dmq.testing.fixtures import dmq_broker
from dmq.testing.ports import tidy_ports
from tests.databases import database_servers
from tests.folder_times import FolderTimes
from tests.object_store import object_store, store_port
from tests.sampling import IS_SOAK, SEED, SOAK, sample_size
from tests.termination import end_in_order
from tests.zookeepers import zookeeper, zookeeper_ensemble

__all__ = ["database_servers", "dmq_broker", "object_store", "store_port", "zookeeper", "zookeeper_ensemble"]

ROOT = Path(__file__).resolve().parent.parent
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"  # contexts of whoever runs the tests are not theirs
SPARK = ROOT / "tests" / "spark"

# Hypothesis keeps tables of characters on disk; they belong with the other caches.
set_hypothesis_home_dir(ROOT / ".venv" / "cache" / "hypothesis")
hypothesis.settings.register_profile("share", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.register_profile(
    "soak", deadline=None, database=None, print_blob=True, max_examples=sample_size(share=100, whole=1000)
)
hypothesis.settings.load_profile("soak" if IS_SOAK else "share")


def pytest_report_header() -> str:
    return f"dmq: {'share of the' if SOAK < 1 else 'whole'} sampling, DMQ_SOAK={SOAK:g}, DMQ_SEED={SEED}"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "uncounted: its lines are not counted for coverage, which takes long")
    end_in_order()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(FolderTimes())


@pytest.fixture(autouse=True)
def _repeated_lines() -> None:
    """A line that another test wrote within the last seconds is written again."""
    _LIMITER.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run a test that is `uncounted`, and the threads it starts, without counting lines."""
    if item.get_closest_marker("uncounted") is None:
        return (yield)
    counting, counting_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(counting)
        threading.settrace(counting_threads)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spark", choices=["only", "without"], help="run only the tests in tests/spark, or all others")


def _is_other_part(path: Path, config: pytest.Config) -> bool:
    part = config.getoption("--spark")
    return part is not None and path.is_relative_to(SPARK) != (part == "only")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare the time to import what is not run."""
    return True if collection_path.parent != ROOT and _is_other_part(collection_path, config) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was named by path or imported all the same."""
    others = [item for item in items if _is_other_part(item.path, config)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if not _is_other_part(item.path, config)]


def pytest_unconfigure() -> None:
    tidy_ports()


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return ROOT
