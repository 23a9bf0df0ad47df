"""One rank of ``telemetry_peers.py``: a plain DDP loop, with or without TraceML, or a session of closeranks.

    torchrun ... telemetry_peers_rank.py PLAN.json                 the bare loop, or closeranks
    traceml run telemetry_peers_rank.py ... --args PLAN.json       the same loop with TraceML

With a socket in its plan it takes a turn each time it is asked to; otherwise it takes all steps and ends. Invariant:
with and without TraceML the loop does the same work. What is planted lies within TraceML's step, where it can be seen:
between two steps TraceML measures nothing but the waiting for data.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from doctor_work import Garbage, Net, Samples, Slow, loss, pad, slow_collate, unequal
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate
from workload import InOrder

from closeranks.elastic.faults.cgroups import CPU, ControlGroup, find_cgroup_parent
from closeranks.run.job.job import load_job
from closeranks.run.session import Session

SLOW_FROM_STEP = 5
COLLATES = {"": default_collate, "pad": pad, "slow_collate": slow_collate}


class Loop(Protocol):
    """Call sequence: ``take_steps`` for each turn, then ``close``."""

    def take_steps(self, num_steps: int) -> None: ...

    def close(self) -> None: ...


class PlainLoop:
    """What one writes by hand; ``plan`` may plant one cause that makes it slow."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan, self._stack = plan, ExitStack()
        dist.init_process_group("gloo")
        rank, num_ranks, batch = dist.get_rank(), dist.get_world_size(), plan["batch"]
        data = unequal() if plan.get("unequal") else Samples(**plan.get("data", {}))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(plan["seed"]))
        indices = order if plan.get("shuffle", True) else torch.arange(len(data))
        mine = indices.view(-1, num_ranks, batch)[:, rank]
        collate = COLLATES[plan.get("collate", "")]
        self._loader = DataLoader(data, batch_sampler=InOrder(list(mine)), collate_fn=collate)
        torch.manual_seed(plan["seed"])
        model = Net(plan.get("hidden", 512), plan.get("layers", 4))
        self._model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=plan.get("bucket_mib")
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        self._traced: Callable[[], AbstractContextManager[object]] = (
            partial(_traceml().trace_step, self._model) if plan["traceml"] else nullcontext
        )
        self._batches = self._endless()
        self._num_done = 0

    def _endless(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield from self._loader

    def take_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = next(self._batches)
            with self._traced():
                self._train(batch)
                self._after_step()
            self._num_done += 1

    def _train(self, batch: dict[str, Tensor]) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        size = self._plan.get("micro_batch") or len(batch["y"])
        *earlier, last = zip(batch["x"].split(size), batch["y"].split(size), strict=True)
        share = size / len(batch["y"])
        for x, y in earlier:
            with self._model.no_sync():
                (loss(self._model, {"x": x, "y": y}) * share).backward()
        x, y = last
        (loss(self._model, {"x": x, "y": y}) * share).backward()
        self._optimizer.step()

    def _after_step(self) -> None:
        """What a user's loop does for logging and saving; here it is what was planted, if anything."""
        match self._plan.get("after_step"):
            case "garbage":
                Garbage().on_step(None, None)
            case "slow":
                Slow().on_step(None, None)
            case "save":
                state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
                torch.save(state, Path(self._plan["folder"]) / f"rank-{dist.get_rank()}.pt")
        share = self._plan.get("slow_rank_share")
        if share and dist.get_rank() == 1 and self._num_done == SLOW_FROM_STEP:
            group = ControlGroup(find_cgroup_parent(CPU))
            self._stack.callback(group.remove)
            group.limit_cpu(share)
            group.add(os.getpid())

    def close(self) -> None:
        self._stack.close()
        dist.barrier()
        dist.destroy_process_group()


def _traceml() -> Any:
    import traceml_ai as traceml

    traceml.init(mode="auto")
    return traceml


class Closeranks:
    """A script with a session, as under torchrun; telemetry is on or off."""

    def __init__(self, plan: dict[str, Any]) -> None:
        batch, num_ranks = plan["batch"], int(os.environ["WORLD_SIZE"])
        tables: dict[str, Any] = {
            "run": {"folder": plan["folder"], "seed": plan["seed"], "device": "cpu"},
            "train": {"steps": plan["num_steps"], "global_batch": batch * num_ranks, "micro_batch": batch},
            "checkpoint": {"save": False},
            "telemetry": {"phases": plan["telemetry"], "sample_s": plan["sample_s"], "report": False},
        }
        self._session = Session.from_job(load_job(Path(__file__).with_name("doctor.toml"), extra=tables).value)
        self._steps = iter(self._session)

    def take_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            next(self._steps).run()

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    loop: Loop = Closeranks(plan) if plan["closeranks"] else PlainLoop(plan)
    if plan["socket"]:
        _take_turns(loop, plan["socket"])
    else:
        loop.take_steps(plan["num_steps"])
    loop.close()


def _take_turns(loop: Loop, path: str) -> None:
    """A line with a number of steps is answered with the seconds they took; the end of the lines ends the loop."""
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.connect(path)
        with endpoint.makefile("rw") as lines:
            for line in lines:
                began_at = time.perf_counter()
                loop.take_steps(int(line))
                print(time.perf_counter() - began_at, file=lines, flush=True)


if __name__ == "__main__":
    main()
