"""The two-tower recommender, and its model spec.

It is the one model with two inputs and two losses. Invariant: both losses are sums over samples, reported separately
and added with a fixed weight, so that the step divides all three by the same number.
"""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ActivationCollectives, Batch, Loss, PipelineSpec, ShardingRule
from closeranks.facts.shapes.pairs import PairsShape, flops_per_sample
from closeranks.models.batches import batch_tensor
from closeranks.models.config import PairsConfig
from closeranks.models.parameter_init import fill_constant, fill_normal
from closeranks.models.registry import MODELS


class Tower(nn.Module):
    """Maps the features of one side to its vector."""

    def __init__(self, num_in: int, hidden_dim: int, vector_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_in, hidden_dim)
        self.output = nn.Linear(hidden_dim, vector_dim)

    def forward(self, features: Tensor) -> Tensor:
        vector: Tensor = self.output(F.relu(self.hidden(features)))
        return vector


class Pairs(nn.Module):
    """User [batch, user_dim] and item [batch, item_dim] in; click logits and ratings out, stacked to [2, batch]."""

    def __init__(self, shape: PairsShape) -> None:
        super().__init__()
        self.user_tower = Tower(shape.user_dim, shape.hidden_dim, shape.vector_dim)
        self.item_tower = Tower(shape.item_dim, shape.hidden_dim, shape.vector_dim)
        self.click_head = nn.Linear(shape.joint_dim, 1)
        self.rating_head = nn.Linear(shape.joint_dim, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        left, right = self.user_tower(user), self.item_tower(item)
        joint = torch.cat((left, right, left * right), dim=-1)
        return torch.stack((self.click_head(joint).squeeze(-1), self.rating_head(joint).squeeze(-1)))


class PairsSpec:
    """The recommender as a run sees it (``core.protocols.ModelSpec``)."""

    def __init__(self, config: PairsConfig) -> None:
        self.config = config
        self.shape = config.shape()
        self.name = "pairs"
        self.metrics: tuple[str, ...] = ("click_loss", "rating_loss")
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
        return Pairs(self.shape)

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        if name.endswith("bias"):
            fill_constant(parameter, 0.0)
        else:
            fill_normal(parameter, sqrt(1.0 / parameter.shape[1]), generator)

    def init_buffers(self, module: nn.Module) -> None:
        """There are none."""

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """``user``, ``item`` [B, features], ``click`` [B] of 0 and 1, ``rating`` [B]."""
        user, item, click, rating = (batch_tensor(batch, key, self.name) for key in ("user", "item", "click", "rating"))
        self._check_widths(user, item)
        answers = module(user, item)
        click_logits, ratings = answers if answers.dtype == torch.float64 else answers.float()
        click_loss = F.binary_cross_entropy_with_logits(click_logits, click.to(click_logits.dtype), reduction="sum")
        rating_loss = F.mse_loss(ratings, rating.to(ratings.dtype), reduction="sum")
        return Loss(
            total=click_loss + self.config.rating_weight * rating_loss,
            weight=float(click.shape[0]),
            metrics={"click_loss": click_loss.detach(), "rating_loss": rating_loss.detach()},
        )

    def _check_widths(self, user: Tensor, item: Tensor) -> None:
        found = (user.shape[-1], item.shape[-1])
        if found != (self.shape.user_dim, self.shape.item_dim):
            what = f"the data has {found[0]} user and {found[1]} item features, the model reads "
            what += f"{self.shape.user_dim} and {self.shape.item_dim}"
            raise ModelError(what, "Set model.user_dim and model.item_dim to the data's.")


@MODELS.register("pairs")
def pairs_spec(config: PairsConfig, *, seq_len: int) -> PairsSpec:
    return PairsSpec(config)
