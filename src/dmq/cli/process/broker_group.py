"""`dmq broker --shards N`: a member of each of several shards on one host, each a process, so that more cores are used.

What always holds: process i of every host that runs the same command is a member of the same shard. A process that dies
is started again; a signal ends this one once all others have handed over and stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from dmq.broker.runtime.service_manager import ServiceManager
from dmq.cli.process.child_process import STOP_SECONDS, ChildProcess, stop_children, stop_event, watch_children
from dmq.errors import InvalidSettings

if TYPE_CHECKING:
    from dmq.settings import Settings

__all__ = ["PORTS_APART", "BrokerGroup", "GroupOptions"]

PORTS_APART: Final = 10
_LOOK_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """What all processes have in common.

    Parameters:
        console_port: of the first status page; None: there are none.
        arguments: of `dmq broker`, as they were given, for what is the same in all.
    """

    settings: Settings
    count: int
    console_port: int | None = None
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.settings.shard.registry_url is None:
            raise InvalidSettings(
                "--shards needs a registry, where the processes find the other members of their shards: give "
                "--registry and --shard, or leave --shards out"
            )

    def member(self, at: int, port: int) -> Sequence[str]:
        """The command of one process; its port is 0, or that which it had."""
        broker, shard = self.settings.broker, self.settings.shard
        apart = PORTS_APART * at
        flags = {
            "name": f"{broker.name}-{at + 1}",
            "shard": f"{shard.name}-{at + 1}",
            "data": str(Path(broker.data) / f"{shard.name}-{at + 1}"),
            "port": port,
            "metrics-port": _behind(broker.metrics_port, at),
            "telnet-port": "none" if broker.telnet_port is None else _behind(broker.telnet_port, apart),
            "replication-port": _behind(shard.replication_port, apart),
        }
        if self.console_port is not None:
            flags["console-port"] = _behind(self.console_port, at)
        advertised = {"shard.address": shard.address, "shard.replication_address": shard.replication_address}
        given = [
            f"--set={key}={_address_behind(address, apart)}"
            for key, address in advertised.items()
            if address is not None
        ]
        return ("broker", *self.arguments, *given, *(f"--{name}={value}" for name, value in flags.items()))


class BrokerGroup:
    """The processes, from their start to their end."""

    def __init__(self, options: GroupOptions) -> None:
        self._options = options
        port = options.settings.broker.port
        self._children = [self._child(at, _behind(port, PORTS_APART * at)) for at in range(options.count)]

    def _child(self, at: int, port: int) -> ChildProcess:
        name = f"{self._options.settings.broker.name}-{at + 1}"
        return ChildProcess(name, lambda port: self._options.member(at, port), None, port)

    def run(self, on_ready: Callable[[list[ChildProcess]], None]) -> None:
        """Run them until SIGTERM or Ctrl-C.

        Parameters:
            on_ready: called when all listen.

        Raises:
            DMQError: one cannot be started.
        """
        stop = stop_event()
        manager = ServiceManager()
        try:
            for child in self._children:
                child.start()
            for child in self._children:
                if not stop.is_set():
                    child.wait_ready()
            manager.tell("READY=1")
            on_ready(self._children)
            while not stop.wait(min(_LOOK_SECONDS, manager.ping_seconds or _LOOK_SECONDS)):
                watch_children(self._children)
                if manager.ping_seconds:
                    manager.tell("WATCHDOG=1")
        finally:
            manager.tell("STOPPING=1")
            stop_children(self._children, seconds=STOP_SECONDS + self._options.settings.broker.drain_seconds)


def _behind(port: int, apart: int) -> int:
    """A port so far behind another; 0 takes any."""
    return port + apart if port else 0


def _address_behind(address: str, apart: int) -> str:
    host, _, port = address.rpartition(":")
    return f"{host}:{_behind(int(port), apart)}"
