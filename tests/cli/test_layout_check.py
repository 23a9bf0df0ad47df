"""``closeranks layout check``: the proof as a person asks for it, equal and not equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.commands import ROOT, TINY, closeranks

pytestmark = pytest.mark.world

SMALL = ["model.num_layers=2", "model.dim=64", "data.max_bytes=20000", "train.global_batch=6"]

OWN = """
[model]
name = "tests.run.own_models:forgetful"
loss = "tests.run.own_models:loss"
tensor = [
  {{ pattern = "blocks.*.up.weight", dim = 0 }},
  {{ pattern = "blocks.*.down.weight", dim = 1 }},
]
args = {{ dropout = {dropout} }}

[data]
name = "tests.run.own_models:dataset"

[train]
steps = 100
global_batch = 8
micro_batch = 3

[optim]
lr = 1e-2
"""


def test_a_layout_that_trains_the_same_model(tmp_path: Path) -> None:
    done = closeranks("layout", "check", TINY, "data=2 zero=3 pipeline=2", "--steps", 2, *SMALL, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "float64: 2 steps, one process" in done.out
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.startswith("float") and ":" not in line}
    assert "within 1e-09" in rows["float64"]
    assert "within 1e-05" in rows["float32"]
    assert "data=2 zero=3 pipeline=2 trains the same model as one process." in done.out
    assert done.left_behind == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "code"), [pytest.param(0.0, 0, marks=pytest.mark.slow), (0.5, 1)])
def test_a_model_of_the_users_own_that_differs_is_found_out(tmp_path: Path, dropout: float, code: int) -> None:
    """Dropout within a split layer draws other masks than one process: nothing hangs, and the check says so."""
    (tmp_path / "own.toml").write_text(OWN.format(dropout=dropout))
    done = closeranks(
        *("layout", "check", "own.toml", "tensor=2", "--precision", "float64"),
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.code == code, done.err
    assert "Traceback" not in done.err
    if code:
        assert "DIFFERENT" in done.out
        assert (
            "tensor=2 does not train the same model in float64: the first to differ is the loss of step 1" in done.err
        )


def test_a_layout_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = closeranks("layout", "check", TINY, "tensor=3", cwd=tmp_path)
    assert done.code == 2
    assert "The nearest legal layout is" in done.err
    assert "steps" not in done.out
