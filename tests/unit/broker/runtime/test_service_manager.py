"""What a service manager such as systemd hears from a broker."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from dmq.broker.runtime.service_manager import ServiceManager


def test_it_hears_when_the_broker_is_ready_lives_and_stops(tmp_path: Path) -> None:
    async def run() -> list[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            path = str(tmp_path / "notify")
            line.bind(path)
            line.setblocking(False)
            manager = ServiceManager({"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())})
            manager.ready()
            loop = asyncio.get_running_loop()
            heard = [await loop.sock_recv(line, 100) for _ in range(4)]
            manager.stopping()
            while heard[-1] != b"STOPPING=1":
                heard.append(await loop.sock_recv(line, 100))
            await asyncio.sleep(0.02)
            try:
                return [*heard, line.recv(100)]
            except BlockingIOError:
                return heard

    heard = asyncio.run(run())
    assert heard[:4] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"]
    assert heard[-1] == b"STOPPING=1"


def test_without_a_manager_or_with_one_that_is_gone_nothing_happens(tmp_path: Path) -> None:
    for environ in ({}, {"NOTIFY_SOCKET": str(tmp_path / "gone")}, {"NOTIFY_SOCKET": "@nobody"}):
        manager = ServiceManager(environ)
        manager.ready()
        manager.stopping()
    assert ServiceManager({"WATCHDOG_USEC": "1000"}).ping_seconds == 0
    other = {"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    assert ServiceManager(other).ping_seconds == 0
