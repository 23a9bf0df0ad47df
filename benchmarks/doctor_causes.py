"""Which runs does ``benchmarks/doctor.py`` make slow, or wrong, on purpose, and which are healthy?

Invariant: each planted run is slow for one reason, which is real: processes that sleep, compute, write and wait, limits
of the kernel, hosts with a slow link. What is found on one GPU has tables of its own: every other run is on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from doctor_places import Place, beside_others, here, limited_cpus, one_slow_link, slow_disk, traced, two_hosts

_QUICK = ("checkpoint.save=false", "telemetry.report=false", "optim.schedule.name=constant")

TINY = ("examples/tiny.toml", "train.steps=60", "train.eval_every=0", "train.eval_samples=24", *_QUICK)
"""A Llama of steps that take some 30 ms."""
OWN = ("benchmarks/doctor.toml", *_QUICK)
"""The MLP of ``doctor_work``."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A run that is slow, or wrong, for one known reason."""

    name: str
    cause: str
    job: Sequence[str]
    overrides: Sequence[str] = ()
    num_workers: int = 2
    faults: str = ""
    place: Place = here
    says: str = ""
    """Words of the finding that name this cause among others of its kind."""


PLANTED = (
    Planted("slow-store", "input-bound", OWN, ("data.args.fetch_s=0.002",)),
    Planted("slow-decode", "input-bound", OWN, ("data.args.decode=60",), num_workers=1),
    Planted("slow-collate", "input-bound", OWN, ('data.collate="doctor_work:slow_collate"',)),
    Planted("slow-rank", "straggler", TINY, (), faults="slow(rank=1, step=5, steps=200, share=0.3)"),
    Planted(
        "tiny-buckets",
        "small-collectives",
        OWN,
        ("sync.bucket_mib=0.002", "sync.first_bucket_mib=0.002", "model.args.hidden=64", "model.args.layers=60"),
    ),
    Planted("few-micro-batches", "pipeline-bubble", TINY, ("layout=pipeline=2", "train.micro_batch=12")),
    Planted("needless-recompute", "needless-recompute", TINY, ("train.recompute=full",), num_workers=1),
    Planted("blocking-saves", "save-stalls", OWN, ("checkpoint.save=true", 'run.hooks=["doctor_work:Saving"]')),
    Planted("large-heap", "garbage-collection", TINY, ("train.gc_every=1", 'run.hooks=["doctor_work:Heap"]')),
    Planted("garbage", "garbage-collection", TINY, ('run.hooks=["doctor_work:Garbage"]',)),
    Planted(
        "uneven-batches",
        "uneven-batches",
        OWN,
        ('data.name="doctor_work:unequal"', "~data.args", 'data.collate="doctor_work:pad"', "data.shuffle=none"),
    ),
    Planted(
        "fp16-overflow",
        "loss-scale",
        OWN,
        ("train.precision=fp16", "optim.loss_scale.interval=1", "optim.loss_scale.growth=1024"),
        num_workers=1,
    ),
    Planted("evaluation-every-step", "frequent-evaluation", TINY, ("train.eval_every=1", "train.eval_samples=48")),
    Planted("slow-hook", "user-code", TINY, ('run.hooks=["doctor_work:Slow"]',)),
    Planted("too-high-rate", "loss-diverged", TINY, ("optim.lr=1.0", "optim.clip=0", "optim.schedule.warmup=30"), 1),
    Planted("stopped-rank", "fault-stopped", TINY, (), faults="stop(rank=1, step=20)"),
    Planted("small-micro-batches", "small-micro-batch", OWN, ("train.micro_batch=1", "train.global_batch=64"), 1),
    Planted(
        "blocked-loader", "fault-loader", OWN, ("data.args.blocks_at=7", "elastic.hang_floor_s=2", "elastic.first_s=20")
    ),
    Planted(
        "mismatched-collective",
        "fault-branch",
        OWN,
        ('model.loss="doctor_work:branching_loss"', "elastic.hang_floor_s=2"),
        says="all_gather",
    ),
    Planted(
        "cold-disk",
        "input-bound",
        OWN,
        ('data.name="doctor_work:cold"', "~data.args"),
        place=slow_disk(24 << 20),
        says="from the disk",
    ),
    Planted(
        "save-every-step",
        "slow-saves",
        OWN,
        ("checkpoint.save=true", "checkpoint.every=1", "train.steps=200", "optim.lr=1e-4"),
        place=slow_disk(8 << 20),
    ),
    Planted("cpu-limit", "cpu-limit", TINY, place=limited_cpus(0.4)),
    Planted("noisy-neighbour", "noisy-neighbour", TINY, place=beside_others(2)),
    Planted("slow-link", "exposed-communication", OWN, place=two_hosts(400), says="gradients travel"),
    Planted(
        "slow-host-link",
        "straggler",
        OWN,
        ("train.global_batch=48", "train.micro_batch=16"),
        3,
        place=one_slow_link(3, 1000, 100),
        says="the kind is network",
    ),
    Planted("tensor-across-hosts", "tensor-across-hosts", TINY, ("layout=tensor=2",), place=two_hosts(1000)),
)

HEALTHY = (
    (TINY, (), 2),
    (TINY, (), 1),
    (TINY, ("layout=zero=1",), 2),
    (TINY, ("layout=zero=3",), 2),
    (TINY, ("layout=pipeline=2", "train.micro_batch=1"), 2),
    (TINY, ("train.global_batch=48",), 2),
    (OWN, (), 2),
    (OWN, (), 1),
    (OWN, ("model.args.hidden=1024",), 2),
    (OWN, ("data.workers=1", "model.args.hidden=1024"), 1),
)

LLAMA = ("examples/tiny.toml", "model.preset=160m", "train.precision=bf16", "train.eval_every=0", *_QUICK)
"""12 blocks of width 768, for a GPU."""
_LARGE = ("data.seq_len=1024", "train.global_batch=32", "train.micro_batch=32", "train.steps=60")
_WIDE = ("model.args.hidden=2048", "train.micro_batch=64", "train.compile=true")
_SHORT = ("data.seq_len=256", "train.steps=60")

PLANTED_ON_GPU = (
    Planted(
        "small-micro-batches",
        "small-micro-batch",
        LLAMA,
        (*_SHORT, "train.global_batch=16", "train.micro_batch=1", "train.compile=true"),
        1,
    ),
    Planted(
        "needless-recompute", "needless-recompute", LLAMA, (*_LARGE, "train.compile=true", "train.recompute=full"), 1
    ),
    Planted("no-compile", "no-compile", LLAMA, _LARGE, 1),
    Planted(
        "launch-bound",
        "launch-bound",
        LLAMA,
        (*_SHORT, "train.global_batch=2", "train.micro_batch=2", "train.steps=300"),
        1,
        place=traced,
    ),
    Planted("unread-tensors", "host-to-device", OWN, (*_WIDE, 'data.collate="doctor_work:with_unread"'), 1),
    Planted("slow-store", "input-bound", OWN, (*_WIDE, "data.args.fetch_s=0.002"), 1),
)

HEALTHY_ON_GPU = (
    (LLAMA, (*_LARGE, "train.compile=true"), 1),
    (LLAMA, ("data.seq_len=2048", "train.global_batch=32", "train.micro_batch=16", "train.compile=true"), 1),
)
