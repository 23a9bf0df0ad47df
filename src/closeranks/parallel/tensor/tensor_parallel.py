"""Tensor parallelism: replaces a module's parameters by this rank's shards along the tensor axis.

``sharding_plan`` decides; here each parameter is replaced by its shard, and hooks add the activation collectives around
modules. Shards are ordinary parameters of smaller shapes, so later transforms need not know of the axis. Invariant:
names stay, tied parameters stay tied, and all ranks together compute what the whole module computes.

[Note: tensor_axis] A module that must know its rank on the axis (a loss over a shard of the vocabulary, dropout on a
shard of the sequence) has an attribute ``tensor_axis`` that is None; ``shard_module`` sets it to a ``TensorAxisGroup``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.pieces import Piece
from closeranks.core.protocols import ActivationCollectives, ShardingRule
from closeranks.core.tracebacks import one_line_error
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor.activation_collectives import ACTIVATION_COLLECTIVES, TensorAxisGroup
from closeranks.parallel.tensor.sharding_plan import OwnerKind, ParameterEntry, ParameterSharding, plan_sharding


@dataclass(frozen=True, slots=True)
class TensorShard:
    """What this rank holds of a parameter."""

    piece: Piece
    is_primary: bool = True
    """False where tensor rank 0 holds the same values: its copy is the primary one, counted in norms and saved."""
    is_partial: bool = False
    """Whether its gradient must still be summed over the tensor ranks."""


def shard_module(
    module: nn.Module,
    rules: Sequence[ShardingRule],
    activation_collectives: Sequence[ActivationCollectives],
    group: RankGroup,
) -> dict[str, TensorShard]:
    """Shard ``module`` in place, on the meta device or with its values, and return the shard of each parameter.

    Keys are the names of ``named_parameters``: a tied parameter appears once, under its first name. All errors are
    raised before anything is changed. A group of one changes nothing.
    """
    if group.size == 1:
        return {name: TensorShard(Piece.whole(name, tuple(p.shape))) for name, p in module.named_parameters()}
    if not rules:
        fix = "Use layout.tensor = 1, or say under [model] tensor which weights split along which dim."
        raise ModelError("this model does not say how it splits along the tensor axis", fix)
    entries = list_parameters(module)
    planned = plan_sharding(
        entries, [name for name, _ in module.named_modules()], rules, activation_collectives, group.size
    )
    axis = TensorAxisGroup.of(group)
    shards = {one.name: _shard(one, planned.shardings[one.name], axis) for one in entries if not one.tied_to}
    _replace(module, entries, planned.shardings, shards, axis)
    for name, collectives in planned.activation_collectives.items():
        _install(module.get_submodule(name), collectives, axis)
    for part in module.modules():
        if getattr(part, "tensor_axis", axis) is None:  # [Note: tensor_axis]
            part.tensor_axis = axis  # type: ignore[assignment]  # any attribute may be set on a module
    return shards


def list_parameters(module: nn.Module) -> list[ParameterEntry]:
    """Every parameter under each of its names, in the order of the module."""
    entries: list[ParameterEntry] = []
    first: dict[Tensor, str] = {}
    for path, owner in module.named_modules():
        for attribute, parameter in owner._parameters.items():
            if parameter is None:
                continue
            name = f"{path}.{attribute}" if path else attribute
            first_name = first.setdefault(parameter, name)
            kind, is_plain = _kind_of(owner)
            one = ParameterEntry(
                name=name,
                shape=tuple(parameter.shape),
                kind=kind,
                label=type(owner).__name__,
                is_plain=is_plain,
                has_bias=getattr(owner, "bias", None) is not None,
                tied_to="" if first_name == name else first_name,
            )
            entries.append(one)
    return entries


def _kind_of(owner: nn.Module) -> tuple[OwnerKind, bool]:
    """The kind of module that owns a parameter, and whether it has torch's own forward."""
    if isinstance(owner, nn.Linear):
        return "linear", type(owner).forward is nn.Linear.forward
    if isinstance(owner, nn.Embedding):
        is_simple = owner.max_norm is None and not owner.scale_grad_by_freq and not owner.sparse
        return "embedding" if is_simple else "fixed", type(owner).forward is nn.Embedding.forward
    torchs_own = [kind for kind in type(owner).__mro__ if kind.__module__.startswith("torch.") and kind != nn.Module]
    return "fixed" if torchs_own else "own", False


