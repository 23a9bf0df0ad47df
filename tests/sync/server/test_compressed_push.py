"""Compressed pushes: servers add what workers encoded, workers keep what was lost, fewer bytes are sent."""

from __future__ import annotations

import pytest
import torch

from closeranks.sync.compress.build import CODECS
from closeranks.sync.config import CompressConfig
from closeranks.testing import run_world
from tests.sync.server.driven import RATIO, Seen, drive

pytestmark = pytest.mark.world
NUM_SERVERS, NUM_WORKERS = 2, 3
NAMES = ("topk", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bf16", "fp16", "int8", "onebit")))


def driven(name: str, kind: str = "sync") -> list[Seen]:
    """Two steps: the first is pushed exactly, so the gradients of the second are those of an exact run."""
    return run_world(drive, NUM_WORKERS + NUM_SERVERS, kind, NUM_SERVERS, 2, 0, 1, 0, name)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sent_and_what_is_kept_are_the_gradient(name: str) -> None:
    exact, found, codec = driven("none"), driven(name), CODECS[name](CompressConfig(ratio=RATIO))
    for one, other in zip(exact[:NUM_WORKERS], found[:NUM_WORKERS], strict=True):
        first, second = other.pushed_bytes
        assert one.pushed_bytes == [first, first], "the warm-up is exact"
        shares = [push.numel() // NUM_SERVERS for push in other.pushes]
        assert second == NUM_SERVERS * sum(map(codec.num_bytes, shares)) < first
        kept = sum(residual.sum().item() for residual in other.residuals)
        sent = sum(push.sum().item() for push in other.pushes)
        assert kept != 0.0
        assert kept + sent == pytest.approx(sum(push.sum().item() for push in one.pushes), rel=1e-9)
        lost = sum(
            (one_push - push).square().sum().item() for one_push, push in zip(one.pushes, other.pushes, strict=True)
        )
        assert lost == pytest.approx(sum(residual.square().sum().item() for residual in other.residuals), rel=1e-9)
    for bucket in range(len(found[0].pushes)):
        summed = torch.cat([server.sums[bucket] for server in found[NUM_WORKERS:]])
        pushes = [worker.pushes[bucket] for worker in found[:NUM_WORKERS]]
        torch.testing.assert_close(summed, pushes[0] + pushes[1] + pushes[2], rtol=0.0, atol=0.0)
    assert any(not torch.equal(found[0].weights[key], weight) for key, weight in exact[0].weights.items())
