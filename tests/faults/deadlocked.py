"""A dataset of a user's that locks itself up at one sample, and the smallest job that learns from it."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

BAD_SAMPLE = 77
NUM_SAMPLES = 128


class Locked:
    """Its lock is taken twice and never released."""

    def __init__(self) -> None:
        self._lock: threading.Lock | None = None

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == BAD_SAMPLE:
            self._lock = threading.Lock()
            self._lock.acquire()
            self._lock.acquire()
        x = torch.full((4,), index / NUM_SAMPLES)
        return {"x": x, "y": x.sum()}


def model() -> nn.Module:
    return nn.Linear(4, 1)


def loss(module: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (module(batch["x"]).squeeze(-1) - batch["y"]).square().mean()
