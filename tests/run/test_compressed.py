"""Gradients that travel compressed: what they left behind survives kills, checkpoints and other layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from closeranks import Hook, Session
from closeranks.core.errors import ConfigError
from closeranks.core.events import Compressed, RunStarted
from closeranks.core.pieces import narrow_to_piece
from closeranks.run.job.job import load_job
from tests.run.generations import TABLES, Case, assert_same, events, losses, run, run_and_die, state
from tests.run.saved import tensors
from tests.sync.compress.names import COMPRESSORS as NAMES

pytestmark = pytest.mark.world

SLOW = pytest.mark.slow


def compress(name: str, **more: Any) -> dict[str, dict[str, Any]]:
    warmup = {"warmup": 2} if name == "onebit" else {}
    return {"sync": {"bucket_mib": 0.02, "compress": {"name": name, "ratio": 0.05, "rank": 2, **warmup, **more}}}


def case(folder: Path, name: str, layout: str = "data=3", **more: Any) -> Case:
    return Case(folder, layout=layout, steps=6, tables=compress(name, **more))


KILLS = [
    ("int8", "data=3"),
    ("topk", "data=3 zero=3"),
    *(pytest.param(name, "data=3", marks=SLOW) for name in NAMES if name != "int8"),
    *(pytest.param(name, "data=3 zero=1", marks=SLOW) for name in NAMES),
    *(pytest.param(name, "data=3 zero=3", marks=SLOW) for name in NAMES if name != "topk"),
    *(pytest.param(name, "data=4 zero=2 shard=2", marks=SLOW) for name in ("int8", "powersgd", "onebit")),
    *(pytest.param(name, "data=4 zero=3 shard=2", marks=SLOW) for name in ("int8", "powersgd", "onebit")),
    *(pytest.param(name, "data=2 tensor=2", marks=SLOW) for name in ("topk", "powersgd")),
    *(pytest.param(name, "data=2 pipeline=2", marks=SLOW) for name in ("topk", "powersgd")),
]


@pytest.mark.parametrize(("name", "layout"), KILLS)
def test_after_a_kill_the_run_is_bit_for_bit_the_one_that_never_failed(tmp_path: Path, name: str, layout: str) -> None:
    through = case(tmp_path / "through", name, layout)
    run(through)
    killed = replace(case(tmp_path / "killed", name, layout), deaths=((1, "step:4"),))
    run_and_die(killed)
    run(replace(killed, generation=1, deaths=()))
    assert_same(killed, through)
    assert any(key.startswith("sync/residual/") and one.any() for key, one in state(through, 1).items())


def test_without_what_was_left_behind_it_would_be_another_run(tmp_path: Path) -> None:
    """The control: the same run that forgets it diverges, so the comparison above can fail."""
    remembers, forgets = case(tmp_path / "a", "topk"), case(tmp_path / "b", "topk", feedback=False)
    run(remembers)
    run(forgets)
    assert losses(remembers)[1][0] == losses(forgets)[1][0]
    assert losses(remembers)[4][0] != losses(forgets)[4][0]


def resumed(folder: Path, name: str, before: str, after: str) -> tuple[Case, Case]:
    """Three steps under one layout, and three more under another, from what the first saved."""
    first = replace(case(folder / "first", name, before), steps=3)
    run(first)
    second = case(folder / "second", name, after)
    second.tables["checkpoint"] = {"every": 0, "resume": str(first.folder / "run")}
    run(replace(second, hooks=(Beginning,)))
    return first, second


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("topk", "data=2"),
        *(pytest.param(name, "data=3", marks=SLOW) for name in NAMES),
        *(pytest.param(name, "data=3 zero=3", marks=SLOW) for name in NAMES),
        pytest.param("powersgd", "data=3 zero=1", marks=SLOW),
        pytest.param("int8", "data=4 zero=1 shard=2", marks=SLOW),
    ],
)
def test_a_checkpoint_brings_it_back(tmp_path: Path, name: str, layout: str) -> None:
    through = case(tmp_path / "through", name, layout)
    run(through)
    _, second = resumed(tmp_path, name, layout, layout)
    assert {step: losses(through)[step] for step in (4, 5, 6)} == losses(second)
    for rank in range(second.size):
        one, two = state(through, rank), state(second, rank)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("topk", "data=3", "data=2 zero=3"),
        pytest.param("int8", "data=2 zero=3", "data=3", marks=SLOW),
        pytest.param("powersgd", "data=3 zero=1", "data=2", marks=SLOW),
        pytest.param("topk", "data=4 zero=3 shard=2", "data=3 zero=2", marks=SLOW),
        pytest.param("onebit", "data=2", "data=4", marks=SLOW),
        pytest.param("topk", "data=2 tensor=2", "data=2 pipeline=2", marks=SLOW),
    ],
)
def test_other_layouts_owe_the_same(tmp_path: Path, name: str, before: str, after: str) -> None:
    """What is owed on each parameter, over all ranks, is the same after it was dealt out to others. Norms travel
    exactly on the tensor axis: nothing is owed on them before, and nothing after."""
    first, second = resumed(tmp_path, name, before, after)
    owed = owed_in(first.folder / "run")
    taken = dealt_out(second)
    assert owed.keys() <= taken.keys()
    assert owed.keys() == taken.keys() or "tensor" in before
    assert any(one.any() for one in owed.values())
    assert not any(one.any() for parameter, one in taken.items() if parameter not in owed)
    for parameter, total in owed.items():
        torch.testing.assert_close(taken[parameter], total, rtol=1e-5, atol=1e-6)


def dealt_out(case: Case) -> dict[str, torch.Tensor]:
    """As a run held it when it began."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(case.size):
        for kind, piece, tensor in torch.load(case.folder / f"begun-{rank}.pt", weights_only=False):
            if kind in ("residual", "owed"):
                name = piece.name.partition("/")[2]
                whole = total.setdefault(name, torch.zeros(piece.shape[1:], dtype=torch.float64))
                row = replace(piece, shape=(1, *piece.shape[1:]), start=(0, *piece.start[1:]))
                index = narrow_to_piece(torch.arange(whole.numel()).view(1, *whole.shape), row).reshape(-1)
                whole.view(-1)[index] += tensor.reshape(-1).double()
    return total


