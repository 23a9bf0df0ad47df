"""A process killed at any labelled point of a save leaves a whole checkpoint to go on from, and the next save succeeds.

The first sweep forks a process for every single passing of every label, on two tiers; the second goes through a real
writer process, told by the environment, once for each label.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from closeranks.checkpoint.load.catalogue import find_checkpoints
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.checkpoint.save import save_tiers
from closeranks.checkpoint.save.writer_client import WriterClient
from closeranks.core.pieces import Piece
from closeranks.storage.lease import LeaseTimes
from closeranks.storage.local import LocalStorage
from closeranks.storage.object_store.remote import RemoteStorage
from tests.checkpoint import saving
from tests.checkpoint.saving import kinds, memfd, order, save, settings
from tests.storage import servers

pytestmark = pytest.mark.world

ROOT = Path(__file__).parents[2]
IN_WRITER = ("writer.order_received",)
"""Passed only by the writer process itself."""
OF_A_SAVE = """
import json, os, shutil, sys
from pathlib import Path
import closeranks.checkpoint.save.writer_process
from closeranks.core.system import failpoints
from tests.checkpoint import saving

class Any(str):
    __hash__ = str.__hash__
    def __ne__(self, other): return False

good, sweep = Path(sys.argv[1]), Path(sys.argv[2])

def in_child(name, death):
    place = sweep / name
    shutil.copytree(good, place)
    child = os.fork()
    if not child:
        failpoints._REQUESTED = death
        where = saving.settings(place / "near", remote=str(place / "far"), keep_last=2)
        saving.save(saving.order(4), where)
        counts = {"points": list(failpoints.FAILPOINTS), "seen": failpoints._SEEN}
        (sweep / f"{name}.json").write_text(json.dumps(counts))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

assert in_child("all", (Any(), -1)) == 0
counts = json.loads((sweep / "all.json").read_text())["seen"]
killed = [[label, n, in_child(f"{label}:{n}", (label, n))] for label in counts for n in range(1, counts[label] + 1)]
print(json.dumps({"points": list(failpoints.FAILPOINTS), "killed": killed}))
"""


def places(folder: Path) -> saving.SaveSettings:
    return settings(folder / "near", remote=str(folder / "far"), keep_last=2)


@pytest.fixture
def fast() -> Iterator[Path]:
    """A kill is as real in memory, and a hundred saves take a hundred times less there than on a disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="closeranks-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints, so that the fourth save collects; the third refers to the first. An unfinished try, too."""
    folder = tmp_path_factory.mktemp("good")
    for step in (1, 2, 3):
        assert (
            kinds(save(order(step), settings(folder / "near", remote=str(folder / "far"))), "remote")[-1] == "committed"
        )
    for tier in ("near", "far"):
        shutil.copytree(folder / tier / "step-00000002", folder / tier / "step-00000000")
        (folder / tier / "step-00000000" / "manifest.json").unlink()
        (folder / tier / "step-00000002" / "part-00000-of-00001.json").write_text("left by a kill")
    return folder


def loaded_step(place: Path) -> int:
    """Loads what a resuming run would, every tensor of it, and compares it with the state of its step."""
    found = find_checkpoints(str(place)).candidates()[0]
    reader = CheckpointReader(found.storage, found.name)
    reader.check_files()
    expected = saving.state(found.step)
    assert reader.shapes("model").keys() == expected.keys()
    for key, whole in expected.items():
        np.testing.assert_array_equal(reader.read("model", key, Piece.whole(key, whole.shape)).numpy(), whole)
    return found.step


def assert_goes_on(folder: Path) -> None:
    """Whole as it is, every manifest; and the next save succeeds and clears up."""
    for tier in ("near", "far"):
        storage = LocalStorage(folder / tier)
        assert loaded_step(folder / tier) in (3, 4)
        for name in saving.committed_names(storage):
            saving.assert_loads(folder / tier, int(name.removeprefix("step-")))
    reports = save(order(5), places(folder))
    for tier in ("primary", "remote"):
        assert [kind for kind in kinds(reports, tier) if kind != "released"][:2] == ["written", "committed"], reports
    for tier in ("near", "far"):
        assert loaded_step(folder / tier) == 5
        assert len(saving.committed_names(LocalStorage(folder / tier))) == 2
        assert not [name for name in saving.files(folder / tier) if "part-" in name or "step-00000000" in name]


