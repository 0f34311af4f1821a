"""Mutations of recorded messages: of their bytes, and of the values in them, so that many get past the parser."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

_DEEP: Any = [[]]
for _ in range(60):
    _DEEP = [_DEEP]
STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    255,
    2**31,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    5e-324,
    "",
    "x",
    "\x00",
    "../../etc/passwd",
    "éक़💥",
    "x" * 5000,
    [],
    {},
    [0] * 500,
    [""] * 500,
    {str(i): i for i in range(100)},
    _DEEP,
)
"""Values that take the place of others."""
_HEADS = (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff")
_CHUNKS = (b"", b"\x00", b"\xff" * 8, b"\xc1", b"{", b'"', b"\\ud800", *_HEADS)
"""Bytes put into others; among them the heads of msgpack's largest map, array and byte string."""

Encode = Callable[[Any], bytes]
Decode = Callable[[bytes], Any]


def msgpack(random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return one mutated message of msgpack."""
    return _mutated(random, corpus, msgspec.msgpack.decode, msgspec.msgpack.encode)


def jsons(random: Random, corpus: Sequence[bytes]) -> bytes:
    """Return one mutated JSON text."""
    return _mutated(random, corpus, json.loads, lambda value: json.dumps(value).encode())


def octets(random: Random, text: bytes, other: bytes = b"") -> bytes:
    """Return `text` with one to four random changes of its bytes."""
    found = bytearray(text)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        match random.randrange(6):
            case 0 if found:
                found[at % len(found)] ^= 1 << random.randrange(8)
            case 1 if found:
                found[at % len(found)] = random.randrange(256)
            case 2:
                found[at:at] = random.choice(_CHUNKS)
            case 3:
                del found[at : at + random.randint(1, 8)]
            case 4:
                del found[at:]
            case _:
                begin = random.randrange(len(other) + 1)
                found[at:at] = other[begin : begin + random.randint(0, 64)]
    return bytes(found)


def _mutated(random: Random, corpus: Sequence[bytes], decode: Decode, encode: Encode) -> bytes:
    text = random.choice(corpus)
    kind = random.random()
    if kind < 0.05:
        return text
    if kind < 0.45:
        return octets(random, text, random.choice(corpus))
    value = decode(text)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        value = _changed(random, value)
    return encode(value)


def _changed(random: Random, value: Any) -> Any:
    """Return a copy of `value` with one change at a random place."""
    made = copy.deepcopy(value)
    node, places = made, []
    while isinstance(node, dict | list) and node and (not places or random.random() < 0.7):
        key = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        places.append((node, key))
        node = node[key]
    if not places:
        return random.choice(STRANGE)
    owner, key = places[-1]
    match random.randrange(8):
        case 0 if isinstance(owner, dict):
            del owner[key]
        case 0:
            owner.extend(owner[:50])
        case 1 if isinstance(owner, dict):
            owner[random.choice(("type", "x", "", "wait_s", str(key) * 2))] = random.choice(STRANGE)
        case 2 if isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
            owner[key] = min(max(owner[key] + random.choice((-1, 1, 2, 100)), -(2**63)), 2**63)
        case 3 if isinstance(owner[key], str):
            owner[key] = octets(random, owner[key].encode(), b"0123").decode(errors="replace")
        case _:
            owner[key] = random.choice(STRANGE)
    return made
