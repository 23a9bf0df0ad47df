"""A run's newest checkpoint as whole tensors, and one written from such: for tests that look inside or spoil one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.save.save_task import SaveSettings
from closeranks.checkpoint.save.saver import CheckpointSaver
from closeranks.core.pieces import Piece

SECTIONS = ("model", "optimizer", "other")


def tensors(place: Path | str, section: str) -> dict[str, Tensor]:
    """Everything of a section, whole."""
    reader = open_newest(str(place))
    return {key: reader.read(section, key, Piece.whole(key, shape)) for key, shape in reader.shapes(section).items()}


def tree(place: Path | str) -> Mapping[str, Any]:
    return open_newest(str(place)).tree


def write(
    place: Path | str, sections: Mapping[str, Mapping[str, Tensor]], values: Mapping[str, Any], step: int
) -> None:
    """One checkpoint, by one process."""
    config = CheckpointConfig()
    saver = CheckpointSaver(0, 1, "test", 9, "data=1", SaveSettings.from_config(config, str(place)), config)
    items = [
        StateTensor(section, key, Piece.whole(key, tuple(tensor.shape)), tensor)
        for section, found in sections.items()
        for key, tensor in found.items()
    ]
    reports = saver.save_now(step, items, values, None)
    saver.close()
    assert any(report.kind == "committed" for report in reports), reports


def spoil_optimizer(run: Path) -> None:
    """A later checkpoint of the same step beside the run's own, whose optimizer remembers nothing."""
    found = {section: tensors(run, section) for section in SECTIONS}
    found["optimizer"] = {key: torch.zeros_like(tensor) for key, tensor in found["optimizer"].items()}
    values = tree(run)
    write(run / "checkpoints", found, values, values["progress"]["step"])
