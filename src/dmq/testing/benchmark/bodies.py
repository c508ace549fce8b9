"""What the messages of a benchmark hold: random bytes, JSON as services send it, or text.

What always holds: the same seed gives the same bodies; all are different, and of the size asked for, as long as that is
enough for a number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

__all__ = ["BODY_NAMES", "BodyName", "made_bodies"]

BodyName: TypeAlias = Literal["random", "json", "text"]
BODY_NAMES: Final[tuple[BodyName, ...]] = ("json", "random", "text")

_POOL_BYTES: Final = 1 << 20
_STRIDE: Final = 4099  # a prime: how far apart two bodies begin in the pool
_PROSE: Final = (
    "the order was paid and leaves our warehouse today please call before you deliver it because nobody is at home "
    "until noon a second parcel with the missing parts follows next week thank you for your patience and kind regards "
    "from all of us in the shop where every customer finds what is needed at a fair price and without waiting long"
)
_ITEM_BYTES: Final = 41
_STATES: Final = ("created", "paid", "packed", "shipped", "delivered", "returned", "cancelled")


def made_bodies(name: BodyName, count: int, size: int, seed: int) -> list[bytes]:
    """So many bodies of one kind."""
    rng = random.Random(seed)
    make: Callable[[int], bytes] = {"random": _random, "json": _json, "text": _text}[name](rng, size)
    return [make(number) for number in range(count)]


def _random(rng: random.Random, size: int) -> Callable[[int], bytes]:
    pool = rng.randbytes(_POOL_BYTES + size)

    def make(number: int) -> bytes:
        at = number * _STRIDE % _POOL_BYTES
        return (number.to_bytes(8, "big") + pool[at : at + size])[:size]

    return make


def _text(rng: random.Random, size: int) -> Callable[[int], bytes]:
    prose = _prose(rng, size)

    def make(number: int) -> bytes:
        at = number * _STRIDE % _POOL_BYTES
        return f"{number}: {prose[at : at + size]}"[:size].encode()

    return make


def _prose(rng: random.Random, size: int) -> str:
    """Words by chance, more than `_POOL_BYTES` and a body of characters."""
    text = " ".join(rng.choices(_PROSE.split(), k=(_POOL_BYTES + size) // 4))
    return text + text[: max(0, _POOL_BYTES + size - len(text))]


def _json(rng: random.Random, size: int) -> Callable[[int], bytes]:
    """Orders: the same fields in all, one item like the other, as many as fit, then a note up to the size."""
    prose = _prose(rng, size)

    def make(number: int) -> bytes:
        text = f'{{"id":{1_000_000 + number},"state":"{rng.choice(_STATES)}"'
        items = []
        room = size - len(text) - len(',"items":[],"note":""}')
        while room > _ITEM_BYTES:
            price, units = rng.randrange(100, 10**4), rng.randrange(1, 9)
            items.append(f'{{"item":"S{rng.randrange(10**5):05}","units":{units},"price":{price}}}')
            room -= len(items[-1]) + 1
        text += f',"items":[{",".join(items)}],"note":"'
        room = size - len(text) - 2
        if room < 0:
            return f"{number:0{size}}"[-size:].encode()
        at = number * _STRIDE % _POOL_BYTES
        return f'{text}{prose[at : at + room]}"}}'.encode()

    return make
