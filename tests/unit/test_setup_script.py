"""What `./scripts/setup` installs for which purpose, with stand-ins for Python, apt and Java that only say so."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$*" in
    "-m venv"*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip"*) echo "pip $*" >>"$TOLD" ;;
    *version_info*print*) echo 3.11 ;;
esac
"""
APT = """#!/bin/sh
echo "apt $*" >>"$TOLD"
case "$*" in *jre*)
    printf '#!/bin/sh\\necho version \\\\"17.0.1\\\\"\\n' >"$TOOLS/java" && chmod +x "$TOOLS/java" ;;
esac
"""
TOOLS = [
    "bash",
    "basename",
    "cat",
    "chmod",
    "cp",
    "dirname",
    "env",
    "flock",
    "head",
    "mkdir",
    "printf",
    "rm",
    "sha256sum",
    "tail",
    "tee",
]


class Machine:
    """A bare machine with a clone of the tree on it."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tools, self.told = folder / "clone", folder / "tools", folder / "told"
        (self.root / "scripts").mkdir(parents=True)
        self.tools.mkdir()
        (self.root / "extension").mkdir()
        for file in ("pyproject.toml", "scripts/setup", "extension/_dmq_speed.pyx"):
            (self.root / file).write_bytes((ROOT / file).read_bytes())
        for tool in TOOLS:
            found = next(path for path in ("/bin", "/usr/bin") if os.path.exists(f"{path}/{tool}"))
            (self.tools / tool).symlink_to(f"{found}/{tool}")
        for name, text in (("python3", PYTHON), ("apt-get", APT), ("sudo", '#!/bin/sh\nexec "$@"\n')):
            (self.tools / name).write_text(text)
            (self.tools / name).chmod(0o755)

    def set_up(self, *arguments: str) -> list[str]:
        """Run the script, and return what it installed: packages of apt, and the extra of pip."""
        self.told.write_text("")
        environ = {"PATH": str(self.tools), "TOLD": str(self.told), "TOOLS": str(self.tools)}
        script = str(self.root / "scripts" / "setup")
        subprocess.run(["bash", script, *arguments], env=environ, check=True, capture_output=True, timeout=60)
        return [line.split()[-1].removeprefix(str(self.root)) for line in self.told.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_demo_needs_java_and_no_database_and_no_development_tools(machine: Machine) -> None:
    assert machine.set_up("demo") == ["openjdk-17-jre-headless", "[demo]"]
    assert machine.set_up("demo") == []


def test_an_environment_for_development_serves_the_demo_and_stays_one(machine: Machine) -> None:
    (machine.tools / "mariadbd").symlink_to("/bin/true")
    (machine.tools / "initdb").symlink_to("/bin/true")
    (machine.tools / "gcc").symlink_to("/bin/true")
    machine.set_up("demo")
    assert machine.set_up() == ["[dev]"]
    assert machine.set_up("demo") == []
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert machine.set_up("demo") == ["[dev]"]


def test_development_has_a_compiler_for_the_extension_and_goes_on_where_there_is_none(machine: Machine) -> None:
    (machine.tools / "mariadbd").symlink_to("/bin/true")
    (machine.tools / "initdb").symlink_to("/bin/true")
    assert machine.set_up() == ["openjdk-17-jre-headless", "libc6-dev", "[dev]"]
    assert machine.set_up() == []
    (machine.tools / "gcc").symlink_to("/bin/true")  # came later
    assert machine.set_up() == ["[dev]"]
    (machine.root / "extension" / "_dmq_speed.pyx").write_text("# changed")
    assert machine.set_up() == ["[dev]"]
    (machine.tools / "gcc").unlink()
    (machine.tools / "apt-get").write_text("#!/bin/sh\nexit 1\n")
    assert machine.set_up() == ["[dev]"]


def test_what_the_demo_installs_is_what_a_user_installs() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["demo"] == ["dmq[fast,spark]"]
