"""Which ranks are servers, and which jobs can have them."""

from __future__ import annotations

from typing import Any

import pytest

from closeranks.core.errors import ConfigError
from closeranks.run.job.job import check_workers, layout_for, load_job
from closeranks.run.job.resize import resize_job
from closeranks.sync.config import ServerConfig, SyncConfig
from closeranks.sync.server.roles import Roles, roles

JOB: dict[str, dict[str, Any]] = {
    "model": {"name": "llama", "preset": "tiny"},
    "data": {"name": "text", "seq_len": 16},
    "train": {"steps": 10, "global_batch": 12},
}


def job(server: dict[str, Any], **tables: Any) -> Any:
    given = {name: {**JOB.get(name, {}), **table} for name, table in {**JOB, **tables}.items()}
    return load_job(None, extra={**given, "sync": {"server": server, **tables.get("sync", {})}}).value


def test_servers_are_the_last_ranks() -> None:
    assert roles(SyncConfig(), 4) == Roles(4, 0)
    split = roles(SyncConfig(server=ServerConfig(count=2)), 6)
    assert [split.worker_rank(rank) for rank in range(6)] == [0, 1, 2, 3, None, None]
    assert [split.server_rank(rank) for rank in range(6)] == [None, None, None, None, 0, 1]


def test_state_is_split_without_a_word_in_the_layout() -> None:
    assert layout_for(job({"count": 2}), 6).zero == 1
    assert layout_for(job({"count": 0}), 6).zero == 0


@pytest.mark.parametrize(
    ("layout", "num_ranks", "what"),
    [
        ({}, 2, "leave no worker"),
        ({"zero": 3}, 4, "the whole model"),
        ({"tensor": 2}, 8, "the whole model"),
        ({"zero": 1, "shard": 2}, 4, "the whole model"),
    ],
)
def test_a_layout_that_servers_do_not_fit(layout: dict[str, int], num_ranks: int, what: str) -> None:
    (problem,) = check_workers(job({"count": 2}, layout=layout), num_ranks)
    assert what in problem.what
    assert problem.fix


@pytest.mark.parametrize(
    ("server", "tables", "key"),
    [
        ({}, {"sync": {"local": {"every": 4}}}, "sync.server.count"),
        ({}, {"sync": {"compress": {"name": "powersgd"}}}, "sync.compress.name"),
        ({"mode": "stale"}, {"sync": {"compress": {"name": "int8"}}}, "sync.compress.name"),
        ({"backup": 1}, {"sync": {"compress": {"name": "int8"}}}, "sync.compress.name"),
        ({"backup": 1, "count": 0}, {}, "sync.server.backup"),
        ({"backup": 1, "mode": "stale"}, {}, "sync.server.backup"),
        ({"backup": 1, "mode": "async"}, {}, "sync.server.backup"),
        ({"backup": 1}, {"run": {"deterministic": True}}, "sync.server.backup"),
        ({"backup": 1}, {"optim": {"ema": 0.9}}, "optim.ema"),
        ({}, {"layout": {"batch_norm": "sync"}}, "layout.batch_norm"),
        ({}, {"train": {"noise_every": 5, "global_batch": 8, "micro_batch": 1}}, "train.noise_every"),
        ({"mode": "stale"}, {"optim": {"ema": 0.9}}, "optim.ema"),
        ({"mode": "async"}, {"train": {"precision": "fp16"}}, "train.precision"),
    ],
)
def test_a_job_that_servers_do_not_fit(server: dict[str, Any], tables: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as found:
        job({"count": 1, **server}, **tables)
    assert [problem.place for problem in found.value.problems] == [key]


def test_somebody_must_not_be_late() -> None:
    (problem,) = check_workers(job({"count": 1, "backup": 2}), 3)
    assert problem.place == "sync.server.backup"
    assert "-n 4" in problem.fix
    assert not check_workers(job({"count": 1, "backup": 2}), 4)


def test_a_smaller_run_has_somebody_to_wait_for() -> None:
    asked = job({"count": 1, "backup": 2}, layout={"data": 6})
    assert resize_job(asked, 4, 6) is not None
    assert resize_job(asked, 3, 6) is None


def test_servers_need_no_micro_batch() -> None:
    few = {"steps": 10, "global_batch": 4, "micro_batch": 1}
    assert not check_workers(job({"count": 2}, train=few), 6)
    (problem,) = check_workers(job({"count": 2}, train=few), 7)
    assert problem.what.startswith("5 workers share 4 micro-batches")
    assert problem.fix.startswith("Use data=6 or fewer")


def test_a_smaller_run_keeps_its_servers() -> None:
    asked = job({"count": 2}, layout={"data": 6})
    resized = resize_job(asked, 4, 6)
    assert resized is not None
    assert roles(resized.job.sync, resized.layout.data) == Roles(2, 2)
    assert resize_job(asked, 2, 6) is None
