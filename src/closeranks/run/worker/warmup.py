"""Warms up the zygote, so that the workers forked from it need not repeat imports and one-time initialisation.

It runs one dummy step like the job's (layout, precision, optimizer) on a small stand-in for its model, in a fake
process group: modules that torch imports late, its tables and ours are then initialised in every worker forked later,
and so are datasets that are read whole. Invariant: afterwards the process is unchanged except for these caches: one
thread, no group, no CUDA, the same RNG state and settings, no file. With a GPU it only imports.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import random
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from closeranks.capture.capture import Capture
from closeranks.capture.slots import SealedSlot, SlotHeader
from closeranks.core.protocols import Batch
from closeranks.core.system.linux import num_threads
from closeranks.core.world import World
from closeranks.data.sampling.order import Ints
from closeranks.data.sources.open import open_source
from closeranks.elastic.snapshot_reader import SnapshotReader
from closeranks.elastic.snapshot_writer import SnapshotDestinations, SnapshotWriter
from closeranks.models.build import spec_for
from closeranks.run.builder.build import RunInputs, build
from closeranks.run.job.job import Job, layout_for
from closeranks.run.state.state import RunState
from closeranks.run.step.step import Step
from closeranks.run.worker import generation_cache
from closeranks.run.worker.process_setup import started_event

_SEQ_LEN, _MICRO_BATCH = 16, 2
_SMALL_MODELS = ("digits", "pairs")
"""Models that are small enough to be used as they are, with their own data."""
_MODEL_KEYS = ("dropout", "attention", "tied")
_DEVICES = ("nvidia", "kfd", "dxg")
"""How the kernel names accelerators: NVIDIA's, AMD's, and any under Windows."""
_THREAD_EXIT_S = 5.0
_LATE_IMPORTS = (
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.fx_passes.apply_gumbel_max_trick",
    "torch._inductor.fx_passes.efficient_conv_bn_eval",
    "torch._inductor.fx_passes.freezing_patterns",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.fx_passes.quantization",
    "torch._inductor.runtime.caching",
    "torch._dynamo.dce_extra_outputs",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.fx.experimental.validator",
    "triton.tools.tensor_descriptor",
)
"""What torch.compile imports only in the middle of its first graph."""
_CACHED_LOOKUPS = (
    ("torch._dynamo.backends.registry", "_lazy_import"),
    ("torch._inductor.codegen.common", "init_backend_registration"),
    ("torch._inductor.codecache", "torch_key"),
    ("triton.runtime.cache", "triton_key"),
)
"""What torch.compile looks up once per process and caches."""


def warm_up(payload: Mapping[str, Any]) -> None:
    """Warm up for workers with this payload; called once in the zygote, after its first workers have started."""
    job = Job.model_validate(payload["job"])
    if job.train.compile:
        warm_up_compiler()
    generation_cache.cache_sources(job.data, job.run.seed)
    if not can_run_backward():
        return
    with preserve_process_state():
        for kind in warmup_jobs(job):
            run_dummy_step(kind)


def warm_up_compiler() -> None:
    """Do what torch.compile does once in every process: find its modules, compute the cache keys of its own and
    triton's version and, when it compiles for the CPU, probe the CPU's features with a program for each. With a warm
    cache that is most of the first compiled step. Not every version of torch has all of these: missing ones are
    skipped."""
    for name in (*_LATE_IMPORTS, *_patterns()):
        with suppress(ImportError, AttributeError):
            importlib.import_module(name)
    lookups = list(_CACHED_LOOKUPS)
    if not _has_devices():
        lookups.append(("torch._inductor.cpu_vec_isa", "valid_vec_isa_list"))
    for name, lookup in lookups:
        with suppress(ImportError, AttributeError):
            getattr(importlib.import_module(name), lookup)()


def _patterns() -> Iterator[str]:
    """The modules that are imported when a graph is first matched against inductor's serialized patterns."""
    with suppress(ImportError):
        package = importlib.import_module("torch._inductor.fx_passes.serialized_patterns")
        yield from (one.name for one in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))


def can_run_backward() -> bool:
    """Whether a backward can run without starting threads. The first one queries the driver of every accelerator that
    torch was built for, even if its devices are hidden, and the driver starts a thread."""
    return torch.accelerator.current_accelerator() is None or not _has_devices()


def _has_devices() -> bool:
    return any(name.startswith(_DEVICES) for name in os.listdir("/dev"))


def warmup_jobs(job: Job) -> list[Job]:
    """The jobs to run a dummy step of: the job itself with a small model, on as few ranks as have the same axes.

    Only the first stage of a pipeline can run without the others; a model without a pipeline covers what the last stage
    does.
    """
    small = small_job(job)
    if job.layout.pipeline == 1:
        return [small]
    return [small, small.model_copy(update={"layout": small.layout.model_copy(update={"pipeline": 1})})]


