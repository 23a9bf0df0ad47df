"""What the zygote learns between generations: it changes nothing that a worker could notice but the time it takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks.agent.config import AgentConfig
from closeranks.agent.event_loop import EventLoop
from closeranks.agent.fault_limits import FaultLimits
from closeranks.agent.launch_plan import AgentCallbacks, LaunchPlan, RecoverySettings
from closeranks.agent.workers.worker_group import WorkerGroup
from closeranks.agent.workers.worker_process import WorkerSetup
from closeranks.agent.workers.zygote_client import ZygoteClient
from closeranks.core.events import StepDone
from closeranks.core.system.environment import child_environment
from closeranks.data.sources.text import TextSource
from closeranks.run.job.job import Job, check_workers, layout_for, load_job
from closeranks.run.state.state import RunState
from closeranks.run.worker import generation_cache, warmup
from closeranks.telemetry.run_log.recorder import read_events
from tests.agent.worker_groups import statuses, worlds_here

ROOT = Path(__file__).parents[3]
TINY = ROOT / "examples" / "tiny.toml"
KINDS = (
    "layout.zero=0 model.dropout=0.1",
    "layout.zero=1 optim.name=sgd",
    "layout.zero=2 train.precision=fp16",
    "layout.zero=3 train.recompute=full",
    "layout.zero=3 layout.shard=2 run.deterministic=true",
    "layout.tensor=2 train.precision=bf16",
    "layout.tensor=2 layout.pipeline=2 layout.zero=1",
    "layout.pipeline=2 layout.schedule=zbv",
    "train.compile=true data.prefetch=0",
    "sync.bucket_mib=auto",
)


def tiny(*overrides: str) -> Job:
    return load_job(TINY, overrides).value


@pytest.mark.parametrize("overrides", KINDS)
def test_a_stand_in_has_the_axes_and_the_arithmetic_of_its_job(overrides: str) -> None:
    job = tiny(*overrides.split())
    for small in warmup.warmup_jobs(job):
        assert check_workers(small, layout_for(small, 0).num_ranks) == []
        assert (small.layout.zero, small.layout.tensor) == (job.layout.zero, job.layout.tensor)
        assert (small.train.precision, small.train.recompute) == (job.train.precision, job.train.recompute)
        assert small.optim.name == job.optim.name
        assert small.run.device == "cpu"
        assert not small.train.compile
        assert not small.checkpoint.save
    assert warmup.warmup_jobs(job)[0].layout.pipeline == job.layout.pipeline
    assert bool(warmup.warmup_jobs(job)[0].layout.shard) == bool(job.layout.shard)


def test_nothing_of_the_users_is_called_and_a_large_model_is_not_built() -> None:
    tables = {"model": {"name": "theirs:net", "stages": ("a", "b")}, "data": {"name": "theirs:data"}}
    tables |= {
        "train": {"epochs": 1, "global_batch": 4096},
        "layout": {"pipeline": 2},
        "run": {"hooks": ["theirs:Hook"]},
    }
    tables["optim"] = {"groups": [{"pattern": "a.*", "frozen": True}]}
    (first, whole) = warmup.warmup_jobs(load_job(None, extra=tables).value)
    for small in (first, whole):
        assert "theirs" not in small.model_dump_json()
        assert not small.optim.groups
    (big,) = warmup.warmup_jobs(tiny("model.preset=70b", "data.seq_len=8192", "train.global_batch=4096"))
    assert (
        big.model.layout_constraints(seq_len=1, global_batch=1, micro_batch=1).num_layers,
        big.train.global_batch,
    ) == (2, 8)


def test_warming_up_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parents[1] / "warmed.py"), str(TINY), *KINDS]
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(1), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["changed"] == {overrides: [] for overrides in KINDS}
    assert told["learned"] == ["torch._inductor.compile_fx"], "which takes seconds to import"
    assert list(tmp_path.iterdir()) == []


def test_what_the_compiler_finds_out_is_found_out_once() -> None:
    lines = ["import time", "from closeranks.run.worker.warmup import warm_up_compiler", "warm_up_compiler()"]
    lines += ["began = time.monotonic()", "warm_up_compiler()", "print(time.monotonic() - began)"]
    script = "\n".join(lines)
    done = subprocess.run(
        [sys.executable, "-c", script], env=child_environment(1), capture_output=True, text=True, check=False
    )
    assert float(done.stdout) < 0.1, done.stderr


def test_a_failure_on_the_way_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no state today")

    monkeypatch.setattr(RunState, "checkpoint_tree", refuse)
    stream, threads = torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(RuntimeError, match="no state today"):
        warmup.warm_up({"job": tiny("layout.zero=3").model_dump(mode="json")})
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), stream)
    assert torch.get_num_threads() == threads
    assert generation_cache._Cache.measured_flops == generation_cache.bucket_mib() == 0.0


def test_where_there_is_a_gpu_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsed: list[Job] = []
    monkeypatch.setattr(warmup, "run_dummy_step", rehearsed.append)
    for may_compute in (False, True):
        monkeypatch.setattr(warmup, "can_run_backward", lambda may=may_compute: may)
        warmup.warm_up({"job": tiny().model_dump(mode="json")})
        assert bool(rehearsed) is may_compute, "a backward would start a thread of the driver"


@pytest.mark.parametrize(
    ("built_for", "devices", "may_compute"),
    [
        (None, ["null", "nvidia0", "nvidiactl"], True),
        ("cuda", ["null", "shm"], True),
        ("cuda", ["null", "nvidia0", "nvidiactl"], False),
        ("cuda", ["kfd", "null"], False),
    ],
)
def test_what_torch_was_built_for_and_the_machine_has_decides(
    monkeypatch: pytest.MonkeyPatch, built_for: str | None, devices: list[str], may_compute: bool
) -> None:
    """Hiding a GPU by CUDA_VISIBLE_DEVICES does not keep a backward from the driver (seen with torch 2.11)."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = None if built_for is None else torch.device(built_for)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    monkeypatch.setattr(warmup.os, "listdir", lambda _: devices)
    assert warmup.can_run_backward() is may_compute


