"""How does Lightning's Trainer take a step? A LightningModule under ``fit``, logging through ``self.log``.

The trainer owns its loop, so it runs in a thread that a callback holds between turns. Invariant: the callback does
nothing else, so that a turn costs what ``fit`` costs.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch.distributed as dist
from contenders import TUNED
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from turns import Turns
from workload import CLIP, StepLog, Workload, loader


class Module(L.LightningModule):
    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model = workload.model()
        self._workload = workload

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        tokens = tokens.long()
        loss: Tensor = self.model(tokens[:, :-1], tokens[:, 1:]) / self._workload.num_targets
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        """The hook for clipping of one's own: Trainer(gradient_clip_val=...) clips alike but does not tell the norm."""
        self.log("grad_norm", clip_grad_norm_(self.parameters(), CLIP))
        self.log("lr", optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = self._workload.optimizer(self.model)
        schedule = LambdaLR(optimizer, self._workload.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class JsonLines(Logger):
    """Lightning's logger interface over the log that everybody writes."""

    name = "steps"
    version = 0

    def __init__(self, log: StepLog) -> None:
        super().__init__()
        self._log = log

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._log.write((step or 0) + 1, metrics["loss"], metrics["grad_norm"], metrics["lr"])

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        return None


class Hold(Callback):
    """Ends a turn where a step ends."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._turns.at_boundary()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not self._turns.at_boundary():
            trainer.should_stop = True


class LightningTrainer:
    def __init__(self, workload: Workload) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self._workload = workload
        self._turns = Turns()
        self.log_path = workload.folder / "lightning.jsonl"
        tokens = workload.num_targets * workload.num_ranks
        self._log = StepLog(self.log_path, tokens, writes=dist.get_rank() == 0)
        self._turns.start(self._fit)

    def _fit(self) -> None:
        workload = self._workload
        trainer = L.Trainer(
            accelerator="cpu",
            devices=workload.num_ranks,
            strategy=DDPStrategy(process_group_backend="gloo", **TUNED),
            plugins=[TorchElasticEnvironment()],
            max_steps=workload.num_steps,
            logger=JsonLines(self._log),
            log_every_n_steps=1,
            callbacks=[Hold(self._turns)],
            use_distributed_sampler=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=workload.folder,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it recommends worker processes for loading, which would be slower here
            trainer.fit(Module(workload), loader(workload, workload.indices(dist.get_rank())))

    def take_steps(self, num_steps: int) -> None:
        self._turns.take(num_steps)

    def close(self) -> None:
        self._turns.close()
        self._log.close()
