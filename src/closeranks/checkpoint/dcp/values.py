"""Encodes non-tensor values as JSON, without pickle.

Decoding gives back the same value of the same type: a tuple stays a tuple, 1 is not 1.0, infinity is preserved.
Invariant: ``decode(encode(x)) == x`` with equal types, or ``encode`` refuses ``x`` with an error that gives its name.
Imports no torch.
"""

from __future__ import annotations

import math
from typing import Any

from closeranks.core.errors import CheckpointError

_FIX = "Save it as a tensor or as plain values (numbers, text, lists, tuples, dicts), or leave it out."


def encode(value: Any, name: str) -> Any:
    """``name``: of the value in the state dict, for errors."""
    kind = type(value)
    if value is None or kind in (bool, int):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if kind is str:
        return _text(value, name)
    if kind is list:
        return [encode(one, name) for one in value]
    if kind is tuple:
        return {"tuple": [encode(one, name) for one in value]}
    if kind is dict:
        return {"dict": [[encode(key, name), encode(one, name)] for key, one in value.items()]}
    raise CheckpointError(f"'{name}' holds a {kind.__module__}.{kind.__qualname__}, which is not pickled", _FIX)


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "tuple":
        return tuple(decode(one) for one in inner)
    if kind == "dict":
        return {decode(key): decode(one) for key, one in inner}
    raise ValueError(f"'{kind}' is not a known kind of value")


def _text(value: str, name: str) -> str:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"'{name}' holds text that is not Unicode", _FIX) from None
    return value
