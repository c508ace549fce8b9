"""A process that replays until it is killed: `python replayer.py TABLES BROKER REPLAY_ID TOPIC STOP COUNT`.

At the step STOP, the COUNT-th time it comes there, it says so on stdout and stands still, to be killed. Steps:
`staged`, the rows are written and the plan is not; `planned`; `asked`, a batch is about to be sent; `answered`, one
was; `sent`, all were and nothing says so yet. `never` goes through.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from dmq.client.producer.numbered_sender import LaneSender
from dmq.pipeline.archive.table_store import Archive
from dmq.pipeline.replay import sender
from dmq.pipeline.replay.plan import Done, Plan, Plans, Selection
from dmq.pipeline.replay.replay import ReplayRequest, execute

__all__ = ["CHOICE", "STOPS"]

STOPS = ("staged", "planned", "asked", "answered", "sent")
CHOICE = Selection(topic="orders")

_lock = threading.Lock()


class _Step:
    def __init__(self, stop: str, count: int) -> None:
        self._stop = stop
        self._left = count

    def reach(self, name: str) -> None:
        with _lock:
            if name != self._stop:
                return
            self._left -= 1
            if self._left == 0:
                print(name, flush=True)
                threading.Event().wait()


def main(tables: str, broker: str, replay_id: str, topic: str, stop: str, count: str) -> None:
    step = _Step(stop, int(count))
    keep, finish, send, add = Plans.keep, Plans.finish, LaneSender.send, sender._Run.add

    def kept(self: Plans, plan: Plan) -> Plan:
        step.reach("staged")
        found = keep(self, plan)
        step.reach("planned")
        return found

    def finished(self: Plans, plan: Plan, done: Done) -> None:
        step.reach("sent")
        finish(self, plan, done)

    def sent(self: LaneSender, header: Any, body: Any, shard: int = 0) -> None:
        step.reach("asked")
        send(self, header, body, shard)

    def added(self: Any, batch: Any, reply: Any) -> None:
        add(self, batch, reply)
        step.reach("answered")

    Plans.keep, Plans.finish = kept, finished  # type: ignore[method-assign]
    LaneSender.send, sender._Run.add = sent, added  # type: ignore[method-assign]
    outcome = execute(Archive(tables), broker, ReplayRequest(CHOICE, topic, replay_id))
    print(f"done {outcome.sent} {outcome.found}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
