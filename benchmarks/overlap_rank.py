"""What does one rank of ``overlap.py`` do? It opens every variant on its host and takes their turns.

Invariant: both ranks go through the same turns in the same order; a variant that cannot be opened is left out on both.
"""

from __future__ import annotations

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
from layouts_ours import Ours
from layouts_work import LayoutWork, Loop
from overlap import FLOOR
from rounds import order
from torch.nn.utils import clip_grad_norm_
from workload import CLIP, logged_losses

from closeranks.core.errors import CloseranksError
from closeranks.core.system.linux import die_with_parent


class Alone(Loop):
    """Trains a data rank's share with nobody to talk to: what a step costs when communication costs nothing."""

    def __init__(self, work: LayoutWork) -> None:
        super().__init__(work, dist.get_rank())
        self._model = work.model()
        self._parameters = list(self._model.parameters())
        self._optimizer = work.optimizer(self._model)

    def take_step(self, micro_batches: list[Any], rate: float) -> tuple[float, float]:
        total = torch.zeros(())
        for indices in micro_batches:
            tokens, targets = self.work.read(indices)
            loss = self._model(tokens, targets) / self.work.num_targets
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(self._parameters, CLIP)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total.item(), norm.item()


def main() -> None:
    die_with_parent(os.getppid())
    warnings.filterwarnings("ignore", category=FutureWarning)
    plan = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders: dict[str, Any] = {FLOOR: Alone(_work(plan, FLOOR, {}))}
    left_out: dict[str, str] = {}
    for name, tables in plan["variants"].items():
        try:
            contenders[name] = Ours(_work(plan, name, tables))
        except CloseranksError as error:  # it says the same on every rank
            left_out[name] = str(error).splitlines()[-1].strip()
    for contender in contenders.values():
        contender.take_steps(plan["block"])
    results = {"seconds": _take_rounds(contenders, plan), "left_out": left_out, "losses": {}}
    for name, contender in contenders.items():
        contender.close()
        if name != FLOOR and dist.get_rank() == 0:
            results["losses"][name] = logged_losses(contender.log_path)
    (Path(plan["folder"]) / f"rank-{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def _take_rounds(contenders: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(plan["rounds"]):
        for name in order(list(contenders), number):
            dist.barrier()
            began_at = time.perf_counter()
            contenders[name].take_steps(plan["block"])
            seconds[name].append(time.perf_counter() - began_at)
    return seconds


def _work(plan: Mapping[str, Any], name: str, tables: Mapping[str, Any]) -> LayoutWork:
    model = {"name": "llama", **plan["model"]}
    return LayoutWork(
        preset=plan["model"]["preset"],
        seq_len=plan["seq_len"],
        batch=plan["batch"],
        num_ranks=dist.get_world_size(),
        num_steps=(plan["rounds"] + 1) * plan["block"] + 1,
        folder=Path(plan["folder"]),
        tables={"model": model, **tables},
        name=name.replace(" ", "-"),
    )


if __name__ == "__main__":
    main()
