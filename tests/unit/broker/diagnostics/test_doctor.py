"""The doctor sees what would keep a broker from running, and touches nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from dmq.broker.diagnostics.doctor import Finding, State, diagnose_machine
from dmq.settings import BrokerSettings, Settings, StoreSettings


def findings(data: Path, *, insecure: bool = False, **broker: object) -> dict[str, Finding]:
    values: dict[str, object] = {"data": str(data), "port": 0, "metrics_port": 0, "telnet_port": None, **broker}
    settings = Settings(broker=BrokerSettings(**values))  # type: ignore[arg-type]
    return {finding.check: finding for finding in diagnose_machine(settings, insecure)}


def test_a_directory_that_is_not_there_is_fine_and_is_not_made(tmp_path: Path) -> None:
    found = findings(tmp_path / "new" / "data")
    assert found["data directory"].state is State.OK
    assert list(tmp_path.iterdir()) == []


def test_a_place_without_a_disk_is_a_problem() -> None:
    found = findings(Path("/proc/dmq-data"))
    assert found["disk space"].state is State.PROBLEM


def test_a_file_in_its_place_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    finding = findings(tmp_path / "data")["data directory"]
    assert (finding.state, finding.advice) == (State.PROBLEM, "choose another with --data")


def test_a_directory_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir(mode=0o500)
    findings(tmp_path)  # everything is imported before the child gives up its rights
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:  # root may write anywhere
                os.setuid(65534)
            state = findings(tmp_path / "data")["data directory"].state
            os._exit(0 if state is State.PROBLEM else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_port_that_is_taken_is_a_problem_that_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = findings(tmp_path, metrics_port=port)["broker.metrics_port"]
    assert finding.state is State.PROBLEM
    assert str(port) in finding.what
    assert "broker.metrics_port" in finding.advice


def test_an_address_for_strangers_is_a_problem_unless_it_is_meant(tmp_path: Path) -> None:
    assert findings(tmp_path, host="0.0.0.0")["address"].state is State.PROBLEM
    assert findings(tmp_path, host="0.0.0.0", insecure=True)["address"].state is State.OK


def test_a_full_disk_is_a_problem(tmp_path: Path) -> None:
    tiny = 1e-9
    settings = Settings(
        store=StoreSettings(disk_clean=tiny, disk_refuse=tiny),
        broker=BrokerSettings(data=str(tmp_path), port=0, metrics_port=0, telnet_port=None),
    )
    found = {finding.check: finding for finding in diagnose_machine(settings)}
    assert found["disk space"].state is State.PROBLEM
    assert "refused" in found["disk space"].what


def test_more_connections_than_descriptors_is_no_more_than_a_warning_or_a_problem(tmp_path: Path) -> None:
    found = findings(tmp_path, connections_max=1 << 40)["file descriptors"]
    assert "connections" in found.what or found.what == "no limit"
