"""One save on all tiers: what is written where, what is referred to, what is reported when something fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from closeranks.checkpoint.format.manifest import folder_name
from closeranks.checkpoint.save import save_tiers
from closeranks.checkpoint.save.save_task import SaveReport
from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import Bytes, DeniedError, StorageError
from tests.checkpoint import saving
from tests.checkpoint.saving import assert_loads, kinds, order, save, settings


def test_a_checkpoint_is_written_read_back_and_committed(tmp_path: Path) -> None:
    reports = save(order(1), settings(tmp_path))
    assert kinds(reports) == ["written", "released", "committed"]
    assert saving.files(tmp_path) == [
        "latest",
        "step-00000001/data-00000-of-00001.safetensors",
        "step-00000001/manifest.json",
    ]
    assert_loads(tmp_path, 1)
    manifest = saving.latest_manifest(LocalStorage(tmp_path))
    assert (manifest.step, manifest.is_full, manifest.tree) == (1, True, {"progress": {"step": 1}})
    written, _, committed = reports
    assert written.num_bytes == manifest.own_bytes == Path(written.path).stat().st_size
    assert committed.path == str(tmp_path / "step-00000001")
    assert committed.num_bytes == manifest.num_bytes
    assert 0 < written.seconds < committed.seconds


def test_what_did_not_change_is_referred_to_and_never_through_a_second_reference(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(order(step), settings(tmp_path))
        assert_loads(tmp_path, step)
    manifest = saving.latest_manifest(LocalStorage(tmp_path))
    assert manifest.referenced_files() == {"step-00000001/data-00000-of-00001.safetensors"}
    assert {entry.chunk.key for entry in manifest.entries if "/" in entry.file} == {"frozen.weight"}
    assert not manifest.is_full
    save(order(4, is_full=True), settings(tmp_path))
    assert saving.latest_manifest(LocalStorage(tmp_path)).referenced_files() == frozenset()


def test_a_state_that_did_not_change_at_all_needs_no_file(tmp_path: Path) -> None:
    values = {key: value for key, value in saving.state(1).items() if value.size}
    save(order(1, values=values), settings(tmp_path))
    reports = save(order(2, values=values), settings(tmp_path))
    assert kinds(reports) == ["written", "released", "committed"]
    assert reports[0].num_bytes == 0
    assert saving.files(tmp_path / "step-00000002") == ["manifest.json"]
    loaded = saving.load(LocalStorage(tmp_path), "step-00000002")
    assert all((loaded[key] == values[key]).all() for key in values)


def test_references_to_files_that_are_gone_are_not_made(tmp_path: Path) -> None:
    save(order(1), settings(tmp_path))
    (tmp_path / "step-00000001/data-00000-of-00001.safetensors").unlink()
    assert kinds(save(order(2), settings(tmp_path)))[-1] == "committed"
    assert_loads(tmp_path, 2)


@pytest.mark.parametrize("damage", ["latest", "step-00000001/manifest.json"])
def test_a_damaged_base_is_no_base(tmp_path: Path, damage: str) -> None:
    save(order(1), settings(tmp_path))
    data = bytearray((tmp_path / damage).read_bytes())
    data[-3] ^= 1
    (tmp_path / damage).write_bytes(data)
    assert kinds(save(order(2), settings(tmp_path)))[-1] == "committed"
    assert saving.latest_manifest(LocalStorage(tmp_path)).is_full
    assert_loads(tmp_path, 2)


def test_ranks_meet_only_in_the_storage(tmp_path: Path) -> None:
    for step in (1, 2):
        for rank in (2, 1):
            assert kinds(save(order(step, rank, 3), settings(tmp_path))) == ["written", "released"]
        assert kinds(save(order(step, 0, 3), settings(tmp_path)))[-1] == "committed"
        assert_loads(tmp_path, step)
    assert not any("part-" in name for name in saving.files(tmp_path))


def test_two_tiers_hold_the_same_each_with_its_own_references(tmp_path: Path) -> None:
    where = settings(tmp_path / "near", remote=str(tmp_path / "far"))
    reports = save(order(1), where)
    assert kinds(reports, "remote") == ["written", "committed"]
    assert [report.kind for report in reports].index("released") < [r.tier for r in reports].index("remote")
    save(order(2, to_remote=False), where)
    save(order(3), where)
    for step in (1, 2, 3):
        assert_loads(tmp_path / "near", step)
    for step in (1, 3):
        assert_loads(tmp_path / "far", step)
    assert saving.committed_names(LocalStorage(tmp_path / "far")) == [folder_name(1), folder_name(3)]
    far, near = (saving.latest_manifest(LocalStorage(tmp_path / name)) for name in ("far", "near"))
    assert [entry.blake3 for entry in far.entries] == [entry.blake3 for entry in near.entries]


def test_the_second_tier_takes_the_buffer_where_the_first_failed(tmp_path: Path) -> None:
    (tmp_path / "near").write_text("a file where a folder should be")
    reports = save(order(1), settings(tmp_path / "near", remote=str(tmp_path / "far")))
    assert kinds(reports, "remote") == ["written", "committed"]
    assert sorted(kinds(reports)) == ["failed", "released"]
    assert_loads(tmp_path / "far", 1)


def test_a_failed_second_tier_leaves_the_first_alone(tmp_path: Path) -> None:
    (tmp_path / "far").write_text("a file where a folder should be")
    reports = save(order(1), settings(tmp_path / "near", remote=str(tmp_path / "far")))
    assert kinds(reports) == ["written", "released", "committed"]
    assert kinds(reports, "remote") == ["failed"]
    assert_loads(tmp_path / "near", 1)


@pytest.mark.parametrize("key", ["frozen.weight", "weight"])
def test_memory_that_changes_after_the_copy_fails_the_save(tmp_path: Path, key: str) -> None:
    save(order(1), settings(tmp_path))
    made, buffer = order(2)
    number = next(number for number, chunk in enumerate(made.chunks) if chunk.key == key)
    wrong = bytearray(buffer)
    wrong[made.offsets[number] + 5] ^= 16
    reports = save((made, bytes(wrong)), settings(tmp_path))
    assert kinds(reports) == ["failed", "released"]
    assert f"memory changed between copy and write: model/{key}" in reports[0].what
    assert saving.files(tmp_path / "step-00000002") == []
    assert kinds(save(order(3), settings(tmp_path)))[-1] == "committed"
    assert not (tmp_path / "step-00000002").exists()


class Liar(LocalStorage):
    """A disk that gives back other bytes than it was given."""

    def read_fresh(self, name: str, chunk_bytes: int):  # type: ignore[no-untyped-def]
        for data in super().read_fresh(name, chunk_bytes):
            yield data[:-1] + bytes([data[-1] ^ 1])


def test_a_file_that_does_not_come_back_whole_never_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    monkeypatch.setattr(
        save_tiers, "open_storage", lambda place: (Liar if place == str(near) else LocalStorage)(Path(place))
    )
    reports = save(order(1), settings(near, remote=str(far)))
    assert kinds(reports) == ["written", "failed", "released"]
    assert "was read back from storage with different bytes" in reports[1].what
    assert saving.files(near) == []
    assert_loads(far, 1)  # the buffer was kept for it
    assert kinds(save(order(2), settings(near, read_back=False)))[-1] == "committed"


def test_a_checkpoint_that_counts_is_never_written_to(tmp_path: Path) -> None:
    save(order(1), settings(tmp_path))
    before = {name: (tmp_path / name).read_bytes() for name in saving.files(tmp_path)}
    made, buffer = order(1, values=saving.state(5))
    reports = save((replace(made, save="other-1"), buffer), settings(tmp_path))
    assert kinds(reports) == ["failed", "released"]
    assert "step-00000001 is already a checkpoint" in reports[0].what
    assert before == {name: (tmp_path / name).read_bytes() for name in saving.files(tmp_path)}


def test_a_superseded_save_is_given_up(tmp_path: Path) -> None:
    made, buffer = order(1, 0, 2)
    reports: list[SaveReport] = []
    asked: list[int] = []

    def is_superseded() -> bool:
        asked.append(1)
        return len(asked) > 12  # past its own data: it waits for rank 1

    save_tiers.save_to_all_tiers(made, saving.source(made, buffer), settings(tmp_path), reports.append, is_superseded)
    assert kinds(reports) == ["written", "released", "failed"]
    assert "a later save was requested" in reports[-1].what
    assert kinds(save(order(2), settings(tmp_path)))[-1] == "committed"
    assert not (tmp_path / "step-00000001").exists()


def test_a_rank_that_fails_tells_rank_0(tmp_path: Path) -> None:
    made, buffer = order(1, 1, 2)
    reports = save((made, bytes(len(buffer))), settings(tmp_path))
    assert kinds(reports) == ["failed", "released"]
    reports = save(order(1, 0, 2), settings(tmp_path, timeout_s=60.0))
    assert kinds(reports)[-1] == "failed"
    assert "rank 1 could not save: memory changed" in reports[-1].what
    assert save(order(1, 1, 2), settings(tmp_path))[-1].kind == "released"  # the same step again, and well
    assert kinds(save(order(1, 0, 2), settings(tmp_path)))[-1] == "committed"


def test_whatever_goes_wrong_is_reported_not_raised(tmp_path: Path) -> None:
    made, buffer = order(1)
    reports = save((replace(made, tree={"loss": float("nan")}), buffer), settings(tmp_path))
    assert kinds(reports)[-1] == "failed"
    assert "ValueError" in reports[-1].what
    reports = save(order(2), settings("nonsense://place"))
    assert kinds(reports) == ["failed", "released"]


def test_retention_follows_every_commit(tmp_path: Path) -> None:
    where = settings(tmp_path, keep_last=2, keep_every=4, keep_best=1)
    gone: list[str] = []
    for step in range(1, 8):
        reports = save(order(step, metric=abs(step - 2.9), is_full=step % 3 == 1), where)
        gone += [name for report in reports if report.kind == "collected" for name in report.names]
    assert saving.committed_names(LocalStorage(tmp_path)) == [folder_name(step) for step in (3, 4, 6, 7)]
    assert sorted(gone) == [folder_name(step) for step in (1, 2, 5)]
    for step in (3, 4, 6, 7):
        assert_loads(tmp_path, step)
    assert saving.files(tmp_path / "step-00000001") == ["data-00000-of-00001.safetensors"]  # 3 refers to it
    assert not (tmp_path / "step-00000002").exists()


class Broken(LocalStorage):
    """Fails what ``is_broken`` says, as often as it says so."""

    is_broken: Callable[[str, str], bool] = staticmethod(lambda act, name: False)

    def publish(self, name: str, data: Bytes, *, replace: bool = False) -> None:
        self._meet("publish", name)
        super().publish(name, data, replace=replace)

    def remove(self, name: str) -> None:
        self._meet("remove", name)
        super().remove(name)

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        self._meet("read", name)
        return super().read(name, start, num_bytes)

    def _meet(self, act: str, name: str) -> None:
        if Broken.is_broken(act, name):
            raise (DeniedError if act == "read" else StorageError)(f"cannot {act} {name}")


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place that fails."""
    place = tmp_path / "broken"
    kinds_of = {str(place): Broken}
    monkeypatch.setattr(save_tiers, "open_storage", lambda at: kinds_of.get(at, LocalStorage)(Path(at)))
    monkeypatch.setattr(Broken, "is_broken", staticmethod(lambda act, name: False))
    return place


