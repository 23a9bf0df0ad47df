"""What does one rank of ``sync_peers.py`` do? It opens every lane on its host and takes their turns.

Invariants: both ranks go through the same turns in the same order, and a turn ends with its last step committed:
nothing of it travels in another's turn.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts_raw import Ddp
from layouts_work import LayoutWork
from rounds import order
from sync_peers import FORGETFUL, OURS, RANK, RIVALS, WARMUP
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from workload import logged_losses

from closeranks.core.system.linux import die_with_parent
from closeranks.lab.compare.namespaces import sent_bytes
from closeranks.run.session import Session
from closeranks.run.worker.agent_client import StandaloneClient, configure_worker
from hosts import INTERFACE

ONE_BUCKET_MIB = 4096.0


class Peer(Ddp):
    """torch's DDP with the hook that the lane's name says."""

    def __init__(self, work: LayoutWork, hook: str, bucket_mib: float) -> None:
        self._hook, self._bucket_mib = hook, bucket_mib
        super().__init__(work)

    def wrap(self, model: nn.Module) -> nn.Module:
        cap = ONE_BUCKET_MIB if self._hook == "powersgd, one bucket" else self._bucket_mib
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False, bucket_cap_mb=cap
        )
        if self._hook == "fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        elif self._hook.startswith("powersgd"):
            # Error feedback and warm start are its defaults; so is the least gain of 2, which is ours too.
            state = PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=WARMUP)
            wrapped.register_comm_hook(state, powerSGD_hook if cap == ONE_BUCKET_MIB else waiting_powersgd)
        return wrapped


def waiting_powersgd(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and strings are none to it
    """torch's hook starts collectives from callbacks; on Gloo two buckets under way at once do so in different orders
    on different ranks, and hang. So one arrives before the next leaves."""
    future = powerSGD_hook(state, bucket)
    future.wait()
    return future


class Ours:
    """A session as under torchrun: its loader, its recorder, nobody to report to."""

    def __init__(self, work: LayoutWork) -> None:
        configure_worker(agent_client=StandaloneClient())  # the benchmark speaks for itself
        self._session = Session.from_job(work.job)
        self._steps = iter(self._session)
        self._step = next(self._steps)
        self._give_collector_back()
        self.log_path = self._session.folder / "metrics" / "rank-00000.jsonl"

    def take_steps(self, num_steps: int) -> None:
        """Asking for the next step commits this one."""
        gc.freeze()
        gc.disable()
        for _ in range(num_steps):
            self._step.run()
            self._step = next(self._steps)
        self._give_collector_back()

    @staticmethod
    def _give_collector_back() -> None:
        """A session holds the garbage collector; between its turns the others have it as Python runs it."""
        gc.unfreeze()
        gc.enable()

    def close(self) -> None:
        self._steps.close()  # type: ignore[attr-defined]


def main() -> None:
    die_with_parent(os.getppid())
    warnings.filterwarnings("ignore", category=FutureWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lanes = _open(plan)
    for lane in lanes.values():
        lane.take_steps(plan["block"])
    results = _take_rounds(lanes, plan)
    results["losses"] = {}
    for name, lane in lanes.items():
        lane.close()
        if dist.get_rank() == 0:
            results["losses"][name] = logged_losses(lane.log_path)
    (Path(plan["folder"]) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _open(plan: Mapping[str, Any]) -> dict[str, Any]:
    lanes: dict[str, Any] = {}
    for kind in plan["kinds"]:
        lanes |= {rival: Peer(_work(plan, rival), hook, plan["bucket_mib"]) for rival, hook in RIVALS[kind].items()}
        compress = {"name": kind} if kind == "none" else {"name": kind, "rank": RANK, "warmup": WARMUP}
        lanes[OURS[kind]] = Ours(_work(plan, OURS[kind], compress))
        if kind == "fp16":
            lanes[FORGETFUL] = Ours(_work(plan, FORGETFUL, {**compress, "feedback": False}))
    return lanes


def _take_rounds(lanes: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """Wall and processor seconds of every turn, and the bytes that left this host in it."""
    seconds, cpu, sent = ({name: [] for name in lanes} for _ in range(3))
    for number in range(plan["rounds"]):
        for name in order(list(lanes), number):
            dist.barrier()
            sent_before, cpu_before, began_at = _sent(), time.process_time(), time.perf_counter()
            lanes[name].take_steps(plan["block"])
            seconds[name].append(time.perf_counter() - began_at)
            cpu[name].append(time.process_time() - cpu_before)
            dist.barrier()  # the other has all that it was sent
            sent[name].append(_sent() - sent_before)
    return {"seconds": seconds, "cpu_seconds": cpu, "sent": sent}


def _sent() -> int:
    return sent_bytes(Path("/proc/net/dev").read_text(), INTERFACE)


def _work(plan: Mapping[str, Any], name: str, compress: Mapping[str, Any] | None = None) -> LayoutWork:
    buckets = {"bucket_mib": plan["bucket_mib"], "first_bucket_mib": min(1.0, plan["bucket_mib"])}
    tables: dict[str, Any] = {"model": {"name": "llama", **plan["model"]}}
    if compress is not None:
        tables |= {"sync": {**buckets, "compress": compress}, "layout": {"data": dist.get_world_size()}}
        tables["elastic"] = {"enabled": False}
    return LayoutWork(
        preset=plan["model"]["preset"],
        seq_len=plan["seq_len"],
        batch=plan["batch"],
        num_ranks=dist.get_world_size(),
        num_steps=(plan["rounds"] + 1) * plan["block"] + 1,  # one that is never taken: after its last, ours evaluates
        folder=Path(plan["folder"]),
        tables=tables,
        name=name.replace(" ", "-").replace(",", ""),
    )


if __name__ == "__main__":
    main()
