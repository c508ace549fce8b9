"""The contract of a registry, on every implementation of it."""

from __future__ import annotations

import asyncio

import pytest

from dmq.errors import (
    DMQError,
    InvalidName,
    InvalidRequest,
    RegistryConflict,
    RegistryDown,
    SessionExpired,
    UnknownEntry,
    WriteUnknown,
)
from dmq.registry.registry import (
    OPERATIONS_MAX,
    PATH_BYTES_MAX,
    VALUE_BYTES_MAX,
    WRITE_BYTES_MAX,
    Check,
    Create,
    Delete,
    Entry,
    Operation,
    Put,
    Reason,
    Registry,
)
from tests.integration.registry.registries import Registries, eventually, new_root, on_loop

# --- entries ----------------------------------------------------------------------------------------------------------


@on_loop
async def test_an_entry_is_created_put_and_deleted(registries: Registries) -> None:
    client = await registries.connect()
    path = f"{await new_root(client)}/a"
    assert await client.read(path) is None
    assert await client.write([Create(path, b"one")]) == (0,)
    assert await client.read(path) == Entry(path, b"one", 0)
    assert await client.write([Put(path, b"two", 0)]) == (1,)
    assert await client.write([Put(path, b"three", None)]) == (2,)
    assert await client.read(path) == Entry(path, b"three", 2)
    assert await client.write([Check(path, 2), Delete(path, 2)]) == (None, None)
    assert await client.read(path) is None
    assert await client.write([Create(path, b"anew")]) == (0,)


@on_loop
async def test_a_put_of_the_same_value_still_counts(registries: Registries) -> None:
    client = await registries.connect()
    path = f"{await new_root(client)}/a"
    await client.write([Create(path, b"one")])
    assert await client.write([Put(path, b"one", 0)]) == (1,)
    assert await client.read(path) == Entry(path, b"one", 1)


@on_loop
async def test_operations_of_a_write_see_those_before_them(registries: Registries) -> None:
    client = await registries.connect()
    root = await new_root(client)
    versions = await client.write(
        [
            Create(f"{root}/a", b""),
            Create(f"{root}/a/b", b"1"),
            Put(f"{root}/a/b", b"2", 0),
            Check(f"{root}/a/b", 1),
            Put(f"{root}/a/b", b"3", 1),
            Create(f"{root}/c", b""),
            Delete(f"{root}/c", 0),
        ]
    )
    assert versions == (0, 0, 1, None, 2, 0, None)
    assert await client.read(f"{root}/a/b") == Entry(f"{root}/a/b", b"3", 2)
    assert await client.read(f"{root}/c") is None


CONFLICTS: list[tuple[str, Operation, Reason, str]] = [
    ("create what is there", Create("a", b""), Reason.EXISTS, "a"),
    ("create below nothing", Create("no/x", b""), Reason.ABSENT, "no"),
    ("create below an ephemeral entry", Create("e/x", b""), Reason.EPHEMERAL, "e"),
    ("check what is not there", Check("no", None), Reason.ABSENT, "no"),
    ("check a version of what is not there", Check("no", 0), Reason.ABSENT, "no"),
    ("check another version", Check("a", 7), Reason.VERSION, "a"),
    ("put what is not there", Put("no", b"", None), Reason.ABSENT, "no"),
    ("put an older version", Put("a", b"", 0), Reason.VERSION, "a"),
    ("delete what is not there", Delete("no", None), Reason.ABSENT, "no"),
    ("delete another version", Delete("a", 2), Reason.VERSION, "a"),
    ("delete what has children", Delete("p", None), Reason.CHILDREN, "p"),
]


