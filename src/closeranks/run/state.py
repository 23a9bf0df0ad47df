"""What must survive a run? The state, gathered from the parts and given back to them.

Invariant: everything a resumed run needs to repeat an uninterrupted one bit for bit is in it: weights and buffers,
optimizer, loss scale, the cursor into the sample order, the seed that keys all randomness, and the identity of the
data. A model that every rank holds whole is saved by rank 0 as one tree; one that is spread is saved by all ranks in
pieces, and never gathered. Both are read back piece by piece, so that any layout resumes from any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from closeranks import __version__
from closeranks.checkpoint.pieces import FOLDER_NAME, PieceReader, is_pieces, save_pieces
from closeranks.checkpoint.single import FILE_NAME, load_tree, save_tree
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.facts.stages import placement
from closeranks.parallel.apply import local_part, whole_tensors
from closeranks.parallel.stages import stage_ranges
from closeranks.run.parts import Parts

MODEL, OPTIMIZER = "model", "optimizer"


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor of the model as this rank holds it."""

    piece: Piece
    tensor: Tensor
    is_spoken: bool
    """Whether this rank saves it: each value has one speaker."""


def kept(parts: Parts) -> Iterator[Kept]:
    """Every parameter and persistent buffer of this rank; a tied one under its first name."""
    groups, is_first = parts.groups, parts.groups.data.rank == 0
    for held in parts.applied.held:
        tensor, piece = local_part(held, groups.shard)
        speaks = groups.replica.rank == 0 if parts.layout.zero == 3 else is_first
        yield Kept(piece, tensor, held.is_spoken and speaks)
    speaks_here = is_first and groups.tensor.rank == 0
    names: set[str] = set()
    for name, tensor in _buffers(parts.applied.stages.values()):
        speaks = speaks_here and name not in names and _speaker_of(name, parts) == groups.pipeline.rank
        names.add(name)
        yield Kept(Piece.whole(name, tuple(tensor.shape)), tensor, speaks)


