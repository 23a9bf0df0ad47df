"""Disks and stores that fail while a save is under way: it is reported in one sentence, nothing half-made counts, and
the next save succeeds. The faults are real: full, read-only, broken and frozen file systems, a connection that is cut.

A broken disk is an ext4 on a loop device whose memory is sealed against writing: the block layer itself says EIO.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from closeranks.checkpoint.save import save_tiers
from closeranks.checkpoint.save.save_task import SaveReport
from closeranks.checkpoint.save.writer_client import WriterClient
from closeranks.storage.local import LocalStorage
from closeranks.storage.object_store.remote import RemoteStorage
from closeranks.storage.object_store.retry import RetryPolicy
from tests.checkpoint import saving
from tests.checkpoint.saving import assert_loads, kinds, memfd, order, save, settings
from tests.storage import servers
from tests.storage.proxy import Rule, Standing

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="mounting file systems needs root")
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878


def run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir()
    run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder)
    try:
        yield folder
    finally:
        run("umount", folder)


@contextmanager
def disk(folder: Path) -> Iterator[int]:
    """An ext4 of its own; the descriptor of the memory it lies in."""
    folder.mkdir(exist_ok=True)
    memory = os.memfd_create("disk", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, 64 << 20)
        path = f"/proc/{os.getpid()}/fd/{memory}"
        run("mkfs.ext4", "-q", "-F", "-O", "^has_journal", path)
        try:
            run("mount", "-o", "loop", path, folder)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no loop devices here: {error.stderr.decode().strip()}")
        try:
            yield memory
        finally:
            run("umount", "-l", folder)
    finally:
        os.close(memory)


def big(step: int, num_mb: float = 3.0, **changes: object) -> tuple[save_tiers.SaveTask, bytes]:
    return order(step, values=saving.state(step, int(num_mb * 125_000)), **changes)


def the_failure(reports: list[SaveReport], tier: str = "primary") -> str:
    failed = [report for report in reports if report.kind == "failed" and report.tier == tier]
    assert len(failed) == 1, reports
    assert "\n" not in failed[0].what
    assert "Traceback" not in failed[0].what
    return failed[0].what


def test_a_disk_without_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "4m") as place:
        where = settings(place, keep_last=2)
        assert kinds(save(order(1), where))[-1] == "committed"
        assert "free" in the_failure(save(big(2, 8), where))
        assert saving.committed_names(LocalStorage(place)) == ["step-00000001"]
        assert_loads(place, 1)
        assert kinds(save(order(3), where))[-1] == "committed"
        assert saving.latest_manifest(LocalStorage(place)).step == 3
        assert not (place / "step-00000002").exists()


def test_a_disk_that_fills_while_it_is_written(tmp_path: Path) -> None:
    """Nothing tells beforehand: somebody else takes the room meanwhile."""
    with tmpfs(tmp_path / "small", "12m") as place:
        where = settings(place)
        save(order(1), where)
        made, buffer = big(2, 6)
        plain = saving.source(made, buffer)

        def source(number: int) -> memoryview:
            if number == 2:
                (place / "somebody else's").write_bytes(bytes(8 << 20))
            return plain(number)

        reports: list[SaveReport] = []
        save_tiers.save_to_all_tiers(made, source, where, reports.append, lambda: False)
        assert "no space is left on the device" in the_failure(reports)
        (place / "somebody else's").unlink()
        assert_loads(place, 1)
        assert kinds(save(order(3), where))[-1] == "committed"
        assert saving.committed_names(LocalStorage(place)) == ["step-00000001", "step-00000003"]
        assert saving.files(place / "step-00000002") == []


def test_one_rank_without_room_fails_the_save_for_all_and_leaves_room_for_the_next(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "8m") as place:
        where = settings(place, keep_last=2)
        for step in (2, 3, 4):  # rank 0's file of each failed save must not pile up
            assert "free" in the_failure(save(big(step, 40, rank=1, num_ranks=2), where))
            assert "rank 1 could not save" in the_failure(save(big(step, 6, rank=0, num_ranks=2), where))
        for rank in (1, 0):
            reports = save(big(5, 6, rank=rank, num_ranks=2), where)
        assert kinds(reports)[-1] == "committed"
        assert saving.committed_names(LocalStorage(place)) == ["step-00000005"]


def test_a_read_only_disk(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "small", "8m") as place:
        save(order(1), settings(place))
        run("mount", "-o", "remount,ro", place)
        assert "read-only" in the_failure(save(order(2), settings(place))).lower()
        assert_loads(place, 1)
        run("mount", "-o", "remount,rw", place)
        assert kinds(save(order(3), settings(place)))[-1] == "committed"


@pytest.mark.world
def test_a_broken_disk(tmp_path: Path) -> None:
    """The second place takes the buffer; the next save, on another disk at the same place, succeeds."""
    place, far = tmp_path / "disk", tmp_path / "far"
    where = settings(place, remote=str(far))
    one = WriterClient(where)
    try:
        with disk(place) as memory, memfd(big(1)[1]) as buffer:
            one.send(big(1)[0], buffer)
            assert "committed" in kinds(one.wait(30.0))
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            os.pwrite(buffer, big(2)[1], 0)
            one.send(big(2)[0], buffer)
            reports = one.wait(30.0)
            assert "input/output error" in the_failure(reports)
            assert kinds(reports, "remote") == ["written", "committed"]
            assert [report.kind for report in reports].count("released") == 1
        assert saving.latest_manifest(LocalStorage(far)).step == 2
        with disk(place), memfd(big(3)[1]) as buffer:
            one.send(big(3)[0], buffer)
            assert "committed" in kinds(one.wait(30.0))
            assert saving.latest_manifest(LocalStorage(place)).step == 3
            one.close()
    finally:
        one.close()


@pytest.mark.world
def test_a_disk_that_stands_still(tmp_path: Path) -> None:
    """Frozen: whoever writes to it sleeps where no signal reaches. The trainer goes on after its patience."""
    place = tmp_path / "disk"
    with disk(place):
        one = WriterClient(settings(place, timeout_s=60.0))
        usual_s = one._patience_s
        handle = os.open(place, os.O_RDONLY)
        made, data = order(2)
        try:
            with memfd(order(1)[1]) as buffer:
                one.send(order(1)[0], buffer)
                assert kinds(one.wait(30.0))[-1] == "committed"
                fcntl.ioctl(handle, _FIFREEZE, 0)
                one._patience_s = 1.0  # while it stands still: a healthy save may take longer on a busy machine
                try:
                    os.pwrite(buffer, data, 0)
                    one.send(made, buffer)
                    reports = one.wait(30.0)
                    assert "no heartbeat for 1 s" in the_failure(reports)
                    assert kinds(reports)[-1] == "released"
                finally:
                    one._patience_s = usual_s
                    fcntl.ioctl(handle, _FITHAW, 0)
                os.pwrite(buffer, order(3)[1], 0)
                one.send(order(3)[0], buffer)
                assert kinds(one.wait(30.0))[-1] == "committed"
            assert_loads(place, 3)
            assert "step-00000002" not in saving.committed_names(LocalStorage(place))
        finally:
            os.close(handle)
            one.close()


@pytest.mark.world
@pytest.mark.parametrize(
    "rule",
    [
        Rule("PUT", "partNumber=2", times=-1, cut_after_bytes=1 << 20),
        pytest.param(Rule("POST", "uploadId", times=-1, cut_after_bytes=0), marks=pytest.mark.slow),
        pytest.param(Rule("PUT", "manifest.json", times=-1, cut_after_bytes=10), marks=pytest.mark.slow),
    ],
    ids=["mid-part", "joining the parts", "the manifest"],
)
def test_a_connection_that_is_cut(moto: servers.Server, proxied: Standing, tmp_path: Path, rule: Rule) -> None:
    """The local tier does not care; far away nothing counts until a later save gets through."""
    near, far = tmp_path / "near", f"s3://{servers.BUCKET}/{tmp_path.name}"
    few = RetryPolicy(num_tries=2, first_s=0.01)

    def opened(place: str) -> LocalStorage | RemoteStorage:
        if place != far:
            return LocalStorage(Path(place))
        return RemoteStorage(far, servers.options(proxy.endpoint), policy=few, part_bytes=5 << 20)

    where = settings(near, remote=far)
    with proxied(moto.endpoint) as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_tiers, "open_storage", opened)
        assert kinds(save(big(1, 16), where), "remote")[-1] == "committed"
        proxy.rules.append(rule)
        reports = save(big(2, 16), where)
        assert kinds(reports)[-1] == "committed"
        the_failure(reports, "remote")
        assert rule.num_applied
        storage = opened(far)
        assert saving.latest_manifest(storage).step == 1
        assert saving.committed_names(storage) == ["step-00000001"]
        proxy.rules.clear()
        assert kinds(save(big(3, 16), where), "remote")[-1] == "committed"
        assert saving.committed_names(storage) == ["step-00000001", "step-00000003"]
        loaded = saving.load(storage, "step-00000003")
        assert all((loaded[key] == value).all() for key, value in saving.state(3, 16 * 125_000).items())
        assert servers.unfinished_uploads(moto.endpoint) == []
