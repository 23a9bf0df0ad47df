"""The context of one rank of a run: its job, its position among the ranks, its device, the run's schedule.

Made while the run is built, and constant afterwards. Invariant: the job, the layout and the schedules are the same on
all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from closeranks.core.errors import ConfigError, Problem, SetupError
from closeranks.core.system.environment import gpus_are_per_task
from closeranks.core.world import World
from closeranks.data.sampling.cursor import Cursor
from closeranks.data.sampling.order import BatchSchedule
from closeranks.facts.layout import Layout
from closeranks.parallel.mesh_groups import MeshGroups
from closeranks.parallel.process_group import WorldGroup
from closeranks.run.job.job import Job, micro_batch_size
from closeranks.run.step.step_timer import StepTimer
from closeranks.sync.local_sgd.sync_schedule import SyncSchedule


@dataclass(frozen=True, slots=True)
class RunContext:
    job: Job
    world: World
    layout: Layout
    device: torch.device
    groups: MeshGroups
    world_group: WorldGroup
    """Its ``closers`` run when the run ends."""
    schedule: BatchSchedule
    sync_schedule: SyncSchedule
    """After which steps all ranks hold the same model: after every one, except with Local SGD and DiLoCo."""
    step_timer: StepTimer

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports losses: of the ranks that computed the same loss, one does (only the last stage
        has any)."""
        return self.groups.tensor.rank == 0

    @property
    def hosts(self) -> list[int]:
        """The host of every rank."""
        return [self.world.host_of(rank) for rank in range(self.world.size)]


def choose_device(job: Job, world: World) -> torch.device:
    """An accelerator per worker where the job and the host allow it."""
    available = torch.cuda.device_count() if job.run.device != "cpu" else 0
    index = device_index(job.run.device, world, available, is_own=gpus_are_per_task())
    if index is None:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def device_index(wanted: str, world: World, available: int, *, is_own: bool = False) -> int | None:
    """Which of the visible CUDA devices this worker takes; None: the CPU.

    ``is_own``: Slurm shows each task its own device alone (``--gpus-per-task``), which is then number 0 to everybody.
    """
    if is_own and available == 1:
        return 0
    if wanted == "cuda" and available <= world.local_rank:
        what = f"run.device = 'cuda', but worker {world.local_rank} of this host finds {available} CUDA devices"
        raise SetupError(what, "Start fewer workers, or set run.device = 'auto'.", rank=world.rank)
    return world.local_rank if available >= world.local_size else None


def batch_schedule(job: Job, num_samples: int, ends: tuple[Cursor, ...] = ()) -> BatchSchedule:
    """Which samples fall into which step, for a length in steps or in epochs. ``ends``: of earlier parts of the run."""
    train, micro = job.train, micro_batch_size(job)
    if train.epochs is not None:
        return BatchSchedule.for_epochs(num_samples, train.global_batch, micro, train.epochs, ends)
    return BatchSchedule.for_steps(num_samples, train.global_batch, micro, train.steps or 1, ends)


def check_last_step(job: Job, schedule: BatchSchedule, num_ranks: int) -> None:
    """Synchronised batch norm is a collective in every forward: a rank with one micro-batch more would hang."""
    num_micro = schedule.num_micro_batches(schedule.num_steps - 1)
    if job.layout.batch_norm == "sync" and num_micro % num_ranks:
        what = f"synchronised batch norm, but the last step's {num_micro} micro-batches do not divide evenly among "
        what += f"{num_ranks} data ranks"
        raise ConfigError(
            [Problem("layout.batch_norm", what, "Give train.steps instead of epochs: every step is then full.")]
        )
