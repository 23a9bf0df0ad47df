"""What must survive a run? The state, named piece by piece, and put back into the parts.

Invariants: everything a resumed run needs to repeat an uninterrupted one bit for bit is in it: weights and buffers,
optimizer, loss scale, the cursor into the sample order, the seed that keys all randomness, and the identity of the
data. Each value is named by every rank that holds it, with how many others do, so that a save can share the writing
out; nothing is ever gathered, and any layout resumes from any other.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from closeranks import __version__
from closeranks.checkpoint.capture import Item
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.data.orders import Change, change_between
from closeranks.elastic.sources import Holding
from closeranks.facts.stages import placement
from closeranks.parallel.apply import is_sharded, local_part, whole_tensors
from closeranks.parallel.group import Group
from closeranks.parallel.stages import stage_ranges
from closeranks.run.memories import restore_memories, unsent
from closeranks.run.parts import Parts
from closeranks.run.rows import anchors, as_row, found_row, has_weights, momenta, restore_outer, weights_key

MODEL, OPTIMIZER, OTHER, SYNC = "model", "optimizer", "other", "sync"


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor of the model as this rank holds it."""

    piece: Piece
    tensor: Tensor
    is_ours: bool
    """False where a rank off the data axis holds the same and saves it."""
    holders: Group | None
    """Who holds the same values along the data axis; None: this rank alone counts."""
    is_steady: bool
    """Whether nothing but the optimizer changes it."""
    is_cut: bool = False
    """Whether the data ranks split it."""

    @property
    def is_spoken(self) -> bool:
        """Whether this rank speaks for it: each value has one speaker."""
        return self.is_ours and (self.holders is None or self.holders.rank == 0)


def kept(parts: Parts) -> Iterator[Kept]:
    """Every parameter and persistent buffer of this rank; a tied one under its first name."""
    groups = parts.groups
    for held in parts.applied.held:
        tensor, piece = local_part(held, groups.shard)
        is_cut = is_sharded(held)
        holders = groups.replica if is_cut else groups.data
        yield Kept(piece, tensor, held.is_spoken, holders, is_steady=True, is_cut=is_cut)
    speaks_here = groups.data.rank == 0 and groups.tensor.rank == 0
    names: set[str] = set()
    for name, tensor in _buffers(parts.applied.stages.values()):
        speaks = speaks_here and name not in names and _speaker_of(name, parts) == groups.pipeline.rank
        names.add(name)
        # Any forward may change a buffer.
        yield Kept(Piece.whole(name, tuple(tensor.shape)), tensor, speaks, None, is_steady=False)


def _model(parts: Parts) -> Iterator[Kept]:
    """What is saved as the model: this rank's part of it, or of the anchor where replicas do not all stand on it."""
    if parts.outer is None or parts.rounds.num_fragments == 1:
        yield from kept(parts)
        return
    yield from (one for one in kept(parts) if one.piece.name not in parts.applied.trainable)
    yield from (Kept(one.piece, one.tensor, one.is_ours, one.holders, is_steady=True) for one in anchors(parts))


def _met(parts: Parts) -> Iterator[Kept]:
    """What replicas that train apart have besides: of their meetings, and each for itself."""
    for piece, tensor, is_ours, holders in momenta(parts):
        yield Kept(piece, tensor, is_ours, holders, is_steady=True)
    if parts.rounds.num_fragments > 1:
        yield from _own_weights(parts)


def _own_weights(parts: Parts) -> Iterator[Kept]:
    """Those of one replica, where replicas do not all stand on the anchor when they meet."""
    home = parts.groups.home
    for one in kept(parts):
        if one.piece.name in parts.applied.trainable:
            piece, row = as_row(parts, replace(one.piece, name=weights_key(one.piece)), one.tensor)
            yield replace(one, piece=piece, tensor=row, holders=home.replica if one.is_cut else home.data)


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


