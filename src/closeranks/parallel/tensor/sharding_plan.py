"""Plans tensor parallelism: how each parameter is sharded, and which modules need activation collectives.

Decided from names, shapes and kinds of modules alone, before anything is changed. Invariant: a returned plan can be
carried out and gives the whole model's result, as far as the modules show; every obstacle is reported with the
parameter's name and shape and a fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ActivationCollectives, ShardingRule
from closeranks.core.registry import did_you_mean

OwnerKind = Literal["linear", "embedding", "own", "fixed"]
"""The kind of module that owns a parameter: a Linear, an Embedding, a class of the model's own that accepts any shard,
or a torch module that needs the whole parameter."""


@dataclass(frozen=True, slots=True)
class ParameterEntry:
    """A parameter under one of its names: the input of a plan."""

    name: str
    shape: tuple[int, ...]
    kind: OwnerKind
    label: str = ""
    """The module's class, for messages."""
    is_plain: bool = True
    """Whether the module has torch's own forward, so that we may replace it."""
    has_bias: bool = False
    tied_to: str = ""
    """The first name of a tied parameter; empty under the first name itself."""

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def is_weight(self) -> bool:
        return self.name.rpartition(".")[2] == "weight"

    def __str__(self) -> str:
        return f"'{self.name}' {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ParameterSharding:
    """``dim`` None: every rank has the whole. ``is_partial``: the true gradient is the sum of all ranks' gradients."""

    dim: int | None = None
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """``shardings`` by every name of a parameter, ``activation_collectives`` by the name of a module."""

    shardings: Mapping[str, ParameterSharding]
    activation_collectives: Mapping[str, ActivationCollectives]


def plan_sharding(
    entries: Sequence[ParameterEntry],
    modules: Sequence[str],
    rules: Sequence[ShardingRule],
    activation_collectives: Sequence[ActivationCollectives],
    size: int,
) -> ShardingPlan:
    """``entries`` and ``modules`` in the order of the model; ``size`` is the number of tensor ranks."""
    _check_used([rule.pattern for rule in rules], [one.name for one in entries])
    _check_used([collectives.pattern for collectives in activation_collectives], modules)
    shardings = {one.name: _sharding_of(one, rules) for one in entries}
    for one in entries:
        sharding = _follow(one, shardings)
        _check_sharding(one, sharding, size)
        shardings[one.name] = sharding
    _check_ties(entries, shardings)
    declared = {
        name: collectives for name in modules if (collectives := _first(name, activation_collectives)) is not None
    }
    _check_met(entries, shardings, declared)
    everywhere = declared | _derived(entries, shardings, declared)
    return ShardingPlan(_with_partial_biases(entries, shardings, everywhere), everywhere)


def _sharding_of(one: ParameterEntry, rules: Sequence[ShardingRule]) -> ParameterSharding:
    rule = next((rule for rule in rules if fnmatchcase(one.name, rule.pattern)), None)
    return ParameterSharding() if rule is None else ParameterSharding(rule.dim, rule.dim is None and rule.sequence)


def _first(name: str, activation_collectives: Sequence[ActivationCollectives]) -> ActivationCollectives | None:
    return next((collectives for collectives in activation_collectives if fnmatchcase(name, collectives.pattern)), None)


def _follow(one: ParameterEntry, shardings: Mapping[str, ParameterSharding]) -> ParameterSharding:
    """A bias is sharded with the outputs of its Linear, whether a rule names it or not."""
    own, weight = shardings[one.name], shardings.get(f"{one.owner}.weight" if one.owner else "weight")
    if one.kind != "linear" or one.is_weight or weight is None:
        return own
    due = ParameterSharding(0) if weight.dim == 0 else ParameterSharding(is_partial=own.is_partial)
    if own.dim is not None and own.dim != due.dim:
        what = f"the bias {one} is to be split along dim {own.dim}, but its weight is not split that way"
        raise ModelError(what, "Leave the bias out of the tensor entries: it follows its weight.")
    return due


def _check_used(patterns: Sequence[str], names: Sequence[str]) -> None:
    taken = {next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "") for name in names}
    for pattern in patterns:
        if pattern in taken:
            continue
        if any(fnmatchcase(name, pattern) for name in names):
            what = f"the tensor entry '{pattern}' matches only what earlier entries take"
            raise ModelError(what, "Put the narrower pattern first, or remove one of them.")
        raise ModelError(f"the tensor entry '{pattern}' matches nothing in the model", _nearest(pattern, names))


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """The nearest name. Blocks are many and alike, so they are suggested as one pattern."""
    return did_you_mean(pattern, {re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names if name})


