"""A machine without Java: Spark's own words, and what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_without_java_a_run_says_in_one_sentence_what_to_install(tmp_path: Path) -> None:
    program = "import sys; from dmq.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "archive",
        "run",
        "--broker",
        "dmq://127.0.0.1:1",
        "--tables",
        str(tmp_path),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")}
    ended = subprocess.run(
        command,
        env={**environment, "JAVA_HOME": str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("dmq: Spark cannot start: ")
    assert last.endswith(": install Java 17 or newer, and name its directory in JAVA_HOME")
    assert ".:" not in last
