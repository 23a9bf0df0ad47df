"""A loader slowed on purpose: the run's report says that steps waited, and for what."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import closeranks
from closeranks.core.protocols import Batch
from closeranks.data.timing import stage

STAGES = {"read": "reading", "fetch": "fetching", "decode": "decoding", "collate": "collating"}


class Slow:
    """A source whose batches take 200 ms in one stage, much longer than a step on a busy machine."""

    identity = "made up"

    def __init__(self, name: str) -> None:
        self._name = name

    def __len__(self) -> int:
        return 64

    def read(self, indices: np.ndarray[Any, Any]) -> Batch:
        if self._name == "read":
            time.sleep(0.2)
        elif self._name:
            with stage(self._name):
                time.sleep(0.2)
        return {"x": torch.ones(len(indices), 4)}


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return torch.as_tensor(model(batch["x"]).square().mean())


def report(source: Slow, folder: Path) -> str:
    closeranks.train(
        torch.nn.Linear(4, 1),
        source,
        loss,
        train={"steps": 8, "global_batch": 8, "micro_batch": 8},
        run={"folder": str(folder)},
        checkpoint={"save": False},
        loading={"prefetch": 1},
    )
    lines = (folder / "report.md").read_text().splitlines()
    return next(line for line in lines if "waiting for data" in line)


@pytest.mark.parametrize("name", STAGES)
def test_what_holds_the_steps_back_is_named(name: str, tmp_path: Path) -> None:
    said = report(Slow(name), tmp_path / "run")
    share = float(said.split("|")[2].split("%")[0])
    assert share > 50
    assert f"{STAGES[name]} takes longest" in said
