"""Consuming with real processes: a broker on a disk, consumers that are terminated and killed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

import dmq
from dmq.client.client import Client, connect
from tests.integration.consumer import processes, signalled
from tests.patience import eventually


class Process:
    """A process of `tests.integration.consumer.processes`."""

    def __init__(self, *arguments: str, program: str = processes.__file__) -> None:
        self._process = subprocess.Popen([sys.executable, program, *arguments], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.output: IO[str] = self._process.stdout

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self, number: int = signal.SIGKILL) -> list[str]:
        """Send it a signal; what it said until its end."""
        self.send(number)
        said = self.output.read().splitlines()
        self.output.close()
        self._process.wait(30)
        return said


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    broker = Process("broker", str(tmp_path))
    yield f"dmq://127.0.0.1:{broker.output.readline().strip()}"
    broker.end(signal.SIGTERM)


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with connect(url, app="test") as connected:
        connected.admin.create_topic("orders", queues=2)
        connected.producer().send_many("orders", [dmq.Message(b"%d" % n) for n in range(20)])
        yield connected


def pull_rest(client: Client, count: int) -> list[tuple[int, int]]:
    """What the group still gets: bodies and attempts."""
    consumer = client.consumer("orders", "billing")
    found: list[tuple[int, int]] = []
    while len(found) < count:
        batch = consumer.pull(wait=20.0)
        assert batch, "there is less than expected"
        found += [(int(message.body), message.attempt) for message in batch]
        consumer.ack(batch)
    return found


def test_sigterm_finishes_what_runs_and_gives_the_rest_back(url: str, client: Client) -> None:
    process = Process("consume", url, "0.3")
    first = [process.output.readline().split() for _ in range(2)]
    said = first + [line.split() for line in process.end(signal.SIGTERM)]
    assert said[-1] == ["ended"]
    begun = {int(words[1]) for words in said if words[0] == "begun"}
    assert begun == {int(words[1]) for words in said if words[0] == "done"}
    rest = pull_rest(client, 20 - len(begun))
    assert {body for body, _ in rest} == {*range(20)} - begun
    assert {attempt for _, attempt in rest} == {1}


def test_another_member_takes_over_from_one_that_was_killed(url: str, client: Client) -> None:
    process = Process("consume", url, "30")
    held = {int(process.output.readline().split()[1]) for _ in range(2)}
    process.end()
    rest = pull_rest(client, 20)
    assert {body for body, _ in rest} == {*range(20)}
    attempts = dict(rest)
    assert {attempts[body] for body in held} == {2}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_that_run_in_a_process_and_no_handler_is_cut_short(
    url: str, client: Client, number: signal.Signals
) -> None:
    process = Process(url, "0.5", program=signalled.__file__)
    running = {*signalled.GROUPS, "four"}
    said: list[list[str]] = []
    while {words[1] for words in said} != running:
        said.append(process.output.readline().split())
    said += [line.split() for line in process.end(number)]
    assert said[-2:] == [["restored", "True"], ["ended"]]
    for group in running:
        assert said.count(["begun", group]) == said.count(["done", group])


def test_a_second_signal_ends_a_process_whose_handlers_take_long(url: str, client: Client) -> None:
    process = Process(url, "600", program=signalled.__file__)
    assert process.output.readline().startswith("begun")
    process.send(signal.SIGTERM)

    def is_ended_by_another() -> bool:
        process.send(signal.SIGTERM)
        return not process.is_alive

    eventually(is_ended_by_another)
    assert ["ended"] not in [line.split() for line in process.end()]
