"""The noise scale of a run, against gradients that are computed here once more from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from closeranks import Loss, Session
from closeranks.core.errors import ConfigError
from closeranks.core.events import NoiseSeen, Restored, RunStarted, StepDone, Warned
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.elastic.snapshot_paths import SnapshotPaths
from closeranks.optim.noise_scale import DECAY
from closeranks.run.job.job import load_job
from closeranks.run.worker.agent_client import configure_worker
from closeranks.testing import run_world
from tests.elastic.snapshot_files import make_snapshot_files, shared_memory
from tests.run.small import of_kind, open_session

STEPS, BATCH, MICRO = 6, 16, 4
TRAIN: dict[str, Any] = {
    "steps": STEPS,
    "global_batch": BATCH,
    "micro_batch": MICRO,
    "noise_every": 1,
    "precision": "float64",
}


def weighed(model: nn.Module, batch: dict[str, torch.Tensor]) -> Loss:
    """A sum of samples that weigh 3 each: what is divided by is not their number."""
    total = nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")
    return Loss(total, 3.0 * len(batch["x"]))


def noisy() -> TensorDataset:
    """Labels that nothing explains: gradients that mostly disagree."""
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(96, 4, generator=generator), torch.randint(0, 2, (96,), generator=generator))


def open_here(folder: Path, **tables: dict[str, Any]) -> Session:
    torch.set_num_threads(1)
    tables["train"] = {**TRAIN, **tables.get("train", {})}
    return open_session(folder, loss=weighed, data=noisy(), **tables)


def go(folder: Path, tables: dict[str, dict[str, Any]]) -> list[tuple[int, float | None, int]]:
    with open_here(folder, **tables) as session:
        for step in session:
            step.run()
        rank = session.world.rank
    return [(one.step, one.noise_scale, one.batch) for one in of_kind(folder, NoiseSeen, rank)]


def alone(folder: Path, **tables: dict[str, Any]) -> list[tuple[int, float | None, int]]:
    set_world(World(launcher="testing"))
    return go(folder, tables)


def by_hand(folder: Path, first_of_ranks: tuple[int, ...]) -> list[float | None]:
    """Per step, from the gradient of each micro-batch by itself; ``first_of_ranks``: which ones are the small batch."""
    set_world(World(launcher="testing"))
    signal = spread = 0.0
    found: list[float | None] = []
    with open_here(folder, train={"noise_every": 0}) as session:
        parameters = list(session.model.parameters())
        for step in session:
            grads = []
            for batch in step:
                part = weighed(session.model, batch)  # type: ignore[arg-type]
                own = torch.autograd.grad(part.total, parameters, retain_graph=True)
                grads.append(torch.cat([g.reshape(-1) for g in own]) / 3.0)
                step.backward(part)
            small = sum(float((grads[n] / MICRO).square().sum()) for n in first_of_ranks) / len(first_of_ranks)
            big = float((torch.stack(grads).sum(0) / BATCH).square().sum())
            signal = DECAY * signal + (1 - DECAY) * (BATCH * big - MICRO * small) / (BATCH - MICRO)
            spread = DECAY * spread + (1 - DECAY) * (small - big) / (1 / MICRO - 1 / BATCH)
            found.append(spread / signal if signal > 0 and spread > 0 else None)
    return found


def assert_as_by_hand(found: list[tuple[int, float | None, int]], expected: list[float | None]) -> None:
    assert [step for step, _, _ in found] == list(range(1, STEPS + 1))
    assert {batch for _, _, batch in found} == {BATCH}
    assert [scale for _, scale, _ in found] == [
        None if one is None else pytest.approx(one, rel=1e-9) for one in expected
    ]
    assert any(scale is not None for _, scale, _ in found)


def test_one_process_compares_its_first_micro_batch_with_the_step(tmp_path: Path) -> None:
    assert_as_by_hand(alone(tmp_path / "run"), by_hand(tmp_path / "hand", (0,)))


@pytest.mark.world
@pytest.mark.parametrize(
    ("zero", "size"),
    [(0, 4), (2, 2), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((0, 2), (1, 2), (1, 4), (2, 4)))],
)
def test_data_ranks_compare_the_first_of_each(tmp_path: Path, zero: int, size: int) -> None:
    """Also where gradients leave in the very backward that is measured: with four ranks each has one micro-batch."""
    ranks = run_world(go, size, tmp_path / "run", {"layout": {"zero": zero}}, timeout_s=300)
    assert_as_by_hand(ranks[0], by_hand(tmp_path / "hand", (0, 2) if size == 2 else (0, 1, 2, 3)))
    assert all(rank == ranks[0] for rank in ranks), "all ranks hold the same bits"


def test_fp16_is_measured_without_its_loss_scale(tmp_path: Path) -> None:
    half = alone(tmp_path / "half", train={"precision": "fp16"}, optim={"loss_scale": {"init": 256.0}})
    full = alone(tmp_path / "full", train={"precision": "float32"})
    scales = [(a, b) for (_, a, _), (_, b, _) in zip(half, full, strict=True) if a is not None and b is not None]
    assert scales
    assert all(a == pytest.approx(b, rel=0.2) for a, b in scales)


def test_it_changes_nothing_of_what_is_learned(tmp_path: Path) -> None:
    alone(tmp_path / "with")
    alone(tmp_path / "without", train={"noise_every": 0})
    with_it, without = (
        [(one.loss, one.grad_norm) for one in of_kind(tmp_path / name, StepDone)] for name in ("with", "without")
    )
    assert with_it == without
    assert not of_kind(tmp_path / "without", NoiseSeen)


def test_only_every_so_many_steps(tmp_path: Path) -> None:
    assert [step for step, _, _ in alone(tmp_path, train={"noise_every": 2})] == [2, 4, 6]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    flat = {"schedule": {"name": "constant", "warmup": 0}}
    through = alone(tmp_path / "through", optim=flat)
    alone(tmp_path / "begun", train={"steps": 3}, optim=flat)
    later = alone(tmp_path / "later", optim=flat, checkpoint={"resume": str(tmp_path / "begun")})
    assert later == through[3:]


def test_a_later_generation_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From the copy in memory, as after a fault."""
    flat: dict[str, Any] = {"schedule": {"name": "constant", "warmup": 0}}
    through = alone(tmp_path / "through", optim=flat)
    kept = {"optim": flat, "elastic": {"snapshot_every": 1}, "checkpoint": {"save": False}}
    with shared_memory() as place:
        shelf = SnapshotPaths(make_snapshot_files(place, 1), 0)
        configure_worker(snapshot_paths=shelf)
        alone(tmp_path / "run", train={"steps": 3}, **kept)
        configure_worker(snapshot_paths=shelf)
        set_world(World(launcher="testing", generation=1))
        later = go(tmp_path / "run", {**kept, "checkpoint": {"save": False, "resume": "auto"}})
        configure_worker()
    assert [one.source for one in of_kind(tmp_path / "run", Restored)] == ["memory"]
    assert later == through


