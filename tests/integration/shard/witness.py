"""The witness: asks every member all the time, and knows afterwards whether two ever served at once.

Members are asked directly, also those that are cut off from the others: a client may sit where only one leader is
reached. An answer belongs to the newest epoch that its member had committed by then, as its log says.

What must hold: once a leader of an epoch has answered, no request that is sent later is answered by one of an epoch
before.
"""

from __future__ import annotations

import datetime
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import dmq
from tests.fault.broker.nursery import ForkedProcess

_PAUSE_SECONDS = 0.03
_TIMEOUT_SECONDS = 1.0
_COMMITTED = re.compile(r"^(\S+) \S+\s+epoch committed shard=\S+ epoch=(\d+) ", re.MULTILINE)


class Answer(NamedTuple):
    """A member has answered as a leader does; times are of the wall."""

    sent_at: float
    came_at: float
    member: int


class Witness:
    """Asks until it is closed.

    Parameters:
        logs: of the members.
    """

    def __init__(self, members: Sequence[ForkedProcess], logs: Sequence[Path]) -> None:
        self._members = members
        self._logs = logs
        self._answers: list[list[Answer]] = [[] for _ in members]
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(len(members))]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        url = self._members[number].url
        while not self._is_over.is_set():
            try:
                with dmq.connect(url, app="witness", any_member=True, timeout=_TIMEOUT_SECONDS) as client:
                    while not self._is_over.wait(_PAUSE_SECONDS):
                        began = time.time()
                        try:
                            client.admin.topics("no such prefix")
                        except dmq.NotLeader:
                            continue
                        self._answers[number].append(Answer(began, time.time(), number))
            except dmq.DMQError:
                self._is_over.wait(_PAUSE_SECONDS)

    def close(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> str:
        """Nobody answered in an epoch when one of a later epoch had; says how much was seen."""
        began = [_epochs_of(log) for log in self._logs]
        answers = sorted((one for answers in self._answers for one in answers), key=lambda one: one.came_at)
        assert answers, "nobody ever answered"
        seen: list[tuple[float, int]] = []  # when an answer came, and the newest epoch of all until then
        for one in answers:
            epoch = max((epoch for epoch, at in began[one.member].items() if at <= one.came_at), default=0)
            assert epoch, f"{one} came before its member led"
            before = _newest_before(seen, one.sent_at)
            assert epoch >= before, f"b{one.member} served in epoch {epoch}, when epoch {before} had: {one}"
            seen.append((one.came_at, max(epoch, seen[-1][1] if seen else 0)))
        return f"{len(answers)} answers of leaders in {sum(map(len, began))} epochs, never two at once"


def _newest_before(seen: list[tuple[float, int]], sent_at: float) -> int:
    """The newest epoch of which an answer had come by then."""
    for came_at, epoch in reversed(seen):
        if came_at < sent_at:
            return epoch
    return 0


def _epochs_of(log: Path) -> dict[int, float]:
    """When each epoch that a member won was committed, as its log says, in seconds of the wall."""
    found = _COMMITTED.findall(log.read_text())
    return {int(epoch): datetime.datetime.fromisoformat(at).timestamp() for at, epoch in found}
