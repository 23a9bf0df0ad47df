"""Which contenders meet in which layout, at what size, and what is asked of ours?

Invariant: all entries of a row train the same step; sizes are chosen so that it takes 100 to 300 ms on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layouts_deepspeed import DeepSpeed
from layouts_ours import Ours
from layouts_pipeline import PipelineParallel
from layouts_raw import Ddp, Fsdp2, ZeroRedundancy
from layouts_tensor import TensorParallel
from layouts_work import LayoutWork
from teams import Maker


@dataclass(frozen=True, slots=True)
class Entry:
    """A contender: how it is made, and what it is told."""

    name: str
    make: Maker
    options: tuple[Any, ...] = ()
    layout: Mapping[str, Any] = field(default_factory=dict)
    """The job's table, of a contender of ours."""
    package: str = "torch"

    @property
    def is_installed(self) -> bool:
        return find_spec(self.package) is not None


@dataclass(frozen=True, slots=True)
class Row:
    """One layout: who trains in it, at what size, and how ours should compare."""

    name: str
    entries: tuple[Entry, ...]
    baseline: str
    goals: Mapping[str, Mapping[str, float]]
    """Of each one of ours: the least ratio of its step rate to each rival's."""
    num_data_ranks: int
    num_micro: int
    """Micro-batches of a data rank and step."""
    batch: int
    preset: str = "small"
    num_layers: int = 8
    seq_len: int = 128
    num_steps: int = 4
    """Of a turn."""

    @property
    def size_in_words(self) -> str:
        return (
            f"Llama {self.preset} of {self.num_layers} blocks, {self.num_data_ranks} data ranks x {self.num_micro} "
            f"micro-batches x {self.batch} samples x {self.seq_len} tokens"
        )

    @property
    def goal_in_words(self) -> str:
        return ", ".join(
            f"{ours} at least {least} of {rival}"
            for ours, rivals in self.goals.items()
            for rival, least in rivals.items()
        )

    def work(self, entry: Entry, num_steps: int, folder: Path) -> LayoutWork:
        return LayoutWork(
            preset=self.preset,
            seq_len=self.seq_len,
            batch=self.batch,
            num_ranks=self.num_data_ranks,
            num_steps=num_steps,
            folder=folder,
            num_layers=self.num_layers,
            num_micro=self.num_micro,
            tables={"layout": entry.layout},
            name=entry.name,
        )


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row(
            "zero1",
            (
                Entry("ddp", Ddp),
                Entry("zero_redundancy", ZeroRedundancy),
                Entry("closeranks", Ours, layout={"data": 2, "zero": 1}),
                Entry("deepspeed", DeepSpeed, (1,), package="deepspeed"),
            ),
            baseline="ddp",
            goals={"closeranks": {"zero_redundancy": 1.0, "deepspeed": 1.0}},
            num_data_ranks=2,
            num_micro=2,
            batch=2,
        ),
        Row(
            "zero3",
            (
                Entry("fsdp2", Fsdp2),
                Entry("closeranks", Ours, layout={"data": 2, "zero": 3}),
                Entry("deepspeed", DeepSpeed, (3,), package="deepspeed"),
                Entry("ddp", Ddp),
            ),
            baseline="fsdp2",
            goals={"closeranks": {"fsdp2": 0.98, "deepspeed": 1.0}},
            num_data_ranks=2,
            num_micro=2,
            batch=2,
        ),
        Row(
            "tensor",
            (
                Entry("parallelize_module", TensorParallel),
                Entry("closeranks", Ours, layout={"tensor": 2}),
            ),
            baseline="parallelize_module",
            goals={"closeranks": {"parallelize_module": 0.98}},
            num_data_ranks=1,
            num_micro=1,
            batch=4,
        ),
        Row(
            "pipeline",
            (
                Entry("torch_1f1b", PipelineParallel, ("1f1b",)),
                Entry("torch_zbv", PipelineParallel, ("zbv",)),
                Entry("closeranks_1f1b", Ours, layout={"pipeline": 2, "schedule": "1f1b"}),
                Entry("closeranks_zbv", Ours, layout={"pipeline": 2, "schedule": "zbv"}),
            ),
            baseline="torch_1f1b",
            goals={"closeranks_1f1b": {"torch_1f1b": 0.98}, "closeranks_zbv": {"torch_zbv": 0.98}},
            num_data_ranks=1,
            num_micro=8,
            batch=1,
        ),
    )
}
