"""What can a job say about how gradients travel? The table ``[sync]``."""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator

from closeranks.core.config.table import ConfigTable

_MIB = 1 << 20
_USUAL_MIB = 25.0
"""Also what "auto" counts as where nothing was measured: in plans, and where a rank has nobody to send to."""


class BucketCaps(NamedTuple):
    bucket_bytes: int
    first_bucket_bytes: int


def _check_bucket(value: float | str) -> float | str:
    if value != "auto" and (isinstance(value, str) or value <= 0):
        raise ValueError(f'{value!r} is not a bucket size: write a number of MiB above 0, such as 25, or "auto"')
    return value


class CompressConfig(ConfigTable):
    """Gradient compression. What is not sent in one step is kept and sent with later ones."""

    name: Literal["none", "bf16", "fp16", "int8", "topk", "powersgd", "onebit"] = "none"
    """bf16 and fp16 send half of the bytes, int8 a quarter, topk only the largest values, powersgd low-rank
    factors, onebit signs."""
    ratio: float = Field(default=0.01, gt=0.0, le=1.0)
    """topk: the share of values that is sent."""
    rank: int = Field(default=4, ge=1)
    """powersgd: the rank of the factors."""
    warmup: float | None = Field(default=None, ge=0)
    """Steps before compression starts; below 1, a fraction of all steps. Unset: a tenth of them for onebit (with adamw
    the second moments are frozen then, as in 1-bit Adam), none for the others."""
    feedback: bool = True
    """Error feedback: keep what was not sent for later steps. Off: only to see its effect."""
    measure_every: int = Field(default=50, ge=0)
    """Every this many steps, also sum some values exactly, to measure the error; 0: never."""

    @field_validator("warmup")
    @classmethod
    def _whole_steps(cls, value: float | None) -> float | None:
        if value is not None and value >= 1 and not float(value).is_integer():
            raise ValueError(f"{value} is neither a number of steps nor a fraction. Write 100 or 0.1.")
        return value

    def num_warmup(self, num_steps: int) -> int:
        """In steps."""
        warmup = self.warmup if self.warmup is not None else (0.1 if self.name == "onebit" else 0.0)
        return math.ceil(warmup * num_steps) if warmup < 1 else int(warmup)


class LocalConfig(ConfigTable):
    """Local SGD, DiLoCo, streaming DiLoCo: replicas train locally between outer steps."""

    every: int = Field(default=0, ge=0)
    """Local steps of each replica between outer steps; 0: gradients are summed over all ranks in every step."""
    replicas: int = Field(default=0, ge=0)
    """How many replicas train locally. 0: data/shard of them where layout.shard is given, else one for each host where
    there are several, else as many as there are data ranks."""
    outer_lr: float = Field(default=0.7, gt=0.0)
    """Learning rate of the outer step; 1 goes from the anchor all the way to the mean of the replicas."""
    outer_momentum: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Momentum of the outer step. With 0 and outer_lr = 1 an outer step is a plain mean: local SGD."""
    nesterov: bool = True
    """Whether the outer momentum is Nesterov's."""
    fragments: int = Field(default=1, ge=1)
    """Parts of the model that are synchronized in turn, every/fragments steps apart; must divide ``every``."""
    balance: bool = False
    """Give slower replicas fewer micro-batches, by their measured time for one; changed only at outer steps."""

    @property
    def is_on(self) -> bool:
        return self.every > 0


class ServerConfig(ConfigTable):
    """Parameter servers: ranks that hold the optimizer state and compute no micro-batch."""

    count: int = Field(default=0, ge=0)
    """How many of the run's ranks are servers, the last ones; each owns a part of every bucket of parameters. Workers
    push gradients to them while backward runs, they update, and workers pull the weights. 0: there are none."""
    mode: Literal["sync", "stale", "async"] = "sync"
    """sync: every step waits for all workers. stale: a worker may be ``bound`` steps ahead of the slowest
    (stale-synchronous parallel). async: servers apply each push when it arrives (Downpour, Hogwild across hosts)."""
    bound: int = Field(default=1, ge=0)
    """stale: steps that a worker may be ahead; 0 trains as sync does. async: pushes whose answer it need not await."""
    every: int = Field(default=32, ge=1)
    """stale, async and with backup workers: steps between synchronizations of all ranks, the points of saving,
    evaluation and recovery."""
    backup: int = Field(default=0, ge=0)
    """sync: a step takes the first pushes to arrive, of all workers but this many. Later ones are dropped, and their
    samples are taken by a later step of the same epoch. Two runs never have the same bits."""
    staleness_lr: bool = False
    """stale and async: divide the learning rate of an update by 1 + its staleness in steps."""

    @property
    def is_on(self) -> bool:
        return self.count > 0

    @property
    def waits_for_all(self) -> bool:
        """Whether all ranks are at the same step: true without servers too."""
        return not self.is_on or (self.mode == "sync" and not self.backup)


class SyncConfig(ConfigTable):
    """How gradients are summed over the data ranks."""

    bucket_mib: Annotated[float | str, AfterValidator(_check_bucket)] = _USUAL_MIB
    """Gradients are reduced in buckets of this many MiB, which affects rounding. "auto": by measurement."""
    first_bucket_mib: float = Field(default=1.0, gt=0)
    """The first bucket is smaller, so that communication starts early in the backward pass."""
    overlap: bool = True
    """Overlap gradient communication with backward, and gather weights ahead; off only to measure the gain."""
    prefetch: int = Field(default=1, ge=0)
    """With zero=3: how many units ahead weights are gathered; each costs the memory of one unit. 0: only when used."""
    reduce: Literal["auto", "flat", "hierarchical"] = "auto"
    """With zero=0 on several hosts: sum over all ranks at once, or inside each host, then across, then inside. auto:
    hierarchical where every host has the same number of data ranks, and more than one."""
    compress: CompressConfig = CompressConfig()
    local: LocalConfig = LocalConfig()
    """Local SGD and DiLoCo."""
    server: ServerConfig = ServerConfig()
    """Parameter servers."""

    @property
    def gradients(self) -> CompressConfig:
        """How gradients travel in every step; with ``[sync.local]``, ``compress`` is how deltas do."""
        return CompressConfig() if self.local.is_on else self.compress

    @property
    def may_reduce_by_host(self) -> bool:
        """Whether gradients may be summed inside hosts first."""
        return self.reduce != "flat" and not self.local.is_on

    def shortest(self) -> SyncConfig:
        """The same kind of synchronisation for a run of one step on the fewest ranks."""
        return self.model_copy(update={"local": self.local.model_copy(update={"replicas": 0, "fragments": 1})})

    def bucket_caps(self, measured_mib: float = 0.0) -> BucketCaps:
        """In bytes; ``measured_mib`` is what "auto" came to. The first is then never the larger one."""
        if not isinstance(self.bucket_mib, str):
            return BucketCaps(int(self.bucket_mib * _MIB), int(self.first_bucket_mib * _MIB))
        size = measured_mib or _USUAL_MIB
        return BucketCaps(int(size * _MIB), int(min(self.first_bucket_mib, size) * _MIB))
