"""Failover: which address to try next, and when; and which connection is in use. Pure: times in, decisions out.

A round tries every address once, in the order of the URL, beginning after the one that was lost. Between rounds it
waits, twice as long each time up to a maximum, with a random part so that a thousand clients do not come back in one
moment. A broker that announced its reboot is out of use (D-09): it is left out of the first round if there is another,
and comes last in later rounds, until it says that it is healthy or a connection to it succeeds.

Of a shard, only the member that leads is used. A member that does not lead names the one that does, which is tried
next, and the other members, which later rounds try too: they need not be in the URL.

Both pools ask `Standing` which connection is in use, which are beside it, and what follows when one breaks. The
blocking pool asks under its lock.

What always holds: with at least one address there is always a next attempt; a round never tries an address twice;
there is at most one connection to an address; `interrupted` and `resumed` alternate; what is closed stays closed, and
the first reason is the one that is told; once a leader of an epoch was heard of, none of a lower one is used.

Asking again: what becomes of a request whose connection broke, or that the broker refused for the moment. Pure.

A request that was refused was not carried out, so it is asked again after the time the broker named. One that a member
of a shard has refused because it does not lead is asked of the leader, once there is a connection to it. One whose
connection broke before the answer came may have been carried out: it is asked again if that does no harm, else it
raises, and says so.

What always holds: a request that is not safe to repeat is sent once; a broker whose connection breaks at the same
request again and again is not asked for ever.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from dmq.client.connection.url import Address, parsed_address
from dmq.errors import BrokerStopping, Busy, DMQError, NotConnected, NotEnoughReplicas, NotLeader
from dmq.event_log import EventLog
from dmq.protocol import Command, Frame, Header, error_from_status
from dmq.protocol.admin import TopicCreate
from dmq.protocol.session import ShardInfo

__all__ = [
    "CONNECT_SECONDS",
    "Attempt",
    "Backoff",
    "Failover",
    "Loss",
    "Repeats",
    "Standing",
    "is_repeatable",
    "nobody_answers",
]

log = EventLog(__name__)


CONNECT_SECONDS: Final = 5.0
ADDRESSES_MAX: Final = 512  # that are remembered
# A leader of a lower epoch is believed after so many rounds in which nobody of a higher one was met.
FORGET_ROUNDS: Final = 20
# Where there are others to try, a host that swallows everything must not hold them up; later rounds wait longer.
FIRST_SECONDS: Final = 1.5
BACKOFF_MIN: Final = 0.1
# A try costs little, and a broker that is back for a moment only must be met in it.
BACKOFF_MAX: Final = 1.5


class Backoff:
    """Growing pauses: the first is `lowest`, each twice the one before, none over `highest`; a quarter is random."""

    def __init__(self, lowest: float = BACKOFF_MIN, highest: float = BACKOFF_MAX, *, seed: int | None = None) -> None:
        self._lowest, self._highest = lowest, highest
        self._random = random.Random(seed)
        self._next = lowest

    def take(self) -> float:
        """The next pause."""
        pause = self._next
        self._next = min(pause * 2, self._highest)
        return pause * self._random.uniform(0.75, 1.0)

    def reset(self) -> None:
        self._next = self._lowest


class Attempt(NamedTuple):
    """Try this address, after this pause, for so long."""

    address: Address
    pause: float
    seconds: float = CONNECT_SECONDS


class Failover:
    """The servers of one client.

    Parameters:
        addresses: of the URL, in its order; or of the members of a shard.
        backoff: the pauses between rounds.
        shard: the one whose leader is looked for, if that is known.
    """

    def __init__(self, addresses: Sequence[Address], backoff: Backoff | None = None, *, shard: str = "") -> None:
        assert addresses
        self._known = [*addresses]  # those of the URL, then those that members of the shard have named
        self._backoff = backoff or Backoff()
        self._names: dict[str, Address] = {}  # brokers that answered, by the name they gave
        self._out: set[Address] = set()
        self._turn = 0
        self._round: list[Address] = []
        self._tried: set[Address] = set()  # in this round
        self._rounds = 0  # since a connection was in use
        self._is_settled = False  # the one that is, or was last, has been so for a while
        self._must_pause = False
        self._lost: Address | None = None  # in the first round: it is tried last, also if others take it for the leader
        self._is_fixed = bool(shard)
        self.shard = shard
        """The shard whose leader is looked for; "" as long as no member of one was met."""
        self.leader: Address | None = None
        """Its leader, as far as is known."""
        self.epoch = 0
        """The highest that was heard of."""

    def next_attempt(self) -> Attempt:
        """Whom to try now; a pause stands before each round but the first."""
        if not self._round:
            ordered = self._known[self._turn :] + self._known[: self._turn]
            self._round = [address for address in ordered if address not in self._out]
            if self._rounds or not self._round:
                self._round += [address for address in ordered if address in self._out]
            if self._rounds:
                self._must_pause, self._lost = True, None
            self._rounds += 1
            self._tried.clear()
        pause = self._backoff.take() if self._must_pause else 0.0
        self._must_pause = False
        address = self._round.pop(0)
        self._tried.add(address)
        seconds = CONNECT_SECONDS
        if len(self._known) > 1:
            seconds = min(seconds, FIRST_SECONDS * max(1, self._rounds))
        return Attempt(address, pause, seconds)

    @property
    def is_round_over(self) -> bool:
        """Whether every address of this round was tried."""
        return not self._round and self._rounds > 0

    def others(self, address: Address) -> list[Address]:
        """Whom else one could ask: those in use, in the order of the URL; none of a shard, where only one serves."""
        return [] if self.shard else [other for other in self._known if other != address and other not in self._out]

    def connected(self, address: Address, broker: str) -> None:
        """An address answered, under this name; its past is forgotten."""
        self._names[broker] = address
        self._out.discard(address)
        self._start_rounds(address, 0)
        self._is_settled = False

    def lost(self, address: Address) -> None:
        """The connection to an address broke: the next round begins with the one after it."""
        self._start_rounds(address, 1)
        self._lost = address
        self._backoff.reset()

    def _start_rounds(self, address: Address, after: int) -> None:
        self._learn(address)
        at = self._known.index(address) if address in self._known else 0
        self._turn = (at + after) % len(self._known)
        self._round, self._rounds, self._lost, self._must_pause = [], 0, None, False
        self._tried.clear()

    def settled(self) -> None:
        """The connection in use has been so for a while: should it be lost, others are tried without waiting long."""
        self._is_settled = True
        self._backoff.reset()

    # --- a shard ----------------------------------------------------------------------------------------------------

    def check_leader(self, address: Address, told: ShardInfo | None) -> DMQError | None:
        """Whether a broker that answered is one to use, by what its hello told of its shard; else why not."""
        where = f"the broker at {address}"
        if told is None:
            if not self._is_fixed:
                return None
            return NotConnected(f"{where} is not a member of shard {self.shard!r}", address=str(address))
        self.shard = self.shard or told.shard
        if told.shard != self.shard:
            return NotConnected(
                f"{where} is a member of shard {told.shard!r}, and the leader of {self.shard!r} is looked for",
                address=str(address),
            )
        for member in told.members:
            if (found := parsed_address(member)) is not None:
                self._learn(found)
        # A shard that was made anew begins with the first epoch: nobody of a higher one answers then.
        is_old = told.epoch < self.epoch and self._rounds <= FORGET_ROUNDS
        if told.is_leader and not is_old:
            self.epoch, self.leader = told.epoch, address
            return None
        if not told.is_leader:
            self.redirect(told.leader, told.epoch)
        return NotLeader(
            f"{where} led shard {told.shard!r} in epoch {told.epoch}, and there is a newer one: wait for its leader"
            if told.is_leader
            else f"{where} does not lead shard {told.shard!r}",
            leader=told.leader,
            epoch=told.epoch,
        )

    def aim(self, addresses: Sequence[Address], leader: str, epoch: int) -> None:
        """The members of the shard are here now, and this is the leader, as far as is known."""
        if addresses:
            at = self._known[self._turn % len(self._known)]
            self._known = [*addresses]
            self._turn = self._known.index(at) if at in self._known else 0
            self._round = [address for address in self._round if address in self._known]
            self._out &= {*addresses}
        if leader:
            self.redirect(leader, epoch)

    def redirect(self, leader: str, epoch: int) -> None:
        """Somebody says that this is the leader: it is tried next, unless it was, or a newer one is known."""
        if epoch < self.epoch:
            return
        if epoch > self.epoch:
            self.epoch, self._lost = epoch, None
        found = self.leader = parsed_address(leader)
        if found is None or found in self._tried or found == self._lost:
            return
        self._learn(found)
        self._round = [found, *(address for address in self._round if address != found)]

    def deposed(self, address: Address, leader: str, epoch: int) -> None:
        """The member in use does not lead any more: the others are tried, first the one that it names.

        Members may say that they lead and not be able to: so itself it is tried after a pause that grows each time, and
        so are the others if it has not led for long, unless somebody has been elected meanwhile.
        """
        before = self.epoch
        self._start_rounds(address, 1)
        self._rounds = 1
        self._tried.add(address)
        self._round = [other for other in self._known[self._turn :] + self._known[: self._turn] if other != address]
        self.redirect(leader, epoch)
        self._must_pause = not self._is_settled and self.epoch == before

    def _learn(self, address: Address) -> None:
        if address not in self._known and len(self._known) < ADDRESSES_MAX:
            self._known.append(address)

    # --- maintenance ------------------------------------------------------------------------------------------------

    def rebooting(self, address: Address) -> bool:
        """A broker announced its reboot; whether there is another one to move to."""
        self._out.add(address)
        return len(self._out) < len(self._known)

    def healthy(self, broker: str, address: str = "") -> Address | None:
        """A broker may be used again; which of ours it is, if any."""
        found = self._names.get(broker)
        if found is None and address:
            found = parsed_address(address)
        if found is None or found not in self._known:
            return None
        self._out.discard(found)
        return found

    def is_in_use(self, address: Address) -> bool:
        return address not in self._out


def nobody_answers(errors: Mapping[Address, DMQError], shard: str = "", leader: Address | None = None) -> DMQError:
    """What to raise when no address could be connected to, with what each of them said.

    Parameters:
        shard: whose leader was looked for, if a member of one answered.
        leader: where it is said to be.
    """
    causes = "; ".join(error.message for error in errors.values())
    if shard and leader is not None and isinstance(errors.get(leader), NotConnected):
        return NotConnected(
            f"the leader of shard {shard!r} is advertised at {leader}, and cannot be reached there ({causes}): if it "
            "has just ended, wait for the election; else check the network, and the address that the broker advertises",
            shard=shard,
            leader=str(leader),
        )
    if shard:
        return NotConnected(
            f"shard {shard!r} has no leader that can be reached ({causes}): wait for the election, or look with "
            f"`dmq shard show {shard}`",
            shard=shard,
        )
    if len(errors) == 1:
        (cause,) = errors.values()
        if not isinstance(cause, NotConnected):
            return cause
        return NotConnected(f"{cause.message}: start a broker there, or check the URL", **cause.detail)
    return NotConnected(f"none of the brokers answers ({causes}): start one, or check the URL")


class AnyConnection(Protocol):
    """A connection of either kind."""

    @property
    def address(self) -> Address: ...

    @property
    def broker(self) -> str: ...

    @property
    def is_usable(self) -> bool: ...


C = TypeVar("C", bound=AnyConnection)


class Loss(NamedTuple):
    """What follows from a connection that broke."""

    is_interruption: bool  # the listeners are to be told
    must_connect: bool  # begin to look for another one
    closed_by: DMQError | None  # set in plain mode: there will be none


class Standing(Generic[C]):
    """The connections of one pool.

    Parameters:
        failover: whom to try.
        reconnect: whether a broken connection is replaced at all.
        any_member: a member of a shard is used whether it leads or not.
    """

    def __init__(self, failover: Failover, reconnect: bool, *, any_member: bool = False) -> None:
        self.failover = failover
        self._reconnect = reconnect
        self._any_member = any_member
        self.in_use: C | None = None
        """The connection in use, which may have broken a moment ago: it says itself whether it is usable."""
        self._others: dict[Address, C] = {}
        self._deposed: list[C] = []  # to members that do not lead any more: their last answers are still to come
        self._seen: C | None = None  # in use at the last look
        self._errors: dict[Address, DMQError] = {}  # what attempts failed with, since a connection was in use
        self._is_interrupted = False
        self._is_connecting = False
        self.searches = 0
        """How many times somebody began to look for a connection."""
        self._left: tuple[Address, str] | None = None  # the broker that was in use before, and why it no longer is
        self.closed_by: DMQError | None = None

    def current(self) -> C | None:
        """The connection in use, if it is usable; None while there is none."""
        connection = self.in_use
        return connection if connection is not None and connection.is_usable else None

    def known(self, address: Address) -> C | None:
        """The connection to an address, if there is one that can be used."""
        for connection in (self.in_use, self._others.get(address)):
            if connection is not None and connection.address == address and connection.is_usable:
                return connection
        return None

    def connections(self) -> list[C]:
        """All of them."""
        return [*self._others.values(), *self._deposed, *([self.in_use] if self.in_use is not None else [])]

    # --- connecting -------------------------------------------------------------------------------------------------

    def begin_connecting(self) -> bool:
        """Whether somebody is to look for a connection from now on; True once until `use`."""
        if self._is_connecting or self.closed_by is not None:
            return False
        self._is_connecting = True
        self.searches += 1
        return True

    def is_searching(self, search: int) -> bool:
        """Whether this search still goes on: it is the last that began, and has found nothing."""
        return self._is_connecting and self.searches == search and self.current() is None

    def next_attempt(self) -> Attempt:
        return self.failover.next_attempt()

    def refusal(self, address: Address, told: ShardInfo | None) -> DMQError | None:
        """Why a broker that has answered at an address is not used; None if it is."""
        return None if self._any_member else self.failover.check_leader(address, told)

    def failed(self, address: Address, error: DMQError) -> None:
        """An attempt failed."""
        self._errors[address] = error

    def nobody_answers(self) -> DMQError:
        """What to raise when no address could be connected to."""
        return nobody_answers(self._errors, self.failover.shard, self.failover.leader)

    def unreached(self, seconds: float) -> NotConnected:
        """What to raise when there was no connection for so long."""
        why = f": {self.nobody_answers().message}" if self._errors and self.failover.shard else ""
        return NotConnected(f"no broker could be reached within {seconds:.3g} s{why}")

    def use(self, connection: C) -> bool:
        """Put a connection in use; whether that ends an interruption. Not to be asked once closed."""
        assert self.closed_by is None
        self._errors.clear()
        self.failover.connected(connection.address, connection.broker)
        self.in_use = connection
        self._others.pop(connection.address, None)
        self._is_connecting = False
        was_interrupted, self._is_interrupted = self._is_interrupted, False
        left, self._left = self._left, None
        if left is not None:
            self._tell_back(connection, *left)
        return was_interrupted

    def _tell_back(self, connection: C, before: Address, reason: str) -> None:
        to = str(connection.address)
        if before == connection.address:
            log.warning("connection restored", once_for=to, address=to, broker=connection.broker, lost=reason)
        else:
            log.warning(
                "failed over to another broker",
                once_for=(str(before), to),
                before=str(before),
                now=to,
                broker=connection.broker,
                reason=reason,
            )

    def keep_beside(self, connection: C) -> C | None:
        """Keep a connection to another broker: the one to use instead if there was one already, None once closed."""
        if self.closed_by is not None:
            return None
        return self.known(connection.address) or self._put_beside(connection)

    def _put_beside(self, connection: C) -> C:
        self._others[connection.address] = connection
        return connection

    def others(self, address: Address) -> list[Address]:
        """Which other brokers could be asked than the one at this address."""
        return self.failover.others(address) if self._reconnect else []

    # --- losing -----------------------------------------------------------------------------------------------------

    def lost(self, connection: C, reason: DMQError) -> Loss:
        """A connection broke. One that was never in use, or is not any more, interrupts nothing."""
        if connection in self._deposed:
            self._deposed.remove(connection)
            return Loss(False, False, None)
        if self._others.get(connection.address) is connection:
            del self._others[connection.address]
        elif self.in_use is not connection:
            return Loss(False, False, None)
        if self.in_use is connection:
            self.in_use = None
            self.failover.lost(connection.address)
        # A broker that reboots may go before another one is found: that is an interruption too.
        if self.in_use is not None or self.closed_by is not None or self._is_interrupted:
            return Loss(False, False, None)
        self._is_interrupted = True
        self._left = self._left or (connection.address, reason.message)
        address = str(connection.address)
        log.warning("connection lost", once_for=address, address=address, reason=reason.message)
        if not self._reconnect:
            self.closed_by = NotConnected(
                f"the connection is closed ({reason.message}), and reconnect=False: connect again"
            )
        return Loss(True, self._reconnect, self.closed_by)

    def deposed(self, connection: C, error: NotLeader) -> Loss:
        """A member of a shard does not lead any more. What it still answers over its connection is waited for; in plain
        mode the connection is to be closed."""
        if self.in_use is not connection or self._any_member or self.closed_by is not None:
            return Loss(False, False, None)
        if not self._reconnect:
            return Loss(False, False, error)
        self.in_use = None
        self._deposed.append(connection)
        leader, epoch = error.detail.get("leader"), error.detail.get("epoch")
        self.failover.deposed(
            connection.address,
            leader if isinstance(leader, str) else "",
            epoch if isinstance(epoch, int) else self.failover.epoch,
        )
        self._is_interrupted = True
        self._left = (connection.address, error.message)
        return Loss(True, True, None)

    def look(self) -> None:
        """To be called now and then: a connection that is in use at two looks is a good one."""
        if self.in_use is not None and self._seen is self.in_use:
            self.failover.settled()
        self._seen = self.in_use

    def rebooting(self, connection: C, reason: str = "") -> bool:
        """A broker announced its reboot; whether to move to another one. Its connection goes on beside that."""
        address = str(connection.address)
        log.info("the broker goes out of use", once_for=address, address=address, reason=reason)
        if self.failover.shard:
            return False  # another member leads before it goes, and this one says so
        has_other = self.failover.rebooting(connection.address) and self._reconnect
        if not has_other or self.in_use is not connection:
            return False
        self.in_use = None
        self._left = (connection.address, reason)
        self._others[connection.address] = connection
        return True

    def is_retired(self, connection: C, outstanding: int, is_late: bool) -> bool:
        """Whether a connection that was moved away from may be closed."""
        may_go = self.current() is not None or connection in self._deposed
        return connection is not self.in_use and may_go and (outstanding == 0 or is_late)

    def close(self, reason: DMQError) -> list[C]:
        """No more: the connections that are to be closed."""
        self.closed_by = self.closed_by or reason
        connections = self.connections()
        self.in_use = None
        self._others.clear()
        self._deposed.clear()
        return connections


# That many connections may break at one request; a broker that comes and goes is met more often than not.
BREAKS_MAX: Final = 16
# So often a request is refused for want of replicas, in about half a minute, before that is the answer.
REPLICAS_MAX: Final = 40
PAUSE_MIN: Final = 0.05
PAUSE_MAX: Final = 1.0

# Questions, and what leaves things as one has said they shall be. A new command is sent once until it stands here.
_REPEATABLE: Final = frozenset(
    {
        Command.HEARTBEAT,
        Command.STATS,
        Command.CLUSTER,
        Command.TRANSACTION_END,
        Command.TRANSACTION_LIST,
        Command.PRODUCER_STATES,
        Command.SETTLE,  # asked only to extend a lease; acks are told
        Command.SEEK,
        Command.POSITION,
        Command.OFFSETS,
        Command.PEEK,
        Command.FIND,
        Command.FETCH,
        Command.ARCHIVED,  # it never goes back
        Command.LOCATE,
        Command.TOPIC_UPDATE,
        Command.TOPIC_LIST,
        Command.TOPIC_DESCRIBE,
        Command.GROUP_CREATE,
        Command.GROUP_LIST,
        Command.GROUP_DESCRIBE,
        Command.DELAY_LIST,
        Command.DEAD_LETTER_LIST,
        Command.LIMIT_GET,
        Command.LIMIT_SET,
        Command.KEY_PUT,
        Command.KEY_GET,
        Command.KEY_LIST,
        Command.SHARD_LIST,
        Command.SHARD_SHOW,
        Command.SHARD_SET,
        Command.SHARD_MEMBER,
        Command.CLUSTER_SHOW,
        Command.CLUSTER_FINALIZE,
        Command.CLUSTER_EXPORT,
        Command.CLUSTER_IMPORT,
        Command.SHARD_ADD,
        Command.SHARD_DRAIN,
        Command.TRACE,
        Command.WHY,
    }
)


def is_repeatable(command: int, header: Header) -> bool:
    """Whether asking twice does what asking once does."""
    if isinstance(header, TopicCreate):
        return header.allow_existing
    return command in _REPEATABLE


class Repeats:
    """The rules for one request, and what happened to it so far.

    Parameters:
        moves: another member of a shard is connected to when one does not lead.
    """

    def __init__(self, command: int, header: Header, *, moves: bool = True) -> None:
        self._moves = moves
        self._is_repeatable = is_repeatable(command, header)
        self._breaks = 0
        self._refusals = 0  # for want of replicas
        self._backoff = Backoff(PAUSE_MIN, PAUSE_MAX)

    def after_break(self, error: NotConnected) -> float:
        """The connection broke before the answer came: the pause before the request is sent again.

        Raises:
            NotConnected: it is not to be sent again.
        """
        self._breaks += 1
        if not self._is_repeatable:
            raise NotConnected(
                f"{error.message} before the answer came, so whether it was done is not known: look, then try again",
                **error.detail,
            ) from error
        if self._breaks >= BREAKS_MAX:
            raise NotConnected(
                f"the connection broke {self._breaks} times before the answer came, the last time because "
                f"{error.message}: look into the broker's log",
                **error.detail,
            ) from error
        return self._backoff.take() if self._breaks > 1 else 0.0

    def after_answer(self, frame: Frame) -> float | None:
        """The pause before the request is sent again; None if this is the answer."""
        if not frame.status:
            return None
        error: DMQError = error_from_status(frame.status, frame.header)
        if isinstance(error, NotLeader):
            return 0.0 if self._moves else None
        if isinstance(error, NotEnoughReplicas):
            self._refusals += 1
            if self._refusals > REPLICAS_MAX:
                return None
        elif not isinstance(error, Busy | BrokerStopping):
            return None
        return self._backoff.take() if error.retry_after is None else max(PAUSE_MIN, error.retry_after)
