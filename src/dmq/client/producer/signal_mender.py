"""What mends one producer after an exception out of a signal's handler that ended a call in the middle.

Such a handler, that of Ctrl-C for example, runs in the main thread between any two steps, and a program may catch
what it raises and go on. To see to that on the way of each message would cost every message; so the thread that was
stopped has everything looked at when its call has ended.

What always holds afterwards: the accumulator agrees with itself; a batch that has ended is settled; one that was in
the hands of this thread goes its way, as one that may be stored if it may have gone out; numbers are never given
twice. What other threads have in their hands is left to them: each batch says who carries it.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

from dmq.client.producer.accumulator import LONE, MESSAGE_BYTES, Accumulator, Lane, SendBatch, Stream
from dmq.client.producer.sender import SCAN_SECONDS, Sender
from dmq.errors import NotConnected
from dmq.model import Durability

__all__ = ["SignalMender"]


class SignalMender:
    """The mender of one producer.

    Parameters:
        sender: that of the producer.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._accumulator: Accumulator = sender.accumulator

    def mend(self) -> None:
        """An exception out of a signal's handler ended a call of this thread: see to what it left half done.

        What has ended is settled, and what this thread had in its hands goes its way: out again, as what may be stored.
        """
        me, sender, accumulator = get_ident(), self._sender, self._accumulator
        with sender.lock:
            self._agree(me)
            lones = [
                accumulator.take_stand_in(lane) for lane in accumulator.lanes() if lane.lone and lane.carrier == me
            ]
            unsettled = [*dict.fromkeys((*accumulator.unsettled(), *accumulator.charged))]
            astray = [batch for batch in unsettled if batch.carrier == me and self._is_astray(batch)]
            waiters = [*accumulator.waiters]
            accumulator.waiters.clear()
            sender._scans += 1
            sender._is_scanning = True
        sender._links.call_later(SCAN_SECONDS, sender._scan)
        for waiter in waiters:
            waiter.wake()
        for batch in unsettled:
            if batch.is_done:
                batch.wake()
                sender._settle(batch)
            elif batch in lones or (batch in astray and not (batch.body or batch.messages or batch.bodies)):
                sender._end(
                    batch, error=NotConnected("the send was interrupted: whether its message is stored is not known")
                )
            elif batch in astray:
                batch.is_unanswered = batch.is_unanswered or batch.is_tried
                sender._disturbed(batch)
                sender._park(batch)
        with sender.lock:
            held = [batch for batch in unsettled if batch.is_held and accumulator.first_under_way(batch) is batch]
            lanes = accumulator.lanes()
        for batch in held:
            batch.is_held = False
            sender._again(batch)
        for lane in lanes:
            if lane.is_held:
                lane.let_go(sender.pump)
            elif not lane.is_idle:
                sender.pump(lane)

    def _is_astray(self, batch: SendBatch) -> bool:
        """Whether a batch has left its lane and is in none of its places."""
        sender = self._sender
        if batch.is_done or not batch.is_sealed or batch in batch.lane.ready or batch.is_held or batch in sender._due:
            return False
        return batch not in sender._parked and (batch not in sender._under_way or batch.pending is None)

    def _agree(self, me: int) -> None:
        """Have everything in the accumulator agree again, in the middle of which this thread may have been stopped.

        No other thread is at work here, since all are under the producer's lock.
        """
        accumulator = self._accumulator
        if accumulator.gatherer is not None:
            accumulator.gatherer.close()
        for batch in accumulator.unsettled_batches:
            if batch.reserved_messages:
                self._mend_columns(batch)
        for lane in accumulator.lanes():
            self._mend_lane(lane)
            waiting = [*lane.ready] if lane.gathering is None else [*lane.ready, lane.gathering]
            accumulator.unsettled_batches.update(dict.fromkeys(batch for batch in waiting if not batch.is_done))
        for batch in [*accumulator.unsettled_batches]:
            lane, place = batch.lane, (batch.lane.place, batch.queue)
            if batch.is_done or batch.carrier != me or batch is lane.gathering or batch in lane.ready:
                continue
            if batch.first_sequence < 0:
                lane.ready.appendleft(batch)
            elif lane.key.durability != Durability.NONE:
                batches = lane.stream.under_way.setdefault(place, [])
                if batch not in batches:
                    batches.append(batch)
                    batches.sort(key=lambda one: one.first_sequence)
        for stream in accumulator.streams.values():
            self._mend_stream(stream)
        accumulator.charged.update(accumulator.unsettled_batches)
        lones = [lane.lone for lane in accumulator.lanes() if lane.lone is not None and lane.stand_in is None]
        accumulator.bytes = sum(batch.bytes for batch in accumulator.charged) + sum(lone.size for lone in lones)
        accumulator.messages = sum(batch.reserved_messages or batch.count for batch in accumulator.charged) + len(lones)

    def _mend_lane(self, lane: Lane) -> None:
        """Have the batch that gathers be whole, and be there only if it has messages."""
        batch, accumulator = lane.gathering, self._accumulator
        if batch is None:
            return
        if batch.is_sealed or not batch.count:
            lane.gathering = None
            if not batch.count:
                accumulator.unsettled_batches.pop(batch, None)
                accumulator.charged.pop(batch, None)
            elif batch not in lane.ready:
                lane.ready.append(batch)
        self._mend_columns(batch)

    @staticmethod
    def _mend_columns(batch: SendBatch) -> None:
        """Have a batch that is not encoded be whole: a message of which not all is there is not there."""
        pairs: list[Any] = batch.pairs
        batch.bodies, batch.keys, batch.pairs = [*batch.bodies, *pairs[::2]], [*batch.keys, *pairs[1::2]], []
        batch.room = batch.reserved_messages = 0
        columns: tuple[list[Any], ...] = (batch.bodies, batch.keys, batch.messages, batch.extras, batch.dues)
        for column in columns:
            del column[batch.count :]
        bodies: list[Any] = batch.bodies if batch.is_plain else [message.body for message in batch.messages]
        batch.bytes = sum(map(len, bodies)) + MESSAGE_BYTES * batch.count

    def _mend_stream(self, stream: Stream) -> None:
        """Have the lanes of a stream agree with what is under way."""
        lanes = [lane for lanes in stream.lanes.values() for lane in lanes]
        lones = {(lane.place, lane.lone.queue): lane for lane in lanes if lane.lone is not None}
        for place, batches in [*stream.under_way.items()]:
            if not batches or (batches is LONE and place not in lones):
                del stream.under_way[place]
        for place in lones:
            stream.under_way.setdefault(place, LONE)
        under_way = [batch for batches in stream.under_way.values() if batches is not LONE for batch in batches]
        for lane in lanes:
            own = [batch for batch in under_way if batch.lane is lane]
            lane.under_way = len(own) + (lane.lone is not None and lane.stand_in is None)
            lane.stalled = sum(batch.is_stalled for batch in own)
