"""Files that are not what they say: checkpoints forged under a valid seal, damaged, or replaced by FIFOs and devices;
job files of every bad kind. Commands end, say what is wrong in a sentence, and never raise."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.hostile import checks
from tests.hostile.cases import STEPS, between, kind, one_of
from tests.hostile.checks import Problem
from tests.hostile.lab import Done, Lab

_PATIENCE_S = 60.0
READERS: dict[str, list[str]] = {
    "ls": ["ckpt", "ls"],
    "verify": ["ckpt", "verify"],
    "show": ["ckpt", "show"],
    "prune": ["ckpt", "prune", "--dry-run"],
    "diff": ["ckpt", "diff", "CALM"],
    "status": ["status"],
    "report": ["report"],
    "sample": ["sample"],
    "convert": ["ckpt", "convert", "--to", "safetensors"],
}
OFTEN = ("ls", "ls", "verify", "verify", "show", "prune", "diff", "sample", "convert")


def look(lab: Lab, reader: str, run: Path) -> Done:
    """A command that reads a run's folder, to its end."""
    words = [str(lab.calm / "run") if word == "CALM" else word for word in READERS[reader]]
    more = {"sample": ["import "], "convert": [str(lab.folder / "out.safetensors")]}.get(reader, [])
    done = lab.command(*words, run, *more, timeout_s=_PATIENCE_S)
    checks.check_words(done.out, done.err, done.code)
    checks.check_code(done.code, {0, 1, 2}, done.said)
    return done


def newest(run: Path) -> Path:
    return run / "checkpoints" / f"step-{STEPS:08d}"


# --- special files


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        # A path in AF_UNIX is short: bind it by a name relative to its folder.
        before = os.getcwd()
        os.chdir(path.parent)
        one.bind(path.name)
        os.chdir(before)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": _fifo,
    "device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),
    "link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "socket": _socket,
    "empty file": lambda path: path.write_bytes(b""),
}
_TARGETS = ("latest", "manifest", "data", "stranger", "checkpoint")


def _target(run: Path, name: str) -> Path:
    checkpoint = newest(run)
    return {
        "latest": run / "checkpoints" / "latest",
        "manifest": checkpoint / "manifest.json",
        "data": min(checkpoint.glob("data-*")),
        "stranger": checkpoint / "part-00000-of-00002.json",
        "checkpoint": checkpoint,
    }[name]


def replace(path: Path, make: Callable[[Path], None]) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path)


def is_root() -> str:
    return "" if os.geteuid() == 0 else "device nodes are made by root alone"


@kind(
    "forged files",
    is_live=False,
    needs=is_root,
    target=one_of(*_TARGETS),
    what=one_of(*SPECIAL),
    reader=one_of(*OFTEN),
)
def special_file_in_a_checkpoint(lab: Lab, target: str, what: str, reader: str) -> None:
    run = lab.copy_of_calm()
    replace(_target(run, target), SPECIAL[what])
    look(lab, reader, run)


@kind(
    "forged files",
    is_live=False,
    needs=is_root,
    what=one_of(*SPECIAL),
    target=one_of("status.json", "metrics/rank-00000.jsonl", "metrics/agent.jsonl", "job.toml", "config.json"),
    reader=one_of("status", "report", "ls", "sample"),
)
def special_file_in_a_run_folder(lab: Lab, what: str, target: str, reader: str) -> None:
    run = lab.copy_of_calm()
    replace(run / target, SPECIAL[what])
    look(lab, reader, run)


# --- damage