def test_a_save_killed_at_any_passing_of_any_point(fast: Path, good: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OF_A_SAVE, str(good), str(fast)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {label for label, _, _ in told["killed"]} == set(told["points"]) - set(IN_WRITER), (
        "every declared point is hit"
    )
    assert len(told["killed"]) > 2 * len(told["points"])
    for label, count, status in told["killed"]:
        assert status == -signal.SIGKILL, (label, count)
        try:
            assert_goes_on(fast / f"{label}:{count}")
        except BaseException as error:
            error.add_note(f"killed at {label}, passing {count}")
            raise


def kill_writer(folder: Path, label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fourth save by a real writer that the environment wants dead at a label."""
    one = WriterClient(places(folder))
    monkeypatch.setenv("CLOSERANKS_KILL_AT", label)
    made, buffer = order(4)
    with memfd(buffer) as fd:
        one.send(made, fd)
        monkeypatch.delenv("CLOSERANKS_KILL_AT")
        reports = one.wait(30.0)
    one.close()
    failed = [report.what for report in reports if report.kind == "failed"]
    assert any("the writer was killed by SIGKILL" in what for what in failed), (label, reports)
    assert [report.kind for report in reports].count("released") == 1, label


SOME = (*IN_WRITER, "save.first_bytes", "document in place", "commit.manifest_published", "collect.manifest_removed")


@pytest.mark.parametrize("label", SOME)
def test_a_writer_that_is_killed_is_reported(
    fast: Path, good: Path, label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(good, fast / "run")
    kill_writer(fast / "run", label, monkeypatch)
    assert_goes_on(fast / "run")


@pytest.mark.slow
def test_a_writer_killed_at_any_point_is_reported(fast: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import json, closeranks.checkpoint.save.writer_process\n"
    code += "from closeranks.core.system.failpoints import FAILPOINTS\nprint(json.dumps(list(FAILPOINTS)))"
    labels = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert set(SOME) < set(labels)
    for label in labels:
        shutil.copytree(good, fast / label)
        kill_writer(fast / label, label, monkeypatch)
        assert_goes_on(fast / label)


@pytest.mark.parametrize("label", ["save.first_bytes", "save.data_durable", "save.part_published"])
def test_another_rank_killed_leaves_rank_0_with_a_failed_save_and_the_next_succeeds(tmp_path: Path, label: str) -> None:
    where = settings(tmp_path, timeout_s=0.3)
    for rank in (1, 0):
        save(order(1, rank, 2), where)
    code = f"from tests.checkpoint.saving import *; save(order(2, 1, 2), settings({str(tmp_path)!r}))"
    environment = {**os.environ, "CLOSERANKS_KILL_AT": label}
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment).returncode == -signal.SIGKILL
    reports = save(order(2, 0, 2), where)
    if label == "save.part_published":  # it had done its part
        assert kinds(reports)[-1] == "committed"
        assert loaded_step(tmp_path) == 2
    else:
        assert "no report from rank 1" in reports[-1].what
        assert loaded_step(tmp_path) == 1
    for rank in (1, 0):
        reports = save(order(3, rank, 2), where)
    assert kinds(reports)[-1] == "committed"
    assert loaded_step(tmp_path) == 3


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


IN_A_STORE = """
import sys
from tests.checkpoint.test_kill_points import save_in_store
save_in_store(sys.argv[1], sys.argv[2], 2)
"""


def opened(place: str, endpoint: str) -> RemoteStorage:
    """With leases that pass soon: the next save waits for that of the one that was killed."""
    terms = LeaseTimes(renew_s=0.3, lease_s=1.0, poll_s=0.05)
    return RemoteStorage(place, servers.options(endpoint), part_bytes=5 << 20, times=terms)


def save_in_store(place: str, endpoint: str, step: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_tiers, "open_storage", lambda place: opened(place, endpoint))
        reports = save(order(step, values=saving.state(step, 2_000_000)), settings(place))
    assert kinds(reports)[-1] == "committed", reports


@pytest.mark.slow
@pytest.mark.parametrize(
    "label",
    [
        *("save.ordered", "save.half_way", "part sent", "parts sent", "upload complete", "save.data_durable"),
        *("save.read_back", "save.part_published", "document put", "commit.parts_gathered"),
        *("commit.manifest_published", "commit.parts_removed", "commit.latest_published"),
    ],
)
def test_a_save_to_a_store_that_is_killed(store: servers.Server, label: str) -> None:
    place = f"s3://{servers.BUCKET}/{label.replace(' ', '-')}"
    save_in_store(place, store.endpoint, 1)
    environment = {**os.environ, "CLOSERANKS_KILL_AT": label}
    words = [sys.executable, "-c", IN_A_STORE, place, store.endpoint]
    assert subprocess.run(words, cwd=ROOT, env=environment).returncode == -signal.SIGKILL
    storage = opened(place, store.endpoint)
    for step in (int(name.removeprefix("step-")) for name in saving.committed_names(storage)):
        loaded = saving.load(storage, f"step-{step:08d}")
        assert all((loaded[key] == value).all() for key, value in saving.state(step, 2_000_000).items())
    assert saving.latest_manifest(storage).step == (2 if label == "commit.latest_published" else 1)
    save_in_store(place, store.endpoint, 3)
    assert saving.latest_manifest(storage).step == 3
