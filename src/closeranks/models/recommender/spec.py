"""The recommender's model spec.

Invariant: the loss is a sum over samples, and each evaluation ranks all of its samples together: its AUC does not
depend on micro-batches or layouts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ActivationCollectives, Batch, Loss, PipelineSpec, ShardingRule
from closeranks.facts.shapes.recommender import flops_per_sample
from closeranks.models.batches import batch_tensor
from closeranks.models.config import RecommenderConfig
from closeranks.models.parameter_init import fill_constant, fill_normal
from closeranks.models.recommender.auc import log_loss, roc_auc
from closeranks.models.recommender.model import Recommender
from closeranks.models.registry import MODELS
from closeranks.models.table import fill_rows


class RecommenderSpec:
    """The recommender as a run sees it (``core.protocols.ModelSpec``, ``SampleMetrics``)."""

    def __init__(self, config: RecommenderConfig) -> None:
        self.config = config
        self.shape = config.shape()
        self.name = "recommender"
        self.metrics: tuple[str, ...] = ()
        self.sample_values = ("score", "click", "probability")
        self.builds_on_meta = True
        self.item = "sample"
        self.items_per_sample = 1
        self.flops_per_item = flops_per_sample(self.shape)
        self.blocks: tuple[str, ...] = ()
        self.compile_units: tuple[str, ...] = ()
        self.sharding_rules: tuple[ShardingRule, ...] = ()
        self.activation_collectives: tuple[ActivationCollectives, ...] = ()
        self.pipeline_spec: PipelineSpec | None = None

    def build(self) -> nn.Module:
        return Recommender(self.shape, hashed=self.config.hashed)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """A table's rows by its key, which is the generator's seed: ``core.table_rows.row_key``."""
        if name.startswith("tables."):
            fill_rows(parameter, generator.initial_seed())
        elif name.endswith("bias"):
            fill_constant(parameter, 0.0)
        else:
            fill_normal(parameter, sqrt(2.0 / parameter.shape[1]), generator)

    def init_buffers(self, module: nn.Module) -> None:
        """There are none."""

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """``dense`` [B, num_dense], ``ids`` [B, features, ids of a bag] with -1 for no id, ``click`` [B] of 0 and 1,
        and the click's true ``probability`` [B] where it is known."""
        dense, ids, click = (batch_tensor(batch, key, self.name) for key in ("dense", "ids", "click"))
        self._check(dense, ids)
        logits = module(dense, ids)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        total = F.binary_cross_entropy_with_logits(wide, click.to(wide.dtype), reduction="sum")
        probability = batch["probability"] if "probability" in batch else torch.full_like(click, math.nan)
        samples = {"score": wide.detach(), "click": click, "probability": probability}
        return Loss(total=total, weight=float(click.shape[0]), samples=samples)

    def sample_metrics(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """The AUC; beside it those of the true probabilities, which no model can beat but by chance."""
        score, click, probability = (values[name] for name in self.sample_values)
        found = {"auc": roc_auc(score, click)}
        if not bool(probability.isnan().any()):
            found |= {"best_auc": roc_auc(probability, click), "best_loss": log_loss(probability, click)}
        return found

    def _check(self, dense: Tensor, ids: Tensor) -> None:
        if ids.ndim != 3 or (dense.shape[-1], ids.shape[1]) != (self.shape.num_dense, self.shape.features):
            what = f"the data has dense values {list(dense.shape)} and ids {list(ids.shape)}, the model reads "
            what += f"{self.shape.num_dense} values and {self.shape.features} features of several ids each"
            raise ModelError(
                what, "Set model.num_dense and model.features to the data's; ids are [batch, features, n]."
            )
        in_range = self.config.hashed or ids.device.type != "cpu" or type(ids) is not Tensor or ids.is_meta
        if not in_range and ids.numel() and int(ids.max()) >= self.shape.rows:
            what = f"the data holds the id {int(ids.max())}, and the tables have {self.shape.rows} rows"
            raise ModelError(what, "Set model.rows above the largest id, or model.hashed = true.")


@MODELS.register("recommender")
def recommender_spec(config: RecommenderConfig, *, seq_len: int) -> RecommenderSpec:
    return RecommenderSpec(config)
