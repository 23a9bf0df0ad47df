"""What does a rank of ``gpu_gloo.py`` try? Each collective on known numbers, and a short training.

Invariant: a rank notes the outcome of each try before it begins the next, so that a try which ends or holds the process
is known by what is missing.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from closeranks.core.system.environment import detect_world, set_world

DTYPES = ("float32", "bfloat16")
WORKS = "works"
NUM = 1024
NUM_STEPS = 5


@dataclass(frozen=True, slots=True)
class Try:
    """One collective on one kind of number."""

    op: str
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.dtype}"


def _all_reduce(mine: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    got = mine.clone()
    dist.all_reduce(got, async_op=True).wait()
    return got, torch.full_like(mine, sum(range(1, size + 1)))


def _all_gather_into_tensor(mine: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    got = mine.new_zeros(size * NUM)
    dist.all_gather_into_tensor(got, mine, async_op=True).wait()
    return got, torch.arange(1, size + 1, device=mine.device, dtype=mine.dtype).repeat_interleave(NUM)


def _reduce_scatter_tensor(mine: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    got = mine.new_zeros(NUM)
    dist.reduce_scatter_tensor(got, mine.repeat(size), async_op=True).wait()
    return got, torch.full_like(got, sum(range(1, size + 1)))


def _broadcast(mine: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    got = mine.clone()
    dist.broadcast(got, src=0, async_op=True).wait()
    return got, torch.ones_like(got)


def _isend_irecv(mine: Tensor, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """To the next rank and from the one before, around the ring."""
    got = mine.new_zeros(NUM)
    sent = dist.isend(mine, (rank + 1) % size)
    received = dist.irecv(got, (rank - 1) % size)
    for work in (sent, received):
        assert work is not None
        work.wait()
    return got, torch.full_like(got, (rank - 1) % size + 1)


OPS: dict[str, Callable[[Tensor, int, int], tuple[Tensor, Tensor]]] = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "broadcast": _broadcast,
    "isend/irecv": _isend_irecv,
}
"""Each gets a vector full of this rank's number, counted from 1, and returns what it got and what it should have."""


def try_all(tries: Sequence[Try], device: str, folder: str) -> None:
    """Raises at the first that does not work: the others may wait for this rank, and a device may be left unusable."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    with (Path(folder) / f"tries-{dist.get_rank()}").open("w", buffering=1) as notes:
        for one in tries:
            words = _try(one, device)
            notes.write(json.dumps(words) + "\n")
            if words != WORKS:
                raise RuntimeError(words)


def _try(one: Try, device: str) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        mine = torch.full((NUM,), rank + 1.0, dtype=getattr(torch, one.dtype), device=device)
        got, wanted = OPS[one.op](mine, rank, size)
        is_right = torch.equal(got.cpu(), wanted.cpu())
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # torch's ways to refuse
        lines = str(error).strip().splitlines()
        return lines[0] if lines else type(error).__name__
    return WORKS if is_right else f"WRONG: {got[:4].tolist()} instead of {wanted[:4].tolist()}"


def told_by(folder: Path, rank: int) -> list[str]:
    """What a rank noted before it was done or ended; a line that was cut off is none."""
    path = folder / f"tries-{rank}"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def train(layout: Mapping[str, int], device: str, folder: Path) -> list[float]:
    """Losses of a tiny Llama under a layout, in float32; every rank takes the first GPU."""
    from layouts_ours import Ours
    from layouts_work import LayoutWork
    from workload import logged_losses

    warnings.filterwarnings("ignore", category=FutureWarning)
    if device == "cuda":  # as if each rank were alone on its host, where the first GPU is its own
        set_world(replace(detect_world(), local_rank=0, local_size=1))
    tables: dict[str, Any] = {"layout": layout, "run": {"folder": str(folder), "seed": 7, "device": device}}
    work = LayoutWork("tiny", 32, 1, 1, NUM_STEPS + 2, folder, 4, num_micro=4, tables=tables)
    ours = Ours(work)
    ours.take_steps(NUM_STEPS + 1)  # the last one is never committed
    ours.close()
    return logged_losses(ours.log_path)[:NUM_STEPS] if dist.get_rank() == 0 else []
