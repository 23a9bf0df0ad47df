"""Job files and values of every bad kind: refused in a sentence with status 2, soon, and with nothing written."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.hostile import checks
from tests.hostile.cases import between, kind, one_of
from tests.hostile.checks import Problem
from tests.hostile.jobs import TEXT
from tests.hostile.lab import Lab

_PATIENCE_S = 60.0

FILES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "not UTF-8": lambda path: path.write_bytes(b"[run]\nname = '\xff\xfe'\n"),
    "NULs": lambda path: path.write_bytes(bytes(1000)),
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "/dev/random": lambda path: path.symlink_to("/dev/urandom"),
    "a loop of links": lambda path: path.symlink_to(path.name),
    "a million unknown keys": lambda path: path.write_text("[run]\n" + "".join(f"k{n} = 1\n" for n in range(10**6))),
    "a line of 50 MB": lambda path: path.write_text("[run]\nname = '" + "x" * 50_000_000 + "'\n"),
    "deep arrays": lambda path: path.write_text("[run]\nhooks = " + "[" * 5000 + "]" * 5000 + "\n"),
    "deep tables": lambda path: path.write_text("[" + ".".join(["a"] * 5000) + "]\nx = 1\n"),
    "half a line": lambda path: path.write_text(TEXT[: len(TEXT) // 2]),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 20),
}

VALUES = (
    *(r'run.folder="a\u0000b"', "run.folder=/", "run.name=../../x", "run.seed=-1", "run.seed=1e400"),
    *("train.steps=nan", "train.global_batch=0", "train.micro_batch=7"),
    *("optim.lr=-1", "optim.lr=nan", "optim.lr=inf", "model.dim=0", "model.dim=-16", "model.num_heads=3"),
    *("data.path=/dev/zero", "data.seq_len=0", "checkpoint.every=-5", "checkpoint.every=10parsecs"),
    *("layout=data=0.5", "layout=data=1000000", "no.such.key=1", "run.=1", "=", "run.hooks=[1]", 'run.hooks=["x:y"]'),
    *("checkpoint.resume=/no/such/run", "checkpoint.resume=/dev/zero", "checkpoint.folder=/dev/null/x"),
    *("elastic.max_faults=-1", "telemetry.log_every=0", r'run.name="\ud800"', "train.precision=float7"),
)


@kind("job files", is_live=False, file=one_of(*FILES), verb=one_of("config", "config", "train"))
def bad_job_file(lab: Lab, file: str, verb: str) -> None:
    path = lab.folder / "bad.toml"
    FILES[file](path)
    done = lab.command(verb, path, timeout_s=_PATIENCE_S)
    checks.check_words(done.out, done.err, done.code)
    checks.check_code(done.code, {2}, done.said)
    _check_nothing_written(lab)


@kind("job files", is_live=False, value=one_of(*VALUES))
def bad_value(lab: Lab, value: str) -> None:
    before = set(Path("/").iterdir())
    done = lab.command("train", lab.job, "-n", 2, value, timeout_s=_PATIENCE_S)
    checks.check_words(done.out, done.err, done.code)
    checks.check_code(done.code, {2}, done.said)
    if new := set(Path("/").iterdir()) - before:
        raise Problem(f"it wrote {sorted(map(str, new))}")
    _check_nothing_written(lab)


@kind("job files", is_live=False, num=between(1, 6), salt=between(0, 10**6))
def job_file_with_random_bytes(lab: Lab, num: int, salt: int) -> None:
    """Some bytes of a good job are replaced: it is still a job, or refused."""
    rng, data = random.Random(salt), bytearray(TEXT.encode())
    for _ in range(num):
        data[rng.randrange(len(data))] = rng.choice([rng.randrange(256), *b'"[]=.\n#0-'])
    lab.job.write_bytes(data)
    done = lab.command("config", lab.job, timeout_s=_PATIENCE_S)
    checks.check_words(done.out, done.err, done.code)
    checks.check_code(done.code, {0, 2}, done.said)


def _check_nothing_written(lab: Lab) -> None:
    if found := [str(path) for path in (lab.folder / "runs").glob("**/*") if path.suffix == ".safetensors"]:
        raise Problem(f"it trained all the same: {found[:2]}")
