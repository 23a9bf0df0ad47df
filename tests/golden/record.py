"""What is recorded of a run: losses, samples and a digest of every tensor of its last checkpoint.

Read from the files that the run left, the tensors' raw bytes as docs/checkpoint-format.md describes them, with none of
the code that wrote them. Invariant: two records are equal exactly if the runs trained the same in every bit.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from closeranks.telemetry.run_log.sample_log import read_samples
from tests.golden.jobs import GROUPS, STEPS
from tests.hostile.checks import Tensor, read_state

Record = dict[str, Any]
"""``losses``, ``norms`` and ``samples`` by step, ``evaluations``, ``state`` (what is no tensor) and ``tensors``."""

FOLDER = Path(__file__).with_name("records")
_STATE = ("progress", "schedule", "data", "random", "algorithm", "identity")
"""What of a checkpoint's tree decides how the run goes on; the rest are settings, versions and times."""


# --- reading a run


def read_run(run: Path) -> Record:
    """A run that has come to its end."""
    samples = read_samples(run)
    assert samples.conflicts == (), f"steps that were repeated took other samples: {samples.conflicts}"
    first, *others = [_steps(path) for path in sorted(run.glob("metrics/rank-*.jsonl"))]
    for other in others:
        assert other == {step: first[step] for step in other}, "ranks disagree on their losses"
    assert sorted(first) == list(range(1, STEPS + 1)), f"{run} has the steps {sorted(first)}"
    checkpoint = _last_checkpoint(run)
    return {
        "losses": [first[step][0] for step in sorted(first)],
        "norms": [first[step][1] for step in sorted(first)],
        "samples": [" ".join(map(str, samples.samples_of(step))) for step in sorted(first)],
        "evaluations": _evaluations(run / "metrics" / "rank-00000.jsonl"),
        "state": _state(checkpoint),
        "tensors": {name: digest(tensor) for name, tensor in sorted(read_state(checkpoint).items())},
    }


def _events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def _steps(path: Path) -> dict[int, tuple[str, str]]:
    """Loss and gradient norm; a step that was repeated counts as it was the last time."""
    told = (event for event in _events(path) if event["event"] == "step")
    return {event["step"]: (float(event["loss"]).hex(), float(event["grad_norm"]).hex()) for event in told}


def _evaluations(path: Path) -> dict[str, str]:
    return {str(event["step"]): float(event["loss"]).hex() for event in _events(path) if event["event"] == "eval"}


def _last_checkpoint(run: Path) -> Path:
    found = sorted(run.glob(f"checkpoints/step-{STEPS:08d}*/manifest.json"))
    assert found, f"{run} has no checkpoint of step {STEPS}"
    return found[-1].parent


def _state(checkpoint: Path) -> dict[str, Any]:
    _, _, body = (checkpoint / "manifest.json").read_bytes().partition(b"\n")
    tree = json.loads(body)["tree"]
    return {name: tree[name] for name in _STATE}


def digest(tensor: Tensor) -> str:
    """Of type, shape and raw bytes; 64 bits of it, enough to tell accidents apart."""
    head = f"{tensor.dtype} {list(tensor.shape)}\n".encode()
    return hashlib.sha256(head + tensor.data).hexdigest()[:16]


# --- comparing


def differences(expected: Record, found: Record) -> list[str]:
    """What is not the same, in words, in the order of a run: samples, losses, state, tensors."""
    said = []
    for kind, word in (("samples", "samples"), ("losses", "loss"), ("norms", "gradient norm")):
        pairs = zip(expected[kind], found[kind], strict=True)
        said += [
            f"{word} of step {step}: {_shown(new)}, recorded {_shown(old)}"
            for step, (old, new) in enumerate(pairs, start=1)
            if old != new
        ]
    if expected["evaluations"] != found["evaluations"]:
        said.append(f"evaluations: {found['evaluations']}, recorded {expected['evaluations']}")
    said += _lost(expected["state"], found["state"], "state")
    old, new = expected["tensors"], found["tensors"]
    said += [f"tensor {name} is no longer saved" for name in old if name not in new]
    said += [f"tensor {name} is saved, and was not" for name in new if name not in old]
    said += [f"tensor {name} has other bits" for name in old if name in new and old[name] != new[name]]
    return said


def _lost(old: Any, new: Any, place: str) -> list[str]:
    """What was said of the state is still said; a later version may say more."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [line for key in old for line in _lost(old[key], new.get(key), f"{place}.{key}")]
    return [] if old == new else [f"{place}: {new!r}, recorded {old!r}"]


def _shown(value: str) -> str:
    return f"{value} ({float.fromhex(value):.9g})" if "0x" in value else value


# --- the files


def environment() -> dict[str, Any]:
    """What the bits of a computation depend on beside the code."""
    told: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        told.setdefault(key.strip(), value.strip())
    vector = ("sse4", "avx", "fma", "f16c", "amx", "asimd", "sve")
    flags = (told.get("flags") or told.get("Features") or "").split()
    return {
        "torch": torch.__version__,
        "cpu": told.get("model name") or platform.processor() or platform.machine(),
        "cpu_model": " ".join(told.get(key, "") for key in ("vendor_id", "cpu family", "model", "stepping")),
        "instructions": " ".join(sorted(flag for flag in flags if flag.startswith(vector))),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": 1,
    }


def load(group: str, folder: Path = FOLDER) -> dict[str, Any]:
    """``environment``, ``reasons`` (why it was written again, if ever) and ``runs`` by name."""
    found: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    return found


def load_runs(folder: Path = FOLDER) -> dict[str, Record]:
    return {
        name: run
        for group in GROUPS
        if (folder / f"{group}.json").exists()
        for name, run in load(group, folder)["runs"].items()
    }


def write(path: Path, told: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=1) + "\n")
