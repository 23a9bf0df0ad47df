"""Compressed pushes: servers add what workers encoded, workers keep what was lost, fewer bytes are sent."""

from __future__ import annotations

import pytest
import torch

from closeranks.testing import run_world
from tests.sync.server.driven import Seen, drive

pytestmark = pytest.mark.world
NUM_SERVERS, NUM_WORKERS = 2, 3
AT_MOST = {"bf16": 0.26, "fp16": 0.3, "int8": 0.2, "topk": 0.35, "onebit": 0.1}
"""Of the bytes of float64."""


def driven(name: str, kind: str = "sync") -> list[Seen]:
    """Two steps: the first is pushed exactly, so the gradients of the second are those of an exact run."""
    return run_world(drive, NUM_WORKERS + NUM_SERVERS, kind, NUM_SERVERS, 2, 0, 1, 0, name)


@pytest.mark.parametrize(
    "name", ["topk", *(pytest.param(one, marks=pytest.mark.slow) for one in AT_MOST if one != "topk")]
)
def test_what_is_sent_and_what_is_kept_are_the_gradient(name: str) -> None:
    exact, found = driven("none"), driven(name)
    for one, other in zip(exact[:NUM_WORKERS], found[:NUM_WORKERS], strict=True):
        first, second = other.pushed_bytes
        assert one.pushed_bytes == [first, first], "the warm-up is exact"
        assert 0 < second <= AT_MOST[name] * first
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