def test_data_that_is_read_whole_is_inherited_by_the_same_job_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_cache._Cache, "sources", {})
    job = tiny("data.max_bytes=100000")
    generation_cache.cache_sources(job.data, 7)
    kept = generation_cache.open_cached_source(job.data, "train", 7)
    assert isinstance(kept, TextSource)
    assert generation_cache.open_cached_source(tiny("data.max_bytes=100000").data, "train", 7) is kept
    assert generation_cache.open_cached_source(job.data, "eval", 7) is not kept
    assert generation_cache.open_cached_source(tiny("data.max_bytes=90000").data, "train", 7) is not kept


def test_a_figure_that_was_handed_on_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_cache, "measure_matmul_flops", lambda *_: 5.0)
    generation_cache.load_payload({"measured_flops": 3.0})
    assert generation_cache.matmul_flops(torch.device("cpu"), torch.float32) == 3.0
    generation_cache.load_payload({})
    assert generation_cache.matmul_flops(torch.device("cpu"), torch.float32) == 5.0


# --- two generations from one zygote, the second after it was warmed up


class Run:
    """What is heard of one zygote's generations."""

    def __init__(self, folder: Path, overrides: str) -> None:
        self.folder = folder
        self.job = tiny(
            "train.steps=3", "train.global_batch=8", "train.micro_batch=2", "model.num_layers=2", *overrides.split()
        )
        self.notes: list[str] = []

    def train(self, num_workers: int, num_generations: int) -> list[list[float]]:
        """The losses of each generation, which all begin anew."""
        (self.folder / "logs").mkdir(parents=True)
        survival = RecoverySettings(
            FaultLimits(), lambda _: None, lambda _: "", warm_up="closeranks.run.worker.warmup:warm_up"
        )
        plan = LaunchPlan(
            num_workers=num_workers,
            entry="closeranks.run.worker.entry:train_entry",
            log_folder=self.folder / "logs",
            environment=child_environment(1),
            config=AgentConfig(),
            payload=self.payload(0),
            preload=("torch._dynamo",),
            recovery_settings=survival,
        )
        listener = AgentCallbacks(lambda *_: None, lambda *_: None, self.notes.append)
        with EventLoop() as loop, ZygoteClient(plan, loop, listener) as nursery:
            _turn_until(loop, lambda: nursery.is_ready)
            for generation in range(num_generations):
                self._generation(plan, generation, nursery, loop, listener)
        return [self.losses(generation) for generation in range(num_generations)]

    def _generation(
        self, plan: LaunchPlan, number: int, nursery: ZygoteClient, loop: EventLoop, listener: AgentCallbacks
    ) -> None:
        def pass_on(address: str) -> None:
            crew.announce_store(address)

        berth = WorkerSetup(self.payload(number), plan.config.host, [], pass_on)
        with WorkerGroup(plan, worlds_here(plan.num_workers, number), nursery, loop, listener, berth) as crew:
            _turn_until(loop, lambda: crew.num_left == 0)
            assert set(statuses(crew).values()) == {0}, crew.worker_reports()

    def payload(self, generation: int) -> dict[str, Any]:
        folder = self.folder / f"generation-{generation}"
        folder.mkdir(parents=True, exist_ok=True)
        inherited = {"measured_flops": 1e9} if generation else {}
        return {"job": self.job.model_dump(mode="json"), "folder": str(folder), **inherited}

    def losses(self, generation: int) -> list[float]:
        found = read_events(self.folder / f"generation-{generation}" / "metrics" / "rank-00000.jsonl")
        return [event.loss for _, event in found if isinstance(event, StepDone)]


def _turn_until(loop: EventLoop, is_done: Any) -> None:
    deadline = time.monotonic() + 60.0
    while not is_done():
        assert time.monotonic() < deadline, "nothing happened for a minute"
        loop.run_once(deadline)


@pytest.mark.world
@pytest.mark.parametrize(
    ("overrides", "num_workers"),
    [
        ("layout.zero=3", 2),
        pytest.param("layout.tensor=2", 2, marks=pytest.mark.slow),
        pytest.param("model.dropout=0.1", 2, marks=pytest.mark.slow),
        pytest.param("layout.pipeline=2", 2, marks=pytest.mark.slow),
        pytest.param("layout.tensor=2 layout.zero=3", 4, marks=pytest.mark.slow),
    ],
)
def test_a_warmed_generation_computes_the_same_bits(tmp_path: Path, overrides: str, num_workers: int) -> None:
    """The first is forked before the zygote warms up, the second after: groups, meshes and tables that torch remembers
    by shape must not be those of the stand-in."""
    run = Run(tmp_path, overrides)
    first, second = run.train(num_workers, 2)
    assert len(first) == 3
    assert second == first
    log = (tmp_path / "logs" / "zygote.log").read_text()
    assert "failed" not in log, log
    assert "threads: 1" in log
    assert run.notes == []
