"""MFU and HFU are those of an independent count of FLOPs: torch's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.events import RunStarted, StepDone
from closeranks.core.protocols import Batch
from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig, LlamaConfig, ModelConfig
from closeranks.parallel.recompute import KEEP, recompute
from closeranks.telemetry.live.throughput import ThroughputMeter
from tests.models.making import materialised, tokens

PEAK, SECONDS = 1e12, 0.25
LLAMA = (LlamaConfig(preset="tiny", attention="math"), {"tokens": tokens(4, 65)}, 4 * 64)
DIGITS = (DigitsConfig(), {"image": torch.ones(32, 1, 8, 8), "label": torch.zeros(32)}, 32)


@pytest.mark.parametrize(("config", "batch", "items"), [LLAMA, DIGITS], ids=["a Llama", "a convnet"])
@pytest.mark.parametrize("mode", ["none", "full"])
def test_shares_of_the_peak(config: ModelConfig, batch: Batch, items: int, mode: str) -> None:
    spec = spec_for(config, seq_len=64)
    module = materialised(spec)
    counted = []
    for each in ("none", mode):
        recompute(module, spec.blocks, each)
        with FlopCounterMode(display=False) as counter:
            spec.loss(module, batch).total.backward()
        counted.append(counter.get_total_flops())
    added = spec.recompute_flops_per_item(mode, KEEP) if hasattr(spec, "recompute_flops_per_item") else 0.0
    started = RunStarted(
        last_step=9,
        flops_per_item=spec.flops_per_item,
        hardware_flops_per_item=spec.flops_per_item + added,
        datasheet_flops=PEAK,
        measured_flops=PEAK / 2,
    )
    meter = ThroughputMeter(started)
    for number in (1, 2, 3):
        reading = meter.observe(StepDone(number, items=items, seconds=SECONDS))
    assert reading.mfu == pytest.approx(counted[0] / SECONDS / PEAK, rel=0.02)
    assert reading.peak_share == pytest.approx(2 * counted[0] / SECONDS / PEAK, rel=0.02)
    assert (reading.hfu is None) == (counted[1] == counted[0])
    if reading.hfu is not None:
        assert reading.hfu == pytest.approx(counted[1] / SECONDS / PEAK, rel=0.02)
