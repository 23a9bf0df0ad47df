"""Datasheet peaks under the names that drivers give their devices."""

from __future__ import annotations

import pytest

from closeranks.facts.devices import datasheet_flops


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp16", 989.4),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.7),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "float64", 19.5),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "float32", 14),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_known_devices(name: str, precision: str, tera: float) -> None:
    assert datasheet_flops(name, precision) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA A10G", "bf16"),
        ("NVIDIA L40", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("NVIDIA H200", "int3"),
        ("AMD EPYC 9354", "float32"),
        ("", "bf16"),
    ],
)
def test_what_no_datasheet_says_is_not_guessed(name: str, precision: str) -> None:
    assert datasheet_flops(name, precision) is None
