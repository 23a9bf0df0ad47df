"""Files that are sealed and well-formed, and hold what no writer of ours ever wrote: every reader ends with a result or
with one sentence of ours, prints no control sequence, and touches nothing outside the folder.

``SEED=7 pytest tests/cli/test_forged_files.py`` draws other forgeries."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from closeranks.checkpoint.format.manifest_validation import validate_manifest
from closeranks.core.errors import CheckpointError, CloseranksError, UserError
from closeranks.core.printable import printable
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.run.job.job import load_job
from closeranks.run.loop import train_job
from closeranks.run.sample import sample
from closeranks.run.state.resume import load_initial_state
from closeranks.telemetry.reports.report import write_report
from tests.checkpoint.forging import seal_text, to_text, variants
from tests.cli.calling import Said, call
from tests.cli.ckpt.calling import ckpt
from tests.run.loading import assembled

SEED = int(os.environ.get("SEED", "0"))
TABLES: dict[str, Any] = {
    "model": {"name": "llama", "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 24},
    "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
    "train": {"steps": 2, "global_batch": 2, "micro_batch": 1, "eval_samples": 1},
    "checkpoint": {"every": 1},
}
TABLES["model"]["vocab_size"] = 256
Read = Callable[[Path], Said]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps that saved after each."""
    set_world(World(launcher="testing"))
    folder = tmp_path_factory.mktemp("real") / "run"
    train_job(load_job(None, extra=TABLES).value, folder)
    return folder


@pytest.fixture
def run(real: Path, tmp_path: Path) -> Path:
    set_world(World(launcher="testing"))
    folder = tmp_path / "run"
    shutil.copytree(real, folder)
    return folder


def body_of(path: Path) -> Any:
    return json.loads(path.read_bytes().partition(b"\n")[2])


def everything(folder: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_size for path in folder.rglob("*")}


def check(said: Said, what: str) -> None:
    assert said.code in (0, 1, 2), (what, said)
    text = said.out + said.err
    assert "Traceback" not in text, what
    assert not set(text) & {"\x1b", "\x07", "\0", "\ud800"}, (what, text)
    if said.code == 2:
        assert "closeranks: " in said.err, (what, said)
    assert len(text) < 400_000, what


def test_every_forged_manifest_is_refused_or_sound(real: Path) -> None:
    path = real / "checkpoints" / "step-00000002"
    body = body_of(path / "manifest.json")
    body["tree"] = {key: body["tree"][key] for key in ("progress", "data", "rhythm")}  # the rest is looked at by verbs
    body["tensors"] = body["tensors"][:2]
    validate_manifest(seal_text("manifest", to_text(body)), str(path))
    refused = 0
    for _, forged in variants(body, SEED):
        with suppress(CheckpointError):
            validate_manifest(seal_text("manifest", to_text(forged)), str(path))
            continue
        refused += 1
    assert refused > 1000


TREE = ("config", "progress", "identity", "data", "rhythm", "algorithm", "noise")


