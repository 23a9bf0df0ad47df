"""A dataset whose samples have unequal lengths is trained on with a collate function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks import Result
from closeranks.core.errors import DataError
from closeranks.core.events import RunStarted, StepDone
from tests.run.small import of_kind, train

pytestmark = pytest.mark.usefixtures("alone")


class Sequences:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(1 + index % 7, 4, generator=draw), torch.tensor(index % 2)


def pad(samples: list[Any]) -> dict[str, Tensor]:
    lengths = torch.tensor([len(x) for x, _ in samples])
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return {"x": x.sum(1) / lengths[:, None], "y": torch.stack([y for _, y in samples])}


def go(folder: Path, workers: int, collate: Any = pad) -> Result:
    beside = {"collate": collate, "eval_data": Sequences()}
    return train(folder, data=Sequences(), train={"global_batch": 16}, loading={"workers": workers}, **beside)


def test_it_trains_and_is_judged_with_a_collate_function(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"do not stack into one micro-batch of 4: 'x' has shapes .*Give collate="):
        go(tmp_path / "stacked", 0, None)
    result = go(tmp_path / "padded", 0)
    assert result.eval is not None
    assert result.eval.weight == 32
    (started,) = of_kind(tmp_path / "padded", RunStarted)
    assert (started.global_batch, started.micro_batch) == (16, 4)


@pytest.mark.world
def test_it_is_collated_in_loader_processes_too(tmp_path: Path) -> None:
    go(tmp_path / "thread", 0)
    go(tmp_path / "process", 1)
    losses = [[done.loss for done in of_kind(tmp_path / name, StepDone)] for name in ("thread", "process")]
    assert losses[0] == losses[1]