def damage(path: Path, how: str, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif how == "longer":
        path.write_bytes(bytes(data) + rng.randbytes(100))
    elif how == "swapped":
        path.write_bytes(rng.randbytes(len(data)))
    else:
        for _ in range({"one bit": 1, "many bits": 50}[how]):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


DAMAGES = ("truncated", "longer", "swapped", "one bit", "many bits")


@kind(
    "forged files",
    is_live=False,
    target=one_of("latest", "manifest", "data"),
    how=one_of(*DAMAGES),
    reader=one_of(*OFTEN),
    salt=between(0, 10**6),
)
def damaged_file(lab: Lab, target: str, how: str, reader: str, salt: int) -> None:
    """Whatever the damage, readers end in words; and verify never calls a damaged checkpoint sound."""
    run = lab.copy_of_calm()
    path = _target(run, target)
    before = path.read_bytes()
    damage(path, how, random.Random(salt))
    done = look(lab, reader, run)
    if reader == "verify" and target != "latest" and path.read_bytes() != before and done.code == 0:
        raise Problem(f"verify finds nothing wrong with {path.name} ({how}): {done.out[-300:]}")


@kind(
    "forged files",
    is_live=False,
    target=one_of("manifest", "data", "latest"),
    how=one_of(*DAMAGES, "FIFO", "device", "folder"),
    num=between(1, 2),
    salt=between(0, 10**6),
)
def resume_from_a_damaged_checkpoint(lab: Lab, target: str, how: str, num: int, salt: int) -> None:
    """Goes on from the newest sound one, loudly, and comes to the undisturbed state."""
    run = lab.copy_of_calm()
    for checkpoint in sorted((run / "checkpoints").glob("step-*"))[-num:]:
        path = checkpoint / _target(run, target).name if target != "latest" else run / "checkpoints" / "latest"
        if how in SPECIAL:
            replace(path, SPECIAL[how])
        else:
            damage(path, how, random.Random(salt))
    expected = checks.read_state(checks.last_states(lab.calm)[-1])
    done = lab.train("checkpoint.resume=auto")
    checks.check_words(done.out, done.err, done.code)
    checks.check_code(done.code, {0}, done.said)
    states = [one for one in checks.last_states(lab.disk) if target == "latest" or one.name != f"step-{STEPS:08d}"]
    if not states:
        raise Problem(f"it saved no state of step {STEPS}: {done.said[-400:]}")
    if other := checks.difference(expected, checks.read_state(states[-1])):
        raise Problem(f"not the undisturbed state: {other}")


# --- forged, under a valid seal


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "created 1e308": lambda body: body | {"created": 1e308},
    "created -1e18": lambda body: body | {"created": -1e18},
    "created text": lambda body: body | {"created": "yesterday"},
    "step 10**30": lambda body: body | {"step": 10**30},
    "step true": lambda body: body | {"step": True},
    "num_ranks 0": lambda body: body | {"num_ranks": 0},
    "num_ranks 10**12": lambda body: body | {"num_ranks": 10**12},
    "tree null": lambda body: body | {"tree": None},
    "tree values null": lambda body: body | {"tree": dict.fromkeys(body["tree"])},
    "tree deep": lambda body: body | {"tree": body["tree"] | {"deep": _deep(500)}},
    "tree empty": lambda body: body | {"tree": {}},
    "tree numbers": lambda body: body | {"tree": dict.fromkeys(body["tree"], 3)},
    "job list": lambda body: body | {"tree": body["tree"] | {"job": []}},
    "layout a list": lambda body: body | {"layout": [1, 2]},
    "layout escapes": lambda body: body | {"layout": "\x1b[2J\x1b]0;x\x07 data=2"},
    "metric infinite text": lambda body: body | {"metric": "inf"},
    "key with a lone surrogate": lambda body: _tensor(body, key="\ud800"),
    "key empty": lambda body: _tensor(body, key=""),
    "key with a NUL": lambda body: _tensor(body, key="a\0b"),
    "shape huge": lambda body: _tensor(body, shape=[2**40, 2**40]),
    "shape negative": lambda body: _tensor(body, shape=[-1, 4]),
    "shape of 2000 dims": lambda body: _tensor(body, shape=[1] * 2000),
    "dtype unknown": lambda body: _tensor(body, dtype="float7"),
    "dtype null": lambda body: _tensor(body, dtype=None),
    "no chunks": lambda body: _tensor(body, chunks=[]),
    "chunk null": lambda body: _tensor(body, chunks=[None]),
    "chunk elsewhere": lambda body: _chunk(body, 3, "../../../../etc/passwd"),
    "chunk absolute": lambda body: _chunk(body, 3, "/etc/passwd"),
    "chunk offset negative": lambda body: _chunk(body, 4, -8),
    "chunk offset far": lambda body: _chunk(body, 4, 2**62),
    "chunk bytes huge": lambda body: _chunk(body, 5, 2**60),
    "crc a text": lambda body: _chunk(body, 6, "zero"),
    "share not hex": lambda body: _chunk(body, 8, "x" * 16),
    "files null": lambda body: body | {"files": None},
    "file size negative": lambda body: body | {"files": [[one[0], -1, *one[2:]] for one in body["files"]]},
    "tensors twice": lambda body: body | {"tensors": body["tensors"] * 2},
    "name another": lambda body: body | {"name": "step-00000099"},
    "name a path": lambda body: body | {"name": "../x"},
    "a list": lambda body: [body],
    "null": lambda body: None,
    "a text": lambda body: "manifest",
    "no fields": lambda body: {},
}


