"""What is captured is what was there at ``begin``, whatever kind of memory it lay in, and training keeps its pace."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from closeranks.capture import capture as room
from closeranks.capture.capture import Capture
from closeranks.capture.capture_plan import CapturePlan, TensorRange, plan_capture
from closeranks.capture.chunk_ranges import CHUNK_BYTES
from closeranks.capture.slots import DATA_AT, SnapshotSlot
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.format.digests import crc32c
from closeranks.checkpoint.save.chunk_source import TensorChunkSource
from closeranks.core.pieces import Piece
from closeranks.core.system.background_thread import BackgroundThread
from tests.capture.taking import Captured, Taking, stored


def item(key: str, tensor: Tensor, **options: object) -> StateTensor:
    return StateTensor("model", key, Piece.whole(key, tuple(tensor.shape)), tensor, **options)  # type: ignore[arg-type]


class Gate:
    """A background whose jobs begin when the test says so."""

    def __init__(self) -> None:
        self.background = BackgroundThread("test")
        self._open = threading.Event()
        self.background.submit(self._open.wait)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()
    made.background.close()


def outcome(captured: list[Captured], gate: Gate) -> Captured:
    gate.background.drain()
    return captured.pop()


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def kinds() -> dict[str, Tensor]:
    """Every kind of memory a state may lie in."""
    flat = torch.arange(1000, dtype=torch.float32)
    return {
        "float32": torch.randn(7, 5),
        "bfloat16": torch.randn(3, 3).bfloat16(),
        "bool": torch.tensor([True, False, True]),
        "int64": torch.arange(5),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.randn(4, dtype=torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.arange(40)[::3],
        "narrowed": torch.randn(6, 8)[:, 2:5],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "first view": flat[:300].view(30, 10),
        "second view": flat[300:],
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }


@pytest.mark.parametrize("is_steady", [True, False])
def test_every_kind_of_tensor_arrives_as_it_is(gate: Gate, is_steady: bool) -> None:
    capture, captured = Capture(background=gate.background), list[Captured]()
    gate.open()
    tensors = kinds()
    capture.begin([item(key, tensor, is_steady=is_steady) for key, tensor in tensors.items()], [Taking(captured)])
    capture.wait_until_copied()
    found = stored(outcome(captured, gate))
    assert found == {key: raw(tensor.detach()) for key, tensor in tensors.items()}
    capture.close()


def test_elements_lie_aligned_in_every_slot() -> None:
    planned = plan_capture([item(key, tensor) for key, tensor in kinds().items()])
    for number, offset in zip(planned.saved, planned.packed, strict=True):
        entry = planned.entries[number]
        assert entry.offset % 64 == 0
        if entry.dtype != "complex64":
            assert offset % kinds()[entry.key].element_size() == 0


def test_a_range_of_strided_memory_is_copied_without_the_rest() -> None:
    tensor = torch.arange(24).view(4, 6).t()
    flat = tensor.contiguous().view(-1)
    for first in range(24):
        for last in range(first, 25):
            assert torch.equal(TensorRange(0, first, last).view_of(tensor), flat[first:last])


def test_what_forward_may_change_is_copied_at_once_and_the_rest_before_join(gate: Gate) -> None:
    """The copy has not begun when both change: what was steady by promise is taken too late, and that is the proof
    that it is taken in the background. Changed behind torch's back, which would notice."""
    steady, unsteady = torch.zeros(100), torch.zeros(100)
    capture, captured = Capture(background=gate.background), list[Captured]()
    capture.begin([item("steady", steady), item("unsteady", unsteady, is_steady=False)], [Taking(captured)])
    steady.numpy().fill(1.0)
    unsteady.fill_(1.0)
    gate.open()
    capture.wait_until_copied()
    found = stored(outcome(captured, gate))
    assert found == {"steady": raw(torch.ones(100)), "unsteady": raw(torch.zeros(100))}
    capture.close()


