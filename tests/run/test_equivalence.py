"""Every number of workers trains the same model: losses, gradients and weights against the single process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks.testing import run_world
from tests.run.trajectories import Trajectory, alone, largest_difference, relative, trajectory

pytestmark = pytest.mark.world

DROPOUT = {"dropout": 0.2}
LAYOUTS = {
    "even": {"global_batch": 12},
    "uneven": {"global_batch": 7},
    "accumulated": {"global_batch": 12, "micro_batch": 5},
}


def compare(results: list[Trajectory], expected: Trajectory, tolerance: float, weights: float) -> None:
    for result in results:
        assert relative(result.losses, expected.losses) < tolerance
        assert relative(result.norms, expected.norms) < tolerance
        assert largest_difference(result.gradients, expected.gradients) < tolerance
        assert largest_difference(result.weights, expected.weights) < weights


@pytest.mark.parametrize("batches", LAYOUTS)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_float64_equals_one_process(tmp_path: Path, size: int, batches: str) -> None:
    if batches == "accumulated" and size == 4:
        size = 3  # five samples a micro-batch make three micro-batches: no work for a fourth rank
    changes = {"model": {**DROPOUT}, "train": {"precision": "float64", **LAYOUTS[batches]}}
    expected = alone(tmp_path / "one", changes)
    results = run_world(trajectory, size, tmp_path / "many", changes)
    compare(results, expected, 1e-9, 1e-9)
    assert expected.losses[-1] < expected.losses[0]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_float32_equals_one_process_to_rounding(tmp_path: Path, size: int) -> None:
    changes = {"model": {**DROPOUT}}
    expected = alone(tmp_path / "one", changes)
    # Adam divides tiny gradients by their own size, so rounding grows in weights: losses and gradients are the proof.
    compare(run_world(trajectory, size, tmp_path / "many", changes), expected, 1e-5, 1e-2)


def test_dropout_is_keyed_by_micro_batch_not_by_process(tmp_path: Path) -> None:
    """One process with eight micro-batches draws the masks that eight processes draw; another seed does not."""
    changes: dict[str, Any] = {
        "model": {"dropout": 0.5},
        "train": {"precision": "float64", "global_batch": 8, "micro_batch": 1, "steps": 3},
    }
    expected = alone(tmp_path / "one", changes)
    results = run_world(trajectory, 8, tmp_path / "eight", changes, timeout_s=300)
    compare(results, expected, 1e-9, 1e-9)
    other = alone(tmp_path / "control", {**changes, "model": {"dropout": 0.4}})
    assert relative(other.losses, expected.losses) > 1e-4


def test_the_last_step_of_an_epoch_is_exact_when_it_is_short(tmp_path: Path) -> None:
    """200 pairs in batches of 48: four full steps and one of eight samples, less than one for some ranks."""
    changes: dict[str, Any] = {
        "model": {"name": "pairs"},
        "data": {"name": "pairs", "num_samples": 200},
        "train": {"steps": None, "epochs": 1.0, "precision": "float64", "global_batch": 48, "micro_batch": 6},
    }
    expected = alone(tmp_path / "one", changes)
    assert len(expected.losses) == 5
    compare(run_world(trajectory, 3, tmp_path / "three", changes), expected, 1e-9, 1e-9)


def test_batch_norm_does_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    """Weights, gradients and the running statistics too."""
    changes: dict[str, Any] = {
        "model": {"name": "digits", "dropout": 0.1},
        "data": {"name": "digits"},
        "train": {"precision": "float64", "global_batch": 24, "micro_batch": 4, "steps": 4},
    }
    expected = alone(tmp_path / "one", changes)
    results = run_world(trajectory, 3, tmp_path / "three", changes)
    compare(results, expected, 1e-9, 1e-8)
    assert any("running_mean" in name for name in expected.weights)
    assert results[0].eval_loss == pytest.approx(expected.eval_loss, rel=1e-9)


def test_bf16_and_fp16_stay_close_to_one_process(tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        changes = {"train": {"precision": precision, "steps": 3}}
        expected = alone(tmp_path / f"one-{precision}", changes)
        for result in run_world(trajectory, 2, tmp_path / f"two-{precision}", changes):
            assert relative(result.losses, expected.losses) < 2e-3
            assert result.taken == expected.taken
            assert result.taken[-1]


def test_tied_embeddings_and_frozen_parameters(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model": {"tied": True},
        "train": {"precision": "float64"},
        "optim": {"groups": [{"pattern": "model.layers.0.*", "frozen": True}]},
    }
    expected = alone(tmp_path / "one", changes)
    results = run_world(trajectory, 3, tmp_path / "three", changes)
    compare(results, expected, 1e-9, 1e-9)
    frozen = [name for name in expected.weights if name.startswith("model.layers.0.")]
    assert frozen
    assert not any(name in expected.gradients for name in frozen)
    assert torch.equal(expected.weights["model.embed_tokens.weight"], expected.weights["lm_head.weight"])


def test_fp16_overflow_skips_on_all_ranks_together_and_recovers(tmp_path: Path) -> None:
    """A scale far too large: every rank skips the same steps, the scale halves, and learning goes on."""
    changes: dict[str, Any] = {
        "train": {"precision": "fp16", "steps": 6},
        "optim": {"loss_scale": {"init": 2.0**18}},
        "model": {},
    }
    results = run_world(trajectory, 3, tmp_path / "three", changes)
    assert len({tuple(result.taken) for result in results}) == 1
    taken, scales = results[0].taken, results[0].scales
    assert not taken[0]
    assert taken[-1]
    for before, after, was_taken in zip(scales, scales[1:], taken, strict=False):
        assert after == (before if was_taken else before / 2)
    for name, tensor in results[0].weights.items():
        assert torch.equal(tensor, results[2].weights[name]), name
