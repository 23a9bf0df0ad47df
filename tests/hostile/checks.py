"""What every case is judged by: exit status, words, the bits of the last state, and what is left behind.

States are compared by their raw bytes, read here from the files as docs/checkpoint-format.md describes them and with
none of the code that wrote them, so that a mistake in that code cannot hide itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from tests.hostile.cases import STEPS

_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4} | dict.fromkeys(
    ("int64", "uint64", "float64"), 8
)
_LONGEST_REFUSAL = 12
"""Lines: several mistakes of a job are told one to a line."""


class Problem(AssertionError):
    """What a case found wrong."""


@dataclass(frozen=True)
class Tensor:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


State = dict[str, Tensor]


# --- the last state


def read_state(checkpoint: Path) -> State:
    """Every tensor by section and key, put together from its chunks."""
    _, _, body = (checkpoint / "manifest.json").read_bytes().partition(b"\n")
    return {f"{one['section']}/{one['key']}": _read_tensor(checkpoint, one) for one in json.loads(body)["tensors"]}


def _read_tensor(checkpoint: Path, told: dict[str, Any]) -> Tensor:
    item_bytes = _ITEM_BYTES[told["dtype"]]
    whole = np.zeros((*told["shape"], item_bytes), np.uint8)
    is_covered = np.zeros(told["shape"], bool)
    for start, size, flat, file, offset, num_bytes, *_ in told["chunks"]:
        path = checkpoint.parent / file if "/" in file else checkpoint / file
        with path.open("rb") as data:
            data.seek(offset)
            raw = np.frombuffer(data.read(num_bytes), np.uint8).reshape(-1, item_bytes)
        box = tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))
        piece, seen = whole[box].reshape(-1, item_bytes).copy(), is_covered[box].reshape(-1).copy()
        first, last = flat if flat is not None else (0, len(piece))
        piece[first:last], seen[first:last] = raw, True
        whole[box], is_covered[box] = piece.reshape(whole[box].shape), seen.reshape(is_covered[box].shape)
    if not is_covered.all():
        raise Problem(f"{told['key']} in {checkpoint} is not whole")
    return Tensor(told["dtype"], tuple(told["shape"]), whole.tobytes())


def last_states(folder: Path, steps: int = STEPS) -> list[Path]:
    """Checkpoints of the last step, in the run's folder and the numbered ones beside it."""
    return [path.parent for path in sorted(folder.glob(f"run*/checkpoints/step-{steps:08d}*/manifest.json"))]


def difference(expected: State, found: State) -> str:
    """The first tensor that is not the same in every bit; empty where all are."""
    if expected.keys() != found.keys():
        return f"other tensors: {sorted(expected.keys() ^ found.keys())[:3]}"
    other = sorted(name for name in expected if expected[name] != found[name])
    return f"{len(other)} of {len(expected)} tensors differ, the first is {other[0]}" if other else ""


def check_last_state(calm: Path, disk: Path) -> None:
    """The run came to its end, with the state of the one that nobody disturbed."""
    found = last_states(disk)
    if not found:
        there = sorted(str(path.relative_to(disk)) for path in disk.glob("run*/checkpoints/step-*"))
        raise Problem(f"no checkpoint of step {STEPS}; there are {there}")
    expected = read_state(last_states(calm)[-1])
    for checkpoint in found:
        if other := difference(expected, read_state(checkpoint)):
            raise Problem(f"{checkpoint.relative_to(disk)} is not the undisturbed state: {other}")


# --- words and exit status


def check_words(out: str, err: str, code: int) -> None:
    """No traceback; and who is refused is told why in few words, after ``closeranks:``."""
    if "Traceback (most recent call last)" in out + err:
        lines = (out + err).splitlines()
        where = next(number for number, line in enumerate(lines) if "Traceback (most recent" in line)
        raise Problem("a traceback: " + " | ".join(line.strip() for line in lines[where : where + 40])[-600:])
    if code == 2:
        told = err.strip().splitlines()
        if not any(line.startswith(("closeranks:", "Usage:")) for line in told):
            raise Problem(f"exit 2 without a sentence: {err[-300:]!r}")
        if len(told) > _LONGEST_REFUSAL:
            raise Problem(f"exit 2 with {len(told)} lines: {told[0][:200]} ...")


def check_code(code: int, allowed: Iterable[int], said: str) -> None:
    if code not in allowed:
        raise Problem(f"exit {code}, allowed are {sorted(allowed)}: {' | '.join(said.strip().splitlines()[-4:])[:400]}")


# --- what is left behind


def descendants(besides: Iterable[int] = ()) -> list[str]:
    """Live processes below this one, which adopts orphans, however they came to be and whatever they dropped."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.pid not in besides and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())[:80]}")
        except psutil.NoSuchProcess:
            continue
    return found
