"""Sampling: seeded, windowed, and true to temperature and top_k."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from closeranks.core.errors import UserError
from closeranks.models.generate import draw, generate

from .making import small_llama


class Counting(nn.Module):
    """Always wants the successor of the last token, and remembers how much it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.lengths: list[int] = []
        self.modes: list[bool] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.lengths.append(tokens.shape[1])
        self.modes.append(self.training)
        return 9.0 * nn.functional.one_hot((tokens + 1) % 50, 50).float() + self.weight


def test_greedy_follows_the_model_within_its_window() -> None:
    module = Counting()
    found = list(generate(module, [47, 48], num_tokens=5, max_len=4, temperature=0.0, top_k=0, seed=0))
    assert found == [49, 0, 1, 2, 3]
    assert module.lengths == [2, 3, 4, 4, 4]
    assert module.modes == [False] * 5
    assert module.training


def test_the_same_seed_writes_the_same_text() -> None:
    _, module = small_llama(torch.float32)

    def written(seed: int) -> list[int]:
        return list(generate(module, [1, 2], num_tokens=30, max_len=16, temperature=1.0, top_k=20, seed=seed))

    assert written(1) == written(1) != written(2)
    assert len(written(1)) == 30


def test_draw_respects_top_k_and_temperature() -> None:
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0])
    generator = torch.Generator().manual_seed(0)
    assert {draw(logits, 5.0, 2, generator) for _ in range(200)} == {1, 2}
    assert {draw(logits, 5.0, 0, generator) for _ in range(400)} == {0, 1, 2, 3}
    assert {draw(logits, 0.01, 0, generator) for _ in range(50)} == {1}
    assert draw(logits, 0.0, 3, generator) == 1
    shares = torch.tensor([draw(logits, 1.0, 0, generator) for _ in range(4000)]).bincount(minlength=4) / 4000
    torch.testing.assert_close(shares, logits.softmax(dim=0), rtol=0, atol=0.03)


@pytest.mark.parametrize(
    "wrong", [{"prompt": []}, {"max_len": 0}, {"temperature": -1.0}, {"top_k": -2}], ids=lambda wrong: next(iter(wrong))
)
def test_mistakes_are_raised_at_the_call(wrong: dict[str, object]) -> None:
    arguments = {"prompt": [1], "num_tokens": 1, "max_len": 8, "temperature": 1.0, "top_k": 0, "seed": 0} | wrong
    with pytest.raises(UserError):
        generate(Counting(), **arguments)  # type: ignore[arg-type]
