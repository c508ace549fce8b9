"""Draining: a broker is taken out of use without being stopped, and put back.

What always holds: a drained broker takes no messages and no subscriptions, changes no topics and hands nothing out; it
goes on to take acks and to answer questions. Its clients are told, those that connect later too. The state lives in
memory: a broker that is started again is in use.
"""

from __future__ import annotations

import logging

from dmq.broker.broker import Broker
from dmq.protocol.commands import Command, one_way_head
from dmq.protocol.session import ServerHealth, ServerReboot

__all__ = ["begin_drain", "end_drain", "reboot_notice", "state_of"]

log = logging.getLogger(__name__)


def reboot_notice(broker: Broker, grace_ms: int, reason: str) -> bytes:
    """What clients are told."""
    return one_way_head(Command.SERVER_REBOOT, ServerReboot(broker.settings.name, grace_ms, reason))


def begin_drain(broker: Broker, grace_ms: int, reason: str) -> None:
    """Take it out of use. Said again, clients are told again."""
    broker.check_open()
    if not broker.is_draining:
        log.warning("broker drained", extra={"reason": reason})
    broker.is_draining = True
    broker.tell_all(reboot_notice(broker, grace_ms, reason))


def end_drain(broker: Broker) -> None:
    """Put it back in use."""
    broker.check_open()
    if not broker.is_draining:
        return
    log.warning("broker in use again")
    broker.is_draining = False
    broker.tell_all(one_way_head(Command.SERVER_HEALTH, ServerHealth(broker.settings.name, broker.address)))
    for consumption in broker.consumptions.values():
        broker.pump_soon(consumption)


def state_of(broker: Broker) -> str:
    """In one word."""
    if broker.is_stopping:
        return "stopping"
    return "drained" if broker.is_draining else "running"
