"""What counts is found, in the order to try it; what does not is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from closeranks.checkpoint.format.manifest import LATEST, MANIFEST, LatestPointer, encode_latest
from closeranks.checkpoint.load.catalogue import Catalogue, find_checkpoints
from closeranks.core.errors import CheckpointError
from tests.checkpoint import making
from tests.checkpoint.making import Whole, a_state, filled


def names(catalogue: Catalogue) -> list[str]:
    return [found.name.removeprefix("step-000000") for found in catalogue.candidates()]


def said(catalogue: Catalogue) -> str:
    return "\n".join(str(odd) for odd in catalogue.problems)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (20, 40, 60):
        making.write(tmp_path, step, a_state(step))
    return tmp_path


def test_latest_comes_first_then_newest_to_oldest(root: Path) -> None:
    assert names(find_checkpoints(str(root))) == ["60", "40", "20"]
    (root / LATEST).unlink()
    making.write(root, 40, a_state(40))
    catalogue = find_checkpoints(str(root))
    assert names(catalogue) == ["40", "60", "20"]
    assert catalogue.latest is not None
    assert catalogue.latest.name == "step-00000040"
    assert [found.step for found in catalogue] == [60, 40, 20]
    assert catalogue.problems == ()


def test_a_later_part_of_the_run_is_newer_than_a_later_step(root: Path) -> None:
    making.write(root, 30, a_state(), part=2, is_latest=False)
    assert [found.name for found in find_checkpoints(str(root))][:2] == ["step-00000030-2", "step-00000060"]
    making.write(root, 40, a_state(), part=2)
    assert names(find_checkpoints(str(root))) == ["40-2", "30-2", "60", "40", "20"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "latest is missing"),
        (b"", "latest is damaged"),
        (b"step-00000040", "latest is damaged"),
        (encode_latest(LatestPointer("step-00000080", "ab" * 32)), "names step-00000080, which does not exist"),
    ],
)
def test_a_lost_or_damaged_latest_costs_nothing(root: Path, data: bytes | None, words: str) -> None:
    if data is None:
        (root / LATEST).unlink()
    else:
        (root / LATEST).write_bytes(data)
    catalogue = find_checkpoints(str(root))
    assert names(catalogue) == ["60", "40", "20"]
    assert words in said(catalogue)
    assert catalogue.latest is None


def test_a_manifest_that_latest_was_not_written_for_is_tried_last(root: Path) -> None:
    (root / LATEST).write_bytes(encode_latest(LatestPointer("step-00000060", "ab" * 32)))
    catalogue = find_checkpoints(str(root))
    assert names(catalogue) == ["40", "20", "60"]
    assert "latest names step-00000060: its manifest.json is not the one" in said(catalogue)
    assert catalogue.found[0].status == "suspect"


def test_an_unfinished_one_is_listed_and_never_tried(root: Path) -> None:
    (root / "step-00000080").mkdir()
    (root / "step-00000080" / "data-00000-of-00002.safetensors").write_bytes(b"half")
    catalogue = find_checkpoints(str(root))
    assert names(catalogue) == ["60", "40", "20"]
    newest = catalogue.found[0]
    assert (newest.step, newest.status, newest.manifest) == (80, "unfinished", None)
    assert "it has no manifest.json" in newest.problem


def test_a_damaged_manifest_is_tried_in_its_turn_so_that_somebody_says_so(root: Path) -> None:
    path = root / "step-00000060" / MANIFEST
    path.write_bytes(path.read_bytes()[:-1])
    catalogue = find_checkpoints(str(root))
    assert names(catalogue) == ["60", "40", "20"]
    assert catalogue.found[0].status == "damaged"
    assert "does not match its digest" in catalogue.found[0].problem
    assert catalogue.latest is None
    assert "latest names step-00000060: " in said(catalogue)


def test_a_folder_whose_manifest_went_but_whose_files_are_needed(tmp_path: Path) -> None:
    base = making.write(tmp_path, 20, a_state())
    making.write(tmp_path, 40, {**a_state(), ("model", "mask"): Whole("bool", filled((9,), "bool", 77))}, base=base)
    (tmp_path / "step-00000020" / MANIFEST).unlink()
    catalogue = find_checkpoints(str(tmp_path))
    assert [found.status for found in catalogue] == ["certified", "serving"]
    assert "step-00000040 still needs its files" in catalogue.found[1].problem


def test_places_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run" / "checkpoints"
    making.write(root, 20, a_state())
    making.write(root, 40, a_state())
    for place in (tmp_path / "run", root, f"file://{tmp_path}/run", f"{root}/"):
        assert names(find_checkpoints(str(place))) == ["40", "20"]
    for place in (root / "step-00000020", f"{root}/step-00000020/", f"file://{root}/step-00000020"):
        catalogue = find_checkpoints(str(place))
        assert [(found.name, found.storage.url) for found in catalogue] == [("step-00000020", str(root))]
        assert catalogue.problems == ()
    monkeypatch.chdir(root / "step-00000040")
    assert names(find_checkpoints(".")) == ["40"]
    monkeypatch.chdir(tmp_path)
    assert names(find_checkpoints("run")) == ["40", "20"]


def test_one_checkpoint_that_is_no_longer_whole(tmp_path: Path) -> None:
    making.write(tmp_path, 20, a_state())
    (tmp_path / "step-00000020" / MANIFEST).unlink()
    catalogue = find_checkpoints(str(tmp_path / "step-00000020"))
    assert [found.status for found in catalogue] == ["unfinished"]
    assert catalogue.candidates() == ()


def test_a_copy_under_a_name_of_its_own(tmp_path: Path) -> None:
    making.write(tmp_path, 20, a_state())
    (tmp_path / "step-00000020").rename(tmp_path / "best")
    found = find_checkpoints(str(tmp_path / "best")).found[0]
    assert (found.name, found.step, found.status) == ("best", 20, "certified")


def test_nothing_there(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nonesuch"):
        catalogue = find_checkpoints(str(place))
        assert catalogue.found == ()
        assert catalogue.candidates() == ()


def test_a_second_place_counts_too(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    making.write(near, 20, a_state())
    making.write(near, 40, a_state())
    making.write(far, 40, a_state())
    making.write(far, 60, a_state())
    catalogue = find_checkpoints(str(near), [str(far)])
    order = [(Path(found.storage.url).name, found.step) for found in catalogue.candidates()]
    assert order == [("far", 60), ("near", 40), ("far", 40), ("near", 20)]


def test_strangers_are_left_alone_and_mentioned(root: Path) -> None:
    (root / "notes.txt").write_text("mine")
    (root / "step-40").mkdir()
    catalogue = find_checkpoints(str(root))
    assert names(catalogue) == ["60", "40", "20"]
    assert "notes.txt and 1 more are not written by closeranks" in said(catalogue)
    assert not any(odd.is_damage for odd in catalogue.problems)


def test_a_place_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_checkpoints(str(tmp_path / "loop"))


def test_a_place_that_cannot_be_seen_does_not_hide_another(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A store that is down: the disk's checkpoints serve, and it is told. Without them nobody may start anew."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    away = elsewhere / "away"
    away.symlink_to(away)
    catalogue = find_checkpoints(str(root), [str(away)])
    assert names(catalogue) == ["60", "40", "20"]
    assert "cannot be read" in said(catalogue)
    with pytest.raises(CheckpointError, match="cannot be read"):
        find_checkpoints(str(elsewhere / "empty"), [str(away)])
