"""Forms the process group of all workers, and offers the few collectives that a step needs.

``open_world_group`` is the rendezvous: it forms the process group of a world on a store of its own; ``RankGroup`` has
the collectives. Invariants: every generation has its own key prefix, so that no address of an earlier one is ever read;
nothing listens beyond loopback unless the job says so; world size 1 takes the same path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from closeranks.core.errors import SetupError
from closeranks.core.world import World

StoreMaker = Callable[[], Store]


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Ranks that run collectives together: the world, or the ranks along an axis. ``process_group`` None is torch's
    default group."""

    rank: int
    size: int
    process_group: dist.ProcessGroup | None = None

    def sum(self, tensor: Tensor) -> Tensor:
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's values to every rank, in place."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.process_group, group_src=0)
        return tensor

    def broadcast_text(self, text: str) -> str:
        """Broadcast rank 0's text to every rank. Slow: it is pickled."""
        if self.size == 1:
            return text
        box = [text]
        dist.broadcast_object_list(box, group=self.process_group, group_src=0)
        return box[0]

    def all_gather_text(self, text: str) -> list[str]:
        """All-gather the texts of all ranks. Slow: they are pickled."""
        if self.size == 1:
            return [text]
        box: list[str] = [""] * self.size
        dist.all_gather_object(box, text, group=self.process_group)
        return box

    def all_agree(self, is_well: bool, topic: str, patience_s: float) -> bool:
        """Whether ``is_well`` holds on every rank of the world. Early ranks wait on the store rather than in a
        collective, whose timeout is short: other ranks may still be writing. Each topic is used once."""
        if self.size == 1:
            return is_well
        store = dist.distributed_c10d._get_default_store()
        names = [f"closeranks/agree/{topic}/{rank}" for rank in range(self.size)]
        store.set(names[self.rank], "here")
        deadline, pause_s = time.monotonic() + patience_s, 0.002
        while not store.check(names) and time.monotonic() < deadline:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.2)
        return all(self.all_gather_text("yes" if is_well else ""))


@dataclass(frozen=True, slots=True)
class WorldGroup:
    """The world's group, and whether we formed it: closing leaves a user's own process group alone."""

    group: RankGroup
    is_ours: bool
    closers: list[Callable[[], None]] = field(default_factory=list)
    """Closes what was opened inside the group since: a user's group that stays open would otherwise keep it all."""

    def close(self) -> None:
        if self.is_ours:  # which also destroys every group created within it
            dist.destroy_process_group()
            return
        while self.closers:
            self.closers.pop()()


def open_world_group(world: World, device: torch.device, make_store: StoreMaker, timeout_s: float) -> WorldGroup:
    """Form the group of this world; a process group that already exists is used as it is."""
    if dist.is_initialized():
        found = (dist.get_rank(), dist.get_world_size())
        if found != (world.rank, world.size):
            what = (
                f"the process group says rank {found[0]} of {found[1]}, the launcher rank {world.rank} of {world.size}"
            )
            raise SetupError(
                what, "Start the script with `closeranks run -n`, torchrun or srun, and let it form the group."
            )
        return WorldGroup(RankGroup(dist.get_rank(), dist.get_world_size()), is_ours=False)
    backend = "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"
    store = PrefixStore(f"closeranks/{world.generation}", make_store())
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    except RuntimeError as error:
        raise SetupError(
            f"the workers could not reach each other: {error}", "Check the address and firewall."
        ) from error
    return WorldGroup(RankGroup(world.rank, world.size), is_ours=True)
