"""What does a rank do in a benchmark of checkpoints? Rounds of delays, then rates and loads while nothing trains.

Invariants: contenders take turns in rotating order in the same processes; each turn's save is settled before the next
turn begins; what is compared was measured in the same round.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from blake3 import blake3
from checkpoint_savers import MAKERS, Contender, Ours, State
from checkpoint_work import Job, Work
from rounds import order

from closeranks.capture.chunk_ranges import CHUNK_BYTES

NUM_STEPS = 3
"""After a save was asked for: those that it may delay."""
LOADERS = ("closeranks", "dcp", "torch.save")
_SAMPLE_S = 0.02


@dataclass(frozen=True, slots=True)
class Plan:
    work: Work
    folder: Path
    num_rounds: int
    num_rates: int
    names: tuple[str, ...]


@dataclass
class Found:
    """What one rank measured: by contender, round by round, in seconds."""

    batch: int = 0
    state_bytes: int = 0
    plain_s: dict[str, list[float]] = field(default_factory=dict)
    """Three steps just before the save."""
    saved_s: dict[str, list[float]] = field(default_factory=dict)
    """Asking for the save, and the three steps after."""
    settled_s: dict[str, list[float]] = field(default_factory=dict)
    """From asking until it was durable, with those three steps in between."""
    rates_s: dict[str, list[float]] = field(default_factory=dict)
    """Of ``written``, ``committed``, ``dd`` and ``blake3``."""
    loads_s: dict[str, list[float]] = field(default_factory=dict)


def run_rank(plan: Plan) -> Found:
    _be_quiet()
    job = Job(plan.work)
    job.choose_batch(plan.work.target_s)
    contenders = {name: MAKERS[name](plan.folder / name.replace(" ", "-"), job.state()) for name in plan.names}
    found = Found(batch=job.batch, state_bytes=sum(tensor.nbytes for tensor in job.state().values()))
    for name in plan.names:  # one turn of each to warm up: processes start, memory is given, files are laid out
        _take_turn(job, contenders[name], name, Found())
    for number in range(plan.num_rounds):
        for name in order(plan.names, number):
            _take_turn(job, contenders[name], name, found)
    for number in range(plan.num_rates):
        _measure_rates(plan, job, contenders["closeranks"], number, found)
    for number in range(plan.num_rates):
        for name in LOADERS:
            if name in contenders:
                _measure_load(contenders[name], job, name, plan.num_rates + number, found)
    for contender in contenders.values():
        contender.close()
    return found


def _take_turn(job: Job, contender: Contender, name: str, found: Found) -> None:
    plain_s = _timed(lambda: [job.step() for _ in range(NUM_STEPS)])
    dist.barrier()
    asked_at = time.perf_counter()
    contender.ask(job.num_steps, job.state())
    for _ in range(NUM_STEPS):
        job.step(contender.before_update)
    saved_s = time.perf_counter() - asked_at
    contender.settle()
    found.settled_s.setdefault(name, []).append(time.perf_counter() - asked_at)
    found.plain_s.setdefault(name, []).append(plain_s)
    found.saved_s.setdefault(name, []).append(saved_s)
    dist.barrier()


def _timed(act: Callable[[], object]) -> float:
    """Seconds of something that all ranks begin together."""
    dist.barrier()
    began_at = time.perf_counter()
    act()
    return time.perf_counter() - began_at


def _measure_rates(plan: Plan, job: Job, ours: Contender, number: int, found: Found) -> None:
    """The same bytes written by our writer, by dd and hashed, all ranks at once, while nothing trains."""
    assert isinstance(ours, Ours)
    dist.barrier()
    ours.ask(job.num_steps + 1 + number, job.state(), is_full=True)
    ours.before_update()
    ours.settle()
    for report in ours.reports:
        if report.kind in ("written", "committed"):
            found.rates_s.setdefault(report.kind, []).append(report.seconds)
    found.rates_s.setdefault("blake3", []).append(_timed(lambda: _hash(job.state())))
    with _memory_file(found.state_bytes) as source:
        target = plan.folder / f"dd-{dist.get_rank()}"
        found.rates_s.setdefault("dd", []).append(_timed(lambda: _dd(source, target)))
        target.unlink()
    dist.barrier()


def _hash(state: State) -> None:
    for tensor in state.values():
        data = tensor.view(-1).view(torch.uint8).numpy()
        for start in range(0, len(data), CHUNK_BYTES):
            blake3(data[start : start + CHUNK_BYTES].data).hexdigest()


class _memory_file:
    """Random bytes in memory, under a name that dd can read."""

    def __init__(self, num_bytes: int) -> None:
        self._fd = os.memfd_create("dd")
        with open(self._fd, "wb", closefd=False) as file:
            block = os.urandom(1 << 20)
            file.writelines(block for _ in range(num_bytes >> 20))
            file.write(block[: num_bytes % (1 << 20)])

    def __enter__(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)


def _dd(source: str, target: Path) -> None:
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def _measure_load(contender: Contender, job: Job, name: str, number: int, found: Found) -> None:
    """Once from the disk and once from the page cache, whatever the save left in it."""
    state = job.state()
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    contender.ask(job.num_steps + 1 + number, state)
    contender.before_update()
    contender.settle()
    dist.barrier()
    contender.load(into)  # gives the tensors their pages, and proves that what is timed below is the state
    assert all(torch.equal(tensor, into[key]) for key, tensor in state.items()), f"{name} loaded something else"
    dist.barrier()
    if dist.get_rank() == 0:
        for path in contender.files():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    found.loads_s.setdefault(f"{name}, cold", []).append(_timed(lambda: contender.load(into)))
    for path in contender.files():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    found.loads_s.setdefault(f"{name}, cached", []).append(_timed(lambda: contender.load(into)))
    dist.barrier()


def run_memory(plan: Plan, name: str) -> int:
    """How many bytes one contender takes beside training, at most: proportional memory of this rank and its children
    while two saves run, less that of a step that saves nothing."""
    _be_quiet()
    job = Job(plan.work)
    with Peak() as before:
        job.step()
    contender = MAKERS[name](plan.folder / "memory" / name.replace(" ", "-"), job.state())
    with Peak() as during:
        for _ in range(2):
            _take_turn(job, contender, name, Found())
    contender.close()
    return during.num_bytes - before.num_bytes


class Peak:
    """The most memory that this process and its children had, shared pages counted once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while True:
            self.num_bytes = max(self.num_bytes, sum(map(_pss, [process, *process.children(recursive=True)])))
            if self._is_over.wait(_SAMPLE_S):
                return


def _pss(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return 1024 * int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):  # it ended just now
        return 0
    return 0


def _be_quiet() -> None:
    """DCP tells of renamed parts of torch's own, and its process logs each request; a rank that fails tells its parent
    by other means. That process looks for its peers at an address."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Round by round: training goes on when the last rank does."""
    return [max(values) for values in zip(*ranks, strict=True)]
