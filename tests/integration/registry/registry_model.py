"""A simple model of a registry that loses answers, and a state machine that compares one with it.

The model has all states in which the registry may be: each with the writes that may still be carried out. A write that
is not answered adds states; what is answered takes those away in which it would have been answered otherwise.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dmq.errors import RegistryConflict, SessionExpired, UnknownEntry, WriteUnknown
from dmq.registry.memory import Fate
from dmq.registry.registry import Check, Create, Delete, Entry, Operation, Put, Registry
from dmq.registry.watch import Watch

T = TypeVar("T")
Value: TypeAlias = tuple[bytes, int, int]  # value, version, session
Tree: TypeAlias = frozenset[tuple[str, Value]]

UNSETTLED_MAX = 4
CLIENTS = 3
NAMES = ["a", "a/x", "a/y", "b", "b/x"]
VALUES = [b"", b"1", b"2"]
# A path, what to do there, a value; and whether it is meant to apply.
DRAFTS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 5), st.sampled_from(VALUES), st.integers(0, 9)),
    min_size=1,
    max_size=3,
)
Draft: TypeAlias = tuple[str, int, bytes, int]


class Unsettled(NamedTuple):
    """A write that may still be carried out."""

    number: int
    session: int
    operations: tuple[Operation, ...]


class World(NamedTuple):
    """One state in which the registry may be."""

    tree: Tree
    unsettled: frozenset[Unsettled]


def carried_out(tree: Tree, operations: Sequence[Operation], session: int) -> tuple[Tree, list[int | None]] | int:
    """The tree after a write and the versions it made; or which operation does not apply."""
    entries = dict(tree)
    versions: list[int | None] = []
    for index, operation in enumerate(operations):
        path = operation.path
        found = entries.get(path)
        above = entries.get(path.rpartition("/")[0])
        made = None
        match operation:
            case Create(_, value, ephemeral):
                if found is not None or above is None or above[2]:
                    return index
                entries[path] = (value, 0, session if ephemeral else 0)
                made = 0
            case Check(_, version) | Put(_, _, version) | Delete(_, version):
                if found is None or (version is not None and version != found[1]):
                    return index
                if isinstance(operation, Put):
                    made = found[1] + 1
                    entries[path] = (operation.value, made, found[2])
                elif isinstance(operation, Delete):
                    if any(other.startswith(f"{path}/") for other in entries):
                        return index
                    del entries[path]
        versions.append(made)
    return frozenset(entries.items()), versions


def later(worlds: set[World]) -> set[World]:
    """The states, and those that they become as unsettled writes are carried out, in the order of each session."""
    found = set(worlds)
    waiting = list(worlds)
    while waiting:
        tree, unsettled = waiting.pop()
        for write in unsettled:
            # Those that the same session sent before are then never carried out any more.
            left = frozenset(w for w in unsettled if w.session != write.session or w.number > write.number)
            done = carried_out(tree, write.operations, write.session)
            world = World(tree if isinstance(done, int) else done[0], left)
            if world not in found:
                found.add(world)
                waiting.append(world)
    return found


class RegistryMachine(RuleBasedStateMachine):
    """Clients that write, lose answers and lose sessions, beside the model.

    A class below it connects clients and drives coroutines.
    """

    def __init__(self) -> None:
        super().__init__()
        self.clients: list[Registry] = []
        self.watches: list[Watch] = []
        self.seen: list[dict[str, Entry]] = []
        self.worlds: set[World] = set()
        self.numbers = itertools.count()
        self.root = ""

    # --- what differs between implementations -----------------------------------------------------------------------

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def connect(self) -> Registry:
        raise NotImplementedError

    def expire_session(self, client: Registry) -> None:
        raise NotImplementedError

    def decide(self, client: Registry, fate: Fate) -> None:
        """The next write of the client meets this fate."""
        raise NotImplementedError

    def settle_watch(self, holds: Callable[[], bool]) -> None:
        """Wait until a watch has told."""
        assert holds()

    # --- steps ------------------------------------------------------------------------------------------------------

    @initialize()
    def begin(self) -> None:
        self.clients = [self.connect() for _ in range(CLIENTS)]
        self.root = f"/machine-{self.clients[0].session:x}"
        self.drive(self.clients[0].write([Create(self.root, b"")]))
        self.worlds = {World(frozenset({(self.root, (b"", 0, 0))}), frozenset())}
        self.watches = [self.drive(self.open_watch(client)) for client in self.clients]
        self.seen = [{} for _ in self.clients]

    async def open_watch(self, client: Registry) -> Watch:
        return client.watch(self.root)

    def compose(self, drafts: list[Draft], session: int) -> tuple[Operation, ...]:
        """Operations that apply in one of the states, as far as they are meant to."""
        tree = min(self.worlds, key=lambda world: (len(world.unsettled), sorted(world.tree))).tree
        operations: list[Operation] = []
        for name, action, value, spoil in drafts:
            entries = dict(tree)
            path = f"{self.root}/{name}"
            above = path.rpartition("/")[0]
            if above not in entries:
                path = above
            found = entries.get(path)
            version = None if action % 2 else (found[1] if found else 0) + (spoil == 0)
            if found is None and spoil != 1:
                operation: Operation = Create(path, value, action > 2)
            elif action < 2:
                operation = Put(path, value, version)
            elif action < 4:
                operation = Delete(path, version)
            else:
                operation = Check(path, version) if action == 4 else Put(path, value, version)
            operations.append(operation)
            done = carried_out(tree, [operation], session)
            tree = tree if isinstance(done, int) else done[0]
        return tuple(operations)

    @rule(which=st.integers(0, CLIENTS - 1), drafts=DRAFTS)
    def write(self, which: int, drafts: list[Draft]) -> None:
        client = self.clients[which]
        operations = self.compose(drafts, client.session)
        self.decide(client, Fate.ANSWERED)
        outcome: tuple[int | None, ...] | int
        try:
            outcome = self.drive(client.write(operations))
        except RegistryConflict as error:
            outcome = int(error.detail["index"])
        except SessionExpired:
            return
        session = client.session  # it may have noticed that the one before was over
        kept: set[World] = set()
        for tree, unsettled in later(self.worlds):
            done = carried_out(tree, operations, session)
            left = frozenset(write for write in unsettled if write.session != session)
            if isinstance(done, int):
                if done == outcome:
                    kept.add(World(tree, left))
            elif tuple(done[1]) == outcome:
                kept.add(World(done[0], left))
        assert kept, f"no order of events explains {outcome} of {operations}"
        self.worlds = kept

    @precondition(lambda self: sum(len(world.unsettled) for world in self.worlds) < UNSETTLED_MAX)
    @rule(
        which=st.integers(0, CLIENTS - 1),
        drafts=DRAFTS,
        fate=st.sampled_from([Fate.UNANSWERED, Fate.LOST, Fate.LATE]),
    )
    def lose_answer(self, which: int, drafts: list[Draft], fate: Fate) -> None:
        client = self.clients[which]
        operations = self.compose(drafts, client.session)
        self.decide(client, fate)
        try:
            self.drive(client.write(operations))
        except WriteUnknown:
            write = Unsettled(next(self.numbers), client.session, operations)
            self.worlds = later({World(tree, unsettled | {write}) for tree, unsettled in self.worlds})
        else:
            raise AssertionError("it was to be unknown")

    @rule(which=st.integers(0, CLIENTS - 1))
    def read(self, which: int) -> None:
        found = self.look(which)
        kept = {world for world in later(self.worlds) if world.tree == found}
        assert kept, f"no order of events explains that {found} was read"
        self.worlds = kept

    def look(self, which: int) -> Tree:
        before: Tree | None = None
        while True:
            # A tree is read entry by entry, and a late write may come in between.
            entries = self.drive(self.read_all(self.clients[which]))
            found = frozenset((e.path, (e.value, e.version, e.session)) for e in entries)
            if found == before:
                return found
            before = found

    async def read_all(self, client: Registry) -> list[Entry]:
        root = await client.read(self.root)
        assert root is not None
        entries = [root]
        for entry in await client.children(self.root):
            with contextlib.suppress(UnknownEntry):  # it has gone since
                entries += [entry, *await client.children(entry.path)]
        return entries

    @precondition(lambda self: any(value[2] for world in self.worlds for _, value in world.tree))
    @rule(which=st.integers(0, CLIENTS - 1))
    def expire(self, which: int) -> None:
        session = self.clients[which].session
        self.expire_session(self.clients[which])
        self.worlds = {
            World(
                frozenset((path, value) for path, value in tree if value[2] != session),
                frozenset(write for write in unsettled if write.session != session),
            )
            for tree, unsettled in later(self.worlds)
        }

    @rule(which=st.integers(0, CLIENTS - 1))
    def follow_watch(self, which: int) -> None:
        """A client that reads no more than its watch names has the last state."""
        seen, watch, client = self.seen[which], self.watches[which], self.clients[which]

        def is_current() -> bool:
            while (changes := watch.take()) is not None:
                if changes.is_all:
                    seen.clear()
                    seen.update({entry.path: entry for entry in self.drive(self.read_all(client))})
                for path in changes.paths:
                    entry = self.drive(client.read(path))
                    if entry is None:
                        seen.pop(path, None)
                    else:
                        seen[path] = entry
            found = {path: value[0] for path, value in self.look(which)}
            return {path: entry.value for path, entry in seen.items()} == found

        self.settle_watch(is_current)

    @invariant()
    def there_is_a_state(self) -> None:
        assert self.worlds or not self.clients

    def teardown(self) -> None:
        for client in self.clients:
            self.drive(client.close())
