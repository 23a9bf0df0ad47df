"""Parts of a run that load weights, here and on every rank of a world. Imports nothing of the weights' makers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from closeranks.checkpoint.weights.open import open_weights
from closeranks.core.system.environment import detect_world
from closeranks.facts.layout import Layout
from closeranks.run.builder.build import BuiltRun, build
from closeranks.run.builder.run_definition import from_job
from closeranks.run.dry_run.live_bytes import LiveBytes
from closeranks.run.job.job import Job, load_job
from closeranks.run.state.initial_weights import load_weights


def job_of(table: dict[str, Any], layout: str = "data=1", precision: str = "float32", seq_len: int = 128) -> Job:
    tables = {
        "model": table,
        "data": {"name": "text", "seq_len": seq_len, "max_bytes": 20_000},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 1, "eval_samples": 1, "precision": precision},
        "checkpoint": {"save": False},
        "layout": asdict(Layout.parse(layout)),
    }
    return load_job(None, extra=tables).value


@contextmanager
def assembled(job: Job) -> Iterator[BuiltRun]:
    built = build(job, detect_world(), from_job(job).load_inputs())
    try:
        yield built
    finally:
        built.engine.batches.close()
        built.engine.context.world_group.close()


@dataclass(frozen=True)
class Loaded:
    """What loading was on one rank."""

    extra: int
    """Bytes of tensors that lived at most while it loaded, beyond those that lived before."""
    own: int
    """Of its own pieces of weights."""
    largest: int
    """The largest of them."""
    whole: int
    """The model's bytes."""
    num_wrong: int
    """Tensors that hold other values than the files."""
    num_tensors: int


def load_here(job: Job, place: str) -> Loaded:
    torch.set_num_threads(1)
    with LiveBytes() as live, assembled(job) as built:
        model, stages = built.engine.model, built.engine.context.groups.pipeline
        live.watch(one.tensor for one in model.local_tensors())
        live.rest()
        before = live.current
        load_weights(model, stages, open_weights(place))
        extra = live.peak - before
        own = [(one.piece, one.tensor.clone()) for one in model.local_tensors()]
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in own]
        whole = sum(torch.Size(shape).numel() * 4 for shape in model.applied.shapes.values())
    found = whole_tensors(Path(place))
    wrong = 0
    for piece, tensor in own:
        box = tuple(slice(first, first + size) for first, size in zip(piece.start, piece.size, strict=True))
        wrong += not torch.equal(tensor, found[piece.name][box].to(tensor.dtype))
    return Loaded(extra, sum(sizes), max(sizes), whole, wrong, len(own))


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by safetensors' own library."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    return found
