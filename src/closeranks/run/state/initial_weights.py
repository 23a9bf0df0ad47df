"""Loads pre-trained weights into the model at the start of a run.

Each rank reads its own pieces of its own parameters, band by band, directly into their memory. Invariants: no rank
allocates a tensor larger than what it holds; weights that do not fit the model, by a name, a shape or a dtype, are
refused before the first value is copied; tied names that are stored twice must have equal values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch
from torch import Tensor

from closeranks.checkpoint.weights.protocol import Weights, row_bands
from closeranks.core.errors import CheckpointError
from closeranks.models.llama.hf_conversion import NameMapping, match_names
from closeranks.parallel.process_group import RankGroup
from closeranks.run.components.model import Model, ModelTensor


def load_weights(model: Model, stages: RankGroup, weights: Weights) -> tuple[str, ...]:
    """Collective. Load each rank's part of the weights into the model. Returns notes for people.

    ``stages``: the group of the pipeline's ranks."""
    found = match_names(model.applied.shapes, weights.names(), _ties(model, stages), weights.path)
    own = list(model.local_tensors())
    for one in own:
        _check_format(one, weights, found)
    with torch.no_grad():
        for one in own:
            _fill(one, weights, found.names[one.piece.name])
            if one.piece.name in found.duplicates:
                _compare(one, weights, found.duplicates[one.piece.name])
    return weights.notes


def _ties(model: Model, stages: RankGroup) -> dict[str, str]:
    """Collective. Maps every further name of a tied parameter to its first. Only the stages that hold a parameter know
    its names, so all stages exchange them."""
    own = {alias: held.piece.name for held in model.applied.held for alias in held.aliases}
    gathered: list[dict[str, str]] = [json.loads(text) for text in stages.all_gather_text(json.dumps(own))]
    return {alias: name for one in gathered for alias, name in one.items()}


def _check_format(one: ModelTensor, weights: Weights, found: NameMapping) -> None:
    name = found.names[one.piece.name]
    stored, held = weights.dtype(name), one.tensor.dtype
    is_alike = stored.is_floating_point == held.is_floating_point and stored.is_complex == held.is_complex
    if stored != held and (not is_alike or stored.itemsize == 1):
        short, wanted = (str(dtype).removeprefix("torch.") for dtype in (stored, held))
        what = f"'{name}' in {weights.path} is stored as {short}, which cannot be converted to {wanted}"
        raise CheckpointError(what, "Use weights that are not quantised.")


def _fill(one: ModelTensor, weights: Weights, name: str) -> None:
    for target, part in _parts_of(one, weights, name):
        target.copy_(part)


def _compare(one: ModelTensor, weights: Weights, name: str) -> None:
    for target, part in _parts_of(one, weights, name):
        if not torch.equal(target.cpu(), part):
            what = f"'{name}' and '{one.piece.name}' differ in {weights.path}, and the model ties them"
            raise CheckpointError(what, "Set model.tied = false, or leave one of them out of the weights.")


def _parts_of(one: ModelTensor, weights: Weights, name: str) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's tensor band by band, each with the weights for it in the tensor's dtype."""
    for band in row_bands(one.piece, max(one.tensor.element_size(), weights.dtype(name).itemsize)):
        target = one.tensor.narrow(0, band.first, band.length) if one.tensor.ndim else one.tensor
        yield target, weights.read(name, band.piece, one.tensor.dtype)
