"""What everybody wrote down in a long run, put together: what was sent, which handlers were called, what broke when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from dmq.client.admin.dead_letters import DeadLetter
from dmq.model import place_shard
from tests.fault.delivery import plan
from tests.fault.delivery.plan import GROUPS, Name, name_of

__all__ = ["Call", "Ledger", "Sent", "lacks", "report"]

# A word about a message has been written by the broker so long after it was said, or something broke in between.
SAID_S: Final = 2.0
_FOREVER: Final = float("inf")


@dataclass
class Sent:
    """A message, as its sender saw it."""

    name: Name
    facts: dict[str, Any]
    answer: str = "none"  # ok, refused, unknown, cancelling; none: its sender died
    answered_at: float = _FOREVER
    id: str | None = None
    place: tuple[int, int] | None = None
    is_cancelled: bool = False
    was_consumed: bool = False

    @property
    def said(self) -> tuple[Any, ...]:
        """What it carries besides its body."""
        priority = self.facts.get("priority")
        return (
            self.facts.get("key"),
            self.facts.get("tag"),
            self.facts.get("business_id"),
            4 if priority is None else priority,
        )


@dataclass
class Transaction:
    """Messages that end together."""

    outcome: str  # as planned
    names: list[Name] = field(default_factory=list)
    is_prepared: bool = False
    end: str = "open"  # ended, over, failed


@dataclass
class Call:
    """One call of a handler."""

    process: str
    group: str
    member: str
    name: Name
    facts: dict[str, Any]
    began_at: float
    ended_at: float = _FOREVER
    word: str = ""  # empty: its process died before

    @property
    def attempt(self) -> int:
        return int(self.facts["attempt"])

    @property
    def shard(self) -> int:
        return place_shard(self.facts["place"][0])

    @property
    def failed(self) -> bool:
        return self.word in ("raise", "retry")


@dataclass
class Break:
    """Something that explains why a message comes again."""

    kind: str
    who: str  # "*" is the broker, or the machine; "*3" a shard
    since: float
    until: float

    @property
    def is_brokers(self) -> bool:
        return self.who.startswith("*")

    def concerns(self, group: str, shard: int | None = None) -> bool:
        """Whether a group may have felt it, in one shard or in any."""
        if self.is_brokers:
            return shard is None or self.who in ("*", f"*{shard}")
        return self.who.rpartition("-")[0] == group


class Ledger:
    """What all processes of a run wrote down, by message.

    Parameters:
        events: by the name of a process (who-count), and of the run itself.
        letters: what was found among the dead letters.
        is_replicated: brokers were members of shards: one that dies may lose what was only stored.
    """

    def __init__(
        self,
        events: Mapping[str, Iterable[dict[str, Any]]],
        letters: Iterable[DeadLetter],
        *,
        is_replicated: bool = False,
    ) -> None:
        self._unpromised = ("none", "stored") if is_replicated else ("none",)
        self.sent: dict[Name, Sent] = {}
        self.transactions: dict[str, Transaction] = {}
        self.calls: list[Call] = []
        self.breaks: list[Break] = []
        self.problems: list[str] = []
        self.calm_at = _FOREVER
        for process, lines in events.items():
            self._read(process, lines)
        self.calls.sort(key=lambda call: call.began_at)
        self.by_reader: dict[tuple[str, Name], list[Call]] = defaultdict(list)  # by group, or member in broadcast
        self.by_group: dict[tuple[str, Name], list[Call]] = defaultdict(list)
        for call in self.calls:
            self.by_reader[self.reader(call), call.name].append(call)
            self.by_group[call.group, call.name].append(call)
        self.letters: dict[tuple[str, Name], list[DeadLetter]] = defaultdict(list)
        for letter in letters:
            self.letters[letter.group, name_of(letter.body)].append(letter)
        self.seen: set[Name] = {call.name for call in self.calls}
        self.seen |= {name for group, name in self.letters if group != plan.PRODUCERS}

    @staticmethod
    def reader(call: Call) -> str:
        """Every group and member that has a position of its own."""
        return call.member if call.group == "all" else call.group

    def _read(self, process: str, lines: Iterable[dict[str, Any]]) -> None:
        calls: dict[int, Call] = {}
        held = 0.0
        for line in lines:
            at, who = line["at"], process.rpartition("-")[0]
            match line["event"]:
                case "got":
                    name = _name(line)
                    calls[line["number"]] = call = Call(process, line["group"], line["member"], name, line, at)
                    self.calls.append(call)
                case "end":
                    calls[line["number"]].ended_at, calls[line["number"]].word = at, line["word"]
                case "stall":
                    self.breaks.append(Break("stall", who, line["since"], at))
                case "hold":
                    held = at
                case "held":
                    self.breaks.append(Break("hold", who, held, at))
                case "break":
                    self.breaks.append(Break(line["kind"], line["who"], line["since"], at))
                case "calm":
                    self.calm_at = at
                case "problem":
                    self.problems.append(f"{process}: {line['error']} in {line['where']}")
                case _:
                    self._read_sent(line)

    def _read_sent(self, line: dict[str, Any]) -> None:
        key: Any = line.get("transaction")
        match line["event"]:
            case "try":
                self.sent[_name(line)] = Sent(_name(line), line)
                if key is not None:
                    self.transactions.setdefault(key, Transaction(line["outcome"])).names.append(_name(line))
            case "ok":
                sent = self.sent[_name(line)]
                sent.answer, sent.answered_at, sent.id = "ok", line["at"], line["id"]
                sent.was_consumed = line.get("was_consumed", False)
                if line.get("place") and line["place"][1] >= 0:
                    sent.place = (line["place"][0], line["place"][1])
            case "failed":
                self.sent[_name(line)].answer = "unknown" if line["retriable"] else "refused"
            case "cancelled":
                self.sent[_name(line)].is_cancelled = True
            case "cancel" | "cancel failed":
                self.sent[_name(line)].answer = "cancelling"  # nobody knows
            case "too late":
                self.sent[_name(line)].answer = "ok"
            case "prepared":
                self.transactions[key].is_prepared = True
                self.sent[self.transactions[key].names[0]].id = line["id"]
            case "ended" | "over" | "end failed" as end:
                self.transactions[key].end = end

    # --- what follows -----------------------------------------------------------------------------------------------

    def is_promised(self, sent: Sent) -> bool:
        """Whether it must have arrived by what its sender was told. What anybody has seen must have, too."""
        key = sent.facts.get("transaction")
        if key is not None:
            transaction = self.transactions[key]
            return transaction.outcome == "commit" and transaction.end == "ended"
        return sent.answer == "ok" and sent.facts["durability"] not in self._unpromised and not sent.is_cancelled

    def readers_of(self, sent: Sent) -> list[tuple[str, str]]:
        """Who must get it: group, and reader."""
        found = []
        for group in GROUPS.values():
            if group.topic != sent.facts["topic"]:
                continue
            if group.name == "picky" and sent.facts.get("tag") not in ("red", "blue"):
                continue
            if group.name == "all":
                found += [("all", f"all-{member}") for member in range(group.members)]
            else:
                found.append((group.name, group.name))
        return found

    def explains(self, group: str, since: float, until: float, shard: int) -> bool:
        """Whether anything broke in this time that a group felt in a shard."""
        return any(
            found.since <= until and found.until >= since for found in self.breaks if found.concerns(group, shard)
        )

    def may_come_again(self, call: Call) -> bool:
        """Whether what was handled may be handed out again: something broke while the message was out, here or, for no
        longer than a lease before, elsewhere; or before what was said of it was written."""
        end = call.ended_at + SAID_S
        return self.explains(call.group, call.began_at - plan.LEASE_S - SAID_S, end, call.shard)

    def losses(self, group: str, until: float = _FOREVER, shard: int | None = None) -> int:
        """How often leases of a group may have been lost, each of which is an attempt."""
        return sum(found.concerns(group, shard) for found in self.breaks if found.since <= until)


def _name(line: dict[str, Any]) -> Name:
    return line["name"][0], line["name"][1]


def lacks(ledger: Ledger) -> list[str]:
    """What never happened in a run: of that the run says nothing, however well it ended."""
    kinds = ("plain", "stored", "ordered", "delayed", "expiring", "urgent", "together", "consumed", "transaction")
    sent = [name[0] for name, sent in ledger.sent.items() if sent.answer == "ok" or name in ledger.seen]
    wanted: dict[str, tuple[Iterable[str], Iterable[str]]] = {
        "sending": (kinds, {kind for kind in kinds if any(f"-{kind}" in stream for stream in sent)}),
        "refusing": (("refused",), {sent.answer for sent in ledger.sent.values()}),
        "handling by": (GROUPS, {call.group for call in ledger.calls if call.word == "ack"}),
        "a handler's": (("ack", "raise", "retry", "reject"), {call.word for call in ledger.calls}),
        "ending with": (("commit", "rollback"), {tx.outcome for tx in ledger.transactions.values() if tx.is_prepared}),
        "dead letters for": (
            ("EXPIRED", "REJECTED", "RETRIES_EXHAUSTED"),
            {letter.reason for letters in ledger.letters.values() for letter in letters},
        ),
        "a broker's": (("kill",), {found.kind for found in ledger.breaks if found.is_brokers}),
    }
    return [f"{what} {word}" for what, (words, found) in wanted.items() for word in words if word not in {*found}]


def outage_sends(ledger: Ledger) -> list[float]:
    """How long each send took that may go anywhere, and was begun while a broker was killed."""
    kills = [found for found in ledger.breaks if found.is_brokers and found.kind == "kill"]
    return sorted(
        sent.answered_at - sent.facts["at"]
        for (stream, _), sent in ledger.sent.items()
        if "-plain" in stream
        and sent.answer == "ok"
        and any(found.since < sent.facts["at"] < found.until for found in kills)
    )


def report(ledger: Ledger) -> str:
    """What happened, in a line or two."""
    answers = Counter(sent.answer for sent in ledger.sent.values())
    ends = Counter(f"{tx.outcome}/{tx.end}" for tx in ledger.transactions.values())
    reasons = Counter(letter.reason for letters in ledger.letters.values() for letter in letters)
    words = Counter(call.word or "died" for call in ledger.calls)
    twice = Counter(
        calls[0].group for calls in ledger.by_reader.values() if sum(call.word == "ack" for call in calls) > 1
    )
    slow = outage_sends(ledger)
    half, most = (slow[len(slow) // 2], slow[-1]) if slow else (0.0, 0.0)
    return (
        f"{len(slow)} plain sends begun in outages: p50 {half:.3f}, at most {most:.2f} s; "
        f"sent {dict(answers)}; transactions {dict(ends)}; calls {dict(words)}; dead letters {dict(reasons)}; "
        f"done more than once {dict(twice)}; breaks {dict(Counter(found.kind for found in ledger.breaks))}"
    )
