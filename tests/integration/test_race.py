"""Every load of the table of bars runs in its smallest size, and a run writes what it measured and where."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.race.load import TASKS, Ground, Side
from dmq.testing.benchmark.baselines import Echo
from dmq.testing.benchmark.bodies import made_bodies

ROOT = Path(__file__).parents[2]
COUNT = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("race")
    (path / "json-200").write_bytes(pickle.dumps(made_bodies("json", COUNT, 200, seed=1)))
    (path / "large").write_bytes(pickle.dumps(made_bodies("random", 10_000, 100, seed=1)))
    return path


@pytest.fixture(scope="module")
def side(folder: Path) -> Iterator[Side]:
    made = Side(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def ground(folder: Path) -> Iterator[Ground]:
    made = Ground(folder)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("many", {"batch": 50}),
        ("each_async", {}),
        ("tasks", {"senders": 10}),
        ("threads", {"senders": 10}),
        ("pull", {"batch": 50}),
        ("handler", {}),
        ("flushed", {}),
        ("end_to_end", {"rate": 2000.0, "way": "send_async"}),
        ("end_to_end", {"rate": 2000.0, "way": "send"}),
        ("disk", {"batch": 50}),
    ],
)
def test_a_load_says_what_it_took(side: Side, task: str, options: dict[str, Any]) -> None:
    answer = TASKS[task](side, bodies="json-200", count=COUNT, **options)
    assert answer["count"] in (COUNT, 2 * COUNT)
    assert answer["seconds"] > 0
    assert answer["client"] > 0
    assert answer["broker"] > 0
    assert all(len(samples) == COUNT for samples in answer.get("samples", {}).values())
    if task == "disk":
        assert answer["disk_bytes"] > 0
        assert {"journal", "index"} <= answer["parts"].keys()
        assert "ballast" not in answer["parts"]


def test_sends_and_echoes_alternate(side: Side) -> None:
    with Echo.running() as echo:
        answer = TASKS["lone"](side, bodies="json-200", count=COUNT, port=echo.port)
    assert len(answer["samples"]["send"]) == len(answer["samples"]["echo"]) == COUNT


def test_an_idle_group_and_a_backlog_are_made(side: Side) -> None:
    assert TASKS["backlog"](side, bodies="large", gigabytes=0.001)["count"] == 10_000
    assert TASKS["idle"](side, queues=5, seconds=0.1)["broker"] >= 0


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("floor_produce", {"batch": 50}),
        ("floor_consume", {"batch": 50}),
        ("floor_window", {"senders": 10}),
        ("floor_relay", {"rate": 2000.0}),
    ],
)
def test_the_floor_does_it_too(ground: Ground, task: str, options: dict[str, Any]) -> None:
    answer = TASKS[task](ground, bodies="json-200", count=COUNT, **options)
    assert answer.get("seconds", 1) > 0
    assert all(len(samples) == COUNT for samples in answer.get("samples", {}).values())


def test_a_run_writes_its_figures_with_machine_settings_and_seed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    small = ["--rounds", "1", "--scale", "0.01", "--seed", "7", "--only", "lone", "--only", "relay-1000"]
    done = subprocess.run(
        [sys.executable, "-m", "bench.race", *small, "--json", str(out), "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert {"system", "cpus", "load", "loop_ns", "trees"} <= found["machine"].keys()
    here = found["machine"]["trees"]["here"]
    assert {"python", "is_debian_python", "is_optimized", "configured", "dmq", "numpy", "version"} <= here.keys()
    assert found["settings"]["seed"] == 7
    assert found["rows"]["lone"]["figures"]["here"].keys() > {"client_us", "broker_us", "send_p50_us", "echo_p50_us"}
    assert [line["what"].rpartition(" ")[2] for line in found["rows"]["relay-1000"]["lines"]] == ["p50", "p99", "p99.9"]
    for row in found["rows"].values():
        for line in row["lines"]:
            assert line["trees"]["here"]["verdict"] in ("met", "missed", "unsure", "")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