def _check_sharding(one: ParameterEntry, sharding: ParameterSharding, size: int) -> None:
    if sharding.dim is None:
        return
    if not 0 <= sharding.dim < len(one.shape):
        dims = ", ".join(str(dim) for dim in range(len(one.shape))) or "none"
        raise ModelError(f"{one} has no dim {sharding.dim} to split along", f"Its dims are {dims}.")
    if one.kind == "fixed":
        what = f"{one} belongs to a {one.label}, which cannot be split along the tensor axis"
        raise ModelError(what, "Split nn.Linear and nn.Embedding weights; leave this one out of the tensor entries.")
    if one.shape[sharding.dim] % size:
        what = f"dim {sharding.dim} of {one} does not split into {size} equal shares"
        raise ModelError(
            what, f"Use a layout.tensor that divides {one.shape[sharding.dim]}, or change the model's width."
        )
    ours_to_compute = (one.kind == "embedding" and sharding.dim == 0) or (
        one.kind == "linear" and sharding.dim == 1 and one.has_bias
    )
    if ours_to_compute and not one.is_plain:
        what = f"{one} belongs to a {one.label} with a forward of its own, which does not expect a shard"
        raise ModelError(what, "Split it along the other dim, or use the plain torch class.")


def _check_ties(entries: Sequence[ParameterEntry], shardings: Mapping[str, ParameterSharding]) -> None:
    for one in entries:
        if one.tied_to and shardings[one.name].dim != shardings[one.tied_to].dim:
            texts = [f"'{name}' {_in_words(shardings[name])}" for name in (one.tied_to, one.name)]
            what = f"one tensor {list(one.shape)} is split in two ways: {texts[0]}, {texts[1]}"
            raise ModelError(what, "Its names are tied: give each a tensor entry with the same dim.")


def _in_words(sharding: ParameterSharding) -> str:
    return "not at all" if sharding.dim is None else f"along dim {sharding.dim}"


def _derived(
    entries: Sequence[ParameterEntry],
    shardings: Mapping[str, ParameterSharding],
    declared: Mapping[str, ActivationCollectives],
) -> dict[str, ActivationCollectives]:
    """Activation collectives for sharded modules where neither they nor a module around them specify any."""
    found: dict[str, ActivationCollectives] = {}
    for one in entries:
        dim = shardings[one.name].dim
        if dim is None or not one.is_weight:
            continue
        around = _around(one.owner, declared)
        if around is None:
            found[one.owner] = _needed(one, dim)
        elif one.kind == "linear" and dim == 1 and one.has_bias and around != one.owner:
            what = f"{one} is split along its inputs, and the bias beside it would be added once by every rank"
            raise ModelError(what, f"Give '{one.owner}' an activation collective of its own, or no bias.")
    return {name: collectives for name, collectives in found.items() if collectives.on_input or collectives.on_output}


def _needed(one: ParameterEntry, dim: int) -> ActivationCollectives:
    if one.kind == "linear":
        return (
            ActivationCollectives(one.owner, on_input="copy")
            if dim == 0
            else ActivationCollectives(one.owner, on_output="sum")
        )
    is_lookup_of_some = one.kind == "embedding" and dim == 0
    return ActivationCollectives(one.owner, on_output="sum" if is_lookup_of_some else "")


def _around(module: str, declared: Mapping[str, ActivationCollectives]) -> str | None:
    """The module itself, or its nearest ancestor, that has an activation collective."""
    while module not in declared:
        if not module:
            return None
        module = module.rpartition(".")[0]
    return module


def _check_met(
    entries: Sequence[ParameterEntry],
    shardings: Mapping[str, ParameterSharding],
    declared: Mapping[str, ActivationCollectives],
) -> None:
    """Sharded outputs must be read by sharded inputs, in a sibling module or later in the model."""
    splits_outputs = {("linear", 0), ("embedding", 1)}
    weights = [one for one in entries if one.is_weight]
    kinds = [(one.kind, shardings[one.name].dim) for one in weights]
    readers = [index for index, kind in enumerate(kinds) if kind == ("linear", 1)]
    for index, one in enumerate(weights):
        if kinds[index] not in splits_outputs or _around(one.owner, declared) is not None:
            continue
        parent = one.owner.rpartition(".")[0]
        beside = any(weights[reader].owner.rpartition(".")[0] == parent for reader in readers)
        if not beside and not any(reader > index for reader in readers):
            what = f"{one} splits its outputs, and nothing after it is split along its inputs to read them"
            raise ModelError(what, "Split the Linear that reads them with dim = 1, or add whole = true to this entry.")


def _with_partial_biases(
    entries: Sequence[ParameterEntry],
    shardings: Mapping[str, ParameterSharding],
    activation_collectives: Mapping[str, ActivationCollectives],
) -> dict[str, ParameterSharding]:
    """A bias that is added to this rank's shard of a sequence has a partial gradient."""
    found = dict(shardings)
    for one in entries:
        collectives = activation_collectives.get(one.owner)
        if (
            one.kind == "linear"
            and not one.is_weight
            and collectives is not None
            and collectives.on_output == "scatter"
        ):
            found[one.name] = ParameterSharding(shardings[one.name].dim, is_partial=shardings[one.name].dim is None)
    return found
