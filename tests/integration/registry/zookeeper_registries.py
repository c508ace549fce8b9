"""Clients of one ZooKeeper, each through a proxy that can be stalled; and what takes their sessions away."""

from __future__ import annotations

import asyncio
import socket

from kazoo.protocol.serialization import Close, Connect, int_struct

from dmq.clock import SystemClock
from dmq.net.address import ServerAddress
from dmq.registry.registry import Registry
from dmq.registry.zookeeper.client import ZooKeeperClient
from dmq.registry.zookeeper.ensemble import Ensemble
from dmq.testing.proxy import ChaosProxy
from tests.patience import PATIENCE_S


class ZooKeeperRegistries:
    kind = "zookeeper"

    def __init__(self, address: ServerAddress) -> None:
        self._address = address
        self._clients: list[ZooKeeperClient] = []
        self._proxies: dict[int, ChaosProxy] = {}
        self.clock = SystemClock()

    async def connect(self) -> Registry:
        proxy = ChaosProxy(self._address)
        client = await ZooKeeperClient.open(
            Ensemble((ServerAddress("127.0.0.1", proxy.port),), "/dmq"), timeout=PATIENCE_S
        )
        self._proxies[id(client)] = proxy
        self._clients.append(client)
        return client

    async def expire(self, client: Registry) -> None:
        await expire(self._address, client)

    def cut(self, client: Registry) -> None:
        assert isinstance(client, ZooKeeperClient)
        client.timeout = 0.3
        self._proxies[id(client)].stall()

    async def outlast(self, client: Registry) -> None:
        await self.expire(client)

    def mend(self, client: Registry) -> None:
        assert isinstance(client, ZooKeeperClient)
        client.timeout = PATIENCE_S
        self._proxies[id(client)].resume()
        self._proxies[id(client)].cut()  # now it notices

    async def close(self) -> None:
        for client in self._clients:
            client.timeout = 1.0
        await asyncio.gather(*(client.close() for client in self._clients))
        for proxy in self._proxies.values():
            await asyncio.get_running_loop().run_in_executor(None, proxy.close)


async def expire(address: ServerAddress, client: Registry) -> None:
    """End a client's session: take it over, and close it, which ZooKeeper tells the client as it tells an expiry."""
    assert isinstance(client, ZooKeeperClient)
    assert client._link is not None
    kazoo = client._link._kazoo
    number, password = kazoo._session_id, kazoo._session_passwd
    if number is not None:  # else it is over already
        await asyncio.to_thread(close_session, address, number, password)


def close_session(address: ServerAddress, number: int, password: bytes) -> None:
    """End a session from outside, by its number and its password."""
    for _ in range(100):
        with socket.create_connection(address, PATIENCE_S) as connection:
            _send(connection, bytes(Connect(0, 0, 6000, number, password, False).serialize()))
            _send(connection, int_struct.pack(1) + int_struct.pack(Close.type))
            granted = _receive(connection)
            if granted and int_struct.unpack_from(granted, 4)[0] <= 0:
                return  # it was over
            if granted and _receive(connection):
                return
        # The client took it back in between.
    raise AssertionError("the session cannot be ended")


def _send(connection: socket.socket, packet: bytes) -> None:
    connection.sendall(int_struct.pack(len(packet)) + packet)


def _receive(connection: socket.socket) -> bytes:
    with connection.makefile("rb", buffering=0) as stream:
        head = stream.read(4) or b""
        if len(head) < 4:
            return b""
        length = int_struct.unpack(head)[0]
        found = b""
        while len(found) < length and (part := stream.read(length - len(found))):
            found += part
        return found
