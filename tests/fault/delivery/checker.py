"""What must be true after a long run of all delivery features, whatever was killed meanwhile.

- Whatever was accepted, or seen by anybody, was handled by each group that should get it, or is among its dead letters
  for a reason that holds. What was rolled back, refused or cancelled was never seen.
- A message has one id, one place and one content, and one dead letter in a group at most.
- A message comes again after it failed, after its time and with one attempt more. Else it comes again only if it was
  out, or the word about it just said, when a process was killed or not let run.
- Nothing delayed or retried comes early. Within a business id, an ordered group succeeds in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from dmq.client.admin.dead_letters import DeadLetter
from tests.fault.delivery import plan
from tests.fault.delivery.ledger import Call, Ledger, Sent
from tests.fault.delivery.plan import GROUPS, Name

__all__ = ["check"]

_ROUNDING_S: Final = 0.002


def check(ledger: Ledger) -> None:
    """Everything; all that is wrong is told at once."""
    wrong = [*ledger.problems]
    checks = (
        _contents, _places, _arrivals, _unseen, _transactions, _letters, _letter_counts, _consumed, _again,
        _again_counts, _attempts, _early, _order,
    )  # fmt: skip
    for one in checks:
        found = one(ledger)
        wrong += [f"{one.__name__.strip('_')}: {line}" for line in found[:5]]
        if len(found) > 5:
            wrong.append(f"{one.__name__.strip('_')}: and {len(found) - 5} more")
    assert not wrong, "\n".join(["what must hold does not:", *wrong])
    assert ledger.seen, "nothing came"


def _contents(ledger: Ledger) -> list[str]:
    wrong = []
    for call in ledger.calls:
        sent = ledger.sent.get(call.name)
        if sent is None:
            wrong.append(f"{_tell(call)} was never sent")
        elif (
            not call.facts["is_whole"]
            or tuple(call.facts["said"]) != sent.said
            or call.facts["topic"] != sent.facts["topic"]
        ):
            wrong.append(f"{_tell(call)} was {sent.said} when it was sent")
    for (group, name), letters in ledger.letters.items():
        for letter in letters:
            sent = ledger.sent.get(name)
            found = (letter.key, letter.tag, letter.business_id, letter.priority)
            if sent is None or letter.body != plan.content(*name) or found != sent.said:
                wrong.append(f"the dead letter {name} of {group} is not what was sent: {found}")
    return wrong


def _places(ledger: Ledger) -> list[str]:
    """A message is in its topic once: moves, firings and commits never double it."""
    ids: dict[Name, str] = {name: sent.id for name, sent in ledger.sent.items() if sent.id}
    places = {name: sent.place for name, sent in ledger.sent.items() if sent.place}
    wrong = []
    for call in ledger.calls:
        place = (call.facts["place"][0], call.facts["place"][1])
        if ids.setdefault(call.name, call.facts["id"]) != call.facts["id"]:
            wrong.append(f"{_tell(call)}: its id was {ids[call.name]}")
        if places.setdefault(call.name, place) != place:
            wrong.append(f"{_tell(call)}: it is stored twice, also at {places[call.name]}")
    twice = [id for id, count in Counter(ids.values()).items() if count > 1]
    return wrong + [f"two messages share the id {id}" for id in twice]


def _arrivals(ledger: Ledger) -> list[str]:
    wrong = []
    for name, sent in ledger.sent.items():
        if name not in ledger.seen and not ledger.is_promised(sent):
            continue
        for group, reader in ledger.readers_of(sent):
            calls = ledger.by_reader.get((reader, name), [])
            words = {call.word for call in calls}
            if "ack" not in words and (group, name) not in ledger.letters:
                wrong.append(f"{name} is lost for {reader}: {_history(calls)}; {_about(ledger, sent)}")
            elif group == "all" and not words & {"ack", "reject", "raise"} and sent.facts.get("expires") is None:
                wrong.append(f"{name} is a dead letter of the group, and never came to {reader}")
    return wrong


def _unseen(ledger: Ledger) -> list[str]:
    wrong = []
    for name in ledger.seen:
        sent = ledger.sent.get(name)
        if sent is not None and (sent.answer == "refused" or sent.is_cancelled):
            wrong.append(f"{name} was {sent.answer if not sent.is_cancelled else 'cancelled'}, and came")
    for call in ledger.calls:
        tag = call.facts["said"][1]
        if call.group == "picky" and tag not in ("red", "blue", "green"):
            wrong.append(f"{_tell(call)}: its tag is {tag}, which nobody asked for")
    return wrong


def _transactions(ledger: Ledger) -> list[str]:
    wrong = []
    for key, tx in ledger.transactions.items():
        seen = [name for name in tx.names if name in ledger.seen]
        given_up = [name for name in tx.names if (plan.PRODUCERS, name) in ledger.letters]
        story = f"{key} ({tx.outcome}, {tx.end}): seen {seen}, given up {given_up} of {tx.names}"
        if tx.is_prepared and seen and len(seen) != len(tx.names) and tx.end == "ended":
            wrong.append(f"{story}: not whole")
        if seen and tx.outcome != "commit":
            wrong.append(f"{story}: it was not committed")
        if set(seen) & set(given_up):
            wrong.append(f"{story}: both")
        if tx.end == "ended" and given_up:
            wrong.append(f"{story}: it was ended by its producer")
        if tx.is_prepared and tx.outcome == "commit" and {*seen, *given_up} != {*tx.names}:
            wrong.append(f"{story}: lost")
        if tx.is_prepared and tx.outcome == "unknown" and {*given_up} != {*tx.names}:
            wrong.append(f"{story}: nobody knew, and it is not among the dead letters")
        if tx.end == "over" and tx.outcome == "commit" and not given_up:
            wrong.append(f"{story}: its commit was refused")
    return wrong


def _letters(ledger: Ledger) -> list[str]:
    """A dead letter has a reason that holds, and nobody succeeded with the message, unless a kill explains that."""
    wrong = []
    for (group, name), letters in ledger.letters.items():
        if group == plan.PRODUCERS:
            continue
        calls = ledger.by_group.get((group, name), [])
        wrong += [
            f"{name} is a dead letter of {group}: {_reason(letter)}; {_history(calls)}"
            for letter in letters
            if not _holds(ledger, letter, ledger.sent[name], calls)
        ]
        if group == "all" or GROUPS[group].is_replayed:
            continue  # each member has a position of its own; what was done is not, once more, after it was set back
        if any(call.word == "ack" and not ledger.may_come_again(call) for call in calls):
            wrong.append(f"{name} is a dead letter of {group}: {_reason(letters[0])}, and done: {_history(calls)}")
    return wrong


def _holds(ledger: Ledger, letter: DeadLetter, sent: Sent, calls: list[Call]) -> bool:
    match letter.reason:
        case "REJECTED":
            return any(call.word == "reject" for call in calls)
        case "EXPIRED":
            expires = sent.facts.get("expires")
            return expires is not None and letter.dead_at_ms / 1000 >= expires - _ROUNDING_S
        case "RETRIES_EXHAUSTED":
            attempts_max = GROUPS[letter.group].attempts_max
            failures = sum(call.failed for call in calls) + ledger.losses(letter.group)
            return attempts_max <= letter.attempts and failures >= attempts_max
    return False


def _letter_counts(ledger: Ledger) -> list[str]:
    wrong = []
    for (group, name), letters in ledger.letters.items():
        most = GROUPS[group].members if group == "all" else 1
        if len(letters) > most:
            wrong.append(f"{name} has {len(letters)} letters of {group}: {list(map(_reason, letters))}")
    return wrong


def _consumed(ledger: Ledger) -> list[str]:
    """Who was told that a group has consumed a message was told the truth."""
    wrong = []
    for name, sent in ledger.sent.items():
        if sent.was_consumed:
            calls = ledger.by_reader.get(("push", name), [])
            if not any(call.word == "ack" and call.ended_at <= sent.answered_at for call in calls):
                wrong.append(f"{name} was told to be consumed: {_history(calls)}")
    return wrong


def _again(ledger: Ledger) -> list[str]:
    """Whatever comes again does so because it failed, or because of what broke."""
    wrong = []
    for (reader, name), calls in ledger.by_reader.items():
        group = GROUPS[calls[0].group]
        if group.is_replayed:
            continue
        for at, call in enumerate(calls[1:], start=1):
            earlier = calls[:at]
            if any(_follows(before, call) for before in earlier):
                continue
            # In place, attempts are known by heart: a broker that begins anew begins to count anew.
            forgotten = group.in_place and ledger.explains(group.name, earlier[-1].began_at, call.began_at, call.shard)
            if not forgotten and not any(map(ledger.may_come_again, earlier)):
                wrong.append(f"{name} came again to {reader} for no reason: {_history(calls)}")
                break
    return wrong


def _again_counts(ledger: Ledger) -> list[str]:
    """What breaks once costs each member what it has in hand at most."""
    twice = Counter(
        calls[0].group for calls in ledger.by_reader.values() if sum(call.word == "ack" for call in calls) > 1
    )
    wrong = []
    for name, group in GROUPS.items():
        most = ledger.losses(name) * group.members * group.prefetch
        if twice[name] > most and not group.is_replayed:
            wrong.append(f"{name} did {twice[name]} messages more than once, more than {most}")
    return wrong


def _follows(before: Call, call: Call) -> bool:
    """Whether a call is what has to come after another one that failed: here at once, or as the next attempt."""
    is_local = before.word == "raise" and before.process == call.process and before.attempt == call.attempt
    return is_local or (before.failed and call.attempt == before.attempt + 1)


def _attempts(ledger: Ledger) -> list[str]:
    wrong = []
    for (reader, name), calls in ledger.by_reader.items():
        group = GROUPS[calls[0].group]
        for at, call in enumerate(calls):
            failures = len({(before.process, before.attempt) for before in calls[:at] if before.failed})
            if (
                not 1
                <= call.attempt
                <= min(group.attempts_max, 1 + failures + ledger.losses(group.name, call.began_at, call.shard))
            ):
                wrong.append(f"{name} came to {reader} as attempt {call.attempt}: {_history(calls)}")
    return wrong


def _early(ledger: Ledger) -> list[str]:
    wrong = []
    for (reader, name), calls in ledger.by_reader.items():
        due = ledger.sent[name].facts.get("due") if name in ledger.sent else None
        for at, call in enumerate(calls):
            if due is not None and call.facts["stored"] < due - _ROUNDING_S:
                wrong.append(f"{_tell(call)}: {due - call.facts['stored']:.3f} s before its time")
            first = [before for before in calls[:at] if before.failed and before.attempt + 1 == call.attempt]
            if not first or any(map(ledger.may_come_again, calls[:at])):
                continue  # another one may have had it whose lease was lost
            # The last call of those that were tried at once, in one place, is the one that counts.
            wait = plan.AFTER_S if first[-1].word == "retry" else plan.TABLE_S[min(call.attempt - 2, 2)]
            if call.began_at < first[-1].ended_at + wait - _ROUNDING_S:
                early = first[-1].ended_at + wait - call.began_at
                wrong.append(f"{name} came to {reader} again {early:.3f} s early: {_history(calls)}")
    return wrong


def _order(ledger: Ledger) -> list[str]:
    """First successes of a business id rise; and so do its places."""
    wrong = []
    first: dict[Name, Call] = {}
    for call in sorted((c for c in ledger.calls if c.word == "ack" and c.group == "ledger"), key=lambda c: c.ended_at):
        if call.facts["said"][2] is not None:
            first.setdefault(call.name, call)
    last: dict[str, int] = defaultdict(lambda: -1)
    for (stream, number), call in first.items():
        if number <= last[stream]:
            wrong.append(f"{_tell(call)} was done after {last[stream]}")
        last[stream] = max(number, last[stream])
    placed = {(c.name, *c.facts["place"]) for c in ledger.calls if c.facts["said"][2] is not None}
    behind: dict[tuple[str, int], int] = defaultdict(lambda: -1)  # a key goes elsewhere when slots change
    for (stream, number), place, offset in sorted(placed, key=lambda found: found[1:]):
        if number <= behind[stream, place]:
            wrong.append(f"{stream} {number} is stored behind {behind[stream, place]}, at {place}/{offset}")
        behind[stream, place] = number
    return wrong


# --- telling --------------------------------------------------------------------------------------------------------


def _tell(call: Call) -> str:
    return f"{call.name} attempt {call.attempt} at {call.facts['place']} in {call.process}"


def _history(calls: list[Call]) -> str:
    return "; ".join(
        f"{call.began_at:.2f}-{call.ended_at:.2f} {call.process} attempt {call.attempt} {call.word or 'died'}"
        for call in calls
    )


def _reason(letter: DeadLetter) -> str:
    return f"{letter.reason} after {letter.attempts}, {letter.last_error!r}"


def _about(ledger: Ledger, sent: Sent) -> str:
    facts = {word: value for word, value in sent.facts.items() if value is not None and word not in ("event", "name")}
    elsewhere = sorted(group for group in GROUPS if (group, sent.name) in ledger.by_group)
    return f"{sent.answer}, {facts}, seen by {elsewhere}"
