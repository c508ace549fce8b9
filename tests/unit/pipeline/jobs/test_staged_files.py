"""What killed runs leave in a table's staging folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.jobs.frames import STAGING, sweep
from dmq.pipeline.tables import TRACE


def test_only_what_is_old_enough_to_be_nobodys_is_swept(tmp_path: Path) -> None:
    table = Archive(str(tmp_path)).table(TRACE)
    sweep(table)
    for name, age_hours in (("young", 1), ("old", 30)):
        folder = Path(table.uri) / STAGING / name
        folder.mkdir(parents=True)
        (folder / "part.parquet").write_bytes(b"x")
        at = time.time() - age_hours * 3600
        os.utime(folder / "part.parquet", (at, at))
        os.utime(folder, (at, at))
    sweep(table)
    assert [path.name for path in (Path(table.uri) / STAGING).iterdir()] == ["young"]
