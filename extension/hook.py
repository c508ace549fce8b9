"""The build hook: a wheel gets the compiled loops where they can be built, and is pure Python where they cannot.

What always holds: a build never fails because of the extension. `DMQ_PURE=1` leaves it out.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ExtensionHook(BuildHookInterface[Any]):
    """Called by hatchling for wheels, editable ones included."""

    _folder: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and add what was built to the wheel."""
        if os.environ.get("DMQ_PURE", "") not in ("", "0"):
            self.app.display_info("dmq: DMQ_PURE is set: without compiled loops")
            return
        self._folder = tempfile.mkdtemp(prefix="dmq-build-")
        try:
            built = _builder(Path(self.root)).build(Path(self._folder))
        except Exception as error:
            self.app.display_warning(f"dmq: without compiled loops, pure Python does the work: {error}")
            return
        # Beside the package and not in it: an editable install finds it there as well, and the tree stays clean.
        name = "force_include_editable" if version == "editable" else "force_include"
        build_data[name][str(built)] = built.name
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Nothing stays behind."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _builder(root: Path) -> Any:
    spec = importlib.util.spec_from_file_location("dmq_extension_builder", root / "extension" / "builder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
