"""Topics of a cluster, at the leader of one shard: the registry has them, and the journal of each slot follows it.

Any leader writes the entry of a topic, brings its own journal in line, and has the leaders of the other slots do the
same. Every leader also does that by itself: for all topics when it begins to lead, and for each one whose entry its
view of the cluster finds changed.

What always holds:
- The journal's slot of a topic has the incarnation of its entry. One of an older incarnation is dropped before the new
  one begins; one of a newer incarnation than the entry's stays, since that registry is an old copy.
- An entry that is absent deletes nothing: a topic that only the journal has is taken over into the registry. Data goes
  by a tombstone of its incarnation, or when the journal itself knows that the slot was removed.
- A tombstone stays until every shard that had the topic has dropped it durably.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from dmq.broker.catalog.catalog import Catalog
from dmq.broker.catalog.changes import Later
from dmq.broker.catalog.cluster_access import ClusterAccess, ClusterGroups
from dmq.broker.runtime.runtime import Runtime
from dmq.errors import (
    Busy,
    DMQError,
    InvalidRequest,
    InvalidSettings,
    LimitReached,
    ShardConflict,
    StaleRoute,
    TopicExists,
    UnknownEntry,
    UnknownTopic,
)
from dmq.event_log import EventLog
from dmq.model import PRIORITIES, QUEUES_MAX, SYSTEM_PREFIX, TopicConfig, check_name
from dmq.registry.cluster_view import ViewChange
from dmq.registry.contents import ShardContent, ShardState, TopicContent, TopicState, hex_id
from dmq.registry.registry import needs_registry
from dmq.storage.state.state import Topic

__all__ = ["ClusterTopics", "SlotChange", "Verdict", "decide", "placed"]

log = EventLog(__name__)

_SPREAD_SECONDS: Final = 5.0  # that the leaders of other slots are waited for
_AGAIN_SECONDS: Final = 0.2
_RETRY_SECONDS: Final = 3.0
_ROUNDS_MAX: Final = 8


class SlotChange(NamedTuple):
    """What is to become of the slots of a topic.

    Attributes:
        add: a shard that gets one.
        queues: of it; as many as the topic usually has if 0.
        remove: a shard whose slot takes no more messages, and goes when it is empty.
        is_drained: ordered messages wait until what is there is consumed.
        is_forced: what is removed goes at once, with its messages.
    """

    add: str = ""
    queues: int = 0
    remove: str = ""
    is_drained: bool = False
    is_forced: bool = False


class Rest(Protocol):
    """What of a topic is not consumed yet in this shard."""

    def behind(self, topic: Topic, hold: int) -> int: ...

    async def is_empty(self, topic: Topic) -> bool: ...


class Verdict(Enum):
    """What is to be done about a topic in our journal."""

    NOTHING = 0
    PUT = 1  # write the slot as the entry has it
    DROP = 2  # drop what the journal has of an older incarnation, or of a slot that was removed
    ADOPT = 3  # the journal has what the registry lacks
    FORGET = 4  # say in the tombstone that we have nothing any more
    CONFLICT = 5  # the registry is an old copy: nothing is changed


def decide(content: TopicContent | None, local: Topic | None, shard: str) -> Verdict:
    """What is to be done about a topic, from its entry and from what our journal has of it."""
    if content is None:
        return Verdict.NOTHING if local is None else Verdict.ADOPT
    incarnation, queues = int(content.incarnation, 16), queues_of(content, shard)
    if local is not None and local.incarnation > incarnation:
        return Verdict.CONFLICT
    if content.state is TopicState.DELETED:
        if local is None:
            return Verdict.NOTHING if queues is None else Verdict.FORGET
        return Verdict.DROP if local.incarnation else Verdict.ADOPT
    if local is None:
        return Verdict.NOTHING if queues is None else Verdict.PUT
    if 0 < local.incarnation < incarnation:
        return Verdict.DROP
    if _is_older(content, local):
        return Verdict.ADOPT
    if queues is None or local.config.queues > queues:
        return Verdict.DROP if queues is None and local.is_removed else Verdict.ADOPT
    wanted = slot_config(content, queues), incarnation, content.slots_version, shard in content.removed
    has = local.config, local.incarnation, local.slots_version, local.is_removed
    return Verdict.NOTHING if has == wanted else Verdict.PUT


class ClusterTopics:
    """The topics of a cluster at one leader; good for as long as its broker.

    Attributes:
        access: the cluster.
        lacking: shards that did not have a change in time, by topic; they get it when they have a leader.
        drain_seconds: how long ordered messages are held at most.
    """

    drain_seconds = 20.0

    def __init__(self, catalog: Catalog, runtime: Runtime, access: ClusterAccess, rest: Rest, topics_max: int) -> None:
        self._catalog = catalog
        self._runtime = runtime
        self._rest = rest
        self._topics_max = topics_max
        self.access = access
        self._view = access.view
        self._entries = access.entries
        self._shard = access.shard
        self.lacking: dict[str, tuple[str, ...]] = {}
        self._due: dict[str, None] = {}  # topics to be looked at
        self._news = asyncio.Event()
        self.groups: Final = ClusterGroups(access, runtime)
        self._is_over = False

    # --- keeping in line ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring all topics in line, and each one whose entry changes from now on."""
        self._view.listeners.append(self._changed)
        self._due.update(dict.fromkeys(self._all_names()))
        self._news.set()
        self._runtime.tasks.run(self._keep(), lambda error: None)
        self._runtime.tasks.run(self._watch_removed(), lambda error: None)
        for topic, group in self._catalog.consumed():  # the leader before us may have died before they were named
            self.groups.began(topic, group)
        self.groups.start()

    def end(self) -> None:
        """Our broker is dropped: nothing is begun any more."""
        self._is_over = True
        self.groups.end()
        if self._changed in self._view.listeners:
            self._view.listeners.remove(self._changed)

    def _all_names(self) -> list[str]:
        local = [topic.name for topic in self._catalog.all() if not topic.name.startswith(SYSTEM_PREFIX)]
        return sorted({*local, *self._view.topics})

    def _changed(self, change: ViewChange) -> None:
        self._due.update(dict.fromkeys(self._all_names() if change.is_all else change.topics))
        if self._due:
            self._news.set()

    async def _keep(self) -> None:
        """For as long as the broker is there."""
        while not self._is_over:
            await self._news.wait()
            self._news.clear()
            if not self._view.is_known:
                await asyncio.sleep(_AGAIN_SECONDS)
                self._news.set()
                continue
            due, self._due = self._due, {}
            for name in due:
                try:
                    await self.bring_in_line(name)
                except DMQError as error:
                    log.warning("topic not in line with the registry yet", once_for=name, topic=name, error=error)
                    self._due[name] = None
            if self._due:
                await asyncio.sleep(_RETRY_SECONDS)
                self._news.set()

    async def bring_in_line(self, name: str) -> None:
        """Make our journal have what the entry of a topic says, as far as our view knows it.

        Raises:
            DMQError: it cannot be done now.
        """
        if name.startswith(SYSTEM_PREFIX) or self._verdict(name) is Verdict.NOTHING:
            return
        change = await self._catalog.changes.after(lambda: self._catalog.changes.begin(("topic", name)))
        try:
            await self._bring_in_line(name)
        finally:
            self._catalog.changes.end(change)

    def _verdict(self, name: str) -> Verdict:
        return decide(self._view.topics.get(name), self._catalog.find(name), self._shard)

    async def _bring_in_line(self, name: str) -> None:
        """The same, for who holds the change."""
        for _ in range(_ROUNDS_MAX):
            content, local = self._view.topics.get(name), self._catalog.find(name)
            match decide(content, local, self._shard):
                case Verdict.NOTHING:
                    return
                case Verdict.PUT:
                    assert content is not None
                    await self._put(name, content)
                case Verdict.DROP:
                    await self._catalog.drop_slot(name)
                case Verdict.ADOPT:
                    assert local is not None
                    await self._adopt(name, local)
                case Verdict.FORGET:
                    await self._entries.forget(name, self._shard)
                case Verdict.CONFLICT:
                    log.error(
                        "the registry has an older incarnation of a topic than the journal: it is an old copy, and the "
                        "topic is served as the journal has it",
                        once_for=name,
                        topic=name,
                    )
                    return

    async def _put(self, name: str, content: TopicContent) -> None:
        queues = queues_of(content, self._shard)
        assert queues is not None
        slot = int(content.incarnation, 16), content.slots_version, self._shard in content.removed
        is_new = self._catalog.find(name) is None
        groups = await self._entries.groups(name, content.incarnation) if is_new else []
        await self._catalog.put_slot(name, slot_config(content, queues), slot, groups)

    async def _adopt(self, name: str, local: Topic) -> None:
        """Take a topic over into the registry that only our journal has, or a slot that the entry lacks."""
        shard, queues = self._shard, local.config.queues

        def adopted(content: TopicContent | None) -> TopicContent | None:
            if decide(content, local, shard) is not Verdict.ADOPT:
                return None
            if content is None or content.state is not TopicState.OPEN:
                least, version = (
                    (0, 0) if content is None else (int(content.incarnation, 16) + 1, content.slots_version)
                )
                return TopicContent(
                    incarnation=hex_id(max(local.incarnation or local.id, least)),
                    settings=settings_of(local.config),
                    slots=[(shard, queues)],
                    slots_version=max(version, local.slots_version) + 1,
                )
            if _is_older(content, local):
                content = msgspec.structs.replace(
                    content,
                    settings=settings_of(local.config),
                    slots_version=local.slots_version,
                    removed=sorted({*content.removed, shard}) if local.is_removed else content.removed,
                )
            there = slot_config(content, queues)
            if there != local.config:
                raise ShardConflict(
                    f"topic {name!r} of shard {shard!r} has other settings than the one of this name in the cluster: "
                    "give both the same with dmq topic update, or delete one of them",
                    topic=name,
                )
            slots = [slot for slot in content.slots if slot[0] != shard] + [(shard, queues)]
            return msgspec.structs.replace(content, slots=slots, slots_version=content.slots_version + 1)

        await self._entries.rewrite(name, adopted)
        for group in self._catalog.groups_at(local):
            self.groups.began(name, group)
        log.info("topic taken over into the registry", topic=name, shard=shard, queues=queues)

    async def _watch_removed(self) -> None:
        """Take slots away that were removed and are empty; for as long as the broker is there."""
        while not self._is_over:
            await asyncio.sleep(_RETRY_SECONDS)
            for topic in [one for one in self._catalog.all() if one.is_removed]:
                try:
                    await self.take_away(topic)
                except DMQError as error:
                    log.warning("a removed slot stays for now", once_for=topic.name, topic=topic.name, error=error)

    async def take_away(self, topic: Topic, *, is_forced: bool = False) -> None:
        """Take our slot of a topic out of its entry, and what it has out of the journal, if nothing is left to consume.

        Raises:
            DMQError: the registry does not answer now.
        """
        name, incarnation = topic.name, hex_id(topic.incarnation)
        if not is_forced and not await self._rest.is_empty(topic):
            return

        def emptied(content: TopicContent | None) -> TopicContent | None:
            if content is None or content.incarnation != incarnation or self._shard not in content.removed:
                return None
            return without_slot(content, self._shard)

        await self._entries.rewrite(name, emptied)
        await self.bring_in_line(name)
        log.info("slot of a topic taken away", topic=name, shard=self._shard, forced=is_forced)

    # --- looking ------------------------------------------------------------------------------------------------------

    def find(self, name: str) -> TopicContent | None:
        """A topic of the cluster, wherever its slots are."""
        content = self._view.topics.get(name)
        return content if content is not None and content.state is TopicState.OPEN else None

    def names(self) -> list[str]:
        """All topics of the cluster."""
        return [name for name, content in self._view.topics.items() if content.state is TopicState.OPEN]

    def elsewhere(self, name: str) -> Topic | None:
        """A topic of the cluster that has no slot here, for people: nothing of it is in our journal."""
        content = self.find(name)
        if content is None:
            return None
        queues = max((count for _, count in content.slots), default=1)
        return Topic(0, name, slot_config(content, queues), 0, incarnation=int(content.incarnation, 16))

    def missing(self, name: str) -> DMQError | Later | None:
        """What is told of a topic that our journal has not: None if the cluster has none, either."""
        content = self.find(name)
        if content is None:
            return None
        if queues_of(content, self._shard) is not None:
            return self._catalog.work_on(name, lambda: self._bring_in_line(name))
        return StaleRoute(
            f"topic {name!r} has no queues in shard {self._shard!r}: ask for its route (ROUTE), and send there",
            topic=name,
            slots_version=content.slots_version,
        )

    # --- changing -----------------------------------------------------------------------------------------------------

    async def create(self, name: str, config: TopicConfig, *, allow_existing: bool, by: str) -> Topic:
        """Make a topic on all open shards; the caller holds the change.

        Raises:
            TopicExists, InvalidName, LimitReached: it cannot be made.
            ShardConflict: no shard is open.
            RegistryDown: the registry does not answer.
        """
        check_name(name, "topic")
        if not 1 <= config.queues <= QUEUES_MAX:
            raise InvalidSettings(f"a topic has 1 to {QUEUES_MAX} queues, not {config.queues}", topic=name)
        with needs_registry():
            await self._view.refresh()
        drawn = time_incarnation(self._runtime.clock.now_ms)
        made = hex_id(drawn)

        def created(content: TopicContent | None) -> TopicContent | None:
            nonlocal made
            if content is not None and content.state is TopicState.OPEN:
                if content.incarnation == made:
                    return None  # our write was not answered, and has taken place
                self._check_same(name, content, config, allow_existing=allow_existing)
                return None
            if content is None and (local := self._catalog.find(name)) is not None:
                self._check_same(name, self._content_of(local), config, allow_existing=allow_existing)
            self._check_room()
            before = 0 if content is None else int(content.incarnation, 16)
            made = hex_id(max(drawn, before + 1))
            return TopicContent(
                incarnation=made,
                settings=settings_of(config),
                slots=[(shard, config.queues) for shard in self._open_shards()],
                slots_version=1 if content is None else content.slots_version + 1,
            )

        content = await self._entries.rewrite(name, created)
        await self._bring_in_line(name)
        if content is not None and content.incarnation == made:
            log.info("topic created in the cluster", topic=name, slots=len(content.slots), by=by)
        return self._now(name)

    def _check_same(self, name: str, content: TopicContent, config: TopicConfig, *, allow_existing: bool) -> None:
        if not allow_existing:
            raise TopicExists(f"topic {name!r} already exists: choose another name or update it", topic=name)
        there = slot_config(content, int(content.settings.get("queues", config.queues)))
        if there != config:
            raise self._catalog.otherwise(name, there, config)

    def _content_of(self, local: Topic) -> TopicContent:
        return TopicContent(incarnation=hex_id(local.id), settings=settings_of(local.config))

    def _check_room(self) -> None:
        count = sum(one.state is TopicState.OPEN for one in self._view.topics.values())
        if count >= self._topics_max:
            raise LimitReached(
                f"this cluster has {count} topics, and broker.topics_max allows no more: delete some, or raise the "
                "setting",
                limit=self._topics_max,
            )

    def _open_shards(self) -> list[str]:
        shards = sorted(self._view.shards.items(), key=lambda pair: pair[1].number)
        found = [name for name, record in shards if record.state is ShardState.OPEN]
        if not found:
            raise ShardConflict("no shard of this cluster is open: a new topic would have no place")
        return found

    async def update(self, name: str, alter: Callable[[TopicConfig], TopicConfig], *, by: str) -> Topic:
        """Change the settings of a topic on all its shards; the caller holds the change.

        Raises:
            UnknownTopic, InvalidSettings: they cannot be changed.
            RegistryDown: the registry does not answer.
        """

        def updated(content: TopicContent | None) -> TopicContent | None:
            content = _existing(name, content)
            usual = int(content.settings.get("queues", max((count for _, count in content.slots), default=1)))
            before = slot_config(content, usual)
            config = alter(before)
            if not before.queues <= config.queues <= QUEUES_MAX:
                raise InvalidSettings(
                    f"topic {name!r} has {before.queues} queues in a shard: it can get more, up to {QUEUES_MAX}, but "
                    "not fewer",
                    topic=name,
                )
            slots, version = content.slots, content.slots_version
            if config.queues > before.queues:
                slots = [(shard, max(count, config.queues)) for shard, count in slots]
                version += 1
            settings = content.settings | settings_of(config)
            return msgspec.structs.replace(content, settings=settings, slots=slots, slots_version=version)

        await self._adopt_first(name)
        await self._entries.rewrite(name, updated)
        await self._bring_in_line(name)
        return self._now(name)

    async def delete(self, name: str, *, by: str) -> list[str]:
        """Delete a topic on all its shards; the caller holds the change. Returns the shards that had it.

        Raises:
            UnknownTopic: there is none.
            RegistryDown: the registry does not answer.
        """

        def deleted(content: TopicContent | None) -> TopicContent | None:
            if content is not None and content.incarnation == gone:
                return None if content.state is TopicState.DELETED else _tombstone(content)
            return None

        await self._adopt_first(name)
        found = _existing(name, await self._entries.read(name))
        gone = found.incarnation
        await self._entries.rewrite(name, deleted)
        log.info("topic deleted in the cluster", topic=name, slots=len(found.slots), by=by)
        await self._bring_in_line(name)
        return [shard for shard, _ in found.slots]

    async def place(self, name: str, change: SlotChange, *, by: str) -> Topic:
        """Add a slot to a topic, or remove one; answered when the shards with a leader have it.

        Raises:
            UnknownTopic, UnknownEntry, InvalidRequest: there is no such topic or shard, or it makes no sense.
            ShardConflict: the state of the shard forbids it.
            RegistryDown: the registry does not answer.
            Busy: it was to be drained, and consumers do not get on; nothing was changed.
        """
        with needs_registry():
            await self._view.refresh()
        await self.bring_in_line(name)
        shards = self._view.shards
        for shard in (change.add, change.remove):
            if shard and shard not in shards:
                known = ", ".join(sorted(shards)) or "none"
                raise UnknownEntry(f"there is no shard {shard!r}: those there are: {known}", shard=shard)
        placed(_existing(name, await self._entries.read(name)), change, shards)  # whether it can be done at all
        if change.is_drained:
            await self._drain(name)
        content = await self._entries.rewrite(name, lambda content: placed(_existing(name, content), change, shards))
        assert content is not None
        log.info("topic placed", topic=name, slots_version=content.slots_version, **change._asdict(), by=by)
        await self.bring_in_line(name)
        await self.spread(name)
        if change.is_forced and change.remove:
            await self._force(name, change.remove)
        return self._now(name)

    async def _drain(self, name: str) -> None:
        """Hold ordered messages until every group has consumed what there is, in all slots."""
        until_ms = self._runtime.clock.now_ms + int(self.drain_seconds * 1000)

        def held(content: TopicContent | None) -> TopicContent:
            return msgspec.structs.replace(_existing(name, content), held_until_ms=until_ms)

        await self._entries.rewrite(name, held)
        try:
            async with asyncio.timeout(self.drain_seconds * 0.9):
                quiet = 0  # twice: what was taken just before may not be written the first time
                while quiet < 2:
                    quiet = 0 if await self._behind(name) else quiet + 1
                    await asyncio.sleep(_AGAIN_SECONDS)
        except TimeoutError:
            await self._entries.rewrite(
                name, lambda content: msgspec.structs.replace(_existing(name, content), held_until_ms=0)
            )
            raise Busy(
                f"the groups of topic {name!r} have not consumed it within {self.drain_seconds:.0f} s: nothing was "
                "changed; see that consumers get on, and ask again, or leave --drain out",
                retry_after_ms=1000,
            ) from None

    async def _behind(self, name: str) -> int:
        """How much is not consumed in all slots; a slot without a leader counts as something."""
        content = _existing(name, self._view.topics.get(name))
        count = 0
        for shard, _ in content.slots:
            if shard == self._shard:
                await self.bring_in_line(name)
                count += self.behind(name)
                continue
            leader = self._view.leader_of(shard)
            try:
                count += 1 if leader is None else await self.access.ask(leader[1].address, name)
            except DMQError:
                count += 1
        return count

    def group_began(self, topic: str, group: str) -> None:
        """A group has its first positions in a topic."""
        self.groups.began(topic, group)

    def behind(self, name: str) -> int:
        """How many messages of a topic its groups have not consumed in our slot."""
        topic = self._catalog.find(name)
        return 0 if topic is None else self._rest.behind(topic, self._hold(name))

    def is_held(self, name: str) -> bool:
        """Whether ordered messages of a topic wait, because its slots are about to change."""
        return self._hold(name) > 0

    def _hold(self, name: str) -> int:
        """Until when they wait, in milliseconds; 0 if they do not."""
        content = self._view.topics.get(name)
        return 0 if content is None or content.held_until_ms <= self._runtime.clock.now_ms else content.held_until_ms

    async def _force(self, name: str, shard: str) -> None:
        """Take a removed slot away with what it has."""

        def forced(content: TopicContent | None) -> TopicContent | None:
            found = _existing(name, content)
            return without_slot(found, shard) if shard in found.removed else None

        if shard != self._shard and (self._view.leader_of(shard) is None or shard in self.lacking.get(name, ())):
            raise ShardConflict(
                f"shard {shard!r} has no leader, and its slot can be taken away only by it: it takes no more messages, "
                "and goes when the shard is back",
                shard=shard,
            )
        await self._entries.rewrite(name, forced)
        await self.bring_in_line(name)
        await self.spread(name, [*(one for one, _ in self._view.topics[name].slots), shard])

    async def _adopt_first(self, name: str) -> None:
        """A topic that our journal alone has is taken over before it is changed."""
        content, local = await self._entries.read(name), self._catalog.find(name)
        if local is not None and decide(content, local, self._shard) is Verdict.ADOPT:
            await self._adopt(name, local)

    def _now(self, name: str) -> Topic:
        found = self._catalog.find(name) or self.elsewhere(name)
        if found is None:
            raise UnknownTopic(f"topic {name!r} was deleted meanwhile", topic=name)
        return found

    # --- the other slots ----------------------------------------------------------------------------------------------

    def spread(self, name: str, shards: Iterable[str] | None = None) -> Coroutine[Any, Any, tuple[str, ...]]:
        """Have the leaders of a topic's other slots bring theirs in line; returns the shards that have not, in time."""
        content = self._view.topics.get(name)
        slots = [] if content is None else [shard for shard, _ in content.slots]
        return self._spread(name, [one for one in (slots if shards is None else shards) if one != self._shard])

    async def _spread(self, name: str, shards: list[str]) -> tuple[str, ...]:
        done = await asyncio.gather(*(self._tell(shard, name) for shard in shards))
        lacking = tuple(shard for shard, is_done in zip(shards, done, strict=True) if not is_done)
        self.lacking.pop(name, None)
        if lacking:
            self.lacking[name] = lacking
            log.warning(
                "shards lack a change of a topic until they have a leader", topic=name, shards=",".join(lacking)
            )
        return lacking

    async def _tell(self, shard: str, name: str) -> bool:
        try:
            async with asyncio.timeout(_SPREAD_SECONDS):
                while (leader := self._view.leader_of(shard)) is not None:
                    try:
                        await self.access.ask(leader[1].address, name)
                        return True
                    except DMQError as error:
                        log.debug("a slot's leader was not reached", shard=shard, topic=name, error=error)
                    await asyncio.sleep(_AGAIN_SECONDS)
                    self._view.ask()
        except TimeoutError:
            pass
        return False

    async def sync(self, name: str) -> int:
        """Another leader has written an entry: read it, and bring our slot in line.

        Returns how many messages of it are not consumed here.

        Raises:
            DMQError: it cannot be done now.
        """
        await self._entries.read(name)
        await self.bring_in_line(name)
        return self.behind(name)


