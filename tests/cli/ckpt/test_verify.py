from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint import making
from tests.checkpoint.making import a_state
from tests.cli.ckpt.calling import ckpt
from tests.cli.commands import closeranks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    base = making.write(tmp_path / "checkpoints", 20, a_state())
    making.write(tmp_path / "checkpoints", 40, {**a_state(5), ("model", "mask"): a_state()["model", "mask"]}, base=base)
    return tmp_path


def test_sound_checkpoints(run: Path) -> None:
    said = ckpt("verify", run)
    assert said.code == 0
    assert "2 checkpoints, " in said.out
    assert ": all sound (" in said.out
    assert " GB/s)" in said.out
    assert said.err == ""


def test_damage_is_named_and_told_by_the_exit_status(run: Path) -> None:
    path = run / "checkpoints" / "step-00000040" / "data-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    said = ckpt("verify", run)
    assert said.code == 1
    assert "DAMAGED  step-00000040: data-00001-of-00002.safetensors: other/scale: " in said.out
    assert "1 damaged" in said.out
    told = json.loads(ckpt("verify", run, "--json").out)
    assert not told["is_sound"]
    assert told["findings"][0]["tensor"] == "other/scale"
    assert ckpt("verify", run / "checkpoints" / "step-00000020").code == 0
    assert ckpt("verify", run / "checkpoints" / "step-00000040").code == 1


def test_what_puts_nothing_in_doubt_is_a_note(run: Path) -> None:
    (run / "checkpoints" / "step-00000060").mkdir()
    (run / "checkpoints" / "step-00000040" / "notes.txt").write_text("mine")
    said = ckpt("verify", run)
    assert said.code == 0
    assert "note     step-00000060: manifest.json: it has no manifest.json" in said.out
    assert "note     step-00000040: notes.txt: no part of this checkpoint" in said.out


def test_a_damaged_latest_is_damage(run: Path) -> None:
    path = run / "checkpoints" / "latest"
    path.write_bytes(path.read_bytes()[:-1])
    said = ckpt("verify", run)
    assert said.code == 1
    assert "latest is damaged" in said.out


def test_nothing_to_verify(tmp_path: Path) -> None:
    assert ckpt("verify", tmp_path).code == 2


def test_as_a_person_calls_it(run: Path) -> None:
    done = closeranks("ckpt", "verify", run, cwd=run)
    assert (done.code, done.err) == (0, "")
    assert "2 checkpoints, " in done.out
    (run / "checkpoints" / "latest").write_bytes(b"")
    assert closeranks("ckpt", "verify", run, cwd=run).code == 1
    done = closeranks("ckpt", "verify", run / "nonesuch", cwd=run)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("closeranks: there are no checkpoints at ")
    assert len(done.err.splitlines()) == 1