def forgeries(body: Any, count: int) -> Iterator[tuple[str, Any]]:
    """Half of them in what a run's state holds, half anywhere."""
    tree = {key: body["tree"][key] for key in TREE if key in body["tree"]}
    for what, forged in variants(tree, SEED, count // 2):
        yield f"tree.{what}", {**body, "tree": {**body["tree"], **forged}}
    yield from variants({key: body[key] for key in body if key != "tree"} | {"tree": tree}, SEED + 1, count // 2)


def spoken(place: Path) -> Said:
    """``closeranks sample``, which writes bytes."""
    try:
        b"".join(sample(place, "a", num_tokens=2, temperature=0.5, top_k=0, seed=0))
    except CloseranksError as error:
        return Said(error.exit_code, "", f"closeranks: {printable(str(error))}")
    return Said(0, "", "")


def readers(run: Path, out: Path) -> list[tuple[str, Callable[[], Said]]]:
    one = run / "checkpoints" / "step-00000002"
    return [
        ("ls", lambda: ckpt("ls", run)),
        ("show", lambda: ckpt("show", one)),
        ("show --json", lambda: ckpt("show", one, "--json")),
        ("verify", lambda: ckpt("verify", run)),
        ("diff", lambda: ckpt("diff", one, run / "checkpoints" / "step-00000001")),
        ("prune", lambda: ckpt("prune", run, "--keep-last", "2", "--keep-best", "1")),
        ("sample", lambda: spoken(one)),
        ("export-hf", lambda: ckpt("export-hf", one, out / "hf")),
        ("convert", lambda: ckpt("convert", one, out / "w.safetensors", "--to", "safetensors")),
        ("convert dcp", lambda: ckpt("convert", one, out / "dcp", "--to", "dcp")),
    ]


@pytest.mark.timeout(600)
def test_every_reader_of_a_forged_manifest_ends_with_a_sentence(
    run: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = run / "checkpoints" / "step-00000002" / "manifest.json"
    body = body_of(path)
    (run / "checkpoints" / "latest").unlink()
    out = tmp_path / "out"
    for what, forged in forgeries(body, 6):
        path.write_bytes(seal_text("manifest", to_text(forged)))
        before = everything(tmp_path)
        for name, read in readers(run, out):
            out.mkdir(exist_ok=True)
            check(read(), f"{what}: {name}")
            shutil.rmtree(out)
        after = everything(tmp_path)
        assert {name for name in before if name not in after} <= {str(path)}, what
        assert {name for name in after if name not in before} <= {str(run / "checkpoints" / ".lock")}, what
    capfdbinary.readouterr()


def test_resuming_from_a_forged_manifest_goes_on_from_the_one_before(run: Path) -> None:
    path = run / "checkpoints" / "step-00000002" / "manifest.json"
    body = body_of(path)
    job = load_job(None, extra={**TABLES, "checkpoint": {"resume": str(run), "save": False}}).value
    steps = set()
    with assembled(job) as built:
        for _, forged in forgeries(body, 20):
            path.write_bytes(seal_text("manifest", to_text(forged)))
            with suppress(UserError):
                steps.add(load_initial_state(built.engine.context, built.state, run).step)
    assert 1 in steps


@pytest.mark.timeout(600)
def test_a_forged_run_folder_is_told(run: Path, tmp_path: Path) -> None:
    metrics = run / "metrics" / "rank-00000.jsonl"
    rows = [json.loads(line) for line in metrics.read_bytes().splitlines()]
    kinds = {row["event"]: row for row in rows}
    agent = {"event": "rank_lost", "at": 1.7e9, "rank": -1, "generation": 0, "kind": "killed", "step": 1, "cause": "x"}
    closed = {"event": "ranks_closed", "at": 1.7e9, "generation": 1, "step": 2, "seconds": 1.0, "parts": {"fork": 0.5}}
    status = {"run": "r", "state": "running", "at": 1.7e9, "workers": [{"rank": 0, "step": 1, "phase": "x"}]}
    status |= {"hosts": [{"name": "a"}], "happened": [{"at": 1.7e9, "text": "x"}], "writer": {"pid": 1, "host": "h"}}
    config = json.loads((run / "config.json").read_bytes())
    files = {
        metrics: rows,
        run / "metrics" / "rank-00001.jsonl": [kinds["run_started"], {"event": "warning", "what": "x", "at": 1.7e9}],
        run / "metrics" / "agent.jsonl": [agent, closed],
        run / "status.json": status,
        run / "config.json": {name: config[name] for name in ("run", "train", "model", "data")},
    }
    for path, body in files.items():
        path.write_bytes(_written(path, body))
    for path, body in files.items():
        for number, (what, forged) in enumerate(variants(body, SEED, 4)):
            path.write_bytes(_written(path, forged))
            check(call("status", run), f"{path.name} {what}: status")
            if number == 0:
                check(call("report", run), f"{path.name} {what}: report")  # draws a picture, which takes a second
            page = write_report(run).read_text()
            assert "\x1b" not in page, what
        path.write_bytes(_written(path, body))


def _written(path: Path, body: Any) -> bytes:
    if path.suffix == ".json":
        return to_text(body)
    return b"".join(to_text(row) + b"\n" for row in body) if isinstance(body, list) else to_text(body)
