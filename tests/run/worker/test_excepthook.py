"""A mistake in a script under plain ``python``: a sentence, the user's own traceback where there is one, status 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.core.errors import ModelError, UserError
from closeranks.run.worker.excepthook import UserErrorHook, user_traceback

pytestmark = pytest.mark.world

SCRIPT = """
import sys, torch, closeranks
data = [{"x": torch.randn(4), "y": torch.zeros(1)} for _ in range(64)]
def loss(model, batch):
    return undefined_name
def train(**settings):
    closeranks.train(torch.nn.Linear(4, 1), data, loss, run={"folder": "run"}, **settings)
if sys.argv[1] == "config":
    train(train={"stps": 30})
elif sys.argv[1] == "loss":
    train(train={"steps": 3, "global_batch": 8})
else:
    try:
        train(train={"stps": 30})
    except closeranks.UserError as error:
        print("caught", type(error).__name__)
    raise KeyError("not ours")
"""


def script(folder: Path, kind: str) -> subprocess.CompletedProcess[str]:
    (folder / "own.py").write_text(SCRIPT)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "own.py", kind]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_a_mistake_in_a_table_is_one_sentence(tmp_path: Path) -> None:
    done = script(tmp_path, "config")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "closeranks: 1 problem in the job:",
        "  train.stps [python]: no such key. Did you mean 'steps'?",
    ]


def test_a_bug_in_the_loss_shows_the_users_own_lines_and_the_sentence(tmp_path: Path) -> None:
    done = script(tmp_path, "loss")
    assert done.returncode == 2
    assert "[rank0]" not in done.stderr
    lines = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert 'own.py", line 5, in loss' in lines[1]
    assert not any("closeranks/run" in line for line in lines)
    assert lines[-1].startswith(
        "closeranks: the loss raised NameError: name 'undefined_name' is not defined (own.py:5)."
    )


def test_what_is_caught_is_caught_and_other_errors_are_as_ever(tmp_path: Path) -> None:
    done = script(tmp_path, "caught")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "caught ConfigError")
    assert done.stderr.splitlines()[-1] == "KeyError: 'not ours'"
    assert "closeranks: " not in done.stderr


def test_other_errors_go_to_the_hook_before() -> None:
    seen: list[BaseException] = []
    error = ValueError("bug")
    UserErrorHook(lambda kind, error, trace: seen.append(error))(ValueError, error, None)
    assert seen == [error]
    with pytest.raises(SystemExit) as leave:
        UserErrorHook(lambda kind, error, trace: seen.append(error))(UserError, UserError("mistake"), None)
    assert (leave.value.code, len(seen)) == (2, 1)


def test_causes_of_ours_have_no_traceback() -> None:
    error = ModelError("what")
    error.__cause__ = UserError("why")
    assert user_traceback(error) == ""