def test_a_run_that_did_not_measure_begins_to(tmp_path: Path) -> None:
    alone(tmp_path / "begun", train={"steps": 3, "noise_every": 0})
    later = alone(tmp_path / "later", checkpoint={"resume": str(tmp_path / "begun")})
    assert [step for step, _, _ in later] == [4, 5, 6]


@pytest.mark.parametrize("num_micro", [1, 3])
def test_a_short_last_step_is_not_measured(tmp_path: Path, num_micro: int) -> None:
    found = alone(tmp_path, train={"steps": None, "epochs": (BATCH + num_micro * MICRO) / 96})
    assert [(step, batch) for step, _, batch in found] == [(1, BATCH)]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"layout": {"zero": 3}}, "with zero = 3 no rank has them. Use data ranks"),
        ({"layout": {"tensor": 2}}, "with the tensor axis no rank has them"),
        ({"layout": {"pipeline": 2}}, "with the pipeline axis no rank has them"),
        ({"train": {"micro_batch": 8}}, "is one micro-batch: there is no smaller one"),
        ({"optim": {"scaling": "linear"}}, "Set optim.base_batch"),
    ],
)
def test_what_cannot_be_measured_is_refused(tables: dict[str, dict[str, Any]], said: str) -> None:
    base: dict[str, dict[str, Any]] = {
        "model": {"name": "llama", "preset": "tiny"},
        "data": {"name": "text"},
        "train": {"steps": 1, "global_batch": 8, "noise_every": 5},
    }
    merged = {name: {**base.get(name, {}), **tables.get(name, {})} for name in {**base, **tables}}
    with pytest.raises(ConfigError, match=said):
        load_job(None, extra=merged)


def test_a_scaled_rate_is_used_and_told(tmp_path: Path) -> None:
    flat = {"name": "constant", "warmup": 0}
    alone(tmp_path, optim={"lr": 0.01, "scaling": "sqrt", "base_batch": 4, "schedule": flat})
    (started,) = of_kind(tmp_path, RunStarted)
    assert started.rate.startswith("learning rate 0.02 = 0.01 x 2 (sqrt in 16 samples a step")
    assert {one.lr for one in of_kind(tmp_path, StepDone)} == {0.02}
    assert [one.what for one in of_kind(tmp_path, Warned) if "warmup" in one.what]