def items(parts: Parts) -> list[Item]:
    """All that this rank has of the state's tensors, to be saved by it or by another that holds the same."""
    found = [_item(MODEL, one.piece, one.tensor, one.holders, one.is_steady) for one in _model(parts) if one.is_ours]
    memories = (memory for memory in _own_memories(parts) if memory.is_ours)
    found += [_item(OPTIMIZER, one.piece, one.tensor, one.holders, is_steady=True) for one in memories]
    found += [_item(SYNC, one.piece, one.tensor, None, is_steady=True) for one in unsent(parts) if one.is_ours]
    met = (one for one in _met(parts) if one.is_ours)
    found += [_item(SYNC, one.piece, one.tensor, one.holders, is_steady=True) for one in met]
    if parts.groups.home.world.rank == 0:
        found += [_item(OTHER, piece, tensor, None, is_steady=False) for piece, tensor in _loss_scale(parts)]
    # Two stages of a rank may each hold a tied parameter: the same values, saved once.
    return list({(item.section, item.piece): item for item in reversed(found)}.values())[::-1]


def holdings(parts: Parts) -> list[Holding]:
    """All that this rank has of the state's tensors, whoever else has them too: what its copies in memory hold."""
    found = [Holding(MODEL, one.piece.name, one.piece, one.tensor, one.is_steady) for one in _model(parts)]
    found += [Holding(OPTIMIZER, one.piece.name, one.piece, one.tensor) for one in _own_memories(parts)]
    found += [Holding(SYNC, one.piece.name, one.piece, one.tensor) for one in _met(parts)]
    found += [Holding(SYNC, one.piece.name, one.piece, one.tensor) for one in unsent(parts)]
    found += [Holding(OTHER, piece.name, piece, tensor, is_steady=False) for piece, tensor in _loss_scale(parts)]
    return list({(one.section, one.piece): one for one in reversed(found)}.values())[::-1]


def held_still(parts: Parts, found: Sequence[Holding]) -> bool:
    """Whether ``holdings`` would find the same memory as before. Costs a tenth of finding it: asked in every step."""
    if parts.rounds.num_fragments > 1:  # the anchor is kept for a model, and that only when replicas meet
        return False
    places = {(one.section, one.key): one.tensor.data_ptr() for one in found}
    for held in parts.applied.held:
        # What FSDP2 has spread it keeps where it is.
        if not is_sharded(held) and places.get((MODEL, held.piece.name)) != held.parameter.data_ptr():
            return False
    buffers = {id(tensor) for stage in parts.applied.stages.values() for tensor in stage.buffers()}
    return all(id(one.tensor) in buffers for one in found if one.section == MODEL and not one.is_steady)


def _item(section: str, piece: Piece, tensor: Tensor, holders: Group | None, is_steady: bool) -> Item:
    rank, size = (holders.rank, holders.size) if holders else (0, 1)
    return Item(section, piece.name, piece, tensor, holder=rank, num_holders=size, is_steady=is_steady)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Something the optimizer remembers of a leaf."""

    piece: Piece
    """By its key in the state: ``parameter/exp_avg``."""
    tensor: Tensor
    is_ours: bool
    holders: Group
    """Of this rank's own home: replicas that train apart remember each its own."""


def _memories(parts: Parts) -> Iterator[_Memory]:
    home = parts.groups.home
    spoken = {held.piece.name for held in parts.applied.held if held.is_spoken}
    cut = {held.piece.name for held in parts.applied.held if is_sharded(held)}
    for leaf, key, tensor in parts.optimizer.memory():
        # With zero 1 and 2 every leaf is a shard: a range of rows or, where memory has another order, a box.
        is_cut = parts.layout.zero in (1, 2) or leaf.piece.name in cut
        piece, is_ours = replace(leaf.piece, name=f"{leaf.piece.name}/{key}"), leaf.piece.name in spoken
        if tensor.ndim == 0:  # a counter has no dims whatever the parameter has: who holds the first element has it
            is_ours, piece = is_ours and _holds_first(leaf.piece), Piece.whole(piece.name, ())
        yield _Memory(piece, tensor, is_ours, home.replica if is_cut else home.data)


