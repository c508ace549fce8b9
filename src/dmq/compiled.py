"""Which way bytes are worked on: loops compiled from `extension/` where they were built, plain Python everywhere else.

What always holds: the choice is made once, when this module is imported, and for all functions alike; both ways give
the same bytes, the same errors and the same state. `DMQ_PURE=1` chooses plain Python. Loops that were built from other
sources than those that lie beside the package, as after a `git pull` without `./scripts/setup`, are not used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sysconfig
from collections.abc import Callable
from functools import update_wrapper
from pathlib import Path
from typing import Any, Final, TypeVar

__all__ = [
    "ABSENCE",
    "IS_COMPILED",
    "choose",
    "described",
    "find",
    "is_declined",
    "quickened",
    "remedy",
    "source_digest",
]

_T = TypeVar("_T", bound=Callable[..., Any])

# Only a checkout has it.
_SOURCES: Final = Path(__file__).resolve().parents[2] / "extension"
_REBUILD: Final = "run ./scripts/setup, or pip install again"


def is_declined() -> bool:
    """Whether `DMQ_PURE` asks for plain Python."""
    return os.environ.get("DMQ_PURE", "") not in ("", "0")


def _load() -> tuple[Any, str]:
    """The extension and nothing, or nothing and why."""
    if is_declined():
        return None, "DMQ_PURE is set"
    try:
        import _dmq_speed
    except ModuleNotFoundError:
        return None, "they were not built when DMQ was installed"
    except ImportError as error:
        return None, f"they cannot be loaded: {error}"
    if (_SOURCES / "_dmq_speed.pyx").exists() and source_digest(_SOURCES) != _dmq_speed.SOURCES:
        return None, "they were built from other sources"
    return _dmq_speed, ""


def source_digest(folder: Path) -> str:
    """What the loops are made of, as a number; `extension/builder.py` writes the same one into them."""
    made_of = sorted(path for path in folder.iterdir() if path.suffix in (".pyx", ".pxi", ".h"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in made_of)).hexdigest()[:16]


_speed, ABSENCE = _load()
IS_COMPILED: Final = _speed is not None


def choose(plain: _T, name: str) -> _T:
    """The compiled function of this name where they are in use, else the plain one. Called at import only."""
    chosen: _T = plain if _speed is None else getattr(_speed, name)
    return chosen


def find(name: str) -> Any:
    """The compiled function of this name where they are in use, else None: where the plain way has another shape."""
    return None if _speed is None else getattr(_speed, name)


def quickened(name: str, *known: Any) -> Callable[[_T], _T]:
    """Have the quick way of a function be compiled. The function stays the general way, for what that is not sure of.

    Parameters:
        name: of what makes the compiled function, given the general way and what is known.
    """

    def decorate(general: _T) -> _T:
        if _speed is None:
            return general
        quick: _T = getattr(_speed, name)(general, *known)
        update_wrapper(quick, general)
        return quick

    return decorate


def described() -> str:
    """Which way is in use, in a few words."""
    return "with compiled loops" if IS_COMPILED else f"in pure Python, without compiled loops: {ABSENCE}"


def remedy() -> str:
    """What to do about loops that are missing here."""
    if is_declined():
        return "unset DMQ_PURE to use them"
    version = sysconfig.get_python_version()
    lacks = [] if shutil.which("cc") or shutil.which("gcc") else ["gcc", "libc6-dev"]
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        lacks.append(f"python{version}-dev")
    return f"apt install {' '.join(lacks)}, then {_REBUILD}" if lacks else _REBUILD
