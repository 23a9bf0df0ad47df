"""Saves of a rank that keeps training: what counts afterwards, and what becomes of saves that cannot."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.config import CheckpointConfig
from closeranks.checkpoint.load.resharding_reader import CheckpointReader
from closeranks.checkpoint.save import save_tiers
from closeranks.checkpoint.save.save_task import SaveReport, SaveSettings, SaveTask
from closeranks.core.errors import SetupError
from closeranks.core.pieces import Piece
from closeranks.run.layout_check import LayoutRecord
from closeranks.storage.open import open_storage
from closeranks.testing import run_world
from tests.capture.taking import TakingSaver
from tests.capture.test_capture import refuse

WAIT_S = 60.0


def make(folder: Path, rank: int = 0, num_ranks: int = 1, **options: object) -> TakingSaver:
    config = CheckpointConfig.model_validate({"timeout_s": 30.0, **options})
    return TakingSaver(rank, num_ranks, "token", 1, "data=1", SaveSettings.from_config(config, str(folder)), config)


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[TakingSaver]:
    made = make(tmp_path)
    yield made
    made.close()


def items(*tensors: torch.Tensor) -> list[StateTensor]:
    named = {f"w{number}": tensor for number, tensor in enumerate(tensors)}
    return [StateTensor("model", key, Piece.whole(key, tuple(value.shape)), value) for key, value in named.items()]


def read(folder: Path, name: str, key: str) -> torch.Tensor:
    reader = CheckpointReader(open_storage(folder), name)
    return reader.read("model", key, Piece.whole(key, reader.shapes("model")[key]))


def kinds(reports: Sequence[SaveReport], save: str) -> list[str]:
    return [report.kind for report in reports if report.save == save]


def test_what_is_saved_is_the_state_at_take_while_training_goes_on(saver: TakingSaver, tmp_path: Path) -> None:
    state = torch.randn(3 << 20)
    before = state.clone()
    saver.make_ready(items(state))
    for step in (10, 20):
        saver.take(step, items(state), {"progress": {"step": step}}, 0.5)
        loss = (state[:1000] ** 2).sum()  # forward and backward read it
        assert saver.land() >= 0.0
        state.mul_(1.5).add_(loss)
        reports = saver.wait(WAIT_S)
        assert kinds(reports, f"token-{step // 10 - 1}")[-1] == "committed"
        assert torch.equal(read(tmp_path, f"step-{step:08d}", "w0"), before)
        before = state.clone()
    manifest = CheckpointReader(open_storage(tmp_path), "step-00000020").manifest
    assert (manifest.tree, manifest.metric) == ({"progress": {"step": 20}}, 0.5)


def test_a_save_that_comes_too_soon_is_told_of_and_the_next_one_counts(saver: TakingSaver, tmp_path: Path) -> None:
    state, gate = torch.ones(10), threading.Event()
    saver.capture._background.submit(gate.wait)
    saver.take(40, items(state), {})
    assert saver.is_busy
    saver.take(41, items(state), {})
    told = [report.what for report in saver.poll() if report.kind == "failed"]
    assert told == ["the save of step 40 is still being written"]
    assert saver.is_busy
    gate.set()
    saver.land()
    saver.wait(WAIT_S)
    assert not saver.is_busy
    saver.take(42, items(state), {})
    saver.land()
    reports = saver.wait(WAIT_S)
    assert "committed" in kinds(reports, "token-2")  # all ranks count alike, whoever was busy
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000040", "step-00000042"]


def test_items_that_cannot_be_saved_are_a_report(saver: TakingSaver) -> None:
    saver.take(1, [StateTensor("model", "w", Piece.whole("w", (4,)), torch.zeros(3))], {})
    assert saver.land() == 0.0
    reports = saver.poll()
    assert kinds(reports, "token-0") == ["failed", "released"]
    assert "model/w is (3,)" in reports[0].what
    assert not saver.is_busy


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_type_that_no_checkpoint_holds_is_told_at_take_and_not_before(saver: TakingSaver) -> None:
    wrong = items(torch.zeros(3, dtype=torch.complex32))
    saver.make_ready(wrong)
    assert saver.poll() == []
    saver.take(1, wrong, {})
    reports = saver.wait(WAIT_S)
    assert kinds(reports, "token-0") == ["failed", "released"]
    assert "model/w0 cannot be saved" in reports[0].what


def test_without_threads_there_are_reports_and_no_exception(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver, state = make(tmp_path), items(torch.zeros(3))
    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        saver.make_ready(state)
        saver.take(1, state, {})
        assert saver.land() == 0.0
        assert saver.land() == 0.0
        reports = saver.poll()
        assert kinds(reports, "token-0") == ["failed", "released"]
        assert "can't start new thread" in reports[0].what
        assert "failed" in kinds(saver.save_now(2, state, {}), "token-1")  # even that takes a thread, for digests
    saver.take(3, state, {})
    assert "committed" in kinds(saver.wait(WAIT_S), "token-2")
    saver.close()


def test_a_state_that_changed_before_join_is_no_checkpoint(saver: TakingSaver, tmp_path: Path) -> None:
    state, gate = torch.ones(10), threading.Event()
    saver.capture._background.submit(gate.wait)
    saver.take(1, items(state), {})
    state.add_(1.0)
    gate.set()
    saver.land()
    reports = saver.wait(WAIT_S)
    assert [(report.kind, report.what) for report in reports] == [
        ("failed", "'w0' changed while it was copied, and not by the optimizer"),
        ("released", ""),
    ]
    assert not list(tmp_path.glob("step-*/manifest.json"))
    saver.take(2, items(state), {})
    assert "committed" in kinds(saver.wait(WAIT_S), "token-1")


class Told:
    """What other ranks were told, in place of telling them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: list[tuple[str, int, str]] = []
        self.threads: list[str] = []
        monkeypatch.setattr(save_tiers, "publish_failure", self._tell, raising=False)

    def _tell(self, order: SaveTask, settings: SaveSettings, why: str) -> None:
        self.words.append((order.save, order.rank, why))
        self.threads.append(threading.current_thread().name)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_is_given_up_here_is_told_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    told, saver, gate = Told(monkeypatch), make(tmp_path, rank, 2), threading.Event()
    state, wrong = torch.ones(10), [StateTensor("model", "w", Piece.whole("w", (4,)), torch.zeros(3))]
    saver.take(1, wrong, {})
    assert not saver.is_busy
    saver.capture._background.submit(gate.wait)
    saver.take(2, items(state), {"wrong": object()})
    state.add_(1.0)
    saver.take(3, items(state), {})
    gate.set()
    saver.wait(WAIT_S)
    saver.save_now(4, wrong, {})
    saver.close()
    whys = {save: why for save, told_by, why in told.words if told_by == rank}
    assert list(whys) == [save for save, _, _ in told.words]  # each once
    assert "model/w is (3,)" in whys["token-0"]
    assert whys["token-1"] == "'w0' changed while it was copied, and not by the optimizer"
    assert whys["token-2"] == "the save of step 2 is still being written"
    assert "model/w is (3,)" in whys["token-3"]
    trains = threading.current_thread().name
    assert [name == trains for (save, _, _), name in zip(told.words, told.threads, strict=True)] == [
        save == "token-3" for save, _, _ in told.words
    ]


