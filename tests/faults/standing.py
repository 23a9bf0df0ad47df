"""A user's code with collectives of its own. Rank 1 goes wrong once, in the way that the file ``misdeed`` names."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks import Hook, Session
from closeranks.core.events import StepDone

NUM_SAMPLES = 240
FROM_SAMPLE = 72
"""After some steps."""
MISDEED = Path("misdeed")
"""In the job's folder, which is the working folder of its workers; removed when it is done."""
TOLD = Path("run/metrics/agent.jsonl")


def goes_wrong(name: str) -> bool:
    """Whether this rank is to do that now, once."""
    if dist.get_rank() != 1 or not MISDEED.exists() or MISDEED.read_text() != name:
        return False
    with suppress(FileNotFoundError):
        MISDEED.unlink()
    return True


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= FROM_SAMPLE and goes_wrong("loader"):
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # loader
        x = torch.full((4,), index / NUM_SAMPLES)
        return {"x": x, "y": x.sum(), "index": torch.tensor(index)}


def model() -> nn.Module:
    return nn.Linear(4, 1)


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error = (module(batch["x"]).squeeze(-1) - batch["y"]).square().mean()
    is_due = int(batch["index"].min()) >= FROM_SAMPLE
    values = error.detach().view(1).clone()
    if is_due and goes_wrong("shape"):
        values = torch.zeros(3)
    if is_due and goes_wrong("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if is_due and goes_wrong("sleep"):
        time.sleep(100_000)  # sleep
    if is_due and goes_wrong("order"):
        dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], torch.zeros(2))  # order
        dist.all_reduce(values)
    elif not (is_due and goes_wrong("branch")):
        dist.all_reduce(values)  # usual
        dist.all_gather([torch.zeros(2) for _ in range(dist.get_world_size())], torch.zeros(2))
    return error


class LongHook(Hook):
    """Takes its time until somebody says so."""

    def on_step(self, session: Session, step: StepDone) -> None:
        while step.step >= 8 and session.world.rank == 1 and MISDEED.exists() and MISDEED.read_text() == "hook":
            time.sleep(0.05)  # hook
            if TOLD.exists() and "standstill" in TOLD.read_text():
                MISDEED.unlink()
