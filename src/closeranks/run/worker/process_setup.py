"""Sets up the process before the first tensor exists, and makes the ``RunStarted`` event.

Process-wide settings (threads, determinism, loopback) are made here, once, from the job. Invariant: nothing later in a
run changes them.
"""

from __future__ import annotations

import atexit
import gc
import platform
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from closeranks import __version__
from closeranks.core.events import RunStarted
from closeranks.core.protocols import ModelSpec, RecomputeFlops
from closeranks.core.system.environment import bind_gloo, fix_cublas_workspace, thread_limit
from closeranks.core.system.fork_safety import close_in_children
from closeranks.core.system.network_interfaces import interface_of
from closeranks.core.system.process_age import process_age_s
from closeranks.core.system.stdio import ignore_broken_pipes
from closeranks.core.world import World
from closeranks.facts.devices import datasheet_flops
from closeranks.optim.lr_scaling import describe_lr_scaling
from closeranks.run.job.job import Job
from closeranks.run.step.engine import Engine
from closeranks.run.worker.agent_client import current_link
from closeranks.telemetry.device import device_memory_bytes, device_name


def prepare_process(job: Job, world: World) -> None:
    if world.launcher in ("single", "torchrun", "slurm"):  # the agent's workers print into a pipe of the agent
        ignore_broken_pipes()
        atexit.register(gc.freeze)  # a script exits a second sooner, without a last search for cycles
    if world.launcher != "testing":
        close_in_children()
    _bind_gloo(world)
    torch.set_num_threads(_threads(job, world))
    if job.run.deterministic:
        fix_cublas_workspace()
        torch.use_deterministic_algorithms(True)
        # A debugging aid that costs a pass per tensor.
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010 (typed as read-only)
        torch.backends.cudnn.benchmark = False


def _bind_gloo(world: World) -> None:
    """Bind gloo to loopback on one host; on several, to the interface of the address that the agents use."""
    link = current_link()
    if world.local_size == world.size:
        bind_gloo("lo")
    elif link is not None:
        bind_gloo(interface_of(link.host))


def _threads(job: Job, world: World) -> int:
    """The job's setting, else the environment's, else an equal share of the cores."""
    return job.run.threads or thread_limit() or max(1, _num_cores() // world.local_size)


@cache
def _num_cores() -> int:
    """Cached, as torch counted them before we set anything: a second session in the process must get the same count."""
    return torch.get_num_threads()


def _hardware_flops(job: Job, spec: ModelSpec) -> float:
    """The model's FLOPs per item, and what recompute repeats of them; 0 where that is not known."""
    if job.train.recompute == "none" or not spec.blocks:
        return spec.flops_per_item
    if not isinstance(spec, RecomputeFlops):
        return 0.0
    return spec.flops_per_item + spec.recompute_flops_per_item(job.train.recompute, job.train.recompute_keep)


def started_event(engine: Engine, known: Mapping[str, Any], first_step: int, folder: Path) -> RunStarted:
    """``known``: fields that were measured while the run was built."""
    context, model = engine.context, engine.model
    name, layout, fields = device_name(context.device), context.layout, dict(known)
    is_sharded = layout.zero > 0 or layout.tensor > 1 or layout.pipeline > 1  # no rank holds the whole state
    for get_fields in engine.components.phases["started"]:
        fields |= get_fields()
    return RunStarted(
        rank=context.world.rank,
        world_size=context.world.size,
        generation=context.world.generation,
        first_step=first_step,
        last_step=context.schedule.num_steps,
        layout=str(layout) if is_sharded else "",
        device=name,
        device_memory_bytes=device_memory_bytes(context.device, context.world.local_size),
        precision=model.precision.name,
        num_params=model.applied.num_params,
        num_trainable=model.applied.num_trainable,
        flops_per_item=model.spec.flops_per_item,
        item=model.spec.item,
        datasheet_flops=datasheet_flops(name, model.precision.name),
        versions={"closeranks": __version__, "torch": str(torch.__version__), "python": platform.python_version()},
        folder=str(folder),
        rate=describe_lr_scaling(context.job.optim, context.job.train.global_batch, context.schedule.num_steps),
        hardware_flops_per_item=_hardware_flops(context.job, model.spec),
        process_s=process_age_s(),
        global_batch=context.schedule.global_batch,
        micro_batch=context.schedule.micro_batch,
        **fields,
    )
