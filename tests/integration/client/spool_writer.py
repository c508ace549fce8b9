"""Processes that send through a spool until they are killed: `python spool_writer.py URL SPOOL ACCEPTED`.

For each number that is read from stdin a process is forked, which saves the time to start one, and its pid is written
to stdout. Its threads send in every way. What was accepted goes to the file ACCEPTED, a line for each message (id, CRC
of its body), after the call returned. The number rises with every process, so that no two messages are the same. With
0 nothing is sent, and the process ends once the spool is empty.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections import deque
from pathlib import Path

from crc32c import crc32c

import dmq
import dmq.client.spool.sender  # before the fork, since every process needs it
from dmq.client.producer.future import SendFuture
from dmq.client.producer.producer import Producer

__all__ = ["TOPIC", "accepted"]

TOPIC = "orders"
SPOOL_BYTES_MAX = 8 << 20


def accepted(path: Path) -> dict[str, int]:
    """The id of everything accepted, and the CRC of its body."""
    cut_torn_line(path)
    return {name: int(crc) for name, crc in (line.split() for line in path.read_text().splitlines())}


def cut_torn_line(path: Path) -> None:
    """Take away what a killed process left of its last line, before the next one writes behind it.

    A write that spans pages is cut short where the signal meets it.
    """
    if path.exists():
        whole = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, whole)


class Writer:
    """What one process sends."""

    def __init__(self, producer: Producer, log: int, life: int) -> None:
        self._producer = producer
        self._log = log
        self._life = life

    def _body(self, who: str, number: int) -> bytes:
        return b"%s %d %d " % (who.encode(), self._life, number) * (1 + number % 17)

    def _accepted(self, *messages: tuple[dmq.Receipt, bytes]) -> None:
        # In one write, so that lines of threads do not mix.
        os.write(self._log, b"".join(b"%s %d\n" % (str(r.id).encode(), crc32c(body)) for r, body in messages))

    def one_by_one(self, who: str) -> None:
        for number in itertools.count():
            body = self._body(who, number)
            self._accepted((self._producer.send(TOPIC, body, business_id=who, ordered=True), body))

    def without_waiting(self, who: str) -> None:
        waiting: deque[tuple[SendFuture, bytes]] = deque()
        for number in itertools.count():
            body = self._body(who, number)
            waiting.append((self._producer.send_async(TOPIC, body, business_id=who, ordered=True), body))
            while len(waiting) > 100:
                future, body = waiting.popleft()
                self._accepted((future.result(60), body))

    def many_at_once(self, who: str) -> None:
        numbers = itertools.count()
        while True:
            bodies = [self._body(who, number) for number in itertools.islice(numbers, 300)]
            messages = [dmq.Message(body, business_id=who, ordered=True) for body in bodies]
            self._accepted(*zip(self._producer.send_many(TOPIC, messages), bodies, strict=True))


def live(url: str, spool: str, log: str, life: int) -> None:
    client = dmq.connect(url, app="shop", timeout=60.0)
    producer = client.producer(spool=spool, spool_bytes_max=SPOOL_BYTES_MAX, timeout=60.0)
    if life == 0:
        producer.flush(60.0)
        client.close()
        return
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    writer = Writer(producer, fd, life)
    for function, count in ((writer.one_by_one, 3), (writer.without_waiting, 2), (writer.many_at_once, 1)):
        for index in range(count):
            threading.Thread(target=function, args=(f"{function.__name__}-{index}",), daemon=True).start()
    threading.Event().wait()


def main(url: str, spool: str, log: str) -> None:
    for line in sys.stdin:
        cut_torn_line(Path(log))
        pid = os.fork()
        if pid == 0:
            live(url, spool, log, int(line))
            os._exit(0)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
