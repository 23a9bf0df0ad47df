"""Plain values with one of them replaced by something hostile, at every place in turn."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from blake3 import blake3

Where = tuple[str | int, ...]

DEEP: Any = None
for _ in range(400):
    DEEP = [DEEP]

HOSTILE: dict[str, Any] = {
    "null": None,
    "true": True,
    "zero": 0,
    "minus one": -1,
    "huge": 10**30,
    "63 bits": 2**63,
    "1e308": 1e308,
    "-1e18": -1e18,
    "nan": float("nan"),
    "infinity": float("inf"),
    "text": "x",
    "empty": "",
    "surrogate": "\ud800",
    "escape": "\x1b[2J\x1b]0;owned\x07",
    "newline": "a\nb",
    "nul": "a\0b",
    "upwards": "../../../../etc/passwd",
    "absolute": "/etc/passwd",
    "other checkpoint": "step-00000020/../../x",
    "long": "n" * 100_000,
    "list": [],
    "nested list": [[[]]],
    "object": {},
    "object of null": {"a": None},
    "deep": DEEP,
}


def places(value: Any, above: Where = ()) -> Iterator[Where]:
    """Of every value within a document, containers too."""
    if above:
        yield above
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*above, key))


def forged(body: Any, where: Where, value: Any) -> Any:
    """A copy with another value at a place."""
    made = copy.deepcopy(body)
    inner = made
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    return made


def renamed(body: Any, where: Where, key: str) -> Any:
    """A copy in which the key at a place of an object is another."""
    made = copy.deepcopy(body)
    inner = made
    for one in where[:-1]:
        inner = inner[one]
    inner[key] = inner.pop(where[-1])
    return made


def to_text(body: Any) -> bytes:
    """JSON as no careful writer makes it: NaN and infinities, lone surrogates."""
    return json.dumps(body, separators=(",", ":")).encode()


def seal_text(kind: str, text: bytes, version: int = 1) -> bytes:
    """Whatever the text, with a seal that holds."""
    return f'{{"closeranks":"{kind}","version":{version},"blake3":"{blake3(text).hexdigest()}"}}\n'.encode() + text


def variants(body: Any, seed: int, count: int | None = None) -> Iterator[tuple[str, Any]]:
    """Every place with every hostile value, each with its name; of many, ``count`` that the seed draws."""
    all_of_them = [(where, name) for where in places(body) for name in HOSTILE]
    all_of_them += [(where, f"key {name}") for where in places(body) if isinstance(where[-1], str) for name in _KEYS]
    chosen = all_of_them if count is None else random.Random(seed).sample(all_of_them, min(count, len(all_of_them)))
    for where, name in chosen:
        said = f"{'.'.join(map(str, where))} = {name}"
        if name.startswith("key "):
            yield said, renamed(body, where, _KEYS[name.removeprefix("key ")])
        else:
            yield said, forged(body, where, HOSTILE[name])


_KEYS = {name: HOSTILE[name] for name in ("surrogate", "escape", "upwards", "long", "empty")}