def placed(content: TopicContent, change: SlotChange, shards: Mapping[str, ShardContent]) -> TopicContent:
    """The entry of a topic with other slots.

    Raises:
        InvalidRequest, ShardConflict: it cannot be.
    """
    if bool(change.add) == bool(change.remove):
        raise InvalidRequest("say one shard to add, or one to remove")
    there, is_removed = (
        queues_of(content, change.add or change.remove),
        (change.add or change.remove) in content.removed,
    )
    slots, removed = list(content.slots), list(content.removed)
    if change.add:
        if shards[change.add].state is not ShardState.OPEN:
            raise ShardConflict(f"shard {change.add!r} is {shards[change.add].state}: it takes no new slots")
        if there is not None and not is_removed:
            raise InvalidRequest(f"the topic has a slot in shard {change.add!r} already", shard=change.add)
        queues = change.queues or there or int(content.settings.get("queues", 1))
        if bool(content.settings.get("priority", False)):
            queues = PRIORITIES
        if there is not None and queues < there:
            raise InvalidRequest(f"the slot had {there} queues before: it can get more, but not fewer")
        slots = [slot for slot in slots if slot[0] != change.add] + [(change.add, queues)]
        removed = [shard for shard in removed if shard != change.add]
    else:
        if there is None:
            raise InvalidRequest(f"the topic has no slot in shard {change.remove!r}", shard=change.remove)
        left = [shard for shard, _ in slots if shard not in removed and shard != change.remove]
        if not left:
            raise InvalidRequest(
                "it is the last slot that takes messages: add another one first, or delete the topic",
                shard=change.remove,
            )
        if is_removed and not change.is_forced:
            raise InvalidRequest(f"the slot in shard {change.remove!r} is removed already, and goes when it is empty")
        removed = removed if is_removed else [*removed, change.remove]
    return msgspec.structs.replace(
        content, slots=slots, removed=removed, slots_version=content.slots_version + 1, held_until_ms=0
    )


