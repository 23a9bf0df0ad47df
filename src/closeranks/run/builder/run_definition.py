"""Defines a run from a job that names its model and data, or from objects that a user passes in Python.

Both become the same ``RunInputs``. Invariant: none of the user's code runs before the job has been checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from closeranks.core.errors import UserError
from closeranks.core.registry import load_object
from closeranks.data.sources.user import as_source
from closeranks.models.build import spec_for
from closeranks.models.user import UserSpec
from closeranks.run.builder.build import RunInputs
from closeranks.run.hooks import Hook
from closeranks.run.job.job import Job, check_vocabulary, load_job
from closeranks.run.worker import excepthook, generation_cache


@dataclass(frozen=True, slots=True)
class RunDefinition:
    """A checked job, and a function that loads its model spec and data once the process is set up."""

    job: Job
    load_inputs: Callable[[], RunInputs]


def from_job(job: Job) -> RunDefinition:
    def load_inputs() -> RunInputs:
        source = generation_cache.open_cached_source(job.data, "train", job.run.seed)
        check_vocabulary(job, getattr(source, "vocab_size", 0))
        return RunInputs(
            spec=spec_for(job.model, seq_len=job.data.seq_len),
            source=source,
            eval_source=generation_cache.open_cached_source(job.data, "eval", job.run.seed),
        )

    return RunDefinition(job, load_inputs)


def from_python(
    model: Any,
    data: Any,
    loss: Any,
    eval_data: Any,
    metrics: Sequence[str],
    collate: Any,
    tables: Mapping[str, Any],
) -> RunDefinition:
    excepthook.install()
    splits = {key: tables[key] for key in ("stages", "tensor") if key in tables}
    extra = {
        **{name: table for name, table in tables.items() if name not in (*splits, "loading")},
        "model": {"name": _name_of(model), "metrics": tuple(metrics), **splits},
        "data": {"name": _name_of(data), **tables.get("loading", {})},
    }
    job = load_job(None, extra=extra).value
    if eval_data is not None and loss is None:
        raise UserError(
            "eval_data is given, but no loss to evaluate it with", "Pass loss as well: a function of (model, batch)."
        )

    def load_inputs() -> RunInputs:
        factory = (lambda: model) if isinstance(model, nn.Module) else model
        named = getattr(job.data, "collate", "")
        own = load_object(named, place="data.collate") if collate is None and named else collate
        return RunInputs(
            spec=UserSpec(
                job.model.name,
                factory,
                loss=loss,
                metrics=tuple(metrics),
                stages=getattr(job.model, "stages", ()),
                tensor=getattr(job.model, "tensor", ()),
            ),
            source=as_source(data, collate=own),
            eval_source=None if eval_data is None else as_source(eval_data, collate=own),
        )

    return RunDefinition(job, load_inputs)


def make_hooks(job: Job) -> list[Hook]:
    """The user's own hooks, which a job names."""
    hooks: list[Hook] = []
    for path in job.run.hooks:
        hook = load_object(path, place="run.hooks")()
        if not isinstance(hook, Hook):
            raise UserError(f"run.hooks: '{path}' is not a closeranks.Hook", "Subclass closeranks.Hook.")
        hooks.append(hook)
    return hooks


def _name_of(thing: Any) -> str:
    """The name in the job of an object passed in Python: the module and qualified name of its code."""
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}:{named.__qualname__}"
