"""Documents that share a row compute what each would alone: loss, gradients, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Batch
from closeranks.models.llama.attention import attend
from closeranks.models.llama.document_mask import document_attention, document_positions, target_mask
from closeranks.models.llama.spec import LlamaSpec
from closeranks.parallel.recompute import recompute
from closeranks.testing import run_world
from tests.models.making import small_llama
from tests.run.trajectories import TINY, Trajectory, alone, largest_difference, relative, trajectory

ROWS = ((5, 9), (17,), (2, 3, 4, 5), (1, 8))
"""Lengths of the documents in each row of 17 tokens; the rest is padding."""
LENGTH = 17


def packed(rows: tuple[tuple[int, ...], ...] = ROWS, length: int = LENGTH, seed: int = 5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 40, (len(rows), length), generator=generator)
    documents = torch.full((len(rows), length), -1, dtype=torch.int32)
    for number, lengths in enumerate(rows):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for document, (size, end) in enumerate(zip(lengths, ends, strict=True)):
            documents[number, end - size : end] = document
        tokens[number, ends[-1] :] = 0
    return {"tokens": tokens, "documents": documents}


def each_alone(batch: Batch) -> list[dict[str, Tensor]]:
    """Every document with something to predict, as a batch of its own without any packing."""
    pairs = zip(batch["tokens"], batch["documents"], strict=True)
    cut = [row[numbers == number] for row, numbers in pairs for number in range(int(numbers.max()) + 1)]
    return [{"tokens": document.unsqueeze(0)} for document in cut if len(document) > 1]


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


def learn(
    spec: LlamaSpec, module: nn.Module, batches: list[dict[str, Tensor]]
) -> tuple[float, float, dict[str, Tensor]]:
    total, weight = 0.0, 0.0
    for batch in batches:
        loss = spec.loss(module, batch)
        loss.total.backward()
        total, weight = total + loss.total.item(), weight + float(loss.weight)
    return total, weight, gradients(module)


def assert_same_learning(spec: LlamaSpec, module: nn.Module, batch: dict[str, Tensor], tolerance: float) -> None:
    total, weight, found = learn(spec, module, [batch])
    expected_total, expected_weight, expected = learn(spec, module, each_alone(batch))
    assert weight == expected_weight == sum(size - 1 for sizes in ROWS for size in sizes)
    assert total == pytest.approx(expected_total, rel=tolerance)
    assert largest_difference(found, expected) < tolerance


@pytest.mark.parametrize("attention", ["auto", "math"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_a_packed_row_is_its_documents_alone(attention: str, num_kv_heads: int) -> None:
    spec, module = small_llama(attention=attention, num_kv_heads=num_kv_heads)
    assert_same_learning(spec, module, packed(), 1e-12)


def test_in_float32() -> None:
    """As close as two orders of the same sums come: a few roundings of 6e-8 through two layers."""
    spec, module = small_llama(torch.float32)
    assert_same_learning(spec, module, packed(), 2e-5)


@pytest.mark.parametrize("without", ["mask", "positions", "targets"])
def test_without_the_mask_or_the_choice_of_targets_the_loss_is_another(
    without: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control. Not so for positions: rotary attention knows their differences alone, and where documents do not see
    each other, those are the same. Positions of their own keep the angles small, as they were when published weights
    learned them, and exact in low precision."""
    spec, module = small_llama()
    batch = packed()
    expected, _, _ = learn(spec, module, each_alone(batch))
    if without == "mask":
        causal = torch.full((LENGTH - 1, LENGTH - 1), float("-inf"), dtype=torch.float64).triu(1)
        monkeypatch.setattr("closeranks.models.llama.document_mask._bias", lambda documents, dtype: causal[None, None])
    elif without == "positions":
        counting = torch.arange(LENGTH - 1).expand(len(ROWS), -1)
        monkeypatch.setattr("closeranks.models.llama.document_mask.document_positions", lambda documents: counting)
    else:
        monkeypatch.setattr("closeranks.models.llama.spec.target_mask", lambda documents: documents[:, 1:] >= 0)
    found, _, _ = learn(spec, module, [batch])
    if without == "positions":
        assert found == pytest.approx(expected, rel=1e-12)
    else:
        assert abs(found - expected) / expected > 1e-3