def test_a_tree_that_is_no_json_is_told_to_the_others(saver: TakingSaver, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(monkeypatch)
    saver.take(1, items(torch.zeros(3)), {"wrong": object()})
    saver.wait(WAIT_S)
    saver.close()
    assert [(save, rank) for save, rank, _ in told.words] == [("token-0", 0)]
    assert "not JSON serializable" in told.words[0][2]


def test_training_does_not_wait_for_word_to_a_place_that_is_stuck(
    saver: TakingSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(save_tiers, "publish_failure", lambda order, settings, why: gate.wait(), raising=False)
    saver.take(1, [StateTensor("model", "w", Piece.whole("w", (4,)), torch.zeros(3))], {})
    saver.take(2, items(torch.zeros(3)), {})
    saver.land()
    assert "committed" in kinds(saver.wait(WAIT_S), "token-1")
    gate.set()


def test_closed_twice_it_touches_nothing_of_others(tmp_path: Path) -> None:
    saver = make(tmp_path)
    fd = saver._slot.fd
    saver.close()
    os.dup2(0, fd)  # the number belongs to somebody else now
    saver.close()
    os.close(fd)
    saver.take(1, items(torch.zeros(3)), {})
    assert saver.land() == 0.0
    assert kinds(saver.poll(), "token-0") == ["failed", "released"]


def test_a_record_of_a_run_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    session: Any = SimpleNamespace(
        world=SimpleNamespace(rank=0, size=1, is_lead=True), context=SimpleNamespace(layout="data=1")
    )

    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    record = LayoutRecord(tmp_path)
    record._write(session, "first", [(Piece.whole("w", (3,)), torch.zeros(3))])
    before = held()
    record._write(session, "second", [(Piece.whole("w", (3,)), torch.zeros(3))])
    with pytest.raises(SetupError):
        record._write(session, "third", [(Piece.whole("w", (4,)), torch.zeros(3))])
    assert held() == before


def test_a_tree_that_is_no_json_is_a_report_and_the_next_save_counts(saver: TakingSaver) -> None:
    saver.take(1, items(torch.zeros(3)), {"wrong": object()})
    saver.land()
    reports = saver.wait(WAIT_S)
    assert kinds(reports, "token-0") == ["failed", "released"]
    assert "not JSON serializable" in reports[0].what
    saver.take(2, items(torch.zeros(3)), {})
    assert "committed" in kinds(saver.wait(WAIT_S), "token-1")


def test_a_place_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    saver = make(tmp_path / "file" / "checkpoints")
    saver.take(1, items(torch.zeros(3)), {})
    saver.land()
    assert set(kinds(saver.wait(WAIT_S), "token-0")) == {"failed", "released"}
    assert "failed" in kinds(saver.save_now(2, items(torch.zeros(3)), {}), "token-1")
    saver.close()


def test_a_writer_that_dies_is_replaced(saver: TakingSaver, tmp_path: Path) -> None:
    state = torch.ones(10)
    saver.make_ready(items(state))
    saver._background.drain()
    process = saver._client._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    saver.take(1, items(state), {})
    saver.land()
    saver._background.drain()
    assert saver.is_busy
    os.kill(process.pid, signal.SIGKILL)
    reports = saver.wait(WAIT_S)
    assert kinds(reports, "token-0") == ["failed", "released"]
    assert "SIGKILL" in reports[0].what
    saver.take(2, items(state), {})
    saver.land()
    assert "committed" in kinds(saver.wait(WAIT_S), "token-1")
    assert torch.equal(read(tmp_path, "step-00000002", "w0"), state)


def test_saved_at_once_it_is_the_same_without_buffer_or_process(saver: TakingSaver, tmp_path: Path) -> None:
    state = [torch.randn(9 << 20), torch.arange(12).view(3, 4).t(), torch.tensor(2.0), torch.empty(0)]
    saver.take(1, items(*state), {"n": 1}, is_full=True)
    saver.wait(WAIT_S)
    reports = saver.save_now(2, items(*state), {"n": 1})
    assert kinds(reports, "token-1")[0] == "written"
    assert "committed" in kinds(reports, "token-1")
    assert not saver._client.is_alive
    storage = open_storage(tmp_path)
    one, other = (CheckpointReader(storage, f"step-0000000{step}").manifest for step in (1, 2))
    assert one.digests() == other.digests()
    assert [entry.chunk for entry in one.entries] == [entry.chunk for entry in other.entries]
    for number, tensor in enumerate(state):
        assert torch.equal(read(tmp_path, "step-00000002", f"w{number}"), tensor)
    saver.take(3, items(*state), {})  # and a writer is started again for the next
    assert "committed" in kinds(saver.wait(WAIT_S), "token-2")


def test_a_save_under_way_is_given_up_when_patience_ends(saver: TakingSaver, tmp_path: Path) -> None:
    state = torch.ones(10)
    saver.make_ready(items(state))
    saver._background.drain()
    process = saver._client._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    saver.take(1, items(state), {})
    saver.land()
    saver._background.drain()
    reports = saver.save_now(2, items(state), {}, patience_s=0.1)
    assert kinds(reports, "token-0") == ["failed", "released"]
    assert "committed" in kinds(reports, "token-1")
    assert torch.equal(read(tmp_path, "step-00000002", "w0"), state)


def test_full_and_remote_saves_follow_the_config(tmp_path: Path) -> None:
    saver = make(tmp_path / "near", remote=str(tmp_path / "far"), remote_every=2, full_every=3)
    orders = [saver._new_task(step, {}, None, None, None) for step in range(7)]
    assert [order.is_full for order in orders] == [True, False, False, True, False, False, True]
    assert [order.to_remote for order in orders] == [True, False, True, False, True, False, True]
    assert [saver.went_remote(step) for step in range(8)] == [True, False, True, False, True, False, True, False]
    said = saver._new_task(7, {}, None, to_remote=True, is_full=True)
    assert saver.went_remote(7)
    saver._new_task(7, {}, None, to_remote=False, is_full=None)
    assert not saver.went_remote(7)
    assert said.is_full
    assert said.to_remote
    saver.close()


def test_where_there_is_no_second_place_nothing_goes_to_it(saver: TakingSaver) -> None:
    for step in range(1000):
        assert saver._new_task(step, {}, None, to_remote=True, is_full=None).to_remote
        assert not saver.went_remote(step)
    assert len(saver._saved_remotely) < 100


def test_both_places_are_waited_for(tmp_path: Path) -> None:
    saver = make(tmp_path / "near", remote=str(tmp_path / "far"))
    saver.take(1, items(torch.ones(10)), {})
    reports = saver.wait(WAIT_S)
    assert {report.tier for report in reports if report.kind == "committed"} == {"primary", "remote"}
    for place in ("near", "far"):
        assert torch.equal(read(tmp_path / place, "step-00000001", "w0"), torch.ones(10))
    saver.close()


def save_together(folder: Path) -> list[str]:
    """Two ranks hold one matrix alike and each half of another; both change right after ``join``."""
    rank = dist.get_rank()
    saver = make(folder, rank, 2)
    torch.manual_seed(0)
    alike, split = torch.randn(1 << 20), torch.randn(4, 6)
    half = Piece.whole("split", (4, 6)).shard(0, rank, 2)
    mine = split.chunk(2)[rank].clone()
    both = [
        StateTensor("model", "alike", Piece.whole("alike", (1 << 20,)), alike, holder=rank, num_holders=2),
        StateTensor("model", "split", half, mine),
    ]
    saver.take(5, both, {"rank": rank} if rank == 0 else None)
    saver.land()
    alike.zero_()
    mine.zero_()
    reports = saver.wait(WAIT_S)
    reports += saver.save_now(6, both, {} if rank == 0 else None)
    saver.close()
    return [report.kind for report in reports]


@pytest.mark.world
def test_ranks_write_what_they_hold_alike_once(tmp_path: Path) -> None:
    first, second = run_world(save_together, 2, tmp_path)
    assert (first.count("committed"), second.count("written")) == (2, 2)
    assert "failed" not in first + second
    assert torch.equal(read(tmp_path, "step-00000006", "split"), torch.zeros(4, 6))
    torch.manual_seed(0)
    assert torch.equal(read(tmp_path, "step-00000005", "alike"), torch.randn(1 << 20))
    assert torch.equal(read(tmp_path, "step-00000005", "split"), torch.randn(4, 6))
    manifest = CheckpointReader(open_storage(tmp_path), "step-00000005").manifest
    assert manifest.tree == {"rank": 0}
    assert manifest.num_bytes == 4 * ((1 << 20) + 24)
    assert len({file.num_bytes // 1024 for file in manifest.files}) == 1  # each wrote its half
