"""What a run was measured on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from bench.race.racer import Tree

__all__ = ["facts"]

_ASKED = """
import json, platform, sys, sysconfig, importlib.metadata as m
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
try:
    from dmq.compiled import IS_COMPILED
except ImportError:  # of a tree from before there was one
    IS_COMPILED = False
print(json.dumps({
    "python": platform.python_version(), "compiler": platform.python_compiler(), "base": sys.base_prefix,
    "is_compiled": IS_COMPILED, "configured": sysconfig.get_config_var("CONFIG_ARGS"),
    **{name: version(name) for name in ("dmq", "numpy", "uvloop", "msgspec", "orjson")},
}))
"""


def _loop_ns() -> float:
    """Nanoseconds of one turn of a plain loop: what the interpreter's build is worth, whatever it was built with."""
    best = float("inf")
    for _ in range(5):
        began, total = time.perf_counter(), 0
        for number in range(200_000):
            total += number & 3
        best = min(best, time.perf_counter() - began)
    return best / 200_000 * 1e9


def _is_optimized(base: str, configured: str) -> bool:
    """Debian's build is made with profiles, which its arguments do not say."""
    return base == "/usr" or "--enable-optimizations" in configured


def _tree(tree: Tree) -> dict[str, Any]:
    told = subprocess.run([tree.python, "-c", _ASKED], capture_output=True, text=True, check=True, env=tree.environ())
    found: dict[str, Any] = json.loads(told.stdout)
    said = subprocess.run(
        [tree.python, "-m", "dmq.cli", "--version"], capture_output=True, text=True, check=False, env=tree.environ()
    )
    return {
        **found,
        "version": " ".join(said.stdout.split()),
        "is_debian_python": found["base"] == "/usr",
        "is_optimized": _is_optimized(found["base"], found["configured"] or ""),
        "is_pure": tree.is_pure,
    }


def facts(trees: list[Tree]) -> dict[str, Any]:
    """Machine, interpreters, versions."""
    cpu = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "system": platform.platform(),
        "processor": cpu[0] if cpu else platform.processor(),
        "cpus": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": os.getloadavg(),
        "loop_ns": _loop_ns(),
        "runs_on": sysconfig.get_python_version() + " at " + sys.base_prefix,
        "trees": {tree.name: _tree(tree) for tree in trees},
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
