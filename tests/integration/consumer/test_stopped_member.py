"""A member whose process stands still for longer than its leases, as in a debugger, a long collection of garbage or a
virtual machine that is suspended: what it had is another member's then."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import dmq
from dmq.client.client import connect
from tests.integration.consumer import processes, stopped_member
from tests.integration.consumer.stopped_member import LEASE_SECONDS, WAYS
from tests.patience import eventually

MESSAGES = 120


class Said(NamedTuple):
    """What a member said of a message."""

    word: str
    way: str
    queue: int
    body: int
    attempt: int
    at_ns: int


class Member:
    """A process of `stopped_member`, and what it said."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, stopped_member.__file__, url], stdout=subprocess.PIPE, text=True
        )
        self.said: list[Said] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, way, *numbers = line.split()
            self.said.append(Said(word, way, *map(int, numbers)))

    def begun(self, way: str) -> list[Said]:
        return [said for said in [*self.said] if said[:2] == ("begun", way)]

    def done(self, way: str) -> set[int]:
        return {said.body for said in [*self.said] if said[:2] == ("done", way)}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def stale(stopped: Iterable[Said], other: Iterable[Said], since_ns: int) -> list[Said]:
    """What a member began since a moment though another had begun the same, in the same attempt or a later one."""
    theirs = {(said.body, attempt): said.at_ns for said in other for attempt in range(1, said.attempt + 1)}
    return [
        said
        for said in stopped
        if since_ns <= said.at_ns and theirs.get((said.body, said.attempt), 1 << 63) < said.at_ns
    ]


def overlaps(member: Member) -> list[tuple[Said, Said]]:
    """Messages of one queue of the ordered group that a process worked on at the same time."""
    open_: dict[int, Said] = {}
    found = []
    for said in sorted((said for said in member.said if said.way == "ordered"), key=lambda said: said.at_ns):
        if said.word == "done":
            open_.pop(said.queue, None)
        elif said.queue in open_:
            found.append((open_[said.queue], said))
        else:
            open_[said.queue] = said
    return found


def test_a_process_that_stood_still_begins_nothing_that_is_another_members_by_then(tmp_path: Path) -> None:
    broker = subprocess.Popen(
        [sys.executable, processes.__file__, "broker", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert broker.stdout is not None
    url = f"dmq://127.0.0.1:{broker.stdout.readline().strip()}"
    members: list[Member] = []
    try:
        with connect(url, app="test") as client:
            for way in WAYS:
                client.admin.create_topic(way, queues=4)
            members += [Member(url), Member(url)]
            one, two = members
            eventually(lambda: [group.members for group in client.admin.groups()] == [len(members) * len(WAYS)])
            for way in WAYS:
                client.producer().send_many(way, [dmq.Message(b"%d" % n) for n in range(MESSAGES)])
            eventually(lambda: all(one.begun(way) for way in WAYS))
            one.process.send_signal(signal.SIGSTOP)
            time.sleep(2.2 * LEASE_SECONDS)
            since_ns = time.monotonic_ns()
            one.process.send_signal(signal.SIGCONT)
            eventually(lambda: all(len(one.done(way) | two.done(way)) == MESSAGES for way in WAYS))
    finally:
        for member in members:
            member.kill()
        broker.terminate()
        broker.wait(30)
        broker.stdout.close()
    assert {way: found for way in WAYS if (found := stale(one.begun(way), two.begun(way), since_ns))} == {}
    for member in members:
        assert overlaps(member) == []
    for queue in range(4):
        begun = sorted(one.begun("ordered") + two.begun("ordered"), key=lambda said: said.at_ns)
        first = list(dict.fromkeys(said.body for said in begun if said.queue == queue))
        assert first == sorted(first)