def fail(monkeypatch: pytest.MonkeyPatch, act: str, part: str, times: int = 1 << 30) -> list[str]:
    met: list[str] = []

    def is_broken(one: str, name: str) -> bool:
        is_it = one == act and part in name and len(met) < times
        met.extend([name] * is_it)
        return is_it

    monkeypatch.setattr(Broken, "is_broken", staticmethod(is_broken))
    return met


@pytest.mark.parametrize(("act", "part"), [("remove", "part-"), ("publish", "latest")])
def test_nothing_that_fails_once_the_manifest_stands_fails_the_save(
    broken: Path, monkeypatch: pytest.MonkeyPatch, act: str, part: str
) -> None:
    save(order(1), settings(broken))
    met = fail(monkeypatch, act, part)
    assert kinds(save(order(2), settings(broken)))[:3] == ["written", "released", "committed"]
    assert met
    assert_loads(broken, 2)
    fail(monkeypatch, act, part, times=0)
    reports = save(order(3), settings(broken))
    assert kinds(reports)[:3] == ["written", "released", "committed"]
    assert saving.latest_manifest(LocalStorage(broken)).step == 3
    assert not any("part-" in name for name in saving.files(broken))


def test_latest_is_tried_again(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "publish", "latest", times=2)
    assert kinds(save(order(1), settings(broken)))[-1] == "committed"
    assert saving.latest_manifest(LocalStorage(broken)).step == 1


