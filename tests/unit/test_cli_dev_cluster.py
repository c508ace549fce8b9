"""What `dmq dev --shards` refuses, and how it looks after its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmq.cli import main
from dmq.cli.process.child_process import ChildProcess, pause_after, stop_children
from dmq.cli.process.dev_cluster import DevClusterOptions, DevPorts, check_lone, held_folder
from dmq.errors import DMQError, InvalidSettings
from tests.patience import eventually


def test_the_data_of_a_broker_and_of_a_shard_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "STORE").touch()
    with pytest.raises(InvalidSettings, match="leave --shards out"):
        DevClusterOptions(tmp_path, "127.0.0.1", DevPorts(), shards=1, replicas=3, session=6.0)
    check_lone(tmp_path)
    (tmp_path / "registry.sqlite").touch()
    with pytest.raises(InvalidSettings, match="add --shards"):
        check_lone(tmp_path)


@pytest.mark.parametrize(
    "arguments", [("--replicas", "3"), ("--shards", "17"), ("--shards", "1", "--replicas", "8"), ("--shards", "-1")]
)
def test_a_wrong_call_is_exit_code_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["dev", *arguments])
    assert caught.value.code == 2


class Script(ChildProcess):
    """A child that is a line of Python."""

    def __init__(self, folder: Path, code: str) -> None:
        super().__init__("a", lambda port: (code,), folder / "a.log", 7)
        self.program = [sys.executable, "-c"]


READY = "import time; print('at dmq://127.0.0.1:4711, on'); import sys; sys.stdout.flush(); time.sleep(600)"


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Script]:
    child = Script(tmp_path, READY)
    yield child
    child.ask_to_stop()
    child.stop(0.0)


def test_a_child_that_dies_is_started_again_on_its_port(script: Script) -> None:
    script.start()
    script.wait_ready()
    assert (script.port, script.address) == (4711, "127.0.0.1:4711")
    before = script.pid
    assert script.look() == ""
    os.kill(before, signal.SIGKILL)
    told: list[str] = []

    def look() -> bool:
        told.extend(filter(None, [script.look()]))
        return len(told) == 2

    eventually(look)
    assert told == [
        f"a (pid {before}) was ended by signal 9: it is started again",
        f"a runs again, with pid {script.pid}",
    ]
    assert script.pid != before


def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    child = Script(tmp_path, "import sys; print('dmq: the port is taken', file=sys.stderr); sys.exit(1)")
    child.start()
    with pytest.raises(DMQError, match="a did not start: the port is taken"):
        child.wait_ready()
    child.stop(0.0)


def test_a_child_that_cannot_go_on_ends_none_of_the_others(tmp_path: Path) -> None:
    child = Script(tmp_path, "import sys; print('dmq: STORE cannot be used', file=sys.stderr); sys.exit(2)")
    child.pause_after = lambda ends: 0.0
    child.start()
    told: list[str] = []

    def look() -> bool:
        told.extend(filter(None, [child.look()]))
        return sum("has ended" in line for line in told) == 7

    eventually(look)
    first, last = told[0], told[-1]
    assert first.endswith("has ended with exit code 2: it is started again")
    assert "as soon as it was started, 7 times in a row: STORE cannot be used (more in" in last
    child.stop(0.0)


def test_a_child_that_is_killed_again_and_again_comes_back_as_quickly(script: Script) -> None:
    asked: list[int] = []

    def at_once(ends: int) -> float:
        asked.append(ends)
        return 0.0

    script.pause_after = at_once
    script.start()
    for _ in range(7):
        script.wait_ready()
        os.kill(script.pid, signal.SIGKILL)
        eventually(lambda: "signal 9" in script.look())
        eventually(lambda: "runs again" in script.look())
    assert asked == [0] * 7


def test_the_pauses_of_a_child_that_cannot_go_on_grow_and_are_bounded() -> None:
    assert [pause_after(ends) for ends in (0, 1, 5, 6, 7, 8, 100)] == [1.0, 1.0, 1.0, 2.0, 4.0, 8.0, 30.0]


def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path, root: Path) -> None:
    code = (
        "import pathlib, sys, time; from tests.unit.test_cli_dev_cluster import READY, Script;"
        "child = Script(pathlib.Path(sys.argv[1]), READY); child.start(); child.wait_ready();"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    eventually(lambda: not Path(f"/proc/{child}").exists())


def test_every_member_has_ports_of_its_own() -> None:
    ports = DevPorts(client=9611, metrics=9690, telnet=9612, console=9680)
    assert ports.of(0) == ports
    assert ports.of(4) == DevPorts(client=9651, metrics=9694, telnet=9652, console=9684)
    assert DevPorts().of(3) == DevPorts()


class Stubborn(ChildProcess):
    """A child that notes until when it was waited for."""

    deadline = 0.0

    def __init__(self) -> None:
        super().__init__("stubborn", lambda port: (), None, 0)

    def stop(self, deadline: float) -> None:
        self.deadline = deadline


def test_a_name_server_that_does_not_end_is_not_waited_for_as_long_as_members() -> None:
    member, name_server = Stubborn(), Stubborn()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        stop_children([member], [name_server], seconds=1000.0)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert name_server.deadline < time.monotonic() + 10.0 < member.deadline


def test_a_folder_that_cannot_be_made_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["dev", "--shards", "1", "--data", str(tmp_path / "file" / "data")])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "cannot be made a directory (Not a directory)" in told
    assert told.count("\n") == 1


def test_a_second_cluster_in_a_folder_is_refused_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "a.log"
    log.write_text("what the member said")
    with held_folder(tmp_path):
        with pytest.raises(SystemExit) as caught:
            main(["dev", "--shards", "1", "--data", str(tmp_path)])
        assert caught.value.code == 1
    assert capsys.readouterr().err.startswith(f"dmq: a cluster runs in {tmp_path} already: stop that dmq dev")
    assert log.read_text() == "what the member said"
    with held_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_written_to_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dev.lock").mkdir()
    with pytest.raises(SystemExit) as caught:
        main(["dev", "--shards", "1", "--data", str(tmp_path)])
    assert caught.value.code == 2
    assert "cannot be written to (Is a directory): give another --data" in capsys.readouterr().err
