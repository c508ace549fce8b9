"""Changes are gathered, named once, and bounded."""

from __future__ import annotations

import asyncio

from dmq.registry.watch import Changes, Watch, Watches


def make(prefix: str, paths_max: int = 4) -> Watch:
    return Watch(prefix, lambda watch: None, paths_max)


def test_paths_are_named_once_in_the_order_they_first_changed() -> None:
    watch = make("/a")
    for path in ("/a/2", "/a/1", "/a/2", "/b", "/ab", "/a"):
        watch.add(path)
    assert watch.take() == Changes(("/a/2", "/a/1", "/a"), False)
    assert watch.take() is None


def test_the_root_has_everything_below_it() -> None:
    watch = make("/")
    watch.add("/a/b")
    assert watch.take() == (("/a/b",), False)


def test_too_many_paths_become_everything() -> None:
    watch = make("/", paths_max=2)
    for n in range(4):
        watch.add(f"/{n}")
    assert watch.take() == ((), True)
    watch.add("/x")
    assert watch.take() == (("/x",), False)


def test_next_waits_for_something() -> None:
    async def main() -> None:
        watch = make("/")
        waiting = asyncio.create_task(watch.next())
        await asyncio.sleep(0)
        assert not waiting.done()
        watch.add("/a")
        assert await waiting == (("/a",), False)

    asyncio.run(main())


def test_a_client_asks_for_the_widest_prefixes_only() -> None:
    watches = Watches()
    opened = [watches.open(prefix) for prefix in ("/a/b", "/a", "/ab", "/a/c", "/a")]
    assert watches.prefixes == ["/a", "/ab"]
    opened[1].close()
    opened[4].close()
    assert watches.prefixes == ["/a/b", "/a/c", "/ab"]
    watches.open("/")
    assert watches.prefixes == ["/"]


def test_everything_below_a_prefix_concerns_those_above_and_below() -> None:
    watches = Watches()
    opened = {prefix: watches.open(prefix) for prefix in ("/", "/a", "/a/b", "/c")}
    watches.add_all("/a")
    assert [prefix for prefix, watch in opened.items() if watch.take()] == ["/", "/a", "/a/b"]
