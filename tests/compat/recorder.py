"""Records what a version of DMQ writes and says, for the versions after it: `python tests/compat/recorder.py FOLDER`.

Run it with the interpreter and the code of the version that is to be recorded, from a checkout of it; nothing but the
public interface of `dmq`, `dmq.testing.processes` and the standard library is used. FOLDER then has

    data.tar.gz   a data directory that was in use: topics, keys, groups with a position, a delayed message, a
                  prepared one, a dead letter, a retry, a limit, an ordered topic, bodies that compress together
    frames.txt    what a client and the broker said to each other meanwhile: a line for each frame, the connection's
                  number, `>` to the broker or `<` to the client, and its bytes in hex
    facts.json    what a reader of the directory must find
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import sys
import tarfile
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import dmq
from dmq.testing.processes import BrokerProcess

_HEAD_BYTES: Final = 20
_FAR_SECONDS: Final = 700 * 86_400.0
_LATER_SECONDS: Final = 86_400.0
_TOGETHER: Final = 200


class RecordingProxy:
    """Carries connections to a broker, and writes down every frame."""

    def __init__(self, port: int, out: Path) -> None:
        self._target = port
        self._out = out.open("w")
        self._writing = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"dmq://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        number = 0
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            broker = socket.create_connection(("127.0.0.1", self._target))
            number += 1
            for source, sink, way in ((client, broker, ">"), (broker, client, "<")):
                threading.Thread(target=self._carry, args=(source, sink, f"{number} {way}"), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, label: str) -> None:
        waiting = b""
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                waiting += data
                while len(waiting) >= _HEAD_BYTES:
                    size = 4 + int.from_bytes(waiting[:4], "big")
                    if len(waiting) < size:
                        break
                    with self._writing:
                        self._out.write(f"{label} {waiting[:size].hex()}\n")
                    waiting = waiting[size:]
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()
        with self._writing:
            self._out.close()


def converse(url: str) -> dict[str, Any]:
    """Do a little of everything; returns what a reader must find."""
    with dmq.connect(url, app="compat", client_id="compat-1") as client:
        admin = client.admin
        admin.create_topic("orders", queues=2)
        admin.create_topic("bills", queues=1)
        admin.create_topic("lines", queues=4, ttl=_FAR_SECONDS)
        client.registry.put("space", "greeting", b"hello")
        admin.set_limit(topic="bills", messages=100_000)
        producer = client.producer()
        ids = [str(producer.send("orders", b"order %d" % n, key=f"o-{n}", tag="red").id) for n in range(10)]
        producer.send_many("orders", [dmq.Message(b"many %d" % n, key=f"m-{n}") for n in range(30)])
        producer.send("bills", b"x" * 5000, properties={"name": "large", "kind": "compressible"}, priority=9)
        for n in range(6):
            producer.send("lines", b"line %d" % n, business_id="customer-1", ordered=True)
        _send_together(client)
        producer.send("bills", b"later", key="delayed", delay=_FAR_SECONDS)
        _consume(client)
        halves = client.producer(group="tellers", check=lambda *_: None)
        with halves.transaction("bills", b"committed"):
            pass
        halves.transaction("bills", b"prepared", key="half")
        admin.find("orders", key="o-3")
        admin.peek("orders", queue=0)
        admin.trace(ids[0])
        admin.lag("orders", "billing")
        admin.topics()
        admin.groups()
        admin.stats()
        admin.offsets("orders")
    return {"recorded_at_ms": time.time_ns() // 1_000_000, "orders": 40, "ids": ids, "together": _TOGETHER}


def _send_together(client: dmq.Client) -> None:
    """Bodies that are alike, in batches, so that a version that compresses them together does; and take some back."""
    client.admin.create_topic("together", queues=1)
    bodies = [
        b'{"order": %d, "customer": "c-%d", "status": "paid", "currency": "EUR", "warehouse": "north", "note": "none"}'
        % (n, n % 7)
        for n in range(_TOGETHER)
    ]
    client.producer().send_many("together", [dmq.Message(body, key=f"t-{n}") for n, body in enumerate(bodies)])
    with client.consumer("together", "pulling", start_from="earliest") as consumer:
        consumer.pull(150, wait=5).ack()
    with client.consumer("together", "pushed", start_from="earliest") as consumer:
        for _ in range(10):
            next(consumer).ack()


def _consume(client: dmq.Client) -> None:
    taken = 0
    with client.consumer("orders", "billing", start_from="earliest") as consumer:
        while taken < 20:
            batch = consumer.pull(20 - taken, wait=5)
            for message in batch:
                message.extend(60)
            taken += len(batch)
            batch.ack()
    with client.consumer("bills", "retrying", start_from="earliest") as consumer:
        for message in consumer.pull(1, wait=5):
            message.nack(delay=_LATER_SECONDS, reason="try again tomorrow")
    with client.consumer("lines", "rejecting", start_from="earliest", ordered=True) as consumer:
        next(consumer).reject("never")
        next(consumer).ack()
        time.sleep(0.5)


def fetch(url: str) -> None:
    """Read the journal from its start, as the archive and Spark do; by hand, since that is not a public interface."""
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as sock:
        stream = sock.makefile("rb")
        hello = b"\x96\xa6compat\xa0\x01\x01\xa0\x91\xa6blocks"  # app, client id, versions, software, features
        for command, header in ((0x0001, hello), (0x0033, b"\x91\x00")):
            head = struct.pack(">IBBHHHII", 16 + len(header), 0xD1, 1, command, 0, 0, command, len(header))
            sock.sendall(head + header)
            stream.read(int.from_bytes(stream.read(4), "big"))


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="dmq-compat-"))
    data = folder / "data"
    with BrokerProcess(data) as broker:
        proxy = RecordingProxy(int(broker.url.rpartition(":")[2]), out / "frames.txt")
        facts = converse(proxy.url)
        fetch(proxy.url)
        time.sleep(2.0)  # the dead letter comes to its database
        with dmq.connect(broker.url, app="compat") as client:
            facts["left"] = {
                "billing": client.admin.lag("orders", "billing").total,
                "dead": len(client.admin.dead_letters()),
                "delays": len(client.admin.delays()),
                "transactions": len(client.admin.transactions()),
            }
        proxy.close()
    with tarfile.open(out / "data.tar.gz", "w:gz") as archive:
        # The ballast is made anew where it is missing.
        archive.add(data, "data", filter=lambda member: None if member.name.endswith("/ballast") else member)
    (out / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(folder)
    print(json.dumps(facts["left"]), os.stat(out / "data.tar.gz").st_size, "bytes")


if __name__ == "__main__":
    main()
