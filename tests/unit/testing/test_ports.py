"""Ports that no other process gets."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dmq.errors import PortTaken
from dmq.testing.ports import Ports, free_port

OTHER = """
import sys, pathlib
from dmq.testing.ports import Ports
ports = Ports([int(word) for word in sys.argv[2:]], pathlib.Path(sys.argv[1]))
print(*[ports.take() for _ in range(5)], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def numbers() -> list[int]:
    """A few that no other test has."""
    return [free_port() for _ in range(8)]


def test_no_port_is_given_twice_while_its_process_lives(tmp_path: Path, numbers: list[int]) -> None:
    ports = Ports(numbers, tmp_path / "ports")
    command = [sys.executable, "-c", OTHER, str(tmp_path / "ports"), *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = {int(word) for word in other.stdout.readline().split()}
        ours = {ports.take() for _ in range(3)}
        assert len(theirs) == 5
        assert ours | theirs == {*numbers}
        with pytest.raises(PortTaken, match=f"all ports of {min(numbers)} to {max(numbers)} are taken"):
            ports.take()
        other.kill()
    assert {ports.take() for _ in range(5)} == theirs


def test_a_port_on_which_somebody_listens_is_not_given(tmp_path: Path, numbers: list[int]) -> None:
    with socket.create_server(("127.0.0.1", numbers[3])):
        ports = Ports(numbers[2:5], tmp_path / "ports")
        assert {ports.take(), ports.take()} == {numbers[2], numbers[4]}
        with pytest.raises(PortTaken):
            ports.take()
    assert ports.take() == numbers[3]


def test_who_takes_many_gives_back_the_oldest(tmp_path: Path, numbers: list[int]) -> None:
    ports = Ports(numbers[:3], tmp_path / "ports", kept_max=2)
    taken = [ports.take() for _ in range(6)]
    assert [len({*taken[at : at + 3]}) for at in range(4)] == [3, 3, 3, 3]


def test_ports_are_below_those_of_outgoing_connections() -> None:
    lowest, _ = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    assert free_port() < int(lowest)


def test_the_file_goes_with_the_last_process_that_has_claims(tmp_path: Path, numbers: list[int]) -> None:
    path = tmp_path / "ports"
    ports = Ports(numbers, path)
    command = [sys.executable, "-c", OTHER, str(path), *map(str, numbers)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = {int(word) for word in other.stdout.readline().split()}
        ports.tidy()
        assert path.exists()
        assert ports.take() not in theirs
        other.kill()
    ports.tidy()
    assert not path.exists()
    assert {ports.take() for _ in range(8)} == {*numbers}
