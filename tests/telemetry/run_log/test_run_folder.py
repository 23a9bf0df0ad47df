import os
from pathlib import Path

from closeranks.telemetry.run_log.run_folder import ResolvedSettings, RunFolder, newest_run


def test_a_key_that_is_not_there_is_none() -> None:
    settings = ResolvedSettings({"run": {"name": "demo"}, "seed": 3})
    assert settings.get("run.name") == "demo"
    assert settings.get("run.seed") is None
    assert settings.get("seed.deep") is None


def test_a_missing_or_torn_config_is_empty(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.resolved().values == {}
    run.config.write_text('{"run": {"na')
    assert run.resolved().values == {}


def test_other_ranks_come_in_order_without_rank_0(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.metrics(0).parent.mkdir()
    for rank in (0, 11, 2):
        run.metrics(rank).touch()
    assert run.other_metrics() == [run.metrics(2), run.metrics(11)]


def test_the_agents_record_is_no_ranks(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.agent.parent.mkdir()
    run.agent.touch()
    assert run.other_metrics() == []


def test_the_newest_run_is_the_one_that_was_told_of_last(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "nowhere") is None
    for name, at in (("a", 300), ("b", 100), ("c", 200)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.toml").touch()
        os.utime(tmp_path / name / "job.toml", (at, at))
    (tmp_path / "z-no-run").mkdir()
    (tmp_path / "z-file").touch()
    assert newest_run(tmp_path) == tmp_path / "a"
    RunFolder(tmp_path / "b").status.touch()
    assert newest_run(tmp_path) == tmp_path / "b"
