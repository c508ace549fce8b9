"""Connections cut at random while threads send in every way: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

import dmq
from dmq.client.producer.future import SendFuture
from tests.integration.client.servers import RunningBroker
from tests.sampling import SEED, sample_size

SECONDS = sample_size(share=5, whole=60) / 2


def stored(client: dmq.Client) -> dict[tuple[int, int], bytes]:
    found = {}
    for queue in client.admin.offsets("orders"):
        at = queue.first_offset
        while at < queue.next_offset:
            messages = client.admin.peek("orders", queue=queue.queue, at=at, limit=20_000)
            found.update({(queue.queue, message.offset): message.body for message in messages})
            at = messages[-1].offset + 1
    return found


@pytest.mark.sampled
def test_cut_connections_lose_and_double_nothing(client: dmq.Client, broker: RunningBroker) -> None:
    producer = client.producer(timeout=120, window_bytes=1 << 20)
    acked: list[tuple[bytes, dmq.Receipt]] = []
    cuts = 0
    stop = time.monotonic() + SECONDS

    def one_by_one(name: int, chance: random.Random) -> None:
        number = 0
        while time.monotonic() < stop:
            body = b"%d-%d" % (name, number)
            acked.append((body, producer.send("orders", body, durability=chance.choice(["stored", "flushed"]))))
            number += 1

    def without_waiting(name: int, chance: random.Random) -> None:
        futures: list[tuple[bytes, SendFuture]] = []
        while time.monotonic() < stop:
            body = b"%d-%d" % (name, len(futures))
            futures.append((body, producer.send_async("orders", body, key=str(len(futures)))))
            if chance.random() < 0.02:
                time.sleep(0.002)
        acked.extend((body, future.result(60)) for body, future in futures)

    def many_at_once(name: int, chance: random.Random) -> None:
        number = 0
        while time.monotonic() < stop:
            bodies = [b"%d-%d-%d" % (name, number, index) for index in range(chance.randrange(1, 3000))]
            messages = [dmq.Message(body) for body in bodies]
            acked.extend(zip(bodies, producer.send_many("orders", messages, durability="stored"), strict=True))
            number += 1
            time.sleep(0.05)

    def cut(name: int, chance: random.Random) -> None:
        nonlocal cuts
        while time.monotonic() < stop - 0.5:
            time.sleep(chance.uniform(0.05, 0.3))
            connection = client._router.home.current()
            if connection is not None:
                try:
                    connection._wire.sock.shutdown(socket.SHUT_RDWR)
                    cuts += 1
                except OSError:
                    pass  # it was gone already

    work: list[Callable[[int, random.Random], None]] = [
        one_by_one, one_by_one, without_waiting, without_waiting, many_at_once, cut,
    ]  # fmt: skip
    threads = [
        threading.Thread(target=function, args=(name, random.Random(SEED + name))) for name, function in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 120)
    assert not any(thread.is_alive() for thread in threads), "somebody is stuck"
    producer.flush(60)
    places = stored(client)
    assert cuts
    assert {body.partition(b"-")[0] for body, _ in acked} == {b"0", b"1", b"2", b"3", b"4"}, "each way got through"
    assert [body for body, receipt in acked if places.get((receipt.queue, receipt.offset)) != body] == []
    assert [body for body, count in Counter(places.values()).items() if count > 1] == []
    assert len({receipt.id for _, receipt in acked}) == len(acked)
    print(f"DMQ_SEED={SEED}: {len(acked)} acknowledged, {len(places)} stored, {cuts} cuts")