def test_a_step_that_counts_is_saved_again_by_saying_so(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ordered it may have heard that it failed; and what a commit left undone is mended."""
    where = settings(broken, remote=str(broken.with_name("far")))
    fail(monkeypatch, "publish", "latest")
    for rank in (1, 0):
        save(order(1, rank, 2, to_remote=False), where)
    assert not (broken / "latest").exists()
    fail(monkeypatch, "publish", "latest", times=0)
    data = (broken / "step-00000001/manifest.json").read_bytes()
    again = save(order(1, 1, 2, save="token-7"), where)
    assert (kinds(again), kinds(again, "remote")) == (["written", "released"], ["written"])
    again = save(order(1, 0, 2, save="token-7"), where)
    assert kinds(again) == ["written", "committed", "released"], "the buffer was kept for the second place"
    assert kinds(again, "remote") == ["written", "committed"]
    assert saving.latest_manifest(LocalStorage(broken)).step == 1
    assert (broken / "step-00000001/manifest.json").read_bytes() == data
    assert_loads(broken.with_name("far"), 1)
    save(order(2), where)
    assert kinds(save(order(1, 0, 2, save="token-8", to_remote=False), where)) == ["written", "released", "committed"]
    assert saving.latest_manifest(LocalStorage(broken)).step == 2, "latest never goes back"


def test_what_cannot_be_cleared_away_fails_no_save(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (2, 4):
        save(order(step), settings(broken))
    (broken / "step-00000003").mkdir()
    fail(monkeypatch, "read", "step-00000002/manifest.json")
    reports = save(order(6), settings(broken))
    assert [kind for kind in kinds(reports) if kind != "collected"] == ["written", "released", "committed"]
    assert "cannot read step-00000002/manifest.json" in reports[0].what
    assert (reports[0].kind, reports[0].names) == ("collected", ())
    assert_loads(broken, 6)


def test_a_part_that_cannot_be_published_feeds_the_second_place_from_its_file(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "publish", "part-")
    far = broken.with_name("far")
    made, data = order(1)
    buffer, reports = bytearray(data), list[SaveReport]()

    def report(one: SaveReport) -> None:
        reports.append(one)
        if one.kind == "released":
            buffer[:] = bytes(len(buffer))  # the trainer copies the next state

    save_tiers.save_to_all_tiers(
        made, saving.source(made, buffer), settings(broken, remote=str(far)), report, lambda: False
    )
    assert kinds(reports) == ["written", "released", "failed"]
    assert kinds(reports, "remote") == ["written", "committed"]
    assert_loads(far, 1)


def test_a_rank_that_gives_up_tells_rank_0_in_every_place(tmp_path: Path) -> None:
    where = settings(tmp_path / "near", remote=str(tmp_path / "far"), timeout_s=600.0)
    save_tiers.publish_failure(replace(order(1, 1, 2)[0], chunks=()), where, "its memory is busy")
    reports = save(order(1, 0, 2), where)
    failed = [report for report in reports if report.kind == "failed"]
    assert [report.tier for report in failed] == ["primary", "remote"]
    assert all("rank 1 could not save: its memory is busy" in report.what for report in failed)
    save_tiers.publish_failure(order(2, 1, 2, to_remote=False)[0], where, "its memory is busy")
    assert not (tmp_path / "far/step-00000002").exists()
    save_tiers.publish_failure(order(3, 0, 2)[0], where, "nobody waits for rank 0")
    assert not (tmp_path / "near/step-00000003").exists()


def test_telling_of_a_failure_never_raises(tmp_path: Path) -> None:
    (tmp_path / "near").write_text("a file where a folder should be")
    where = settings(tmp_path / "near", remote="nonsense://place")
    save_tiers.publish_failure(order(1, 1, 2)[0], where, "its memory is busy")
