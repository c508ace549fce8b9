"""Asks groups what messages came to: any live instance of a group's confirm service, found in the registry.

What always holds: an answer is one that an instance gave; where none did, nothing is known, which is not the same as
"not consumed".
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from dmq.client.client import Client
from dmq.errors import DMQError, NotConnected
from dmq.event_log import EventLog
from dmq.outbox.repair.confirm_service import NAMESPACE
from dmq.outbox.repair.confirm_wire import IDS_MAX, Confirmed, ask_address

__all__ = ["ConfirmClient"]

log = EventLog(__name__)


class ConfirmClient:
    """Asks confirm services.

    Parameters:
        timeout: seconds one instance has for an answer.
    """

    def __init__(self, client: Client, timeout: float) -> None:
        self._client = client
        self._timeout = timeout

    def ask(self, group: str, send_ids: Sequence[str]) -> dict[str, Confirmed | None] | None:
        """What each message came to in a group; None for one that was not consumed.

        Returns:
            None if nobody could be asked about all of them.
        """
        found: dict[str, Confirmed | None] = {}
        for start in range(0, len(send_ids), IDS_MAX):
            part = [*send_ids[start : start + IDS_MAX]]
            said = self._ask_any(group, part)
            if said is None:
                return None
            found |= {send_id: said.get(send_id) for send_id in part}
        return found

    def _ask_any(self, group: str, send_ids: list[str]) -> dict[str, Confirmed] | None:
        addresses = [*self._client.registry.entries(NAMESPACE, f"{group}/").values()]
        random.shuffle(addresses)
        for address in addresses:
            try:
                return ask_address(address.decode(errors="replace"), group, send_ids, self._timeout)
            except NotConnected as error:
                log.info("a confirm service did not answer", group=group, error=error)
        return None

    def groups_of(self, topic: str) -> list[str]:
        """The groups that consume a topic.

        Raises:
            DMQError: the broker does not say.
        """
        return [group.name for group in self._client.admin.groups(topic)]

    def has_backlog(self, topic: str, group: str) -> bool:
        """Whether messages wait for a group, so that one which is missing may be among them."""
        try:
            found = [report for report in self._client.admin.groups(topic) if report.name == group]
        except DMQError:
            return True
        return any(report.lag or report.retrying for report in found)
