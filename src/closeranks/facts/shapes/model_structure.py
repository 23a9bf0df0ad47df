"""The structure of a model, as far as distributing it over ranks needs to know it.

Units in execution order, each with its weights, how those are sharded along the tensor axis, and its share of the work.
Nothing is built: shapes come from ``facts.shapes`` or from a module on the meta device. Invariant: every parameter is
listed in the unit that owns it; a tied one is listed again in the unit that borrows it, under its first name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod

Rule = tuple[str, int | None, bool]
"""Pattern of names, the dim that is sharded along the tensor axis, and whether a replicated parameter works on a shard
of the sequence; as in ``core.protocols.ShardingRule``, the first match counts."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    """The dim that is sharded; None: every tensor rank holds it whole."""
    is_partial: bool = False
    """Whether each tensor rank computes a partial gradient."""

    def rows(self, tensor: int) -> int:
        """Size of its first dim on one of ``tensor`` ranks; a scalar is one row."""
        first = self.shape[0] if self.shape else 1
        return -(-first // tensor) if self.dim == 0 else first

    @cached_property
    def _whole(self) -> int:
        return prod(self.shape)

    def numel(self, tensor: int) -> int:
        if self.dim is None or tensor == 1:
            return self._whole
        size = self.shape[self.dim]
        return self._whole // size * -(-size // tensor)


@dataclass(frozen=True, slots=True)
class ModelUnit:
    """A part of the model that is never divided between stages."""

    name: str
    weights: tuple[ParameterInfo, ...]
    cost: float = 0.0
    is_block: bool = False
    """Whether it is one of the repeated blocks, which are gathered one by one; the rest of a stage is gathered
    together."""

    def numel(self, tensor: int = 1) -> int:
        return sum(weight.numel(tensor) for weight in self.weights)


@dataclass(frozen=True, slots=True)
class ModelStructure:
    units: tuple[ModelUnit, ...]


def distinct_parameters(units: Iterable[ModelUnit]) -> tuple[ParameterInfo, ...]:
    """The weights of these units, a tied one once."""
    found: dict[str, ParameterInfo] = {}
    for unit in units:
        for weight in unit.weights:
            found.setdefault(weight.name, weight)
    return tuple(found.values())


def model_structure(
    shapes: Mapping[str, tuple[int, ...]],
    *,
    units: Sequence[str] = (),
    costs: Sequence[float] = (),
    blocks: Iterable[str] = (),
    rules: Sequence[Rule] = (),
    ties: Mapping[str, str] | None = None,
) -> ModelStructure:
    """The structure of a model from the names and shapes of its parameters.

    ``units`` are names of modules; parameters outside all of them form a last unit. ``ties`` maps the other names of a
    parameter to its first one.
    """
    owned: dict[str, list[ParameterInfo]] = {unit: [] for unit in (*units, "")}
    weights = {name: _weight(name, shape, rules) for name, shape in shapes.items()}
    weights |= {alias: weights[name] for alias, name in (ties or {}).items()}
    prefixes = {f"{unit}.": unit for unit in units}
    for name, weight in weights.items():
        owned[_owner(name, prefixes)].append(weight)
    if not owned[""]:
        del owned[""]
    priced = dict(zip(units, costs or [1.0] * len(units), strict=True))
    chosen = set(blocks)
    return ModelStructure(
        tuple(ModelUnit(name, tuple(held), priced.get(name, 0.0), name in chosen) for name, held in owned.items())
    )


def _owner(name: str, prefixes: Mapping[str, str]) -> str:
    """The unit whose name is a prefix of a parameter's: one look-up per dot, however many units there are."""
    end = name.rfind(".")
    while end > 0:
        if name[: end + 1] in prefixes:
            return prefixes[name[: end + 1]]
        end = name.rfind(".", 0, end)
    return ""


def _weight(name: str, shape: tuple[int, ...], rules: Sequence[Rule]) -> ParameterInfo:
    for pattern, dim, sees_share in rules:
        if fnmatchcase(name, pattern):
            return ParameterInfo(name, shape, dim, sees_share)
    return ParameterInfo(name, shape)