@pytest.mark.parametrize(("operation", "reason", "place"), [c[1:] for c in CONFLICTS], ids=[c[0] for c in CONFLICTS])
@on_loop
async def test_a_write_that_does_not_apply_writes_nothing(
    registries: Registries, operation: Operation, reason: Reason, place: str
) -> None:
    client = await registries.connect()
    root = await new_root(client)
    await client.write([Create(f"{root}/a", b"0"), Put(f"{root}/a", b"1", 0)])
    await client.write([Create(f"{root}/p", b""), Create(f"{root}/p/child", b"")])
    await client.write([Create(f"{root}/e", b"", ephemeral=True)])
    match operation:
        case Create(path, value, ephemeral):
            moved: Operation = Create(f"{root}/{path}", value, ephemeral)
        case Put(path, value, version):
            moved = Put(f"{root}/{path}", value, version)
        case Check(path, version):
            moved = Check(f"{root}/{path}", version)
        case Delete(path, version):
            moved = Delete(f"{root}/{path}", version)
    before = await client.children(root)
    with pytest.raises(RegistryConflict) as caught:
        await client.write(
            [Create(f"{root}/new", b""), Put(f"{root}/a", b"2", 1), Put(f"{root}/a", b"1", 2), moved, Delete(root, 0)]
            if reason is not Reason.VERSION
            else [Create(f"{root}/new", b""), Delete(f"{root}/new", 0), Check(root, 0), moved, Delete(root, 0)]
        )
    assert caught.value.detail == {"index": 3, "path": f"{root}/{place}", "reason": str(reason)}
    assert not caught.value.retriable
    assert await client.children(root) == before


@on_loop
async def test_children_come_in_the_order_of_their_names(registries: Registries) -> None:
    client = await registries.connect()
    root = await new_root(client)
    assert await client.children(root) == []
    names = ["b", "a", "é", "Z", "a.b", "a-b", "10", "9", "漢字"]
    for name in names:
        await client.write([Create(f"{root}/{name}", name.encode())])
    await client.write([Create(f"{root}/a/below", b"")])
    found = await client.children(root)
    assert [entry.name for entry in found] == sorted(names)
    assert all(entry.value == entry.name.encode() for entry in found)
    assert root[1:] in [entry.name for entry in await client.children("/")]


@on_loop
async def test_a_path_that_is_not_there_has_no_children_to_list(registries: Registries) -> None:
    client = await registries.connect()
    with pytest.raises(UnknownEntry):
        await client.children(f"{await new_root(client)}/no")


@on_loop
async def test_many_children_with_large_values_are_listed_whole(registries: Registries) -> None:
    client = await registries.connect()
    root = await new_root(client)
    value = bytes(range(256)) * 16
    for start in range(0, 600, 100):
        await client.write([Create(f"{root}/{n:04}", value + bytes(n)) for n in range(start, start + 100)])
    found = await client.children(root)
    assert [(entry.name, len(entry.value)) for entry in found] == [(f"{n:04}", 4096 + n) for n in range(600)]
    assert all(entry.value.startswith(value) for entry in found)


@pytest.mark.parametrize("value", [b"", b"\0", bytes(range(256)), b"\xff\xfe", b"x" * VALUE_BYTES_MAX])
@on_loop
async def test_a_value_is_any_bytes(registries: Registries, value: bytes) -> None:
    client = await registries.connect()
    path = f"{await new_root(client)}/a"
    await client.write([Create(path, value)])
    assert await client.read(path) == Entry(path, value, 0)