def _buffers(stages: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Each persistent buffer object once. Two stages may share one, or have one each of the same name."""
    seen: set[int] = set()
    for stage in stages:
        persistent = stage.state_dict().keys()
        for name, tensor in stage.named_buffers():
            if name in persistent and id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor


def _speaker_of(name: str, parts: Parts) -> int:
    chain, layout = parts.spec.chain, parts.layout
    if chain is None or layout.pipeline == 1:
        return 0
    ranges = stage_ranges(chain.costs, layout)
    return buffer_speaker(name, chain.units, ranges, placement(layout.schedule, layout.pipeline))


def buffer_speaker(name: str, units: Sequence[str], ranges: Sequence[range], placed: Sequence[Sequence[int]]) -> int:
    """The pipeline rank that saves a buffer: that of its unit's first stage; rank 0 where all have it, in no unit.

    ``ranges``: the units of each stage; ``placed``: the stages of each rank.
    """
    number = next((number for number, unit in enumerate(units) if name.startswith(f"{unit}.")), None)
    if number is None:
        return 0
    stage = next(stage for stage, own in enumerate(ranges) if number in own)
    return next(rank for rank, stages in enumerate(placed) if stage in stages)


def state_name(parts: Parts) -> str:
    """What the state is called in a run folder: one file, or a folder of pieces."""
    return FOLDER_NAME if parts.is_spread else FILE_NAME


def save_state(parts: Parts, step: int, path: Path) -> int:
    """Write the state; every rank calls it. ``path`` is a file, or a folder where the model is spread. Its bytes."""
    tree: dict[str, Any] = {
        "loss_scale": parts.loss_scale.state(),
        "progress": {"step": step, "position": parts.schedule.position(step)},
        "identity": _identity(parts),
        "config": parts.job.model_dump(mode="json"),
        "versions": {"closeranks": __version__, "torch": torch.__version__},
    }
    if not parts.is_spread:
        if not parts.world.is_lead:
            return 0
        model = {one.piece.name: one.tensor for one in kept(parts)}
        return save_tree({MODEL: model, OPTIMIZER: parts.optimizer.state(), **tree}, path)
    tree["algorithm"] = parts.job.optim.name
    own = save_pieces(path, parts.world.rank, parts.world.size, _items(parts), tree)
    return int(parts.groups.world.sum(torch.tensor([own])))


def _items(parts: Parts) -> Iterator[tuple[str, str, Piece, Tensor]]:
    for one in kept(parts):
        if one.is_spoken:
            yield MODEL, one.piece.name, one.piece, one.tensor
    for leaf, key, tensor in parts.optimizer.memory():
        if leaf.is_spoken:
            yield OPTIMIZER, f"{leaf.piece.name}/{key}", _memory_piece(leaf.piece, key, tensor), tensor


def _memory_piece(piece: Piece, key: str, tensor: Tensor) -> Piece:
    """A counter has no dims, whatever the parameter has."""
    return Piece.whole(f"{piece.name}/{key}", ()) if tensor.ndim == 0 else piece


class Saved(Protocol):
    """A saved state, read piece by piece."""

    @property
    def tree(self) -> Mapping[str, Any]:
        """Everything but the tensors of model and optimizer."""

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of what a section holds, by key."""
        ...

    def read(self, section: str, key: str, piece: Piece) -> Tensor: ...


class SavedTree:
    """A state that was saved whole."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = {**tree, "algorithm": tree[OPTIMIZER].get("algorithm")}
        memory = tree[OPTIMIZER]["parameters"].items()
        self._sections: dict[str, dict[str, Tensor]] = {
            MODEL: dict(tree[MODEL]),
            OPTIMIZER: {f"{name}/{key}": value for name, entry in memory for key, value in entry.items()},
        }

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self._sections[section].items()}

    def read(self, section: str, key: str, piece: Piece) -> Tensor:
        box = self._sections[section][key]
        for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
            box = box.narrow(dim, start, size)
        return box if piece.flat is None else box.reshape(-1)[slice(*piece.flat)]


def open_saved(path: Path) -> Saved:
    """The state of a run folder, or of the file or folder it was saved to."""
    return PieceReader(path) if is_pieces(path) else SavedTree(load_tree(path))


def restore_state(parts: Parts, saved: Saved) -> int:
    """Put a saved state back into the parts; returns the number of finished steps."""
    tree = saved.tree
    _refuse_foreign(parts, tree["identity"])
    _load_model(parts, saved)
    _load_optimizer(parts, saved)
    parts.loss_scale.load_state(tree["loss_scale"])
    step: int = tree["progress"]["step"]
    if tree["progress"]["position"] != parts.schedule.position(step):
        what = f"the saved run ended inside a step, at sample {tree['progress']['position']}: going on would skip some"
        raise CheckpointError(what, "Resume with the same train.epochs, or train by steps.")
    if step >= parts.schedule.num_steps:
        what = f"nothing is left to do: the state is at step {step} of {parts.schedule.num_steps}"
        raise CheckpointError(what, f"Set train.steps to more than {step}.")
    return step


def _load_model(parts: Parts, saved: Saved) -> None:
    check_alike(parts.applied.shapes, saved.shapes(MODEL))
    with torch.no_grad():
        for one in kept(parts):
            one.tensor.copy_(saved.read(MODEL, one.piece.name, one.piece))


def _load_optimizer(parts: Parts, saved: Saved) -> None:
    algorithm = saved.tree.get("algorithm")
    if algorithm != parts.job.optim.name:
        what = f"the saved optimizer is '{algorithm}', the job's is '{parts.job.optim.name}'"
        raise CheckpointError(what, "Set optim.name back, or start a new run from the weights alone.")
    found = saved.shapes(OPTIMIZER)
    wanted = {f"{leaf.piece.name}/{key}" for leaf, key, _ in parts.optimizer.memory()}
    trained = {key.rpartition("/")[0] for key in found}
    odd = sorted({key.rpartition("/")[0] for key in wanted} - trained) or sorted(trained - parts.applied.trainable)
    if odd:
        where = "only the saved optimizer" if odd[0] in trained else "only this model"
        what = f"{where} has the trainable parameter '{odd[0]}'"
        raise CheckpointError(what, "Use the model and the frozen groups of the saved run, or start a new one.")
    if missing := sorted(wanted - found.keys()):
        raise CheckpointError(
            f"the saved optimizer has no {missing[0]}", "Use the optimizer settings of the saved run."
        )
    with torch.no_grad():
        for leaf, key, tensor in parts.optimizer.memory():
            tensor.copy_(saved.read(OPTIMIZER, f"{leaf.piece.name}/{key}", _memory_piece(leaf.piece, key, tensor)))


def load_model(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Copy saved weights and buffers into a whole module of the same shape."""
    own = dict(whole_tensors(module))
    shapes = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (own, saved))
    check_alike(*shapes)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def check_alike(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse the tensors of another model."""
    if wanted.keys() != found.keys():
        odd = sorted(wanted.keys() ^ found.keys())
        raise CheckpointError(
            f"the saved model is another one: {len(odd)} tensors do not match, such as '{odd[0]}'",
            "Resume with the model the state was saved from.",
        )
    for name, shape in wanted.items():
        if shape != found[name]:
            what = f"'{name}' has shape {shape} here and {found[name]} in the saved state"
            raise CheckpointError(what, "Resume with the model the state was saved from.")


def _identity(parts: Parts) -> dict[str, Any]:
    """What must be equal for a resumed run to be the same run."""
    return {
        "data": parts.source.identity,
        "num_samples": len(parts.source),
        "seed": parts.job.run.seed,
        "global_batch": parts.job.train.global_batch,
        "precision": parts.job.train.precision,
    }


_KEYS = {"seed": "run.seed", "global_batch": "train.global_batch", "precision": "train.precision"}


def _refuse_foreign(parts: Parts, saved: Mapping[str, Any]) -> None:
    for key, value in _identity(parts).items():
        if saved.get(key) != value:
            place = _KEYS.get(key, "data")
            what = f"the state was saved with another {place}: {saved.get(key)!r}, not {value!r}"
            raise CheckpointError(what, f"Set {place} back, or start anew without checkpoint.resume.")
