"""The jobs of the golden record: a model of a few kilobytes, six steps, and every way of training it that we promise.

A job is fixed once it is recorded. To cover something new, add a job; do not change one.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from closeranks.facts.layout import Layout

Tables = dict[str, dict[str, Any]]

STEPS = 6
STOP_AT, KILL_AT = 2, 4
"""The step after which a run is stopped, to be resumed (local SGD finishes its round first), and that of the kill."""
TABLES: Tables = {
    "run": {"deterministic": True, "seed": 7},
    "model": {
        "name": "llama",
        "dim": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 4,
        "ffn_dim": 32,
        "dropout": 0.1,
    },
    # Every step has a short micro-batch, two data ranks never come out even, and the last step is short.
    "train": {"epochs": 1.0, "global_batch": 9, "micro_batch": 2, "eval_samples": 3, "precision": "float32"},
    "optim": {"lr": 1e-2, "clip": 0.5},
    "telemetry": {"report": False, "log_every": 100},
    "checkpoint": {"every": 0},
    "elastic": {"snapshot_every": 1, "hang_floor_s": 60, "stragglers": "off"},
}


@dataclass(frozen=True)
class GoldenJob:
    group: str
    """The file of ``records/`` that it stands in."""
    name: str
    layout: str
    changes: Tables = field(default_factory=dict)
    data: str = "text"

    @property
    def num_ranks(self) -> int:
        return Layout.parse(self.layout).num_ranks

    def tables(self, data: Path, layout: str = "") -> Tables:
        """The job file as tables. ``data``: the folder that ``write_data`` filled."""
        found = {**TABLES, "data": data_table(self.data, data), "layout": layout_table(layout or self.layout)}
        for name, table in self.changes.items():
            found[name] = {**found.get(name, {}), **table}
        return found


def layout_table(text: str) -> dict[str, Any]:
    words = (word.split("=") for word in text.split())
    return {key: int(value) if value.isdecimal() else value for key, value in words}


# --- data: generated, so that it depends on no file of the machine


def write_data(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(_letters("text", 16 * 56 + 1))
    sizes = {"documents": [3 + 5 * row % 19 for row in range(150)], "web": [17] * 36, "mail": [17] * 17}
    for name, counts in sizes.items():
        texts = (_letters(f"{name} {row}", count) for row, count in enumerate(counts))
        lines = (json.dumps({"tokens": list(text.encode())}) for text in texts)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def _letters(key: str, count: int) -> str:
    text = ""
    while len(text) < count:
        text += hashlib.sha256(f"{key} {len(text)}".encode()).hexdigest()
    return text[:count]


def data_table(name: str, folder: Path) -> dict[str, Any]:
    records = {"name": "records", "seq_len": 16}
    tables: dict[str, dict[str, Any]] = {
        "text": {"name": "text", "path": str(folder / "text.txt"), "seq_len": 16, "eval_fraction": 0.1},
        "packed": {
            "name": "tokens",
            "path": str(folder / "documents.jsonl"),
            "packing": "documents",
            "seq_len": 32,
            "eval_fraction": 0.1,
        },
        "mixture": {
            "name": "mixture",
            "parts": {
                "web": {"weight": 2.0, "data": {**records, "path": str(folder / "web.jsonl")}},
                "mail": {"weight": 1.0, "data": {**records, "path": str(folder / "mail.jsonl")}},
            },
        },
    }
    return {**tables[name], "log_samples": True}


# --- the jobs

LAYOUTS = (
    *("data=1", "data=2", "data=3", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3"),
    *("tensor=2", "tensor=4", "pipeline=2", "data=2 tensor=2", "data=2 pipeline=2", "tensor=2 pipeline=2"),
    *("data=2 zero=1 tensor=2", "data=2 zero=2 pipeline=2", "data=2 zero=3 tensor=2", "data=2 zero=3 pipeline=2"),
    *("data=4 zero=1 shard=2", "data=4 zero=2 shard=2", "data=4 zero=3 shard=2"),
    *("data=4 zero=3 shard=2 tensor=2", "data=2 tensor=2 pipeline=2", "data=2 zero=3 tensor=2 pipeline=2"),
)
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv", "dualpipev")
COMPRESSORS = ("bf16", "fp16", "int8", "topk", "powersgd", "onebit")


def _compress(name: str, **more: Any) -> Tables:
    warmup = {"warmup": 2} if name == "onebit" else {}
    compress = {"name": name, "ratio": 0.05, "rank": 2, "measure_every": 2, **warmup, **more}
    return {"sync": {"bucket_mib": 0.01, "first_bucket_mib": 0.005, "compress": compress}}


def _local(every: int, **more: Any) -> Tables:
    return {"sync": {"local": {"every": every, **more}}}


def _precision(name: str) -> Tables:
    """A first loss scale that overflows fp16, so that steps are skipped and the scale falls."""
    return {"train": {"precision": name}, "optim": {"loss_scale": {"init": 2.0**18, "interval": 2}}}


_LOCAL_SGD = _local(2, outer_lr=1.0, outer_momentum=0.0)
_GROUPS = {"groups": [{"pattern": "lm_head*", "lr_scale": 0.1}, {"pattern": "model.embed*", "frozen": True}]}
_FOUR_LAYERS = {"model": {"num_layers": 4}}  # two stages for each rank
_SMALL_BUCKETS = {"sync": {"bucket_mib": 0.01, "first_bucket_mib": 0.001}}

JOBS: dict[str, GoldenJob] = {
    job.name: job
    for job in (
        *(GoldenJob("layouts", layout, layout) for layout in LAYOUTS),
        *(GoldenJob("schedules", name, f"pipeline=2 schedule={name}", _FOUR_LAYERS) for name in SCHEDULES),
        *(GoldenJob("compressors", f"{name} data=3", "data=3", _compress(name)) for name in COMPRESSORS),
        GoldenJob("compressors", "topk data=2 zero=1", "data=2 zero=1", _compress("topk")),
        GoldenJob("compressors", "int8 data=2 zero=3", "data=2 zero=3", _compress("int8")),
        GoldenJob("compressors", "topk without feedback data=2", "data=2", _compress("topk", feedback=False)),
        GoldenJob("local_sgd", "local SGD", "data=2", _LOCAL_SGD),
        GoldenJob("local_sgd", "DiLoCo", "data=2", _local(2)),
        GoldenJob("local_sgd", "DiLoCo data=3 fragments=2", "data=3", _local(2, fragments=2)),
        GoldenJob("local_sgd", "DiLoCo data=4 zero=3 replicas=2", "data=4 zero=3", _local(3, replicas=2)),
        GoldenJob(
            "local_sgd",
            "DiLoCo topk data=2",
            "data=2",
            {"sync": {**_local(2)["sync"], **_compress("topk")["sync"]}},
        ),
        GoldenJob("numbers", "fp16 data=2", "data=2", _precision("fp16")),
        GoldenJob("numbers", "fp16 data=2 zero=3", "data=2 zero=3", _precision("fp16")),
        GoldenJob("numbers", "bf16 data=2", "data=2", _precision("bf16")),
        GoldenJob("numbers", "bf16 tensor=2", "tensor=2", _precision("bf16")),
        GoldenJob("numbers", "sgd groups data=2 zero=2", "data=2 zero=2", {"optim": {"name": "sgd", **_GROUPS}}),
        GoldenJob("numbers", "lamb data=2 zero=1", "data=2 zero=1", {"optim": {"name": "lamb"}}),
        GoldenJob("numbers", "small buckets data=2", "data=2", _SMALL_BUCKETS),
        GoldenJob("numbers", "recomputed data=2 zero=3", "data=2 zero=3", {"train": {"recompute": "full"}}),
        GoldenJob("numbers", "tied pipeline=2", "pipeline=2", {"model": {"tied": True}}),
        GoldenJob("data", "packed data=2", "data=2", data="packed"),
        GoldenJob("data", "mixture data=2", "data=2", data="mixture"),
    )
}

RESIZED: dict[str, tuple[str, str]] = {
    f"{name}, resized to {layout}": (name, layout)
    for name, layout in (
        ("data=2", "data=3"),
        ("data=2 zero=3", "data=4 zero=2 shard=2"),
        ("tensor=2", "data=2 zero=1"),
        ("pipeline=2", "data=1"),
        ("topk data=3", "data=2"),
        ("DiLoCo", "data=3"),
    )
}
"""Stopped after ``STOP_AT`` steps and resumed on another number of workers or layout: the job, and that layout."""
DISTURBED = tuple(name for name, _ in RESIZED.values())
"""The jobs that are also drained, killed and resumed; each must come to the record of the undisturbed run."""


def group_of(name: str) -> str:
    return "resized" if name in RESIZED else JOBS[name].group


GROUPS = (*dict.fromkeys(job.group for job in JOBS.values()), "resized")