def _shard(one: ParameterEntry, sharding: ParameterSharding, axis: TensorAxisGroup) -> TensorShard:
    piece = Piece.whole(one.name, one.shape)
    if sharding.dim is None:
        return TensorShard(piece, is_primary=axis.rank == 0, is_partial=sharding.is_partial)
    return TensorShard(piece.shard(sharding.dim, axis.rank, axis.size))


def _replace(
    module: nn.Module,
    entries: Sequence[ParameterEntry],
    shardings: Mapping[str, ParameterSharding],
    shards: Mapping[str, TensorShard],
    axis: TensorAxisGroup,
) -> None:
    made: dict[str, nn.Parameter] = {}
    for one in entries:
        dim, first_name = shardings[one.name].dim, one.tied_to or one.name
        if dim is None:
            continue
        owner, attribute = module.get_submodule(one.owner), one.name.rpartition(".")[2]
        if first_name not in made:
            made[first_name] = _local(owner.get_parameter(attribute), shards[first_name].piece, dim)
        setattr(owner, attribute, made[first_name])
        if one.is_weight and one.kind in _ADAPT:
            _ADAPT[one.kind](owner, dim, axis)


def _local(whole: nn.Parameter, piece: Piece, dim: int) -> nn.Parameter:
    """A copy, so that the whole parameter can be freed; on the meta device there is nothing to copy."""
    shard = whole.detach().narrow(dim, piece.start[dim], piece.size[dim])
    return nn.Parameter(shard.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)


def _adapt_linear(owner: nn.Module, dim: int, axis: TensorAxisGroup) -> None:
    assert isinstance(owner, nn.Linear)
    owner.out_features, owner.in_features = owner.weight.shape
    if dim == 1 and owner.bias is not None:
        owner.__class__ = _RowLinear


def _adapt_embedding(owner: nn.Module, dim: int, axis: TensorAxisGroup) -> None:
    assert isinstance(owner, nn.Embedding)
    owner.num_embeddings, owner.embedding_dim = owner.weight.shape
    if dim == 0:
        owner.__class__ = _VocabularyEmbedding
        assert isinstance(owner, _VocabularyEmbedding)
        owner.axis = axis
        if owner.padding_idx is not None:
            local = owner.padding_idx - axis.rank * owner.num_embeddings
            owner.padding_idx = local if 0 <= local < owner.num_embeddings else None


_ADAPT: dict[str, Callable[[nn.Module, int, TensorAxisGroup], None]] = {
    "linear": _adapt_linear,
    "embedding": _adapt_embedding,
}


class _RowLinear(nn.Linear):
    """A row-parallel Linear: its inputs are sharded; partial sums are reduced, then the bias is added once.

    The class of an existing module is changed to this one, so that its hooks, its name and references to it stay valid.
    """

    on_output: Callable[[Tensor, TensorAxisGroup], Tensor]
    axis: TensorAxisGroup

    def forward(self, input: Tensor) -> Tensor:
        total = self.on_output(F.linear(input, self.weight), self.axis)
        return total + self.bias.to(total.dtype)