def _tensor(body: dict[str, Any], **changes: Any) -> dict[str, Any]:
    first, *others = body["tensors"]
    return body | {"tensors": [first | changes, *others]}


def _chunk(body: dict[str, Any], place: int, value: Any) -> dict[str, Any]:
    chunk = list(body["tensors"][0]["chunks"][0])
    chunk[place] = value
    return _tensor(body, chunks=[chunk])


def _forge(path: Path, name: str) -> None:
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    forged = json.dumps(FORGERIES[name](body)).encode()
    head = {"closeranks": "manifest", "version": 1, "blake3": blake3(forged).hexdigest()}
    path.write_bytes(json.dumps(head, separators=(",", ":")).encode() + b"\n" + forged)


@kind("forged files", is_live=False, forgery=one_of(*FORGERIES), reader=one_of(*OFTEN))
def forged_manifest(lab: Lab, forgery: str, reader: str) -> None:
    run = lab.copy_of_calm()
    _forge(newest(run) / "manifest.json", forgery)
    look(lab, reader, run)


# --- documents beside the checkpoints

GARBAGE: dict[str, bytes] = {
    "null": b"null\n",
    "a number": b"3\n",
    "deep": b"[" * 100_000,
    "not UTF-8": b"\xff\xfe\x00" * 50,
    "wrong types": b'{"event": "step", "step": "x", "loss": [], "at": {}, "rank": null, "time": "1e999"}\n',
    "huge numbers": b'{"event": "step", "step": 1e308, "loss": 1e400, "at": -1e300, "time": 1e300, "rank": 1e30}\n',
    "half a line": b'{"event": "st',
    "a line of 20 MB": b'{"event": "' + b"x" * 20_000_000 + b'"}\n',
    "surrogates": b'{"event": "warning", "text": "\\ud800", "message": "\\ud800", "step": 1}\n',
    "nothing": b"",
}


@kind(
    "forged files",
    is_live=False,
    target=one_of("status.json", "metrics/rank-00000.jsonl", "metrics/agent.jsonl", "config.json", "job.toml"),
    garbage=one_of(*GARBAGE),
    is_appended=one_of(True, False),
    reader=one_of("status", "report", "status", "report", "sample", "ls"),
)
def garbage_in_a_run_folder(lab: Lab, target: str, garbage: str, is_appended: bool, reader: str) -> None:
    run = lab.copy_of_calm()
    path = run / target
    before = path.read_bytes() if is_appended and path.exists() else b""
    path.write_bytes(before + GARBAGE[garbage])
    look(lab, reader, run)
