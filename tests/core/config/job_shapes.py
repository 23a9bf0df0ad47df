"""A small job with the shapes of the real one: plain tables, a union of tables, an array of tables, nested tables."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import Problem
from closeranks.core.registry import did_you_mean

PRESETS = ("tiny", "small", "8b")


class LlamaConfig(ConfigTable):
    name: Literal["llama"] = "llama"
    preset: str = "tiny"
    """Which published shape to start from."""
    num_layers: int | None = Field(default=None, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)

    @field_validator("preset")
    @classmethod
    def _known(cls, preset: str) -> str:
        if preset not in PRESETS:
            raise ValueError(f"there is no preset '{preset}'. {did_you_mean(preset, PRESETS)}")
        return preset


class DigitsConfig(ConfigTable):
    name: Literal["digits"] = "digits"
    channels: tuple[int, ...] = (16, 32)


class UserModelConfig(ConfigTable):
    name: str
    args: dict[str, Any] = Field(default_factory=dict)
    """Handed to the factory as keyword arguments."""
    metrics: tuple[str, ...] = ()


def _model_kind(value: Any) -> str | None:
    name = value.get("name", "llama") if isinstance(value, dict) else getattr(value, "name", None)
    return "user" if ":" in str(name) else None if name is None else str(name)


ModelConfig = Annotated[
    Annotated[LlamaConfig, Tag("llama")]
    | Annotated[DigitsConfig, Tag("digits")]
    | Annotated[UserModelConfig, Tag("user")],
    Discriminator(_model_kind),
]


class RunConfig(ConfigTable):
    name: str = "run"
    """What the run folder is called."""
    seed: int = 0
    deterministic: bool = False
    """Trade speed for the same bits in every run."""
    threads: int | None = None


class TrainConfig(ConfigTable):
    steps: int = Field(ge=1)
    """Optimizer steps to take."""
    global_batch: int = Field(default=8, ge=1, le=4096)
    micro_batch: int = Field(default=8, gt=0)
    precision: Literal["float32", "bf16", "fp16", "float64"] = "float32"


class GroupConfig(ConfigTable):
    pattern: str
    """Which parameters, as a shell pattern on their names."""
    lr_scale: float = Field(default=1.0, gt=0)
    weight_decay: float | None = None
    frozen: bool = False


class ScheduleConfig(ConfigTable):
    name: Literal["constant", "cosine"] = "cosine"
    warmup: int | float = 0.05

    @model_validator(mode="after")
    def _constant_has_no_warmup(self) -> ScheduleConfig:
        if self.name == "constant" and self.warmup:
            raise ValueError("a constant schedule has no warmup. Set warmup = 0.")
        return self


class OptimConfig(ConfigTable):
    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    groups: tuple[GroupConfig, ...] = ()
    schedule: ScheduleConfig = ScheduleConfig()


class LayoutConfig(ConfigTable):
    data: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)
    pipeline: int = Field(default=1, ge=1)
    schedule: str = "1f1b"


class Job(ConfigTable):
    """One training run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = LlamaConfig()
    train: TrainConfig
    """How long and how large."""
    optim: OptimConfig = OptimConfig()
    layout: LayoutConfig = LayoutConfig()


def batches_divide(job: Job) -> list[Problem]:
    if job.train.global_batch % job.train.micro_batch == 0:
        return []
    return [Problem("train.micro_batch", "it does not divide train.global_batch", "Write train.micro_batch = 1.")]


def layout_fits_seed(job: Job) -> list[Problem]:
    return [Problem("layout.data", "it is 3 and the seed is 3")] if job.layout.data == job.run.seed == 3 else []
