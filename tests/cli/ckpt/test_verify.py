from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, filled
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


def test_a_lost_file_is_one_line_and_the_newest_sound_one_is_named(run: Path) -> None:
    (run / "checkpoints" / "step-00000040" / "data-00001-of-00002.safetensors").unlink()
    said = ckpt("verify", run)
    assert said.code == 1
    lost = [line for line in said.out.splitlines() if line.startswith("DAMAGED")]
    assert len(lost) == 1
    assert lost[0].endswith(" tensors)")
    assert said.out.splitlines()[-1].startswith("The newest sound one is step-00000020: ")
    assert len(json.loads(ckpt("verify", run, "--json").out)["findings"]) > 2


def test_a_file_with_many_faults_is_cut_short(tmp_path: Path) -> None:
    state = {("model", f"layers.{n}"): Whole("float32", filled((2,), "float32", n)) for n in range(40)}
    making.write(tmp_path / "checkpoints", 20, state, num_ranks=1)
    path = tmp_path / "checkpoints" / "step-00000020" / "data-00000-of-00001.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: -40 * 8] + bytes(byte ^ 255 for byte in data[-40 * 8 :]))
    said = ckpt("verify", tmp_path)
    assert said.out.count("DAMAGED") == 10
    assert "and 30 more of this file: --json names them all" in said.out


def test_what_puts_nothing_in_doubt_is_a_note(run: Path) -> None:
    (run / "checkpoints" / "step-00000060").mkdir()
    (run / "checkpoints" / "step-00000040" / "notes.txt").write_text("mine")
    said = ckpt("verify", run)
    assert said.code == 0
    assert "note     step-00000060: manifest.json: it has no manifest.json" in said.out
    assert "note     step-00000040: notes.txt: not part of this checkpoint" in said.out


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
    assert done.err.startswith("closeranks: there is nothing at ")
    assert len(done.err.splitlines()) == 1
