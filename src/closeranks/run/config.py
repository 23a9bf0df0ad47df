"""What can a job say about the run itself? The tables ``[run]`` and ``[train]``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from closeranks.core.config.table import ConfigTable

_NAME_BYTES = 200
"""A file system takes 255, and a number may be added."""


def _check_name(name: str) -> str:
    """One part of a path, so that a run stays in ``runs/``."""
    if "/" in name or "\\" in name or name in (".", ".."):
        raise ValueError(f"'{name}' is a path, not a name. Set run.folder to write outside runs/")
    if len(name.encode(errors="replace")) > _NAME_BYTES or not name.isprintable():
        raise ValueError(f"a name has at most {_NAME_BYTES} bytes, all of them printable. Shorten it")
    return name


class RunConfig(ConfigTable):
    """Where a run is stored and how it is reproduced."""

    name: Annotated[str, AfterValidator(_check_name)] = ""
    """Name of the run and of its folder in runs/; empty: the job file's name."""
    folder: str = ""
    """Where everything it writes goes; empty: runs/<name>. A folder that holds an earlier run is never overwritten."""
    seed: int = Field(default=0, ge=0)
    """All randomness follows from it: initial weights, sample order, dropout."""
    deterministic: bool = False
    """Bit-identical repetition on the same layout, at some cost in speed on accelerators."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: an accelerator where there is one for each worker."""
    threads: int = Field(default=0, ge=0, le=4096)
    """CPU threads per worker; 0: the cores shared evenly."""
    wait_s: float = Field(default=0.0, ge=0)
    """How long to wait for another run that still owns the run folder or the checkpoint folder; 0: fail at once."""
    timeout_s: float = Field(default=600.0, gt=0)
    """How long a collective may wait for a slow worker before the run fails."""
    hooks: tuple[str, ...] = ()
    """Your own hooks, as package.module:Class; each is constructed without arguments."""


class TrainConfig(ConfigTable):
    """How long the model is trained, and with which batch sizes."""

    steps: int | None = Field(default=None, ge=1, le=10**12)
    """Total number of optimizer steps; set this or epochs."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the data instead of steps; the last step may then be smaller, and is weighted exactly."""
    global_batch: int = Field(default=32, ge=1)
    """Samples per optimizer step, over all workers; never changed by the number of workers."""
    micro_batch: int = Field(default=0, ge=0)
    """Samples per forward and backward, whatever the number of workers; 0: an eighth of the global batch; for data
    without a sequence length, at least a quarter of it or 16 samples, whichever is less."""
    precision: Literal["float32", "bf16", "fp16", "float64"] = "float32"
    """bf16 and fp16 are mixed precision: weights stay float32. fp16 scales the loss. float64 is for verification."""
    compile: bool = False
    """torch.compile for each block: faster steps after a slow first one."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: recompute each block's activations in backward; selective keeps the costly ones."""
    recompute_keep: tuple[Literal["attention", "matmul", "collective"], ...] = ("attention", "matmul", "collective")
    """What selective recompute keeps: results of attention, of matrix products, of collectives."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out data; 0: only at the end."""
    eval_samples: int = Field(default=0, ge=0)
    """At most this many held-out samples per evaluation; 0: all."""
    noise_every: int = Field(default=0, ge=0)
    """Steps between measurements of the gradient noise scale: how large a batch is still worthwhile; 0: never."""
    gc_every: int = Field(default=100, ge=1)
    """Steps between runs of Python's garbage collector, which is off in between."""
    patience: int = Field(default=3, ge=1)
    """The run fails after this many steps in a row with non-finite gradients."""