class _VocabularyEmbedding(nn.Embedding):
    """Lookup in a shard of the rows; ids of other ranks give zeros, so that the sum over ranks is the whole lookup.

    An id outside the whole vocabulary is also outside the first or last shard, whose lookup then fails as it would in
    one process, without an explicit check (which would be a sync on an accelerator).
    """

    axis: TensorAxisGroup

    def forward(self, input: Tensor) -> Tensor:
        local = input - self.axis.rank * self.num_embeddings
        is_first, is_last = self.axis.rank == 0, self.axis.rank == self.axis.size - 1
        elsewhere = local >= self.num_embeddings if is_first else local < 0
        if not is_first and not is_last:
            elsewhere = elsewhere | (local >= self.num_embeddings)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight, self.padding_idx)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


def _install(module: nn.Module, collectives: ActivationCollectives, axis: TensorAxisGroup) -> None:
    if collectives.on_input:
        module.register_forward_pre_hook(
            partial(_apply_to_input, ACTIVATION_COLLECTIVES[collectives.on_input], axis), with_kwargs=True
        )
    if not collectives.on_output:
        return
    if isinstance(module, _RowLinear):
        module.on_output, module.axis = ACTIVATION_COLLECTIVES[collectives.on_output], axis
    else:
        module.register_forward_hook(partial(_apply_to_output, ACTIVATION_COLLECTIVES[collectives.on_output], axis))


def _apply_to_input(
    collective: Callable[[Tensor, TensorAxisGroup], Tensor],
    axis: TensorAxisGroup,
    module: nn.Module,
    arguments: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Apply the collective to the first argument; others (rotary tables, masks) are the same on every rank."""
    if arguments:
        return (collective(arguments[0], axis), *arguments[1:]), named
    first = next(iter(named))
    return arguments, {**named, first: collective(named[first], axis)}


def _apply_to_output(
    collective: Callable[[Tensor, TensorAxisGroup], Tensor],
    axis: TensorAxisGroup,
    module: nn.Module,
    arguments: tuple[Any, ...],
    output: Any,
) -> Any:
    """Apply the collective to the output, or to the first of several."""
    if isinstance(output, tuple):
        return (collective(output[0], axis), *output[1:])
    return collective(output, axis)


@contextmanager
def explain_sharding_errors(pieces: Iterable[Piece]) -> Iterator[None]:
    """Around forwards of a sharded model: a shape error is reported with the sharding rule that likely caused it.

    ``pieces`` are what this rank holds; they are read only after an error.
    """
    try:
        yield
    except RuntimeError as error:
        explained = explain_sharding_error(error, pieces)
        if explained is None:
            raise
        raise explained from error


# What torch says about tensor shapes; nothing that a broken collective would say, since the run recovers from those.
_SHAPE_ERROR = re.compile(r"shape|size of tensor|sizes of tensors|must match|input of size", re.IGNORECASE)


def explain_sharding_error(error: RuntimeError, pieces: Iterable[Piece]) -> ModelError | None:
    """The likely cause of a shape error in a sharded model; None where it is no such error."""
    if not _SHAPE_ERROR.search(str(error)):
        return None
    numbers = {int(number) for number in re.findall(r"\d+", str(error))}
    for piece in pieces:
        whole, held = piece.shape, piece.size
        for dim, (all_of_it, here) in enumerate(zip(whole, held, strict=True)):
            if all_of_it != here and (numbers & {all_of_it, here} or _is_viewed_whole(str(error), all_of_it, here)):
                what = (
                    f"{one_line_error(error)}; '{piece.name}' {list(whole)} is split along dim {dim} into {here} each"
                )
                fix = "What reads it must accept a shard (use -1 in view and reshape), or its entry needs whole = true."
                return ModelError(what, fix)
    return None


_VIEW = re.compile(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)")


def _is_viewed_whole(message: str, all_of_it: int, here: int) -> bool:
    """Whether a view asked for all columns of a tensor that has a shard of them; its sizes may be factors of either."""
    found = _VIEW.search(message)
    if found is None:
        return False
    wanted, size = prod(map(int, found[1].split(","))), int(found[2])
    return wanted * here == size * all_of_it and size % here == 0
