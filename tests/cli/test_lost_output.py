"""A run goes on when nobody reads what it prints, and its exit status is its own; verbs that only tell end quietly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import TINY, mark, marked_processes

pytestmark = pytest.mark.world

STEPS = 30
QUICK = [
    *("model.num_layers=2", "model.dim=32", "train.global_batch=6", "train.micro_batch=3", f"train.steps={STEPS}"),
    *("train.eval_every=0", "train.eval_samples=6", "telemetry.log_every=1", "run.folder=run"),
]
LONG = [*QUICK, "train.steps=100000"]
SCRIPT = """
import torch, closeranks
data = [{"x": torch.randn(4), "y": torch.zeros(1)} for _ in range(64)]
def loss(model, batch):
    print("a user's own line", flush=True)
    return (model(batch["x"]) - batch["y"]).square().mean()
result = closeranks.train(torch.nn.Linear(4, 1), data, loss, train={"steps": 30, "global_batch": 8},
                          run={"folder": "run"}, telemetry={"log_every": 1})
assert result.steps == 30
"""


def in_shell(command: str, cwd: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """``"$@"`` in the command is what the words name."""
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command, "bash", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def is_whole(run: Path) -> bool:
    """Trained to its end, saved, reported."""
    status = json.loads((run / "status.json").read_text()) if (run / "status.json").exists() else {"state": "finished"}
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    return status["state"] == "finished" and f"step-{STEPS:08d}" in saved and (run / "report.md").exists()


TRAIN = (sys.executable, "-m", "closeranks", "train", TINY, "-n", 1, *QUICK)


@pytest.mark.parametrize(
    "command",
    ['"$@" | head -3', '"$@" >&- 2>&-', '"$@" > /dev/full 2>&1'],
    ids=["reader leaves", "closed from the start", "full disk"],
)
def test_training_goes_on_when_nobody_reads(tmp_path: Path, command: str) -> None:
    done = in_shell(command, tmp_path, *TRAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_whole(tmp_path / "run")


def test_a_failure_keeps_its_exit_status_when_nobody_reads(tmp_path: Path) -> None:
    bad = (sys.executable, "-m", "closeranks", "train", TINY, "train.steps=-1")
    assert in_shell('"$@" >&- 2>&-', tmp_path, *bad).returncode == 2
    assert in_shell('"$@" 2>&1 | true', tmp_path, *bad).returncode == 2


@pytest.mark.parametrize("command", ['"$@" | head -3', '"$@" >&- 2>&-'], ids=["reader leaves", "closed"])
@pytest.mark.parametrize("launcher", ["python", "run", "torchrun"])
def test_a_script_goes_on_when_nobody_reads(tmp_path: Path, launcher: str, command: str) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    starters = {
        "python": [sys.executable],
        "run": [sys.executable, "-m", "closeranks", "run", "-n", "1"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"],
    }
    done = in_shell(command, tmp_path, *starters[launcher], "own.py")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert any(is_whole(folder) for folder in tmp_path.glob("run*") if folder.is_dir())


def test_a_reader_may_leave_in_the_middle(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*map(str, TRAIN)], cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step    10/"):
                break
        process.stdout.close()
        assert process.wait(timeout=300) == 0
    assert is_whole(tmp_path / "run")


TAKE_TERMINAL = (
    "import fcntl, os, signal, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == 'nohup' else signal.SIG_DFL);"
    " os.execv(sys.argv[2], sys.argv[2:])"
)


@pytest.mark.parametrize("handling", ["nohup", "default"])
def test_a_terminal_that_vanishes(tmp_path: Path, handling: str) -> None:
    """As when an ssh connection drops: SIGHUP, then EIO. By default the run saves and stops; under nohup it goes on."""
    ours, theirs = os.openpty()
    marker = mark()
    command = [sys.executable, "-m", "closeranks", "train", TINY, "-n", "1", *(QUICK if handling == "nohup" else LONG)]
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, handling, *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", marker: "1"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown = b""
    while b"step " not in shown:
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    try:
        assert process.wait(timeout=300) == (0 if handling == "nohup" else 129)
    finally:
        process.kill()
    assert not marked_processes(marker)
    if handling == "nohup":
        assert is_whole(tmp_path / "run")
    else:
        assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "disconnected"
        assert (tmp_path / "run" / "checkpoints" / "latest").exists()
        assert (tmp_path / "run" / "report.md").exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [(["config", TINY, "--explain"], 141), (["layout", "ls", TINY, "-n", "64"], 141), (["--help"], 141)],
)
def test_verbs_that_only_tell_end_quietly_as_by_sigpipe(tmp_path: Path, words: list[str], code: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "closeranks", *words], cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=300
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (code, b"")


def test_a_listing_on_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "closeranks", "config", TINY]
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("closeranks: stdout cannot be written (No space left on device).")
    assert len(done.stderr.splitlines()) == 1
