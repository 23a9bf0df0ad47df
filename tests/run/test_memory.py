"""Out of memory: the person is told what took it and what to change, not where torch was."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from closeranks.core.errors import SetupError
from tests.cli.commands import FAST, TINY, closeranks
from tests.cli.test_bad_input import refused
from tests.run.small import loss, train

LIMIT = 3 << 30
PARTS = ("parameters", "gradients", "optimizer state", "activations")


@pytest.mark.slow
@pytest.mark.world
def test_a_micro_batch_that_does_not_fit(tmp_path: Path) -> None:
    """The limit is inherited by everything the command starts; a million tokens need more than it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, hard))
    try:
        sizes = ["train.global_batch=8192", "train.micro_batch=4096", "data.seq_len=256", "run.folder=run"]
        done = closeranks("train", TINY, "-n", 2, *FAST, *sizes, cwd=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    refused(done, "ran out of memory", "halve train.micro_batch", "MiB more was requested", *PARTS)
    assert "DefaultCPUAllocator" not in done.err + done.out
    assert done.err.count("ran out of memory") == 1, "told once, by one rank"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        MemoryError("Unable to allocate 9.3 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_kind_of_complaint_is_put_into_words(tmp_path: Path, error: Exception) -> None:
    def hungry(model: nn.Module, batch: dict[str, Any]) -> Any:
        raise error

    with pytest.raises(SetupError, match="ran out of memory") as told:
        train(tmp_path, loss=hungry)
    assert told.value.__cause__ is error
    for part in PARTS:
        assert part in str(told.value)
    assert "train.micro_batch" in str(told.value)


@pytest.mark.usefixtures("alone")
def test_another_error_of_torch_is_not_taken_for_it(tmp_path: Path) -> None:
    def wrong(model: nn.Module, batch: dict[str, Any]) -> Any:
        return loss(model, {**batch, "x": batch["x"][:, :3]})

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(tmp_path, loss=wrong)
