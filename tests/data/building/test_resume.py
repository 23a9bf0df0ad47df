"""Builds that are killed: they go on, and end in the bytes of one that was left alone."""

from __future__ import annotations

import gzip
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.core.errors import DataError, RunFailed, SetupError
from closeranks.data.building import build
from closeranks.data.building.build import BuildReporter, BuildRequest, BuildSummary, build_shards
from closeranks.data.building.journal import BuildJournal, OutputFolderState, decide, differences
from closeranks.data.building.worker_pool import _ignoring_interrupts
from tests.cli.data.calling import data
from tests.data.building.material import contents, json_lines, rows, texts_folder

pytestmark = pytest.mark.world
SHARD = 30_000
BUILD = """
import sys
from pathlib import Path
from closeranks.data.building.build import BuildRequest, build_shards
request = BuildRequest(tuple(sys.argv[3:]), Path(sys.argv[1]), shard_bytes=30_000, num_processes=2, on_bad=sys.argv[2])
print(build_shards(request).num_resumed)
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("inputs")
    texts_folder(folder / "texts", 3)
    (folder / "a.jsonl").write_bytes(json_lines(rows(1200)))
    return str(folder / "texts"), str(folder / "a.jsonl")


@pytest.fixture(scope="module")
def undisturbed(inputs: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    build_shards(BuildRequest(inputs, out, shard_bytes=SHARD, num_processes=2))
    found = contents(out)
    assert len(found) > 6
    return found


def again(inputs: tuple[str, ...], out: Path) -> BuildSummary:
    return build_shards(BuildRequest(inputs, out, shard_bytes=SHARD, num_processes=2))


def killed_at(label: str, inputs: tuple[str, ...], out: Path, on_bad: str = "stop") -> None:
    """A build whose processes die at a point; it must not end well."""
    command = [sys.executable, "-c", BUILD, str(out), on_bad, *inputs]
    env = {**os.environ, "CLOSERANKS_KILL_AT": label}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0, done.stdout


@pytest.mark.parametrize(
    "label",
    [
        pytest.param("shard begun:2", marks=pytest.mark.slow),
        pytest.param("shard durable:2", marks=pytest.mark.slow),
        "shard named:2",
        pytest.param("build.part_written:3", marks=pytest.mark.slow),
        "build.part_noted:3",
        pytest.param("build.parts_done", marks=pytest.mark.slow),
        "build.described",
    ],
)
def test_a_build_killed_anywhere_goes_on_to_the_same_bytes(
    label: str, inputs: tuple[str, ...], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    killed_at(label, inputs, tmp_path / "out")
    again(inputs, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed
    assert sorted(path.name for path in (tmp_path / "out" / ".build").iterdir()) == ["lock", "plan.json"]


def test_finished_parts_are_not_built_again(inputs: tuple[str, ...], tmp_path: Path) -> None:
    killed_at("build.part_noted:3", inputs, tmp_path / "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.crs")}
    summary = again(inputs, tmp_path / "out")
    assert summary.num_resumed == 3
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.crs")}
    assert len(before) >= 3
    assert {name: after[name] for name in before} == before


def test_a_part_of_several_shards_goes_on_behind_the_last_that_is_finished(tmp_path: Path) -> None:
    """A compressed file is one part, whatever it holds. Bad records before the kill are counted after it, once."""
    lines = json_lines(rows(3000)).splitlines(keepends=True)
    lines[5] = lines[2000] = b"[]\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"".join(lines)))
    request = BuildRequest((str(tmp_path / "a.jsonl.gz"),), tmp_path / "out", shard_bytes=30_000, on_bad="skip")
    build_shards(replace(request, out=tmp_path / "whole"))
    killed_at("shard named:3", request.inputs, tmp_path / "out", "skip")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.crs")}
    summary = build_shards(request)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.crs")}
    assert len(before) == 3
    assert {name: after[name] for name in before} == before
    assert (summary.num_skipped, summary.num_documents, summary.num_parts) == (2, 2998, 1)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_worker_that_is_killed_is_named_and_the_build_goes_on_when_asked(
    inputs: tuple[str, ...], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    """SIGKILL from outside, as the kernel does when memory runs out."""
    struck: list[int] = []

    def strike(num_bytes: int) -> None:
        if not struck:
            struck.extend(children(os.getpid())[-1:])
            os.kill(struck[0], signal.SIGKILL)

    request = BuildRequest(inputs, tmp_path / "out", shard_bytes=SHARD, num_processes=2)
    with pytest.raises(RunFailed, match=r"process \d+ was killed by SIGKILL .* run the same command again"):
        build_shards(request, BuildReporter(on_bytes=strike))
    assert not (tmp_path / "out" / "dataset.json").exists()
    again(inputs, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_a_build_that_is_killed_leaves_no_process_and_goes_on(
    inputs: tuple[str, ...], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", BUILD, str(out), "stop", *inputs], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(out.glob("*.crs")) and time.monotonic() < deadline:
        time.sleep(0.002)
    workers = children(process.pid)
    process.kill()
    process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.002)
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    again(inputs, out)
    assert contents(out) == undisturbed


def test_ctrl_c_says_how_to_go_on(inputs: tuple[str, ...], undisturbed: dict[str, bytes], tmp_path: Path) -> None:
    """As a terminal sends it: to every process of the group."""
    words = ["data", "build", *inputs, "--out", "out", "--shard-size", "30kB", "--processes", "2"]
    command = [sys.executable, "-m", "closeranks", *words]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **pipe)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/*.crs*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "parts are built. Run the same command again to continue." in said
    assert "Traceback" not in said
    again(inputs, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_processes_of_a_build_are_deaf_to_ctrl_c_from_their_birth() -> None:
    """A handler of their own would come too late: what an interpreter imports takes a while."""
    with _ignoring_interrupts():
        code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_ctrl_c_while_processes_start_waits_until_they_can_be_ended() -> None:
    started = []

    def start() -> None:
        with _ignoring_interrupts():
            signal.raise_signal(signal.SIGINT)
            started.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started


def test_ctrl_c_before_anything_is_built_is_one_line(
    inputs: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "make_build_spec", interrupted)
    said = data("build", *inputs, "--out", tmp_path / "out")
    assert (said.code, said.out) == (130, "")
    assert said.err == "closeranks: interrupted before anything was built. Run the same command again.\n"
    monkeypatch.setattr(build, "_inspect", interrupted)
    said = data("build", *inputs, "--out", tmp_path / "out")
    assert (said.code, said.err) == (130, "closeranks: interrupted\n")


def test_a_description_that_is_damaged_is_made_again(
    inputs: tuple[str, ...], undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    again(inputs, tmp_path / "out")
    path = tmp_path / "out" / "dataset.json"
    path.write_bytes(path.read_bytes()[:-9])
    again(inputs, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


# What may be built into a folder


def test_the_same_command_on_a_finished_build_does_nothing(inputs: tuple[str, ...], tmp_path: Path) -> None:
    first = again(inputs, tmp_path / "out")
    second = again(inputs, tmp_path / "out")
    assert (first.is_old, second.is_old) == (False, True)
    assert (first.num_documents, first.num_tokens) == (second.num_documents, second.num_tokens)


def test_other_settings_are_refused_and_can_overwrite(inputs: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "out"
    again(inputs, out)
    with pytest.raises(DataError, match=r"another build: shard-size was 30000 and is now 99999.*--overwrite"):
        build_shards(BuildRequest(inputs, out, shard_bytes=99_999))
    summary = build_shards(BuildRequest(inputs, out, shard_bytes=99_999, is_overwriting=True, num_processes=1))
    build_shards(BuildRequest(inputs, tmp_path / "new", shard_bytes=99_999, num_processes=1))
    assert contents(out) == contents(tmp_path / "new")
    assert summary.num_shards == len(list(out.glob("*.crs")))


def test_inputs_that_changed_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    request = BuildRequest((str(tmp_path / "a.txt"),), tmp_path / "out", num_processes=1)
    build_shards(request)
    (tmp_path / "a.txt").write_text("two")
    with pytest.raises(DataError, match="its inputs have changed since"):
        build_shards(request)


def test_a_folder_with_other_files_is_refused_even_to_overwrite(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    for is_overwriting in (False, True):
        request = BuildRequest((str(tmp_path / "a.txt"),), tmp_path / "out", is_overwriting=is_overwriting)
        with pytest.raises(DataError, match=r"is not empty: it holds thesis\.tex"):
            build_shards(request)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


def test_two_builds_do_not_share_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with BuildJournal(tmp_path / "out").lock(), pytest.raises(SetupError, match="another process is building"):
        build_shards(BuildRequest((str(tmp_path / "a.txt"),), tmp_path / "out"))


@pytest.mark.parametrize(
    ("state", "is_overwriting", "choice"),
    [
        ("new", False, "fresh"),
        ("ours", False, "resume"),
        ("done", False, "done"),
        ("ours", True, "fresh"),
        ("done", True, "fresh"),
        ("other", True, "fresh"),
    ],
)
def test_what_is_done_with_a_folder(state: str, is_overwriting: bool, choice: str) -> None:
    assert decide(OutputFolderState(state), "out", is_overwriting) == choice  # type: ignore[arg-type]


def test_differences_are_told_in_words() -> None:
    found = {"eos": None, "kind": "tokens", "fingerprint": "a"}
    assert differences(found, {**found, "eos": 3}) == "eos was None and is now 3"
    assert differences(found, {**found, "fingerprint": "b"}) == "its inputs have changed since it began"
