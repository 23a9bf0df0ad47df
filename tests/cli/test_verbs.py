"""Each verb of the command line does what its help says."""

import json
from pathlib import Path

import pytest

from closeranks.cli.main import build_app
from closeranks.run.job.job import load_job
from tests.cli.calling import call
from tests.cli.commands import FAST, TINY, closeranks


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One small trained run, with its report."""
    folder = tmp_path_factory.mktemp("verbs")
    quick = [change for change in FAST if not change.startswith("telemetry")]
    done = closeranks("train", TINY, "-n", 2, *quick, "--profile", "2:4", "run.folder=run", cwd=folder)
    assert done.code == 0, done.err
    assert "was not written" not in done.out + done.err
    assert "\x1b" not in done.out
    assert "\r" not in done.out
    return folder / "run"


@pytest.mark.parametrize("verb", ["", "train", "run", "config", "sample", "status", "report"])
def test_help_shows_an_example(tmp_path: Path, verb: str) -> None:
    done = (call if verb else closeranks)(*([verb] if verb else []), "--help", cwd=tmp_path)
    assert done.code == 0
    assert f"    closeranks {verb or 'train'} " in done.out


@pytest.mark.parametrize("verb", ["ckpt", "data", "plan"])
def test_a_command_line_that_is_built_again_costs_the_same(verb: str) -> None:
    """Each verb is registered once in it, however many were built before in this process."""
    for _ in range(2):
        (group,) = build_app([verb]).registered_groups
        assert group.typer_instance is not None
        names = [command.name for command in group.typer_instance.registered_commands]
        assert sorted(set(names)) == sorted(names) != []


def test_config_prints_a_job_that_loads_back_equal(tmp_path: Path) -> None:
    done = call("config", TINY, "train.steps=7", cwd=tmp_path)
    (tmp_path / "again.toml").write_text(done.out)
    assert load_job(tmp_path / "again.toml").value == load_job(Path(TINY), ["train.steps=7"]).value


def test_explain_tells_where_each_value_came_from(tmp_path: Path) -> None:
    done = call("config", TINY, "optim.lr=0.5", "--explain", cwd=tmp_path)
    by_key = {line.split(" = ")[0]: line for line in done.out.splitlines()}
    assert "command line" in by_key["optim.lr"]
    assert "tiny.toml:" in by_key["train.global_batch"]
    assert " default " in by_key["optim.eps"]
    assert "Samples per optimizer step" in by_key["train.global_batch"]


def test_the_schema_knows_every_table(tmp_path: Path) -> None:
    schema = json.loads(call("config", "--schema", cwd=tmp_path).out)
    assert set(schema["properties"]) == set(load_job(Path(TINY)).value.model_dump())


@pytest.mark.world
def test_a_run_leaves_everything_in_its_folder(run: Path) -> None:
    for name in ("job.toml", "config.json", "curve.png", "report.md", "checkpoints/latest"):
        assert (run / name).stat().st_size > 0, name
    for rank in range(2):
        assert (run / "metrics" / f"rank-{rank:05d}.jsonl").exists()
        assert (run / "logs" / f"rank-{rank:05d}.log").exists()
        assert (run / "traces" / f"rank-{rank:05d}.json.gz").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.world
def test_a_sample_repeats_by_its_seed(run: Path) -> None:
    texts = [closeranks("sample", run, "import ", "--tokens", 20, "--seed", seed, cwd=run).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("import ") for text in texts)


@pytest.mark.world
def test_report_draws_and_writes_again(run: Path) -> None:
    (run / "curve.png").unlink()
    (run / "report.md").unlink()
    done = call("report", run, cwd=run)
    assert done.code == 0, done.err
    assert (run / "curve.png").exists()
    assert "Trained 4 steps on 2 workers" in (run / "report.md").read_text()


@pytest.mark.world
def test_a_refused_resume_leaves_the_run_as_it_was(run: Path) -> None:
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    same = ["model.num_layers=2", "run.folder=run", "checkpoint.resume=run"]
    done = closeranks("train", TINY, "-n", 2, *same, "run.seed=8", cwd=run.parent)
    assert done.code == 2
    assert "run.seed" in done.err
    done = closeranks("train", TINY, "-n", 2, *same, "train.steps=4", cwd=run.parent)
    assert done.code == 2
    assert "nothing is left to do" in done.err
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert sorted(path.name for path in run.parent.iterdir()) == ["run"]


@pytest.mark.world
def test_a_second_run_gets_a_folder_of_its_own(run: Path) -> None:
    done = closeranks("train", TINY, *FAST, "run.folder=run", cwd=run.parent)
    assert done.code == 0, done.err
    assert (run.parent / "run-2" / "checkpoints" / "latest").exists()
