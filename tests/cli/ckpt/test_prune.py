from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.checkpoint.manifest import folder_name
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
    assert "of no use to any checkpoint" in rows[folder_name(0)]
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
