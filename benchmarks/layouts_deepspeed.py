"""How does DeepSpeed take a step? By its engine, on CPU over Gloo, with torch's AdamW instead of one it would compile.

It comes with the extra ``peers``. Invariant: nothing is compiled or launched; where it stands is told by the variables
its launcher would set.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from layouts_work import LayoutWork, Loop
from workload import CLIP


class DeepSpeed(Loop):
    """``deepspeed.initialize``, ``engine.backward``, ``engine.step``: ZeRO by its stage, the rest by its defaults."""

    def __init__(self, work: LayoutWork, stage: int) -> None:
        super().__init__(work, dist.get_rank())
        model = work.model()
        optimizer = work.optimizer(model)
        deepspeed = _import()
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=self._config(stage), dist_init_required=False
        )

    def _config(self, stage: int) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.work.batch,
            "gradient_accumulation_steps": self.work.num_micro,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 1_000_000_000,
        }

    def take_step(self, micro_batches: list[Any], rate: float) -> tuple[float, float]:
        engine, total = self._engine, torch.zeros(())
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        for indices in micro_batches:
            tokens, targets = self.work.read(indices)
            loss = engine(tokens, targets) / targets.numel()
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # takes the step when all of them are in
            total += loss.detach() / len(micro_batches)
        dist.all_reduce(total)
        return total.item() / self.work.num_ranks, float(engine.get_global_grad_norm())


def _import() -> Any:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(DS_ACCELERATOR="cpu", DEEPSPEED_LOG_LEVEL="error")
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")  # asked for, never used: the group stands
    warnings.filterwarnings("ignore")  # what it says of its own imports
    import deepspeed

    # The shared-memory collective serves inference alone; it would be compiled here, for a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