def small_job(job: Job) -> Job:
    """The job, without its size, its files, and what it names: the user's models and data, and parameters."""
    axes = {"data": 4, "shard": 2} if job.layout.shard else {"data": 2}
    layout = job.layout.model_copy(update={**axes, "schedule": "1f1b"})  # others receive between stages of one rank
    tables = {**job.model_dump(), "layout": layout.model_dump(), "checkpoint": {"save": False}}
    tables["run"] = {"seed": job.run.seed, "device": "cpu"}
    tables["optim"]["groups"] = ()
    tables["sync"] = job.sync.shortest().model_dump()
    num_samples = _MICRO_BATCH * layout.data * max(2, layout.pipeline)
    size = {"steps": 1, "epochs": None, "micro_batch": _MICRO_BATCH, "global_batch": num_samples}
    tables["train"] |= {**size, "compile": False}
    if job.model.name not in _SMALL_MODELS:
        kept = {key: tables["model"][key] for key in _MODEL_KEYS if key in tables["model"]}
        tables["model"] = {"name": "llama", "preset": "tiny", "num_layers": max(2, layout.pipeline), **kept}
        tables["data"] = {"name": "text", "seq_len": _SEQ_LEN}
    return Job.model_validate(tables)


class _DummySource:
    """A data source with as many samples as a step takes, all equal."""

    identity = "nothing"

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def read(self, indices: Ints) -> Batch:
        return {"tokens": torch.zeros(len(indices), _SEQ_LEN + 1, dtype=torch.uint8)}


def run_dummy_step(job: Job) -> None:
    """Run one step as rank 0, from the build to a snapshot of the state."""
    size = layout_for(job, 0).num_ranks
    source = (
        open_source(job.data, "train", 0) if job.model.name in _SMALL_MODELS else _DummySource(job.train.global_batch)
    )
    inputs = RunInputs(spec_for(job.model, seq_len=job.data.seq_len), source, None)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        built = build(job, World(0, size, 0, size), inputs)
        engine = built.engine
        try:
            started_event(engine, built.started_fields, 0, Path())
            engine.model.module.train()
            engine.batches.loader.start(0)
            step = Step(engine, 0)
            step.run()
            step.commit()
            _snapshot_and_restore(built.state)
        finally:
            engine.batches.close()
            engine.context.world_group.close()
    finally:
        dist.destroy_process_group()


def _snapshot_and_restore(state: RunState) -> None:
    """Take a snapshot of the state into private memory, and restore it. Does not call ``take_snapshot_paths``, which
    counts the sessions of a process."""
    with ExitStack() as stack:
        paths = [_memory(stack), _memory(stack)]
        capture, writer = Capture(), SnapshotWriter(SnapshotDestinations(own=(paths[0], paths[1])))
        stack.callback(writer.close)
        stack.callback(capture.close)
        header, tree = SlotHeader(0, 1, "stand-in", 1), json.dumps(state.checkpoint_tree(1)).encode()
        capture.begin(state.tensors(), writer.snapshot(header, tree))
        writer.wait()
        state.restore(SnapshotReader([SealedSlot(paths[0])]))


def _memory(stack: ExitStack) -> str:
    fd = os.memfd_create("closeranks-warm", os.MFD_CLOEXEC)
    stack.callback(os.close, fd)
    return f"/proc/{os.getpid()}/fd/{fd}"


@contextmanager
def preserve_process_state() -> Iterator[None]:
    """Restore RNG states and settings at the end, so that each worker starts as if nothing had been drawn or set."""
    running, threads, stream = num_threads(), torch.get_num_threads(), torch.get_rng_state()
    numpy_stream, python_stream = np.random.get_state(), random.getstate()
    hook = sys.excepthook  # torch installs one that prefixes every line with the rank
    torch.set_num_threads(1)
    generation_cache.load_payload(
        {generation_cache.KEY: 1.0, generation_cache.BUCKET_KEY: 1.0}
    )  # no measurements for a dummy step
    try:
        yield
    finally:
        generation_cache.load_payload({})
        sys.excepthook = hook
        torch.set_num_threads(threads)
        torch.set_rng_state(stream)
        np.random.set_state(numpy_stream)
        random.setstate(python_stream)
        _await_threads(running)


def _await_threads(number: int) -> None:
    """Wait until joined threads are gone: one may live on in the kernel for a moment, and a fork would lose it
    half-way."""
    deadline = time.monotonic() + _THREAD_EXIT_S
    while num_threads() > number and time.monotonic() < deadline:
        time.sleep(0.001)