def _is_older(content: TopicContent, local: Topic) -> bool:
    """Whether the journal has newer slots of a topic than its entry: the registry was restored from an old backup."""
    return local.incarnation == int(content.incarnation, 16) and local.slots_version > content.slots_version


def without_slot(content: TopicContent, shard: str) -> TopicContent:
    """The entry of a topic when a removed slot is gone."""
    return msgspec.structs.replace(
        content,
        slots=[slot for slot in content.slots if slot[0] != shard],
        removed=[one for one in content.removed if one != shard],
        slots_version=content.slots_version + 1,
    )


def queues_of(content: TopicContent, shard: str) -> int | None:
    """How many queues a topic has in a shard; None if it has no slot there."""
    return next((queues for name, queues in content.slots if name == shard), None)


def slot_config(content: TopicContent, queues: int) -> TopicConfig:
    """The settings of one slot.

    Raises:
        InvalidSettings: the entry has settings that are none.
    """
    known = {name: value for name, value in content.settings.items() if name in TopicConfig.__struct_fields__}
    try:
        return msgspec.convert(known | {"queues": queues}, TopicConfig)
    except msgspec.ValidationError as error:
        raise InvalidSettings(f"the settings of a topic in the registry cannot be read: {error}") from error


def settings_of(config: TopicConfig) -> dict[str, Any]:
    """Settings as an entry has them."""
    return msgspec.structs.asdict(config)


def time_incarnation(now_ms: int) -> int:
    """A number above those that were drawn before, by the clock, and unlike any drawn elsewhere."""
    return max(1, now_ms) << 16 | secrets.randbits(16)


def _existing(name: str, content: TopicContent | None) -> TopicContent:
    if content is None or content.state is not TopicState.OPEN:
        raise UnknownTopic(f"there is no topic {name!r}: create it first", topic=name)
    return content


def _tombstone(content: TopicContent) -> TopicContent:
    return msgspec.structs.replace(content, state=TopicState.DELETED)