class Beginning(Hook):
    """Writes down what is owed as a run begins."""

    def __init__(self, case: Case, rank: int) -> None:
        self._path = case.folder / f"begun-{rank}.pt"

    def on_start(self, session: Session) -> None:
        kept = [(one.kind, one.piece, one.tensor.clone()) for one in session.engine.reducer.error_feedback()]
        torch.save(kept, self._path)


def owed_in(folder: Path) -> dict[str, torch.Tensor]:
    """By parameter, the sum over ranks of what is not sent yet."""
    total: dict[str, torch.Tensor] = {}
    for key, tensor in tensors(folder, "sync").items():
        kind, _, name = key.partition("/")
        if kind in ("residual", "owed"):
            total[name] = total.get(name, 0) + tensor.double().sum(0)
    return total


def test_what_is_lost_is_measured_and_said(tmp_path: Path) -> None:
    one = case(tmp_path, "int8", "data=2", measure_every=2)
    run(one)
    told = events(one, Compressed)
    assert [event.step for event in told] == [1, 3, 5]
    assert all(1e-4 < event.relative_error < 0.1 and event.cosine > 0.99 for event in told)
    assert events(one, RunStarted)[0].sync == "gradients are sent in 8 bits, with error feedback"


def test_warm_up_is_the_plain_run(tmp_path: Path) -> None:
    """And for onebit the second moments stay as they are from then on."""
    plain = Case(tmp_path / "plain", layout="data=2", steps=3, tables=compress("none"))
    run(plain)
    warm = replace(case(tmp_path / "warm", "onebit", "data=2"), steps=6)
    run(warm)
    for step in (1, 2):
        assert losses(warm)[step][0] == pytest.approx(losses(plain)[step][0], rel=1e-6)
    assert all(math.isfinite(loss) for loss, _ in losses(warm).values())
    key = next(key for key in state(warm, 0) if key.endswith("layers.0.mlp.up_proj.weight/step"))
    assert state(warm, 0)[key].item() == 2


def refused(**tables: Any) -> str:
    merged = {**TABLES, **{name: {**TABLES.get(name, {}), **table} for name, table in tables.items()}}
    merged["train"] = {"steps": 10, **merged["train"]}
    with pytest.raises(ConfigError) as caught:
        load_job(None, extra=merged)
    return str(caught.value)


def test_what_cannot_be_compressed_is_refused() -> None:
    topk = {"compress": {"name": "topk"}}
    assert "loss scale" in refused(sync=topk, train={"precision": "fp16"})
    assert "layout.zero = 2 or less" in refused(sync=topk, layout={"zero": 3, "tensor": 2, "data": 1})
    assert "nothing would be compressed" in refused(sync={"compress": {"name": "topk", "warmup": 10}})
    assert "no second moments" in refused(sync={"compress": {"name": "onebit", "warmup": 0}})
    assert "topk" in refused(sync={"compress": {"name": "topkk"}}), "did you mean"


def apart(folder: Path, name: str, layout: str, **local: Any) -> Case:
    """Local SGD replicas with two outer steps in six steps; what they tell each other is compressed."""
    one = case(folder, name, layout, measure_every=1)
    one.tables["sync"]["local"] = {"every": 3, **local}
    return one


APART = [
    ("topk", "data=2", {}),
    pytest.param("int8", "data=3", {}, marks=SLOW),
    pytest.param("powersgd", "data=4 zero=3 shard=2", {}, marks=SLOW),
    pytest.param("bf16", "data=2 tensor=2", {}, marks=SLOW),
    pytest.param("topk", "data=2", {"fragments": 3}, marks=SLOW),
]


@pytest.mark.parametrize(("name", "layout", "local"), APART)
def test_what_replicas_tell_each_other_is_compressed_and_recovered(
    tmp_path: Path, name: str, layout: str, local: dict[str, Any]
) -> None:
    through = apart(tmp_path / "through", name, layout, **local)
    run(through)
    killed = replace(apart(tmp_path / "killed", name, layout, **local), deaths=((1, "step:6"),))
    run_and_die(killed)
    run(replace(killed, generation=1, deaths=()))
    assert_same(killed, through)
    assert any(key.startswith("sync/outer/residual/") and one.any() for key, one in state(through, 1).items())
    told = [event.step for event in events(through, Compressed)]
    assert told[-1] == 6
    assert 3 in told


def test_replicas_inside_a_replica_are_summed_though_only_meetings_are_compressed(tmp_path: Path) -> None:
    """One replica meets itself, so nothing is compressed at all: the same run, bit for bit."""
    layout = "data=4 zero=3 shard=2"
    found = []
    for name in ("none", "int8"):
        one = apart(tmp_path / name, name, layout, replicas=1)
        run(one)
        found.append(losses(one))
    assert found[0] == found[1]


@SLOW
@pytest.mark.parametrize("name", ["int8", "powersgd"])
def test_tied_ends_of_a_sharded_pipeline_are_saved_once_and_stay_alike(tmp_path: Path, name: str) -> None:
    one = case(tmp_path / name, name, "data=2 zero=3 pipeline=2")
    one.tables["model"] = {**TABLES["model"], "tied": True}
    run(one)
    assert list((one.folder / "run").rglob("manifest.json")), "it could be saved"