def trained(steps_before_join: int) -> tuple[bytes, bytes]:
    """State changed ``steps_before_join`` times while it is copied (behind torch's back, which would notice), and again
    after ``join``: what it was, and what was captured of it (without looking at digests)."""
    gate = Gate()
    state = torch.randn(CHUNK_BYTES // 4 + 1000)
    before = raw(state)
    capture, captured = Capture(background=gate.background), list[Captured]()
    capture.begin([item("w", state)], [Taking(captured)])
    for _ in range(steps_before_join):
        state.data.add_(1.0)
    gate.open()
    (state[:100] @ state[:100]).item()
    capture.wait_until_copied()
    state.mul_(-3.0)
    gate.background.drain()
    found = captured.pop()
    num_bytes = sum(chunk.num_bytes for chunk in found.chunks)
    with mmap.mmap(found.fd, DATA_AT + num_bytes, access=mmap.ACCESS_READ) as memory:
        result = before, memory[DATA_AT:]
    gate.background.close()
    capture.close()
    return result


def test_the_values_are_those_before_the_optimizer_came() -> None:
    before, captured = trained(steps_before_join=0)
    assert captured == before


def test_changing_the_state_before_join_would_be_seen() -> None:
    """The control of the test above."""
    before, captured = trained(steps_before_join=1)
    assert captured != before


def test_memory_that_changes_between_digest_and_copy_is_found(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(1000)

    def digest_then_change(data: memoryview, value: int = 0) -> int:
        found = crc32c(data, value)
        state.numpy().fill(7.0)  # behind torch's back: not even the counter of changes tells
        return found

    monkeypatch.setattr(room, "crc32c", digest_then_change)
    capture, captured = Capture(background=gate.background), list[Captured]()
    gate.open()
    capture.begin([item("w", state)], [Taking(captured)])
    capture.wait_until_copied()
    found = outcome(captured, gate)
    assert not found.problem
    with pytest.raises(AssertionError):
        stored(found)
    capture.close()


def changed_by(change: Callable[[], object], items: list[StateTensor], gate: Gate) -> Captured:
    """Captured while ``change`` happens after ``begin`` and before the copy."""
    capture, captured = Capture(background=gate.background), list[Captured]()
    capture.begin(items, [Taking(captured)])
    change()
    gate.open()
    capture.wait_until_copied()
    found = outcome(captured, gate)
    if not found.problem:
        stored(found)
    capture.close()
    return found


@pytest.mark.parametrize("is_by_base", [False, True])
def test_a_change_before_join_is_a_problem_that_names_the_tensor(gate: Gate, is_by_base: bool) -> None:
    flat = torch.zeros(100)
    view, other = flat[10:20], torch.zeros(5)
    changed = flat if is_by_base else view
    found = changed_by(lambda: changed.add_(1.0), [item("other", other), item("view", view)], gate)
    assert found == Captured(problem="'view' changed while it was copied, and not by the optimizer")


def test_a_change_while_it_is_copied_is_a_problem(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.zeros(1000)

    def digest_then_change(data: memoryview, value: int = 0) -> int:
        state.fill_(7.0)
        return crc32c(data, value)

    monkeypatch.setattr(room, "crc32c", digest_then_change)
    assert changed_by(lambda: None, [item("w", state)], gate).problem.startswith("'w' changed while it was copied")


def test_a_change_after_join_is_none(gate: Gate) -> None:
    state = torch.zeros(1000)
    capture, captured = Capture(background=gate.background), list[Captured]()
    gate.open()
    for _ in range(3):
        capture.begin([item("w", state)], [Taking(captured)])
        capture.wait_until_copied()
        state.add_(1.0)
        assert not outcome(captured, gate).problem
    capture.close()


def test_forward_and_backward_raise_no_alarm(gate: Gate) -> None:
    """Parameters and an optimizer's slices that are views of one flat tensor; gradients and statistics change."""
    flat = torch.randn(30)
    weight, bias = (torch.nn.Parameter(flat[:20].view(4, 5)), torch.nn.Parameter(torch.zeros(4)))
    weight.data, bias.data = flat[:20].view(4, 5), flat[20:24]
    mean = torch.zeros(4)
    with torch.inference_mode():
        frozen = torch.randn(3)

    def step() -> None:
        out = torch.nn.functional.linear(torch.randn(8, 5), weight, bias)
        mean.copy_(out.detach().mean(0))
        out.sum().backward()

    tensors = {"weight": weight, "bias": bias, "slice": flat[12:24], "frozen": frozen}
    items = [item(key, tensor) for key, tensor in tensors.items()] + [item("mean", mean, is_steady=False)]
    assert not changed_by(step, items, gate).problem
    assert weight.grad is not None


def test_a_parameter_that_gets_other_memory_is_saved_as_it_was(gate: Gate) -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    capture, captured = Capture(background=gate.background), list[Captured]()
    capture.begin([item("w", weight)], [Taking(captured)])
    weight.data = torch.ones(10)
    gate.open()
    capture.wait_until_copied()
    assert stored(outcome(captured, gate)) == {"w": raw(torch.zeros(10))}
    capture.close()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_there_is_nothing_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    background = BackgroundThread("test")
    capture, captured = Capture(background=background), list[Captured]()
    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        capture.begin([item("w", torch.zeros(3))], [Taking(captured)])
    assert "can't start" in captured.pop().problem
    assert capture.wait_until_copied() == 0.0
    capture.begin([item("w", torch.zeros(3))], [Taking(captured)])  # there are threads again
    capture.join()
    assert not captured.pop().problem
    assert capture.close()


def test_the_slot_is_kept_and_grows(gate: Gate) -> None:
    capture, captured = Capture(background=gate.background), list[Captured]()
    target = Taking(captured)
    gate.open()
    for size in (10, 3 << 20, 5, 9 << 20):
        state = [item("w", torch.arange(size, dtype=torch.int32))]
        capture.make_ready(state, target)
        capture.begin(state, [target])
        capture.wait_until_copied()
        found = outcome(captured, gate)
        assert stored(found) == {"w": raw(state[0].tensor)}
        assert all(chunk.num_bytes <= CHUNK_BYTES for chunk in found.chunks)
    capture.close()


def test_two_targets_get_the_same_bytes_from_one_pass(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []

    def count(data: memoryview, value: int = 0) -> int:
        digested.append(len(data))
        return crc32c(data, value)

    monkeypatch.setattr(room, "crc32c", count)
    state = [item(key, tensor) for key, tensor in kinds().items()]
    capture, one, other = Capture(background=gate.background), list[Captured](), list[Captured]()
    gate.open()
    capture.begin(state, [Taking(one), Taking(other)])
    capture.join()
    assert stored(one[0]) == stored(other[0]) == {key: raw(tensor.detach()) for key, tensor in kinds_of(state).items()}
    assert sum(digested) == sum(chunk.num_bytes for chunk in one[0].chunks)
    capture.close()


def kinds_of(state: list[StateTensor]) -> dict[str, Tensor]:
    return {one.key: one.tensor for one in state}


def check_a_target_without_memory_fails_alone(background: BackgroundThread, device: str) -> None:
    """Also where it would have taken more of the state than the others."""
    capture, one, other = Capture(background=background), list[Captured](), list[Captured]()
    state = [item(f"w{n}", torch.full((3,), float(n), device=device), holder=0, num_holders=2) for n in range(8)]
    poor, rich = Poor(one), Taking(other)
    capture.make_ready(state, rich)
    capture.begin(state, [poor, rich])
    capture.join()
    assert ["No space left on device" in found.problem for found in one] == [True]
    saved = stored(other[0])
    assert 0 < len(saved) < 8
    assert saved == {key: raw(tensor.cpu()) for key, tensor in kinds_of(state).items() if key in saved}
    capture.close()


class Poor(Taking):
    """Wants the whole state, and has no memory for it."""

    def entries(self, plan: CapturePlan) -> Sequence[int]:
        return range(len(plan.entries))

    def open(self, plan: CapturePlan) -> Sequence[int]:
        return no_memory()


def test_a_target_without_memory_fails_alone(gate: Gate) -> None:
    gate.open()
    check_a_target_without_memory_fails_alone(gate.background, "cpu")


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_target_that_cannot_finish_fails_alone(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, comes_first: bool
) -> None:
    capture, one, other = Capture(background=gate.background), list[Captured](), list[Captured]()
    broken, sound = Taking(one), Taking(other)
    monkeypatch.setattr(broken, "finish", no_memory)
    gate.open()
    capture.begin([item("w", torch.ones(3))], [broken, sound] if comes_first else [sound, broken])
    capture.join()
    assert ["No space left on device" in found.problem for found in one] == [True]
    assert [stored(found) for found in other] == [{"w": raw(torch.ones(3))}]
    capture.close()


def no_memory(*_: object) -> NoReturn:
    raise OSError(28, "No space left on device")


def test_holders_capture_their_shares_and_together_all(gate: Gate) -> None:
    tensor, small = torch.randn(3 << 20), torch.randn(10)
    gate.open()
    parts: list[dict[str, bytes]] = []
    capture = Capture(background=gate.background)
    for holder in range(3):
        captured = list[Captured]()
        both = [item(key, value, holder=holder, num_holders=3) for key, value in (("w", tensor), ("b", small))]
        capture.begin(both, [Taking(captured)])
        capture.wait_until_copied()
        parts.append(stored(outcome(captured, gate)))
    capture.close()
    assert {part["w"] for part in parts} == {raw(third) for third in tensor.chunk(3)}
    assert [part["b"] for part in parts if "b" in part] == [raw(small)]


def test_a_copy_that_fails_reaches_nobody_but_the_report(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SnapshotSlot, "reserve", no_memory)
    capture, captured = Capture(background=gate.background), list[Captured]()
    capture.begin([item("w", torch.zeros(3))], [Taking(captured)])
    gate.open()
    assert capture.wait_until_copied() >= 0.0
    assert "No space left on device" in outcome(captured, gate).problem
    assert capture.wait_until_copied() == 0.0
    capture.close()


def test_what_cannot_be_saved_is_told_by_name(gate: Gate) -> None:
    capture, captured = Capture(background=gate.background), list[Captured]()
    gate.open()
    wrong = StateTensor("model", "w", Piece.whole("w", (4,)), torch.zeros(3))
    capture.begin([wrong], [Taking(captured)])
    assert "model/w is (3,), not (4,)" in captured.pop().problem
    capture.begin([item("q", torch.empty(3, dtype=torch.bits8))], [Taking(captured)])
    capture.join()
    assert "model/q cannot be saved" in captured.pop().problem
    capture.close()


def test_landing_tells_how_long_it_took(gate: Gate) -> None:
    capture, captured = Capture(background=gate.background), list[Captured]()
    capture.begin([item("w", torch.zeros(3))], [Taking(captured)])
    threading.Timer(0.2, gate.open).start()
    assert capture.wait_until_copied() >= 0.15
    assert not outcome(captured, gate).problem
    capture.close()


def test_straight_from_memory_the_digests_are_the_same(gate: Gate) -> None:
    items = [item(key, tensor) for key, tensor in kinds().items()] + [item("large", torch.randn(9 << 20))]
    capture, captured = Capture(background=gate.background), list[Captured]()
    gate.open()
    capture.begin(items, [Taking(captured)])
    capture.wait_until_copied()
    straight = TensorChunkSource(items)
    assert straight.chunks() == outcome(captured, gate).chunks
    assert [crc32c(straight(n)) for n in range(len(straight.chunks()))] == [c.crc32c for c in straight.chunks()]
    capture.close()


class Pace:
    """How much of the time a loop in pure Python could go on: on a processor, or ready to be. What is missing, it
    waited for the interpreter's lock. Whoever else uses this machine makes no difference to it."""

    def __init__(self) -> None:
        self._began_at, self._before_s = time.perf_counter(), self._ready_s()

    def share(self) -> float:
        return (self._ready_s() - self._before_s) / (time.perf_counter() - self._began_at)

    def _ready_s(self) -> float:
        """Nanoseconds on a processor, nanoseconds in the queue for one, and a count."""
        running, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
        return (int(running) + int(queued)) / 1e9


def paces_beside_copies() -> list[float]:
    """Of two copies of 96 MiB; the first one, which faults pages in, does not count."""
    state = [item(f"w{n}", torch.ones(8 << 20)) for n in range(3)]
    capture, captured, shares = Capture(), list[Captured](), list[float]()
    for _ in range(3):
        capture.begin(state, [Taking(captured)])
        task, pace, turns = capture._last, Pace(), 0
        assert task is not None
        while not task.is_copied.is_set():
            for _ in range(100):
                turns += 1
        shares.append(pace.share())
        capture.join()
        assert not captured.pop().problem
    capture.close()
    return shares[1:]


def test_python_keeps_its_pace_while_the_copy_runs() -> None:
    assert max(paces_beside_copies()) >= 0.8


@pytest.mark.parametrize("keeps_lock", [False, True])
def test_a_copy_that_kept_the_lock_would_be_felt(monkeypatch: pytest.MonkeyPatch, keeps_lock: bool) -> None:
    """The control of the test above: a digest that sleeps, once as a good neighbour and once with the lock in hand."""
    libc = ctypes.PyDLL(None) if keeps_lock else ctypes.CDLL(None)

    def slow(data: memoryview, value: int = 0) -> int:
        libc.usleep(100_000)  # long beside what a busy machine makes the copy itself wait
        return crc32c(data, value)

    monkeypatch.setattr(room, "crc32c", slow)
    # On a busy machine a copy that waits for a processor of its own may be felt or not by chance: one clear case of a
    # few is enough.
    assert any((pace >= 0.8) is not keeps_lock for _ in range(3) for pace in paces_beside_copies())
