"""A script of ten lines under plain ``python``: what it says, in which order, and what is there when it has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.world

SCRIPT = """
import sys, closeranks
train = closeranks.train
print("torch is loaded:", "torch" in sys.modules, flush=True)

def make():
    import torch
    return torch.nn.Linear(4, 1)

def loss(model, batch):
    return model(batch["x"]).square().mean()

class Data:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        import torch
        return torch.full((4,), float(index))

result = train(make, Data(), loss, train={"steps": 3, "global_batch": 8}, run={"folder": "run"})
print("result:", result.steps)
"""


def test_something_is_said_before_anything_heavy_and_the_result_after_the_report(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["torch is loaded: False", "closeranks: importing PyTorch's distributed modules ..."]
    assert lines[2].startswith("5 parameters on 1 worker")
    assert lines[-2:] == ["report: run/report.md", "result: 3"]
    assert (tmp_path / "run" / "curve.png").exists(), "drawn before the interpreter has ended"
    assert "](curve.png)" in (tmp_path / "run" / "report.md").read_text()
