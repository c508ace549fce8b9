"""What `deploy/` ships agrees with the code: every setting in dmq.toml, paths and ports in the units and the image.

`python -m tests.unit.test_deploy >deploy/dmq.toml` writes the settings anew.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from itertools import groupby
from pathlib import Path

import pytest

from dmq.settings import FIELDS, Field, Settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
HEAD = """\
# Settings of a DMQ broker, each with its default. Take the # away from what you change.
# `dmq config show --config FILE` tells what is in force; docs/reference/settings.md has more. A wrong key is an error.
"""


def toml_value(field: Field) -> str:
    shown = field.show(field.default)
    is_bare = isinstance(field.default, bool | int | float) and not field.is_size
    return shown if is_bare else f'"{shown}"'


def sample() -> str:
    text = HEAD
    for section, fields in groupby(FIELDS.values(), lambda field: field.section):
        text += f"\n[{section}]\n"
        for field in fields:
            text += f"# {field.meta.description}\n# {field.name} = {toml_value(field)}\n"
    return text


def test_the_settings_file_has_every_setting_with_its_default() -> None:
    assert (DEPLOY / "dmq.toml").read_text() == sample(), "python -m tests.unit.test_deploy >deploy/dmq.toml"


def test_the_settings_file_is_good_as_it_is_and_with_every_line_in_force(tmp_path: Path) -> None:
    assert Settings.resolve(DEPLOY / "dmq.toml").settings == Settings()
    text = re.sub(r"^# (?=\w+ = )", "", (DEPLOY / "dmq.toml").read_text(), flags=re.MULTILINE)
    assert sum(map(len, tomllib.loads(text).values())) == len(FIELDS)
    (tmp_path / "all.toml").write_text(text)
    assert Settings.resolve(tmp_path / "all.toml").settings == Settings()


def test_the_image_starts_a_broker_that_its_health_check_asks() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    broker = Settings().broker
    assert f"EXPOSE {broker.port} {broker.metrics_port}" in text
    assert f"http://127.0.0.1:{broker.metrics_port}/readyz" in text
    assert re.search(r"^USER dmq$", text, re.MULTILINE)
    for copied in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for name in copied.split():
            assert (DEPLOY.parent / name).exists()


@pytest.mark.parametrize("unit", ["dmq-broker.service", "dmq-nameserver.service", "dmq-backup.service"])
def test_a_unit_calls_a_command_with_options_that_exist(unit: str) -> None:
    from dmq.cli import COMMANDS, load

    line = re.search(r"^ExecStart=/opt/dmq/bin/dmq (\w+) (.*)$", (DEPLOY / unit).read_text(), re.MULTILINE)
    assert line
    known = {option for parameter in load(COMMANDS[line[1]][0]).params for option in parameter.opts}
    assert {word for word in line[2].split() if word.startswith("--")} <= known


PAGES = ("deploy", "name-servers", "backup", "upgrade", "capacity")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_exists_with_its_options(page: str) -> None:
    from dmq.cli import COMMANDS, load

    text = (DEPLOY.parent / "docs" / "guide" / f"{page}.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"dmq \w", line)]
    for line in lines:
        words = line.split("#")[0].split()[1:]
        found = load(COMMANDS[words[0]][0])
        if words[1:] and words[1] in getattr(found, "commands", ()):
            found = found.commands[words[1]]
        known = {option for parameter in found.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line
    assert lines


def test_every_file_that_the_page_installs_is_there() -> None:
    text = (DEPLOY.parent / "docs" / "guide" / "deploy.md").read_text()
    named = set(re.findall(r"deploy/[\w.-]+", text))
    assert {path.name for path in DEPLOY.iterdir()} == {name.removeprefix("deploy/") for name in named}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for name in ("dmq-broker.service", "dmq-nameserver.service", "dmq-backup.service", "dmq-backup.timer"):
        # It wants the program to be there, and the pages.
        text = (DEPLOY / name).read_text().replace("/opt/dmq/bin/dmq", shutil.which("env") or "/usr/bin/env")
        (tmp_path / name).write_text(re.sub(r"^Documentation=.*\n", "", text, flags=re.MULTILINE))
    units = [str(path) for path in sorted(tmp_path.iterdir())]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", *units], capture_output=True, text=True, check=False
    )
    # Of a machine without a running systemd it may complain about others' units, not about these.
    assert [line for line in done.stderr.splitlines() if "dmq-" in line] == []


if __name__ == "__main__":
    print(sample(), end="")
