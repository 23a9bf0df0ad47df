"""The registry of models by name.

Each model's file registers one function from its config to its spec. Invariant: the registry names no model itself, so
adding one touches the new file, its config and the list of imports in ``build``.
"""

from __future__ import annotations

from typing import Any, Protocol

from closeranks.core.protocols import ModelSpec
from closeranks.core.registry import Registry


class SpecFactory(Protocol):
    """``config`` is the table that carries the registered name."""

    def __call__(self, config: Any, *, seq_len: int) -> ModelSpec: ...


MODELS: Registry[SpecFactory] = Registry("model")
