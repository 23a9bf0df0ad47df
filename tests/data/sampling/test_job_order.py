"""The table ``[data]`` decides the order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from closeranks.core.seeds import derive_seed
from closeranks.data.config import MixtureConfig, TextConfig
from closeranks.data.sampling.job_order import OrderChange, order_change, order_of
from closeranks.data.sampling.mixture_order import MixtureOrder
from closeranks.data.sampling.order import BlockOrder, FullOrder, SampleOrder, SequentialOrder


@dataclass(frozen=True)
class Stored:
    size: int
    block: int = 0
    parts: tuple[Stored, ...] = ()

    def __len__(self) -> int:
        return self.size


@pytest.mark.parametrize(
    ("table", "block", "expected"),
    [
        ({}, 7, FullOrder(50, 3)),
        ({"shuffle": "none"}, 7, SequentialOrder(50)),
        ({"shuffle": "blocks"}, 7, BlockOrder(50, 3, 7, 16)),
        ({"shuffle": "blocks"}, 0, BlockOrder(50, 3, 1024, 16)),
        ({"shuffle": "blocks", "shuffle_block": 5, "shuffle_window": 2}, 7, BlockOrder(50, 3, 5, 2)),
    ],
)
def test_one_source(table: dict[str, object], block: int, expected: object) -> None:
    assert order_of(TextConfig.model_validate(table), Stored(50, block), seed=3) == expected


def mixture(weights: dict[str, float], **table: object) -> MixtureConfig:
    parts = {name: {"weight": weight, "data": {"name": "text", "shuffle": "none"}} for name, weight in weights.items()}
    return MixtureConfig.model_validate({"name": "mixture", "parts": parts, **table})


def test_a_mixture_says_once_how_all_of_its_parts_are_shuffled() -> None:
    source = Stored(30, parts=(Stored(10, 4), Stored(20)))
    order = order_of(mixture({"web": 3.0, "code": 1.0}, shuffle="blocks", shuffle_window=2), source, seed=3)
    web, code = derive_seed(3, "part", "web"), derive_seed(3, "part", "code")
    assert order == MixtureOrder((BlockOrder(10, web, 4, 2), BlockOrder(20, code, 1024, 2)), (3.0, 1.0))


def test_a_part_keeps_its_order_when_others_come() -> None:
    two = order_of(mixture({"a": 1.0, "b": 1.0}), Stored(15, parts=(Stored(10), Stored(5))), seed=1)
    three = order_of(mixture({"c": 5.0, "a": 2.0, "b": 1.0}), Stored(22, parts=(Stored(7), Stored(10), Stored(5))), 1)

    def of_a(order: object, first: int) -> list[int]:
        samples = order.between(0, 400)  # type: ignore[attr-defined]
        return [int(one) - first for one in samples if first <= one < first + 10]

    assert of_a(two, 0)[:90] == of_a(three, 7)[:90]


def test_parts_are_shuffled_apart() -> None:
    order = order_of(mixture({"a": 1.0, "b": 1.0}), Stored(200, parts=(Stored(100), Stored(100))), seed=1)
    samples = order.between(0, 200)
    first, second = samples[samples < 100], samples[samples >= 100] - 100
    assert np.mean(first == second) < 0.1


def test_the_parts_must_be_those_of_the_table() -> None:
    with pytest.raises(ValueError, match="zip"):
        order_of(mixture({"a": 1.0, "b": 1.0}), Stored(15, parts=(Stored(10),)), seed=1)


BLOCKS = BlockOrder(50, 3, 7, 16)
MIXTURE = MixtureOrder((FullOrder(10, 3), FullOrder(20, 4)), (3.0, 1.0))


@pytest.mark.parametrize(
    ("saved", "here", "told"),
    [
        (FullOrder(50, 3), BLOCKS, OrderChange("data.shuffle", "data.shuffle", "'full'", "'blocks'")),
        (BLOCKS, SequentialOrder(50), OrderChange("data.shuffle", "data.shuffle", "'blocks'", "'none'")),
        (BLOCKS, BlockOrder(50, 3, 8, 16), OrderChange("data.shuffle_block", "data.shuffle_block", "7", "8")),
        (BLOCKS, BlockOrder(50, 3, 7, 4), OrderChange("data.shuffle_window", "data.shuffle_window", "16", "4")),
    ],
)
def test_a_change_of_order_is_told_by_the_words_of_the_job(
    saved: SampleOrder, here: SampleOrder, told: OrderChange
) -> None:
    assert order_change(saved.signature, here.signature) == told


def test_another_mixture_is_told_as_one() -> None:
    other = MixtureOrder(MIXTURE.parts, (2.0, 1.0))
    assert order_change(MIXTURE.signature, other.signature).name == "mixture"
    assert order_change(MIXTURE.signature, BLOCKS.signature).name == "mixture"
