"""Splits a whole model into the stages of one pipeline rank.

A stage is a skeleton of the model that contains its own units and None in place of other stages' units, so that every
parameter keeps its name. Units are shared with the whole model, never copied: a skeleton has no tensor of its own.
Invariants: every parameter is in some unit, hence in exactly one stage unless it is tied; a parameter tied within a
rank stays one object.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import PipelineSpec
from closeranks.facts.layout import Layout
from closeranks.facts.pipeline.stages import balance_stages


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several stages use: each stage computes a part of its gradient."""

    name: str
    """Its first name in the whole model."""
    aliases: tuple[str, ...]
    """Its other names; none where a whole unit is shared."""
    stages: tuple[int, ...]
    """Ascending, two or more. Those of one rank hold the same object."""


@dataclass(frozen=True, slots=True)
class RankStages:
    """This rank's stages of a model."""

    stages: Mapping[int, nn.Module]
    """By global stage, ascending."""
    ties: tuple[TiedParameter, ...]
    """Those of the whole model, identical on every rank, so that process groups can be created from them."""


def stage_ranges(costs: Sequence[float], layout: Layout) -> tuple[range, ...]:
    """The units of every stage, such that the most expensive stage is as cheap as possible."""
    return tuple(range(first, last) for first, last in balance_stages(costs, layout.num_stages))


def split_into_stages(
    module: nn.Module, spec: PipelineSpec, ranges: Sequence[range], mine: Sequence[int]
) -> RankStages:
    """Stages ``mine`` of the ``ranges`` of units. The given module is not changed; the caller frees it."""
    _refuse_what_no_unit_holds(module, spec.units)
    stages = {stage: _stage(module, spec, ranges[stage]) for stage in sorted(mine)}
    return RankStages(stages, tied_across_stages(module, spec.units, ranges))


def tied_across_stages(module: nn.Module, units: Sequence[str], ranges: Sequence[range]) -> tuple[TiedParameter, ...]:
    """Parameters that are in more than one stage, by their first names."""
    stages = {unit: [s for s, own in enumerate(ranges) if unit in (units[n] for n in own)] for unit in units}
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    ties: list[TiedParameter] = []
    for first, *aliases in names.values():
        holders = {stage for name in (first, *aliases) for stage in stages[_unit_of(name, units) or ""]}
        if len(holders) > 1:
            ties.append(TiedParameter(first, tuple(aliases), tuple(sorted(holders))))
    return tuple(ties)


def _unit_of(name: str, units: Sequence[str]) -> str | None:
    return next((unit for unit in units if name.startswith(f"{unit}.")), None)


def _refuse_what_no_unit_holds(module: nn.Module, units: Sequence[str]) -> None:
    for unit in units:
        around = next((other for other in units if unit.startswith(f"{other}.")), None)
        if around is not None:
            what = f"unit '{unit}' of the model's chain is inside unit '{around}', so no stage can be cut between"
            raise ModelError(what, "Name modules that do not contain one another.")
    for name, _ in module.named_parameters(remove_duplicate=False):
        if _unit_of(name, units) is None:
            what = f"parameter '{name}' belongs to no unit of the model's chain, so no pipeline stage would train it"
            raise ModelError(what, "Move it into a module that the chain names, or use pipeline=1.")


def _stage(module: nn.Module, spec: PipelineSpec, own: range) -> nn.Module:
    kept = {spec.units[number] for number in own}
    skeleton = _Skeleton(module, [unit for unit in dict.fromkeys(spec.units) if unit not in kept])
    # Set on the instance: the class stays, and hooks on the stage (FSDP2's) still run around forward.
    skeleton.root.forward = partial(_run_units, spec, skeleton.root, own)
    return skeleton.root


def _run_units(spec: PipelineSpec, stage: nn.Module, own: range, hidden: Tensor, shared_inputs: Any = None) -> Tensor:
    for number in own:
        hidden = spec.run_unit(stage, number, hidden, shared_inputs)
    return hidden


class _Skeleton:
    """Copies of the modules above the dropped units, each a new object with its own dicts; all else is shared."""

    def __init__(self, module: nn.Module, dropped: Sequence[str]) -> None:
        self._twins: dict[int, nn.Module] = {}
        self.root = self._twin(module)
        for unit in dropped:
            above, _, last = unit.rpartition(".")
            self._parent(module, above)._modules[last] = None

    def _parent(self, module: nn.Module, path: str) -> nn.Module:
        """The skeleton's own module at ``path``; ``module`` is the root it was taken from."""
        parent = self.root
        for part in path.split(".") if path else ():
            module = module.get_submodule(part)
            below = self._twin(module)
            parent._modules[part] = below
            parent = below
        return parent

    def _twin(self, module: nn.Module) -> nn.Module:
        """The copy of a module; one for a module used in two places. Its children, hooks and buffers can change without
        affecting the original."""
        if id(module) not in self._twins:
            twin = module.__new__(type(module))
            tables = {key: copy(value) for key, value in vars(module).items() if isinstance(value, dict | set)}
            twin.__dict__ = {**vars(module), **tables}
            self._twins[id(module)] = twin
        return self._twins[id(module)]
