"""Captures from a device: what is copied is what was there, and training waits for its landing alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import pytest
import torch

from closeranks.capture.capture import Capture
from closeranks.capture.pinned_memory import PinnedMemory
from closeranks.capture.tensors import StateTensor
from closeranks.checkpoint.save.chunk_source import TensorChunkSource
from closeranks.core.pieces import Piece
from closeranks.core.system.background_thread import BackgroundThread
from tests.capture.taking import Captured, Taking, stored
from tests.capture.test_capture import check_a_target_without_memory_fails_alone, item, kinds, raw
from tests.checkpoint.save.test_saver import WAIT_S, make, read

pytestmark = pytest.mark.gpu


@pytest.fixture
def background() -> Iterator[BackgroundThread]:
    made = BackgroundThread("test")
    yield made
    made.close()


def on_device() -> dict[str, torch.Tensor]:
    """Every kind of memory, on the device; one tensor stays with the CPU."""
    moved = {key: tensor.detach().to("cuda") for key, tensor in kinds().items() if key != "int64"}
    moved["transposed"] = torch.randn(4, 6, device="cuda").t()
    moved["strided"] = torch.arange(40, device="cuda")[::3]
    moved["large"] = torch.randn(20 << 20, device="cuda")
    moved["large rows"] = torch.randn(3000, 3001, device="cuda")[:, 1:]
    return {**moved, "int64": kinds()["int64"]}


def captured_of(capture: Capture, target: Taking, items: list[StateTensor]) -> Captured:
    capture.begin(items, [target])
    capture.join()
    return target.outcomes.pop()


def made_ready(background: BackgroundThread, items: list[StateTensor]) -> tuple[Capture, Taking]:
    """A target whose slot is pinned."""
    capture, target = Capture(background=background), Taking([])
    capture.make_ready(items, target)
    capture._pin_thread.drain()
    return capture, target


@pytest.mark.parametrize("pins", [True, False])
def test_every_kind_of_tensor_arrives_as_it_is(
    background: BackgroundThread, monkeypatch: pytest.MonkeyPatch, pins: bool
) -> None:
    """Where CUDA refuses to pin shared memory, by way of memory that it has pinned itself."""
    if not pins:
        monkeypatch.setattr(PinnedMemory, "pin", lambda pinned, is_enough: False)
    capture, tensors, target = Capture(background=background), on_device(), Taking([])
    items = [item(key, tensor) for key, tensor in tensors.items()]
    capture.make_ready(items, target)
    found = captured_of(capture, target, items)
    assert stored(found) == {key: raw(tensor.detach().cpu()) for key, tensor in tensors.items()}
    capture._pin_thread.drain()
    assert [pinned.is_pinned for pinned in capture._pinned_slots.values()] == [pins]
    assert TensorChunkSource(items).chunks() == found.chunks
    capture.close()


def test_the_slot_grows_and_stays_pinned(background: BackgroundThread) -> None:
    capture, target = Capture(background=background), Taking([])
    for size in (1000, 30 << 20, 10):
        tensor = torch.randn(size, device="cuda")
        assert stored(captured_of(capture, target, [item("w", tensor)])) == {"w": raw(tensor.cpu())}
        assert [pinned.is_pinned for pinned in capture._pinned_slots.values()] == [True]
    capture.close()


def test_a_target_without_memory_fails_alone(background: BackgroundThread) -> None:
    check_a_target_without_memory_fails_alone(background, "cuda")


def test_a_copy_into_a_pinned_slot_does_not_wait_for_another_to_be_pinned(
    background: BackgroundThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = [item("w", torch.ones(1000, device="cuda"))]
    capture, target = made_ready(background, state)
    has_begun, gate = threading.Event(), threading.Event()

    def pin(pinned: PinnedMemory, is_enough: threading.Event) -> bool:
        has_begun.set()
        return gate.wait()

    monkeypatch.setattr(PinnedMemory, "pin", pin)
    capture.make_ready(state, Taking([]))
    has_begun.wait()
    assert stored(captured_of(capture, target, state)) == {"w": raw(torch.ones(1000))}
    gate.set()
    capture.close()


def changed(background: BackgroundThread, is_joined: bool) -> tuple[bytes, bytes, bytes]:
    """A state that training changes, right after ``join`` or without it: what it was, what became of it, and what was
    captured. Behind a long queue of work the copy has not begun when the change is asked for, behind torch's back,
    which would notice."""
    state = torch.randn(64 << 20, device="cuda")
    before = raw(state.cpu())
    capture, target = made_ready(background, [item("w", state)])
    gate = threading.Event()
    if not is_joined:
        background.submit(gate.wait)
    matrix = torch.randn(8192, 8192, device="cuda")
    for _ in range(5):
        matrix @ matrix
    capture.begin([item("w", state)], [target])
    if is_joined:
        capture.wait_until_copied()
    state.data.neg_()
    gate.set()
    capture.join()
    background.drain()
    values = stored(target.outcomes.pop())["w"]
    capture.close()
    return before, raw(state.cpu()), values


def test_the_training_stream_waits_for_the_copy(background: BackgroundThread) -> None:
    before, after, values = changed(background, is_joined=True)
    assert before != after
    assert values == before


def test_a_change_before_join_would_be_seen(background: BackgroundThread) -> None:
    """The control of the test above."""
    before, _, values = changed(background, is_joined=False)
    assert values != before


@pytest.mark.parametrize("is_sent_off", [False, True])
def test_a_change_before_join_is_a_problem(background: BackgroundThread, is_sent_off: bool) -> None:
    """Before the copies are asked of the device, or after that and before they are done."""
    state = torch.randn(64 << 20, device="cuda")
    capture, target = made_ready(background, [item("w", state)])
    gate = threading.Event()
    if not is_sent_off:
        background.submit(gate.wait)
    matrix = torch.randn(8192, 8192, device="cuda")
    for _ in range(5):
        matrix @ matrix
    capture.begin([item("w", state)], [target])
    if is_sent_off:
        time.sleep(0.01)  # the matrix products take longer
    state.neg_()
    gate.set()
    capture.join()
    background.drain()
    assert target.outcomes.pop().problem.startswith("'w' changed while it was copied")
    capture.close()


def test_a_change_after_landing_is_none(background: BackgroundThread) -> None:
    state = torch.randn(64 << 20, device="cuda")
    capture, target = made_ready(background, [item("w", state)])
    matrix = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        for _ in range(5):
            matrix @ matrix
        capture.begin([item("w", state)], [target])
        capture.wait_until_copied()
        state.neg_()
        capture.join()
        assert not target.outcomes.pop().problem
    capture.close()


def test_what_forward_may_change_is_copied_at_once(background: BackgroundThread) -> None:
    counter = torch.zeros(1000, device="cuda")
    capture, found = Capture(background=background), list[Captured]()
    gate = threading.Event()
    background.submit(gate.wait)
    capture.begin([item("n", counter, is_steady=False)], [Taking(found)])
    counter.add_(1.0)
    gate.set()
    capture.join()
    background.drain()
    assert stored(found.pop()) == {"n": raw(torch.zeros(1000))}
    capture.close()


def test_a_saver_saves_from_a_device_both_ways(tmp_path: Path) -> None:
    state = torch.randn(3000, 1000, device="cuda")
    before = state.cpu()
    saver, capture = make(tmp_path), Capture()
    whole = [StateTensor("model", "w", Piece.whole("w", (3000, 1000)), state)]
    saver.warm_up(capture, whole)
    capture.begin(whole, saver.begin_save(1, {}))
    capture.wait_until_copied()
    state.zero_()
    saver.wait(WAIT_S)
    assert torch.equal(read(tmp_path, "step-00000001", "w"), before)
    saver.save_now(2, whole, {})
    assert torch.equal(read(tmp_path, "step-00000002", "w"), torch.zeros(3000, 1000))
    capture.close()
    saver.close()


class Loop:
    """Steps of matrix products, about ten milliseconds each, and an optimizer that changes the state after each."""

    def __init__(self) -> None:
        self.state = [torch.randn(64 << 20, device="cuda") for _ in range(8)]
        self._matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def run(self, capture: Capture | None, items: list[StateTensor], target: Taking) -> tuple[float, float]:
        """Seconds of thirty steps, with a capture at the first, and what ``land`` waited on the host."""
        torch.cuda.synchronize()
        began_at, waited_s = time.perf_counter(), 0.0
        for step in range(30):
            if capture is not None and step == 0:
                capture.begin(items, [target])
            for _ in range(6):
                self._matrix @ self._matrix
            if capture is not None:
                waited_s += capture.wait_until_copied()
            for tensor in self.state:
                tensor.mul_(1.0001)
        torch.cuda.synchronize()
        return time.perf_counter() - began_at, waited_s


def test_the_stall_is_a_small_part_of_a_blocking_copy(
    background: BackgroundThread, record_property: Callable[[str, object], None]
) -> None:
    """2 GiB: what a capture adds to the loop, beside what copying with the loop at rest takes. Interleaved rounds."""
    loop = Loop()
    items = [item(f"w{number}", tensor) for number, tensor in enumerate(loop.state)]
    capture, target = made_ready(background, items)
    added_s, waited_s, blocking_s = [], [], []
    for number in range(6):
        alone_s, _ = loop.run(None, items, target)
        beside_s, join_s = loop.run(capture, items, target)
        capture.join()
        assert not target.outcomes[-1].problem
        began_at = time.perf_counter()
        for tensor in loop.state:
            tensor.cpu()
        if number:  # the first round warms up
            added_s.append(beside_s - alone_s)
            waited_s.append(join_s)
            blocking_s.append(time.perf_counter() - began_at)
    figures = {
        "added_ms": 1000 * median(added_s),
        "host_waited_ms": 1000 * median(waited_s),
        "blocking_copy_ms": 1000 * median(blocking_s),
    }
    for name, value in figures.items():
        record_property(name, round(value, 2))
    print({name: round(value, 2) for name, value in figures.items()})
    assert median(added_s) < median(blocking_s) / 2
    capture.close()