def test_what_a_document_computes_does_not_depend_on_its_neighbours() -> None:
    _, module = small_llama()
    batch = packed()
    tokens, documents = batch["tokens"][:, :-1], batch["documents"][:, :-1]
    first = module(tokens, None, None, documents)
    second = module(torch.where(documents == 1, tokens, 39 - tokens), None, None, documents)
    own = documents == 1
    assert torch.equal(first[own], second[own])
    assert not torch.isclose(first[~own], second[~own]).all()
    assert first.isfinite().all(), "padding is no exception"


def test_positions_and_targets() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 2, 2, 2, 2, 2], [-1, -1, -1, -1, -1, -1, -1]])
    assert document_positions(documents).tolist() == [
        [0, 1, 2, 0, 1, 0, 1],
        [0, 0, 0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5, 6],
    ]
    assert target_mask(documents).int().tolist() == [[1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]


def test_rotary_tables_follow_the_documents() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, -1]])
    cos, sin = torch.rand(6, 4), torch.rand(6, 4)
    apart = document_attention(documents, cos, sin)
    assert torch.equal(apart.cos[0], cos[[0, 1, 0, 1, 2, 0]])
    assert torch.equal(apart.sin[0], sin[[0, 1, 0, 1, 2, 0]])


def test_a_batch_of_padding_weighs_nothing_and_learns_nothing() -> None:
    spec, module = small_llama()
    empty = {"tokens": torch.zeros(2, 9, dtype=torch.long), "documents": torch.full((2, 9), -1)}
    total, weight, found = learn(spec, module, [empty])
    assert (total, weight) == (0.0, 0.0)
    assert all(gradient.abs().max() == 0 for gradient in found.values())


def test_a_mask_weighs_targets_inside_documents() -> None:
    spec, module = small_llama()
    batch = packed()
    halves = torch.full((len(ROWS), LENGTH - 1), 0.5, dtype=torch.float64)
    whole, half = spec.loss(module, batch), spec.loss(module, {**batch, "mask": halves})
    assert half.total.item() == pytest.approx(whole.total.item() / 2, rel=1e-12)
    assert float(half.weight) == float(whole.weight) / 2


def test_rows_of_one_document_are_plain_rows() -> None:
    spec, module = small_llama()
    tokens = packed()["tokens"]
    plain = spec.loss(module, {"tokens": tokens})
    one = spec.loss(module, {"tokens": tokens, "documents": torch.zeros_like(tokens)})
    assert one.total.item() == pytest.approx(plain.total.item(), rel=1e-12)
    assert float(one.weight) == plain.weight


