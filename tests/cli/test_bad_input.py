"""Every mistake a person can make gets one clear sentence, exit status 2, no traceback and no orphan.

What is refused before any worker starts is called in this process; the exit status and the streams of real commands
are those of ``test_all_problems_are_told_at_once`` and of the mistakes that workers meet.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.calling import Said, call
from tests.cli.commands import FAST, TINY, Done, closeranks

pytestmark = pytest.mark.world

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def net(): return nn.Linear(4, 2)
def raises(): raise ValueError("no such weights")
def loss(model, batch): return nn.functional.cross_entropy(model(batch["x"]), batch["y"])
def data(): return TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long))
def empty(): return []
def nan():
    x = torch.randn(64, 4)
    x[7, 2] = float("nan")
    return TensorDataset(x, torch.zeros(64, dtype=torch.long))
def divides_by_zero(model, batch): return (model(batch["x"]) / 0).mean()
"""


def refused(done: Done | Said, *words: str) -> None:
    assert done.code == 2, done
    assert "Traceback" not in done.err + done.out, done.err
    for word in words:
        assert word in done.err, (word, done.err)
    assert done.err.startswith("closeranks: ")
    assert not isinstance(done, Done) or not done.left_behind


def own_job(folder: Path, *, model: str = "own:net", data: str = "own:data", loss: str = "own:loss") -> Path:
    (folder / "own.py").write_text(OWN)
    job = folder / "job.toml"
    job.write_text(
        f'[model]\nname = "{model}"\nloss = "{loss}"\n[data]\nname = "{data}"\n[train]\nsteps = 5\nglobal_batch = 8\n'
    )
    return job


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stepz=5", ("train.stepz", "Did you mean", "steps")),
        ("train.steps=many", ("train.steps", "whole number", "many")),
        ("train.steps=0", ("train.steps",)),
        ("trian.steps=5", ("trian", "train")),
        ("optim.lr=fast", ("optim.lr", "number")),
        ("model.preset=tinny", ("preset", "tiny")),
        ("train.micro_batch=100", ("train.micro_batch", "24")),
        ("layout.tensor=3", ("layout.tensor", "The nearest legal layout is tensor=2")),
        ("layout.context=2", ("layout.context", "Set it to 1")),
        ("layout.pipeline=16", ("layout.pipeline", "2 layers do not fill 16 stages")),
        ("layout.schedule=1f1bb", ("layout.schedule", "Did you mean '1f1b'")),
        ("model.vocab_size=100", ("model.vocab_size", "256")),
        ("telemetry.profile=9", ("profile", "10:13")),
    ],
)
def test_a_bad_value_is_named_with_its_fix(tmp_path: Path, override: str, words: tuple[str, ...]) -> None:
    refused(call("train", TINY, "-n", 2, *FAST, f"run.folder={tmp_path}/run", override, cwd=tmp_path), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("override", "word"),
    [("data.path=/no/such/text", "/no/such/text"), ("checkpoint.resume=/no/such/run", "/no/such/run")],
)
def test_a_path_that_workers_do_not_find_is_named(tmp_path: Path, override: str, word: str) -> None:
    refused(closeranks("train", TINY, "-n", 2, *FAST, f"run.folder={tmp_path}/run", override, cwd=tmp_path), word)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    done = closeranks("train", TINY, "train.stepz=5", "optim.lr=fast", "model.preset=tinny", cwd=tmp_path)
    refused(done, "3 problems", "train.stepz", "optim.lr", "model.preset")


def test_missing_and_broken_files(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text("[train\nsteps = 5\n")
    refused(call("train", "tinny.toml", cwd=tmp_path), "tinny.toml", "tiny.toml")
    refused(call("train", "tiny.toml", cwd=tmp_path), "tiny.toml", "line 1")
    refused(call("train", ".", cwd=tmp_path), "folder")


def test_fewer_micro_batches_than_workers(tmp_path: Path) -> None:
    done = call("train", TINY, "-n", 4, "train.global_batch=3", "train.micro_batch=1", cwd=tmp_path)
    refused(done, "4", "3")


def test_an_empty_dataset(tmp_path: Path) -> None:
    refused(closeranks("train", own_job(tmp_path, data="own:empty"), "-n", 2, cwd=tmp_path), "empty")


def test_nan_in_the_data_names_the_sample(tmp_path: Path) -> None:
    job = own_job(tmp_path, data="own:nan")
    refused(closeranks("train", job, "-n", 2, "train.steps=20", cwd=tmp_path), "7")


def test_a_loss_that_is_never_finite(tmp_path: Path) -> None:
    job = own_job(tmp_path, loss="own:divides_by_zero")
    refused(closeranks("train", job, "-n", 2, cwd=tmp_path), "finite", "3 steps")


def test_a_factory_that_raises_is_named_with_its_line(tmp_path: Path) -> None:
    done = closeranks("train", own_job(tmp_path, model="own:raises"), "-n", 2, cwd=tmp_path)
    refused(done, "own:raises", "no such weights", "own.py:7")
    assert done.err.count("no such weights") == 1


def test_a_factory_that_does_not_exist(tmp_path: Path) -> None:
    refused(closeranks("train", own_job(tmp_path, model="own:nett"), cwd=tmp_path), "own:nett", "net")
    refused(closeranks("train", own_job(tmp_path, model="onw:net"), cwd=tmp_path), "onw")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = closeranks("train", TINY, "-n", 2, *FAST, f"agent.port={port}", cwd=tmp_path)
    refused(done, str(port), "in use")


def test_an_unwritable_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(call("train", TINY, f"run.folder={tmp_path}/file/run", cwd=tmp_path), "cannot be written", "run.folder")
    refused(call("train", TINY, "run.folder=/proc/nowhere", cwd=tmp_path), "/proc/nowhere")


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a small file system needs root")
@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("256k", ("disk is full", "MiB are free")),
        pytest.param("4k", ("cannot be written",), marks=pytest.mark.slow),
    ],
)
def test_a_full_disk(tmp_path: Path, size: str, words: tuple[str, ...]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], check=True)
    try:
        if size == "4k":
            (disk / "filler").write_bytes(b"x" * 4096)
        refused(closeranks("train", TINY, "-n", 2, *FAST, f"run.folder={disk}/run", cwd=tmp_path), *words)
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_script_that_is_not_there_and_one_that_fails(tmp_path: Path) -> None:
    refused(closeranks("run", "-n", 2, "nothing.py", cwd=tmp_path), "nothing.py")
    (tmp_path / "fails.py").write_text("import closeranks\nraise KeyError('lost')\n")
    done = closeranks("run", "-n", 2, "fails.py", cwd=tmp_path)
    assert done.code == 1
    assert "fails.py:2" in done.err
    assert "KeyError" in done.err
    assert not done.left_behind


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    refused(call("report", tmp_path, cwd=tmp_path), "not a run folder")
    refused(call("sample", tmp_path, "import ", cwd=tmp_path), "there is no checkpoint at")


def test_a_working_folder_that_was_removed(tmp_path: Path) -> None:
    command = f"mkdir gone && cd gone && rmdir ../gone && exec {sys.executable} -m closeranks config {TINY}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "closeranks: the working folder no longer exists. Change to one that does.\n"