@on_loop
async def test_the_longest_path_is_taken(registries: Registries) -> None:
    client = await registries.connect()
    path = f"{await new_root(client)}/"
    path += "é" * ((PATH_BYTES_MAX - len(path)) // 2)
    await client.write([Create(path, b"1")])
    assert [entry.path for entry in await client.children(path.rpartition("/")[0])] == [path]


@pytest.mark.parametrize(
    "path", ["", "a", "a/b", "/a/", "//a", "/a//b", "/.", "/a/..", "/a\nb", "/a\0", "/" + "é" * (PATH_BYTES_MAX // 2)]
)
@on_loop
async def test_what_is_no_path_is_refused(registries: Registries, path: str) -> None:
    client = await registries.connect()
    with pytest.raises(InvalidName):
        await client.read(path)
    with pytest.raises(InvalidName):
        await client.children(path)
    with pytest.raises(InvalidName):
        await client.write([Create(path, b"")])
    with pytest.raises(InvalidName):
        client.watch(path)


@on_loop
async def test_a_write_has_bounds(registries: Registries) -> None:
    client = await registries.connect()
    root = await new_root(client)
    most = [Check(root, 0)] * OPERATIONS_MAX
    await client.write(most)
    large = b"x" * VALUE_BYTES_MAX
    for refused in (
        [],
        [*most, Check(root, 0)],
        [Create(f"{root}/a", large + b"x")],
        [Create(f"{root}/{n}", large) for n in range(WRITE_BYTES_MAX // VALUE_BYTES_MAX + 1)],
        [Put("/", b"", None)],
        [Delete("/", None)],
    ):
        with pytest.raises(InvalidRequest):
            await client.write(refused)
    assert await client.children(root) == []
    await client.write([Create(f"{root}/{n}", large) for n in range(WRITE_BYTES_MAX // VALUE_BYTES_MAX)])


# --- sessions ---------------------------------------------------------------------------------------------------------


@on_loop
async def test_an_ephemeral_entry_goes_when_its_client_closes(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await client.write([Create(f"{root}/e", b"1", ephemeral=True), Create(f"{root}/stays", b"")])
    await client.write([Put(f"{root}/e", b"2", 0)])
    found = await other.read(f"{root}/e")
    assert found == Entry(f"{root}/e", b"2", 1, client.session)
    assert found.is_ephemeral
    await client.close()
    assert [entry.name for entry in await other.children(root)] == ["stays"]
    assert client.session == 0
    with pytest.raises(RegistryDown):
        await client.read(root)


@on_loop
async def test_an_expired_session_takes_its_entries_along_and_its_client_begins_another(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await client.write([Create(f"{root}/e", b"", ephemeral=True)])
    await other.write([Create(f"{root}/f", b"", ephemeral=True)])
    session, deadline = client.session, client.deadline
    assert session
    assert deadline > registries.clock.boottime() - client.session_seconds
    await registries.expire(client)
    assert [entry.name for entry in await other.children(root)] == ["f"]

    async def is_new() -> bool:
        try:
            await client.write([Check(root, None)])
        except (SessionExpired, WriteUnknown):  # unknown: the old connection ended with the write under way
            return False
        return client.session not in (0, session)

    await eventually(is_new)
    assert client.deadline < registries.clock.boottime()
    await client.write([Create(f"{root}/e", b"", ephemeral=True)])
    found = await other.read(f"{root}/e")
    assert found is not None
    assert found.session == client.session != other.session


@on_loop
async def test_nothing_of_a_write_in_an_expired_session_is_written(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await registries.expire(client)
    try:
        await client.write([Create(f"{root}/e", b"", ephemeral=True)])
    except (SessionExpired, WriteUnknown):  # unknown: the connection ended before it was told of the expiry
        assert await other.children(root) == []
    else:
        found = await other.read(f"{root}/e")  # it had noticed already
        assert found is not None
        assert found.session == client.session


@on_loop
async def test_the_deadline_counts_from_when_an_answered_write_to_our_entry_was_sent(registries: Registries) -> None:
    client, clock = await registries.connect(), registries.clock
    root = await new_root(client)
    half = client.session_seconds / 2
    long_past = clock.boottime() - 1000

    async def deadline_of(*operations: Operation) -> tuple[float, float, float]:
        before = clock.boottime()
        await client.write(operations)
        return before + half, client.deadline, clock.boottime() + half

    assert client.deadline < long_past
    await client.write([Create(f"{root}/a", b"")])
    await client.write([Put(f"{root}/a", b"", 0)])
    assert client.deadline < long_past, "an entry that stays says nothing of the session"

    least, deadline, most = await deadline_of(Create(f"{root}/e", b"", ephemeral=True))
    assert least <= deadline <= most
    await client.read(f"{root}/e")
    with pytest.raises(RegistryConflict):
        await client.write([Put(f"{root}/e", b"", 7)])
    await client.write([Put(f"{root}/a", b"", None)])
    assert client.deadline == deadline, "only an answered write to our own entry moves it"

    least, deadline, most = await deadline_of(Check(f"{root}/a", None), Put(f"{root}/e", b"", 0))
    assert least <= deadline <= most
    await client.write([Delete(f"{root}/e", None)])
    await client.write([Create(f"{root}/e", b"")])
    await client.write([Put(f"{root}/e", b"", 0)])
    assert client.deadline == deadline, "the entry is not ours any more"


@on_loop
async def test_sessions_have_numbers_of_their_own(registries: Registries) -> None:
    clients = [await registries.connect() for _ in range(5)]
    sessions = {client.session for client in clients}
    assert len(sessions) == 5
    assert 0 not in sessions


# --- many clients -----------------------------------------------------------------------------------------------------


@on_loop
async def test_of_many_that_create_one_entry_one_wins(registries: Registries) -> None:
    clients = [await registries.connect() for _ in range(6)]
    root = await new_root(clients[0])

    refusals: list[object] = []

    async def stand(number: int, turn: int) -> int | None:
        try:
            await clients[number].write([Create(f"{root}/{turn}", b"%d" % number, ephemeral=True)])
        except RegistryConflict as error:
            refusals.append(error.detail["reason"])
            return None
        return number

    for turn in range(10):
        results = await asyncio.gather(*(stand(number, turn) for number in range(len(clients))))
        winners = [number for number in results if number is not None]
        assert len(winners) == 1
        assert set(refusals) == {Reason.EXISTS}
        found = await clients[0].read(f"{root}/{turn}")
        assert found is not None
        assert (found.value, found.session) == (b"%d" % winners[0], clients[winners[0]].session)


@on_loop
async def test_compare_and_set_loses_no_step_of_a_counter(registries: Registries) -> None:
    clients = [await registries.connect() for _ in range(4)]
    root = await new_root(clients[0])
    await clients[0].write([Create(f"{root}/count", b"0"), Create(f"{root}/same", b"0")])

    refusals: list[object] = []

    async def count(client: Registry) -> None:
        done = 0
        while done < 15:
            entry = await client.read(f"{root}/count")
            assert entry is not None
            value = b"%d" % (int(entry.value) + 1)
            try:
                # Two entries in step, of which one alone is compared.
                await client.write([Put(f"{root}/same", value, None), Put(f"{root}/count", value, entry.version)])
            except RegistryConflict as error:
                refusals.append((error.detail["index"], error.detail["reason"]))
            else:
                done += 1

    await asyncio.gather(*map(count, clients))
    assert set(refusals) <= {(1, Reason.VERSION)}
    assert [(entry.value, entry.version) for entry in await clients[0].children(root)] == [(b"60", 60), (b"60", 60)]


# --- watches ----------------------------------------------------------------------------------------------------------


@on_loop
async def test_a_watch_begins_with_everything_and_then_names_what_changed(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await other.write([Create(f"{root}/a", b"")])
    with client.watch(f"{root}/a") as watch:
        assert (await watch.next()).is_all
        told = set()  # what was written before the watch may be told, too, and what is told once may be told again
        for operation in (
            Put(f"{root}/a", b"1", None),
            Create(f"{root}/a/b", b""),
            Create(f"{root}/a/b/c", b"", ephemeral=True),
        ):
            await other.write([Check(root, 0), operation])
            told.add(operation.path)
            while operation.path not in (changes := await watch.next()).paths:
                assert told.issuperset(changes.paths)
            assert (told.issuperset(changes.paths), changes.is_all) == (True, False)
        await other.write([Create(f"{root}/ab", b""), Create(f"{root}/x", b""), Delete(f"{root}/a/b/c", 0)])
        assert await watch.next() == ((f"{root}/a/b/c",), False), "a sibling is not below it"
    assert watch.is_closed
    await other.write([Put(f"{root}/a", b"2", None)])
    assert await client.read(f"{root}/a") is not None
    assert watch.take() is None


@on_loop
async def test_a_watch_tells_of_what_went_with_a_session(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await other.write([Create(f"{root}/e", b"", ephemeral=True)])
    watch = client.watch(root)
    assert (await watch.next()).is_all
    await registries.expire(other)
    assert f"{root}/e" in (await watch.next()).paths
    assert await client.read(f"{root}/e") is None


@on_loop
async def test_a_watch_never_misses_the_last_state(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    for n in range(3):
        await other.write([Create(f"{root}/{n}", b"0")])
    seen: dict[str, bytes] = {}
    last = {f"{root}/{n}": b"40" for n in range(3)}

    async def follow() -> None:
        with client.watch(root) as watch:
            while seen != last:
                changes = await watch.next()
                entries = [await client.read(path) for path in changes.paths]
                if changes.is_all:
                    entries = [*await client.children(root)]
                seen.update({entry.path: entry.value for entry in entries if entry is not None and entry.path != root})

    async def change(n: int) -> None:
        for step in range(1, 41):
            await other.write([Put(f"{root}/{n}", b"%d" % step, None)])

    await asyncio.gather(follow(), *(change(n) for n in range(3)))
    assert {entry.path: entry.value for entry in await other.children(root)} == last


@on_loop
async def test_a_watch_that_is_read_late_names_little(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    watch, mark = client.watch(root), client.watch(f"{root}/last")
    assert (await watch.next()).is_all
    assert (await mark.next()).is_all
    for start in range(0, 1300, 100):
        await other.write([Create(f"{root}/{n}", b"") for n in range(start, start + 100)])

    await other.write([Create(f"{root}/last", b"")])
    while f"{root}/last" not in (told := await mark.next()).paths and not told.is_all:
        pass
    # What changed before has been told by now.
    named = 0
    while True:
        changes = await watch.next()
        named += len(changes.paths)
        if changes.is_all or f"{root}/last" in changes.paths:
            break
    assert named <= 1024


# --- the way there is broken ------------------------------------------------------------------------------------------


@on_loop
async def test_a_client_that_is_cut_off_loses_its_session_and_comes_back(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await client.write([Create(f"{root}/e", b"", ephemeral=True)])
    watch = client.watch(root)
    assert (await watch.next()).is_all
    session = client.session
    registries.cut(client)
    with pytest.raises(WriteUnknown):
        await client.write([Create(f"{root}/cut", b"", ephemeral=True)])
    with pytest.raises(DMQError) as caught:
        await client.read(root)
    assert isinstance(caught.value, RegistryDown)
    await registries.outlast(client)

    async def is_gone() -> bool:
        return await other.read(f"{root}/e") is None

    await eventually(is_gone)
    await other.write([Create(f"{root}/after", b"")])
    registries.mend(client)
    while not ((changes := await watch.next()).is_all or f"{root}/after" in changes.paths):
        pass

    async def is_back() -> bool:
        try:
            await client.write([Create(f"{root}/back", b"", ephemeral=True)])
        except (SessionExpired, RegistryDown, WriteUnknown):
            return False
        except RegistryConflict as error:
            return bool(error.detail["reason"] == Reason.EXISTS)  # by the one that was not answered
        return True

    await eventually(is_back)
    assert client.session not in (0, session)
    names = [entry.name for entry in await client.children(root)]
    assert names == ["after", "back"], "what was sent in the session that is over never comes"


@on_loop
async def test_a_client_that_is_cut_off_for_a_moment_keeps_its_session(registries: Registries) -> None:
    client, other = await registries.connect(), await registries.connect()
    root = await new_root(other)
    await client.write([Create(f"{root}/e", b"", ephemeral=True)])
    session = client.session
    registries.cut(client)
    with pytest.raises(WriteUnknown):
        await client.write([Create(f"{root}/cut", b"")])
    registries.mend(client)

    async def is_back() -> bool:
        try:
            await client.write([Put(f"{root}/e", b"again", None)])
        except (RegistryDown, WriteUnknown):
            return False
        return True

    await eventually(is_back)
    assert client.session == session
    found = await other.read(f"{root}/e")
    assert found is not None
    assert (found.value, found.session) == (b"again", session)
    # That write was answered: the one before it is settled, and reading tells how.
    first = await client.read(f"{root}/cut")
    await asyncio.sleep(0.05)
    assert await other.read(f"{root}/cut") == first
