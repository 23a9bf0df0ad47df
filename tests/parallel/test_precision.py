from __future__ import annotations

import pytest
import torch

from closeranks.parallel.precision import Precision

CPU = torch.device("cpu")
WEIGHTS = {"float32": torch.float32, "bf16": torch.float32, "fp16": torch.float32, "float64": torch.float64}
COMPUTE = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


@pytest.mark.parametrize("name", WEIGHTS)
def test_mixed_precision_keeps_wide_weights(name: str) -> None:
    precision = Precision(name)
    assert precision.weights == WEIGHTS[name]
    assert precision.compute == COMPUTE[name]
    assert precision.scales_loss == (name == "fp16")


@pytest.mark.parametrize("name", WEIGHTS)
def test_products_run_in_the_compute_format(name: str) -> None:
    precision = Precision(name)
    weight = torch.ones(2, 2, dtype=precision.weights)
    with precision.context(CPU):
        assert (weight @ weight).dtype == precision.compute
    assert (weight @ weight).dtype == precision.weights


@pytest.mark.parametrize("name", WEIGHTS)
def test_only_floating_inputs_are_cast(name: str) -> None:
    label, text = torch.arange(3), ["a", "b", "c"]
    given = {"x": torch.ones(3, dtype=torch.float64), "half": torch.ones(3).half(), "label": label, "text": text}
    cast = Precision(name).cast(given)
    assert cast["x"].dtype == cast["half"].dtype == WEIGHTS[name]
    assert cast["label"] is label
    assert cast["text"] is text
    assert given["x"].dtype == torch.float64


def test_what_has_the_format_already_is_not_copied() -> None:
    x = torch.ones(3)
    assert Precision("bf16").cast({"x": x})["x"] is x
