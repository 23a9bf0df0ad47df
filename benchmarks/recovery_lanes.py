"""How long does a run need from the death of a worker to its next finished step? Ours, and a script under torchrun.

A lane is started, struck several times by SIGKILL from outside, and ended. Both are timed alike: from the signal until
every rank has finished a step again.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elastic_runs import Launched, Ours, lines_of

NUM_RANKS = 4
_STEPS_BETWEEN = 5
_SCRIPT = Path(__file__).with_name("recovery_rival.py")


@dataclass(frozen=True, slots=True)
class Recovery:
    """What one strike came to."""

    total_s: float
    """From the signal to a step that is finished on all ranks."""
    noticed_s: float | None = None
    """The same from when the fault was noticed; None where nobody tells."""
    num_redone: int = 0
    parts: dict[str, float] = field(default_factory=dict)


def strike_ours(folder: Path, layout: str, num_strikes: int) -> list[Recovery]:
    overrides = ["model.num_layers=4", "model.dropout=0.1", "train.global_batch=8", "train.micro_batch=2"]
    overrides += ["train.steps=1000000", "elastic.snapshot_every=1", "elastic.max_faults=1000", *layout.split()]
    with Ours(folder, NUM_RANKS, overrides) as lane:
        lane.wait_for("the zygote's warm-up", lambda: lane.is_warm)
        found = []
        for number in range(num_strikes):
            first = lane.num_done
            lane.wait_for("a step", lambda first=first: lane.num_done >= first + _STEPS_BETWEEN)
            found.append(_kill_once(lane, number))
        return found


def _kill_once(lane: Ours, number: int) -> Recovery:
    workers = lane.workers()
    began_at = time.monotonic()
    os.kill(workers[number % len(workers)], signal.SIGKILL)
    closed_at = lane.wait_for("the next good step", lambda: len(lane.events("ranks_closed", "agent")) > number)
    closed = lane.events("ranks_closed", "agent")[number]
    return Recovery(closed_at - began_at, closed["seconds"], closed["num_redone"], closed["parts"])


def strike_torchrun(folder: Path, kind: str, num_strikes: int) -> list[Recovery]:
    """With the one setting by which a restart with Gloo works, and the state in memory."""
    with _memory() as states:
        options = ["--standalone", "--nproc-per-node", str(NUM_RANKS), "--max-restarts", str(num_strikes)]
        command = ["-m", "torch.distributed.run", *options, str(_SCRIPT), kind, str(folder), str(states)]
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with Launched(command, folder, environment) as lane:
            return [_kill_rival(lane, number) for number in range(num_strikes)]


def _kill_rival(lane: Launched, attempt: int) -> Recovery:
    lane.wait_for("a step", lambda: _fewest_steps(lane.folder, attempt) >= _STEPS_BETWEEN)
    lines = lines_of(lane.folder / f"rank-{attempt % NUM_RANKS}.jsonl")
    began_at = time.monotonic()
    os.kill(lines[-1]["pid"], signal.SIGKILL)
    lane.wait_for("the next good step", lambda: _fewest_steps(lane.folder, attempt + 1) >= 1)
    firsts = [_steps(lane.folder, rank, attempt + 1)[0] for rank in range(NUM_RANKS)]
    last = max(step for rank in range(NUM_RANKS) for step, _ in _steps(lane.folder, rank, attempt))
    return Recovery(max(at for _, at in firsts) - began_at, num_redone=last - firsts[0][0] + 1)


def _steps(folder: Path, rank: int, attempt: int) -> list[tuple[int, float]]:
    """Step and time of all that a rank has finished in an attempt."""
    lines = lines_of(folder / f"rank-{rank}.jsonl")
    return [(line["step"], line["at"]) for line in lines if line["attempt"] == attempt]


def _fewest_steps(folder: Path, attempt: int) -> int:
    return min(len(_steps(folder, rank, attempt)) for rank in range(NUM_RANKS))


@contextmanager
def _memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="closeranks-recovery-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
