"""How does a job say its weights are to be updated? The table ``[optim]``.

Invariant: a value no update could use (a negative rate, a beta of one) is refused here, before anything is built.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from closeranks.core.config.table import ConfigTable

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class GroupConfig(ConfigTable):
    """Parameters that are treated differently; the first group whose pattern matches a parameter takes it."""

    pattern: str = Field(min_length=1)
    """Shell-style pattern on the parameter's full name: ``model.layers.0.*``, ``*.bias``."""
    lr_scale: float = Field(default=1.0, ge=0.0)
    """Multiplies the learning rate."""
    weight_decay: float | None = Field(default=None, ge=0.0)
    """For every parameter the pattern matches, norms and biases too. Unset: as without the group."""
    frozen: bool = False
    """Keep these parameters as they are: no gradient, no optimizer state."""


class ScheduleConfig(ConfigTable):
    """The learning rate schedule."""

    name: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    """After the warmup: constant, cosine or linear decay, or stable with a decay at the end (wsd)."""
    warmup: float = Field(default=0.05, ge=0)
    """Steps until the full rate; below 1, a fraction of all steps."""
    min_ratio: Fraction = 0.1
    """The final rate, as a fraction of ``lr``."""
    decay: Fraction = 0.2
    """For wsd: the fraction of all steps, at the end, in which the rate decays."""

    @field_validator("warmup")
    @classmethod
    def _whole_steps(cls, value: float) -> float:
        if value >= 1 and not float(value).is_integer():
            raise ValueError(f"{value} is neither a number of steps nor a fraction. Write 100 or 0.05.")
        return value


class LossScaleConfig(ConfigTable):
    """Loss scaling, which only fp16 uses."""

    init: float = Field(default=65536.0, gt=0.0)
    """The scale at the first step."""
    growth: float = Field(default=2.0, ge=1.0)
    """Factor after ``interval`` good steps in a row."""
    backoff: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Factor after a step whose gradients overflowed."""
    interval: int = Field(default=2000, ge=1)
    """Good steps in a row before the scale grows."""
    minimum: float = Field(default=1.0, gt=0.0)
    """The scale never falls below this."""


class TablesConfig(ConfigTable):
    """Embedding tables whose rows are updated one by one, where they had a gradient."""

    rule: Literal["none", "adagrad", "adam"] = "none"
    """none: tables are parameters like all others. adagrad, adam: rows are born at their first update, only touched
    rows travel, and one second moment is kept for a whole row. With parameter servers the servers keep the rows."""
    lr: float | None = Field(default=None, ge=0.0)
    """Peak learning rate of rows, which follows ``schedule``; unset: that of the other parameters."""

    @property
    def is_on(self) -> bool:
        return self.rule != "none"


class OptimConfig(ConfigTable):
    """The optimizer and its learning rate, decay and clipping."""

    name: Literal["adamw", "sgd", "lars", "lamb"] = "adamw"
    """The optimizer. lars and lamb adapt the rate of each layer, for large batches."""
    lr: float = Field(default=1e-3, ge=0.0)
    """Peak learning rate."""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How ``lr`` grows with the batch: by train.global_batch / base_batch, or by its square root."""
    base_batch: int | None = Field(default=None, ge=1)
    """Samples per step that ``lr`` was tuned for; scaling starts from it."""
    weight_decay: float = Field(default=0.1, ge=0.0)
    """On matrices only, not on norms and biases. Decoupled in adamw and lamb; added to the gradient in sgd and lars."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """adamw, lamb: decay of the two moments."""
    eps: float = Field(default=1e-8, gt=0.0)
    """adamw, lamb: added to the denominator for stability."""
    momentum: Beta = 0.9
    """sgd, lars: decay of the momentum; 0 for none."""
    nesterov: bool = False
    """sgd: use Nesterov momentum."""
    trust: float = Field(default=0.001, gt=0.0)
    """lars: a layer's step, as a share of its weight's norm, at a learning rate of 1."""
    ema: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Decay of a moving average of the weights, 0.999 say: the model is then evaluated, exported and sampled with the
    average; training is unchanged. 0: none."""
    clip: float = Field(default=1.0, ge=0.0)
    """Clip the norm of all gradients together to this; 0: no clipping."""
    groups: tuple[GroupConfig, ...] = ()
    """``[[optim.groups]]``: parameters with another rate or decay, or frozen."""
    schedule: ScheduleConfig = ScheduleConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    tables: TablesConfig = TablesConfig()

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> OptimConfig:
        if self.name == "sgd" and self.nesterov and self.momentum == 0.0:
            raise ValueError("nesterov needs momentum. Set optim.momentum above 0, or optim.nesterov = false.")
        if self.name == "lars" and self.nesterov:
            raise ValueError("lars has no nesterov momentum. Set optim.nesterov = false.")
        return self

    @model_validator(mode="after")
    def _scaling_needs_a_base(self) -> OptimConfig:
        if self.scaling != "none" and self.base_batch is None:
            raise ValueError(
                f"scaling = '{self.scaling}' needs to know which batch optim.lr was tuned for. Set optim.base_batch."
            )
        if self.scaling == "none" and self.base_batch is not None:
            raise ValueError("base_batch does nothing without a rule. Set optim.scaling to 'linear' or 'sqrt'.")
        return self
