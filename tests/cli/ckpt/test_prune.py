from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from closeranks.checkpoint.format.manifest import folder_name
from closeranks.storage.local import LocalStorage
from tests.checkpoint import saving
from tests.checkpoint.saving import order, save, settings
from tests.cli.ckpt.calling import Said, ckpt


class Prune:
    def __init__(self, run: Path) -> None:
        self.run = run

    def __call__(self, *words: object, run: object = None) -> Said:
        return ckpt("prune", run or self.run, *words)

    @property
    def root(self) -> Path:
        return self.run / "checkpoints"

    def names(self) -> list[str]:
        return saving.committed_names(LocalStorage(self.root))

    def num_bytes(self) -> int:
        return sum((self.root / name).stat().st_size for name in saving.files(self.root))


@pytest.fixture
def pruning(tmp_path: Path) -> Prune:
    """Six checkpoints, all but the first and fourth with references; one save that was cut short, one under way."""
    root = tmp_path / "checkpoints"
    for step in range(1, 7):
        save(order(step, is_full=step == 4, metric=abs(step - 2.1)), settings(root, keep_last=9))
    for step in (0, 7):
        (root / folder_name(step)).mkdir()
        (root / folder_name(step) / "data-00000-of-00002.safetensors").write_bytes(b"cut short")
    return Prune(tmp_path)


def test_it_says_what_goes_and_what_that_frees_and_does_it(pruning: Prune) -> None:
    before = pruning.num_bytes()
    said = pruning("--keep-last", 2, "--keep-best", 1)
    assert said.code == 0, said.err
    assert pruning.names() == [folder_name(step) for step in (2, 5, 6)]
    rows = {line.split()[0]: line for line in said.out.splitlines() if line.startswith("step-")}
    assert sorted(rows) == [folder_name(step) for step in (0, 1, 3, 4)]
    assert "not used by any checkpoint" in rows[folder_name(0)]
    assert "others still need files of it" in rows[folder_name(1)]
    for step in (2, 5, 6):
        saving.assert_loads(pruning.root, step)
    assert not (pruning.root / folder_name(3)).exists()
    assert (pruning.root / folder_name(7)).exists(), "a save that may be under way is not touched"
    freed = before - pruning.num_bytes()
    assert f"{freed / 1024:.1f} KiB freed; 3 checkpoints stay." in said.out
    assert "Nothing to remove; 3 checkpoints stay." in pruning("--keep-last", 2, "--keep-best", 1).out


def test_a_dry_run_only_says_it(pruning: Prune) -> None:
    before = saving.files(pruning.root)
    said = pruning("--dry-run")
    assert said.code == 0
    assert "would go" in said.out
    assert "would be freed; 3 checkpoints stay." in said.out
    assert saving.files(pruning.root) == before
    with LocalStorage(pruning.root).lock("a run"):
        assert pruning("--dry-run").out == said.out


def test_every_nth_stays(pruning: Prune) -> None:
    assert pruning("--keep-last", 2, "--keep-every", 3).code == 0
    assert pruning.names() == [folder_name(step) for step in (3, 5, 6)]


def test_it_refuses_while_a_run_saves_there(pruning: Prune) -> None:
    before = saving.files(pruning.root)
    with LocalStorage(pruning.root).lock("the run that saves step-00000007"):
        said = pruning("--keep-last", 2)
    assert said.code == 2
    assert "cannot be pruned now" in said.err
    assert "in use by the run that saves step-00000007" in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert saving.files(pruning.root) == before


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "there are no checkpoints at"),
        ("checkpoints/step-00000003", "is one checkpoint, and prune chooses among all"),
    ],
)
def test_other_places_are_refused(pruning: Prune, tmp_path: Path, place: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    before = saving.files(tmp_path)
    said = pruning(run=tmp_path / (place or "empty"))
    assert said.code == 2
    assert words in said.err
    assert saving.files(tmp_path) == before
    assert list((tmp_path / "empty").iterdir()) == []


def test_fewer_than_two_cannot_be_asked_for(pruning: Prune) -> None:
    assert pruning("--keep-last", 1).code == 2


SAVES = """
import select, sys
from time import monotonic
from concurrent.futures import ThreadPoolExecutor
from tests.checkpoint.saving import kinds, order, save, settings

step, took_s = 0, 0.0
with ThreadPoolExecutor(2) as ranks:
    while not select.select([sys.stdin], [], [], took_s)[0] or step < 12:  # training between two saves, as long as one
        step, began_at = step + 1, monotonic()
        orders = [order(step, rank, 2) for rank in range(2)]
        told = list(ranks.map(lambda one: save(one, settings(sys.argv[1], keep_last=4)), orders))
        assert "committed" in kinds(told[0]), told[0]
        assert not any("failed" in kinds(one) for one in told), told
        print(step, flush=True)
        took_s = monotonic() - began_at
"""


def test_beside_live_saves_it_takes_nothing_that_is_needed(tmp_path: Path) -> None:
    """Another process saves, each checkpoint referring to the first one for what never changes, while this one and a
    third prune as fast as they can; until three of this one's came between two saves, and twelve were saved."""
    root = tmp_path / "checkpoints"
    num_done = 0
    with subprocess.Popen(
        [sys.executable, "-c", SAVES, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    ) as saver:
        assert saver.stdin is not None
        assert saver.stdout is not None
        assert saver.stdout.readline().strip() == "1"
        pruner = f"while kill -0 {saver.pid} 2>/dev/null; do {sys.executable} -m closeranks ckpt prune {root}; done"
        third = subprocess.Popen(["bash", "-c", pruner], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while saver.poll() is None:
            said = ckpt("prune", tmp_path, "--keep-last", 2)
            assert said.code == 0 or "cannot be pruned now" in said.err, said
            num_done += said.code == 0
            assert saving.committed_names(LocalStorage(root))
            if num_done == 3 and not saver.stdin.closed:
                saver.stdin.close()
        last = int(saver.stdout.read().split()[-1])
    assert saver.returncode == 0
    _, complaints = third.communicate()
    assert "Traceback" not in complaints
    assert ckpt("prune", tmp_path, "--keep-last", 2).code == 0
    assert ckpt("verify", tmp_path).code == 0
    names = saving.committed_names(LocalStorage(root))
    assert folder_name(last) in names
    for name in names:
        saving.assert_loads(root, int(name.removeprefix("step-")))