def test_documents_must_number_every_token() -> None:
    spec, module = small_llama()
    batch = packed()
    with pytest.raises(ModelError, match=r"'documents' of a batch is \[4, 16\] and its tokens are \[4, 17\]"):
        spec.loss(module, {**batch, "documents": batch["documents"][:, 1:]})


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_blocks_learn_the_same(mode: str) -> None:
    spec, module = small_llama(dropout=0.3)
    torch.manual_seed(7)
    expected = learn(spec, module, [packed()])
    recompute(module, spec.blocks, mode)
    torch.manual_seed(7)
    found = learn(spec, module, [packed()])
    assert found[0] == expected[0]
    assert largest_difference(found[2], expected[2]) == 0.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_blocks_learn_the_same() -> None:
    torch._dynamo.reset()
    spec, module = small_llama(torch.float32)
    expected, plain = learn(spec, module, [packed()]), spec.loss(module, {"tokens": packed()["tokens"]})
    for unit in spec.compile_units:
        module.get_submodule(unit).compile(backend="aot_eager")
    found = learn(spec, module, [packed()])
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    assert largest_difference(found[2], expected[2]) < 2e-5
    assert spec.loss(module, {"tokens": packed()["tokens"]}).total.item() == pytest.approx(plain.total.item(), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_bias_has_the_format_of_the_scores(dtype: torch.dtype) -> None:
    """Else every block would make, and keep for backward, a copy of its own."""
    spec, module = small_llama(torch.float32)
    batch = packed()
    wide = spec.loss(module, batch).total.item()
    with torch.autocast("cpu", dtype=dtype):
        table = torch.ones(LENGTH, 4)
        assert document_attention(batch["documents"], table, table).bias.dtype == dtype
        assert spec.loss(module, batch).total.item() == pytest.approx(wide, rel=0.05)


def test_units_in_a_row_are_the_loss() -> None:
    spec, module = small_llama(dropout=0.4)
    chain, batch = spec.pipeline_spec, packed()
    assert chain is not None
    torch.manual_seed(4)
    whole = spec.loss(module, batch)
    torch.manual_seed(4)
    hidden, beside = chain.first_input(module, batch), chain.shared_inputs(module, batch)
    for number in range(len(chain.units)):
        hidden = chain.run_unit(module, number, hidden, beside)
    parted = chain.loss_from_output(module, hidden, batch)
    assert torch.equal(parted.total, whole.total)
    assert torch.equal(torch.as_tensor(parted.weight), torch.as_tensor(whole.weight))
    assert chain.shared_inputs(module, {"tokens": batch["tokens"]}) is None


# Worlds: packed rows as a user's dataset, trained on layouts that cut the model.

NUM_ROWS = 24


class PackedRows:
    """Rows of 17 tokens with documents of many lengths; never the same split twice in a row."""

    identity = "packed rows"

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        batch = packed((ROWS[index % len(ROWS)],), seed=index)
        return {name: tensor[0] for name, tensor in batch.items()}


def job(**layout: Any) -> dict[str, Any]:
    return {
        "model": {
            **TINY["model"],
            "vocab_size": 40,
            "dropout": 0.1,
        },
        "data": {"name": "tests.models.llama.test_document_mask:PackedRows", "seq_len": LENGTH - 1},
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "precision": "float64"},
        "layout": layout,
    }


def _trained(folder: str, changes: dict[str, Any]) -> Trajectory:
    return trajectory(Path(folder), changes)


@pytest.mark.world
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"pipeline": 2}, {"zero": 3}], ids=["tensor", "pipeline", "zero"])
def test_layouts_learn_what_one_process_does(layout: dict[str, int], tmp_path: Path) -> None:
    expected = alone(tmp_path / "alone", job())
    first, *_ = run_world(_trained, 2, str(tmp_path / "world"), job(**layout))
    assert relative(first.losses, expected.losses) < 1e-10
    assert relative(first.norms, expected.norms) < 1e-10


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_kv_heads", [8, 2])
def test_cuda_kernels_keep_documents_apart(dtype: torch.dtype, num_kv_heads: int) -> None:
    documents = packed(((50, 70), (128,), (1, 2, 3, 100)), 128)["documents"].cuda()
    inputs = [
        torch.randn(3, n, 128, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (8, *[num_kv_heads] * 2)
    ]
    table = torch.ones(128, 32, device="cuda", dtype=dtype)
    bias = document_attention(documents, table, table).bias
    mixed = attend(*inputs, "auto", bias)
    mixed.float().square().sum().backward()
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = attend(*wide, "math", bias.double())
    expected.square().sum().backward()
    tolerance = 3e-2 if dtype == torch.bfloat16 else 2e-3
    for found, right in zip((mixed, *(i.grad for i in inputs)), (expected, *(w.grad for w in wide)), strict=True):
        assert found is not None
        assert right is not None
        assert (found.double() - right).norm() < tolerance * right.norm()
    with pytest.raises(ModelError, match="takes no mask"):
        attend(*inputs, "flash", bias)
