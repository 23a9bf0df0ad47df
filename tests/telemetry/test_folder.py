from pathlib import Path

from closeranks.telemetry.folder import RunFolder, Settings


def test_a_key_that_is_not_there_is_none() -> None:
    settings = Settings({"run": {"name": "demo"}, "seed": 3})
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