def _own_memories(parts: Parts) -> Iterator[_Memory]:
    """As they are saved."""
    for memory in _memories(parts):
        piece, tensor = as_row(parts, memory.piece, memory.tensor)
        yield replace(memory, piece=piece, tensor=tensor)


def _loss_scale(parts: Parts) -> Iterator[tuple[Piece, Tensor]]:
    for key, tensor in parts.loss_scale.state().items():
        yield as_row(parts, Piece.whole(f"loss_scale/{key}", ()), tensor)


def _holds_first(piece: Piece) -> bool:
    return piece.numel > 0 and not any(piece.start) and (piece.flat is None or piece.flat[0] == 0)


def tree_of(parts: Parts, step: int) -> dict[str, Any]:
    """Everything of the state that is no tensor."""
    return {
        **sketch_of(parts),
        "progress": progress_of(parts, step),
        "schedule": _schedule_state(parts, step),
        "random": {"seed": parts.job.run.seed, "keyed_by": ["seed", "step", "micro_batch"]},
        "data": parts.supply.state(),
        "noise": parts.noise.state(),
        "usage": parts.usage.state(),
        "config": parts.job.model_dump(mode="json"),
        "versions": {"closeranks": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }


def _schedule_state(parts: Parts, step: int) -> dict[str, Any]:
    schedule = parts.schedule
    return {
        "lr": parts.optimizer.lr(step),
        "num_steps": schedule.num_steps,
        "micro_batch": schedule.micro_batch,
        "ends": [list(end) for end in schedule.ends],
    }


def sketch_of(parts: Parts) -> dict[str, Any]:
    """What shows whether a state belongs to a job; the same at every step."""
    return {"identity": _identity(parts), "algorithm": parts.job.optim.name}


def progress_of(parts: Parts, step: int) -> dict[str, int]:
    return {"step": step, "position": parts.schedule.position(step)}


def unsaved(parts: Parts) -> list[str]:
    """What a module keeps beside parameters and buffers, in words: it is in no checkpoint."""
    stages = parts.applied.stages.values()
    names = [
        n
        for stage in stages
        for n, m in stage.named_modules()
        if type(m).get_extra_state is not nn.Module.get_extra_state
    ]
    return [
        f"what get_extra_state of '{name}' gives is not saved, and a resumed run begins without it" for name in names
    ]


class Saved(Protocol):
    """A saved state, read piece by piece: ``checkpoint.reader.CheckpointReader`` is one."""

    @property
    def tree(self) -> Mapping[str, Any]:
        """Everything but the tensors."""
        ...

    def shapes(self, section: str) -> Mapping[str, tuple[int, ...]]:
        """Whole shapes of what a section holds, by key."""
        ...

    def read(self, section: str, key: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor: ...

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        """Into memory that is there."""
        ...


def check_fits(parts: Parts, saved: Saved, *, may_be_done: bool = False) -> int:
    """Refuse a state that this job cannot go on from, before any of it is read; returns the number of finished steps.

    What is refused here is the job's to mend; what fails later, while tensors are read, is damage. ``may_be_done``: a
    state with nothing left to do is taken too.
    """
    tree = saved.tree
    if tree.get("progress") is None or tree.get("identity") is None:
        what = "the checkpoint holds weights alone, not the state of a run"
        raise CheckpointError(what, "Name it as checkpoint.weights to start from it.")
    _refuse_foreign(parts, tree["identity"])
    check_alike(parts.applied.shapes, saved.shapes(MODEL))
    _check_optimizer(parts, saved)
    schedule, step, position = parts.schedule, int(tree["progress"]["step"]), int(tree["progress"]["position"])
    if step >= schedule.num_steps:
        if may_be_done:
            return step
        what = f"nothing is left to do: the state is at step {step} of {schedule.num_steps}"
        if parts.job.train.epochs is None:
            raise CheckpointError(what, f"Set train.steps to more than {step}.")
        epochs = f"{position / schedule.num_samples:g}"
        raise CheckpointError(f"{what}, after {epochs} epochs", f"Set train.epochs to more than {epochs}.")
    if position != schedule.position(step):
        what = f"the saved state stands at sample {position}, but step {step} of this run ends at "
        what += f"{schedule.position(step)}: going on would skip some or take them twice"
        raise CheckpointError(what, "Resume from another checkpoint of the run.")
    return step


def restore_state(parts: Parts, saved: Saved) -> None:
    """Put a saved state that fits back into the parts. Where it raises, the parts hold some of it and some not."""
    parts.supply.load_state(saved.tree.get("data", {}))
    parts.noise.load_state(saved.tree.get("noise", {}))
    parts.usage.load_state(saved.tree.get("usage"))
    restore_memories(list(unsent(parts)), saved, SYNC, has_owners=parts.has_owners)
    _restore_weights(parts, saved)
    restore_outer(parts, saved, SYNC, MODEL)
    shapes = saved.shapes(OPTIMIZER)
    for memory in _memories(parts):
        piece = found_row(parts, memory.piece, shapes[memory.piece.name])
        saved.read_into(OPTIMIZER, piece.name, piece, memory.tensor.view(piece.local_shape))
    parts.optimizer.restored()
    scale = saved.shapes(OTHER)
    rows = {key: found_row(parts, Piece.whole(key, ()), scale[key]) for key in scale if key.startswith("loss_scale/")}
    parts.loss_scale.load_state(
        {key.removeprefix("loss_scale/"): saved.read(OTHER, key, row).view(()) for key, row in rows.items()}
    )


def _restore_weights(parts: Parts, saved: Saved) -> None:
    shapes = saved.shapes(SYNC) if has_weights(parts, saved, SYNC) else {}
    for one in kept(parts):
        key = weights_key(one.piece)
        if key in shapes:
            row = found_row(parts, replace(one.piece, name=key), shapes[key])
            saved.read_into(SYNC, key, row, one.tensor.view(row.local_shape))
        else:
            saved.read_into(MODEL, one.piece.name, one.piece, one.tensor)


def _check_optimizer(parts: Parts, saved: Saved) -> None:
    algorithm = saved.tree.get("algorithm")
    if algorithm != parts.job.optim.name:
        what = f"the saved optimizer is '{algorithm}', the job's is '{parts.job.optim.name}'"
        raise CheckpointError(what, "Set optim.name back, or start a new run from the weights alone.")
    found = saved.shapes(OPTIMIZER)
    wanted = {memory.piece.name for memory in _memories(parts)}
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


def load_model(module: nn.Module, saved: Saved) -> None:
    """Copy saved weights and buffers into a whole module of the same shape, one tensor at a time."""
    own = dict(whole_tensors(module))
    check_alike({name: tuple(tensor.shape) for name, tensor in own.items()}, saved.shapes(MODEL))
    for name, tensor in own.items():
        saved.read_into(MODEL, name, Piece.whole(name, tuple(tensor.shape)), tensor)


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
        "order": parts.supply.described,
        "global_batch": parts.job.train.global_batch,
        "precision": parts.job.train.precision,
    }


_KEYS = {
    "seed": "run.seed",
    "global_batch": "train.global_batch",
    "precision": "train.precision",
}


def _refuse_foreign(parts: Parts, saved: Mapping[str, Any]) -> None:
    for key, value in _identity(parts).items():
        found = saved.get(key, "")
        if found != value:
            if key == "num_samples":
                what = f"the state was saved with a dataset of {found} samples, and it has {value} now"
                fix = "Give it the same samples again, or start a new run with this one as checkpoint.weights."
                raise CheckpointError(what, fix)
            place = _KEYS.get(key, "data")
            plain = Change(place, place, repr(found), repr(value))
            change = change_between(str(found), str(value)) if key == "order" else plain
            values = f": {change.saved}, not {change.here}" if change.saved else ""
            what = f"the state was saved with another {change.name}{values}"
            raise CheckpointError(what, f"Set {change.keys} back, or start anew without checkpoint.resume.")
