"""A module split over ranks against the whole one: loss and every gradient, number of collectives, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from closeranks.core.errors import ModelError
from closeranks.core.pieces import Piece
from closeranks.core.protocols import ActivationCollectives, ShardingRule
from closeranks.models.llama.vocab_parallel_loss import vocab_parallel_cross_entropy
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor.activation_collectives import TensorAxisGroup
from closeranks.parallel.tensor.tensor_parallel import (
    TensorShard,
    explain_sharding_error,
    explain_sharding_errors,
    shard_module,
)
from closeranks.testing import run_world
from tests.parallel.splitting import compare_gradients, filled, llama_spec, part_of, split_here, tokens, world

# Dynamo touches .grad of non-leaf tensors while it traces, and hides the warning only where warnings are not errors.
traced = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def llama_matches(overrides: dict[str, Any], batch: int, has_mask: bool) -> float:
    """Loss and gradients of this rank's share against the whole Llama; the loss, for all ranks to agree."""
    spec = llama_spec(**overrides)
    whole, part = filled(spec), filled(spec)
    shares = split_here(part, spec.sharding_rules, spec.activation_collectives)
    data: dict[str, Tensor] = {"tokens": tokens(batch, 9)}
    if has_mask:
        data["mask"] = torch.rand(batch, 8, generator=torch.Generator().manual_seed(5)).double()
    losses = []
    for module in (whole, part):
        torch.manual_seed(7)
        loss = spec.loss(module, data)
        loss.total.backward()
        losses.append(loss)
    assert losses[0].weight == losses[1].weight
    torch.testing.assert_close(losses[1].total, losses[0].total, rtol=1e-12, atol=0.0)
    compare_gradients(whole, part, shares)
    if overrides.get("tied"):
        assert part.lm_head.weight is part.model.embed_tokens.weight
    return losses[1].total.item()


@pytest.mark.world
@pytest.mark.parametrize(
    ("size", "overrides", "batch", "has_mask"),
    [
        (2, {}, 3, False),
        (2, {"tied": True}, 2, True),
        (2, {"dropout": 0.3}, 1, False),
        (4, {"dropout": 0.3, "tied": True}, 3, True),
    ],
    ids=["untied", "tied-masked", "dropout", "four-all"],
)
def test_a_llama_over_ranks_is_the_whole_llama(size: int, overrides: Any, batch: int, has_mask: bool) -> None:
    results = run_world(llama_matches, size, overrides, batch, has_mask)
    assert len(set(results)) == 1, "all ranks have the same bits"


def llama_in_evaluation() -> None:
    spec = llama_spec(dropout=0.5)
    whole, part = filled(spec).eval(), filled(spec).eval()
    shares = split_here(part, spec.sharding_rules, spec.activation_collectives)
    ids = tokens(2, 8)
    with torch.no_grad():
        logits = part(ids)
        torch.testing.assert_close(logits, whole(ids).tensor_split(2, dim=-1)[dist.get_rank()], rtol=1e-11, atol=1e-11)
    assert part.lm_head.out_features == 20 == shares["lm_head.weight"].piece.size[0]


@pytest.mark.world
def test_logits_stay_split_by_vocabulary() -> None:
    run_world(llama_in_evaluation, 2)


def pieces_of_a_meta_llama() -> tuple[dict[str, TensorShard], dict[str, tuple[int, ...]]]:
    spec = llama_spec(tied=True)
    with torch.device("meta"):
        module = spec.build()
    module.model.norm.weight.requires_grad_(False)
    module.model.embed_tokens.weight.requires_grad_(False)
    shares = split_here(module, spec.sharding_rules, spec.activation_collectives)
    assert all(parameter.is_meta for parameter in module.parameters())
    assert not module.model.norm.weight.requires_grad
    assert not module.lm_head.weight.requires_grad
    assert module.lm_head.weight is module.model.embed_tokens.weight
    return shares, {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


@pytest.mark.world
def test_a_module_without_memory_is_cut_the_same_way() -> None:
    for rank, (shares, shapes) in enumerate(run_world(pieces_of_a_meta_llama, 2)):
        assert shapes == {name: share.piece.size for name, share in shares.items()}
        query, norm = shares["model.layers.1.self_attn.q_proj.weight"], shares["model.norm.weight"]
        assert query == TensorShard(Piece("model.layers.1.self_attn.q_proj.weight", (32, 32), (16 * rank, 0), (16, 32)))
        assert norm == TensorShard(Piece.whole("model.norm.weight", (32,)), is_primary=rank == 0, is_partial=True)
        assert "lm_head.weight" not in shares


def test_a_group_of_one_changes_nothing() -> None:
    spec = llama_spec()
    module = filled(spec)
    before = dict(module.named_parameters())
    shares = shard_module(module, spec.sharding_rules, spec.activation_collectives, RankGroup(0, 1))
    assert {name: id(p) for name, p in module.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert all(share == TensorShard(Piece.whole(name, tuple(before[name].shape))) for name, share in shares.items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert module.token_loss.tensor_axis is None


def collectives_of_a_block() -> tuple[dict[str, int], dict[str, int]]:
    spec = llama_spec()
    module = filled(spec)
    split_here(module, spec.sharding_rules, spec.activation_collectives)
    hidden = torch.randn(2, 4, 32, dtype=torch.float64, requires_grad=True)
    with CommDebugMode() as forward:
        output = module.model.layers[0](hidden, module.model.rope_cos, module.model.rope_sin)
    with CommDebugMode() as backward:
        output.sum().backward()
    return tuple({str(op): count for op, count in mode.get_comm_counts().items()} for mode in (forward, backward))


@pytest.mark.world
def test_a_block_makes_two_gathers_and_two_scatters_each_way() -> None:
    gather, scatter = "c10d_functional.all_gather_into_tensor", "c10d_functional.reduce_scatter_tensor"
    for forward, backward in run_world(collectives_of_a_block, 2):
        assert forward == backward == {gather: 2, scatter: 2}


def collectives_of_the_ends() -> dict[str, int]:
    spec = llama_spec(num_layers=1)
    module = filled(spec)
    split_here(module, spec.sharding_rules, spec.activation_collectives)
    with CommDebugMode() as mode:
        spec.loss(module, {"tokens": tokens(2, 9)}).total.backward()
    return {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


@pytest.mark.world
def test_embedding_head_and_loss_add_one_gather_one_scatter_and_two_small_sums() -> None:
    ends = {"all_gather_into_tensor": 2 + 2 + 1 + 1, "reduce_scatter_tensor": 2 + 2 + 1 + 1, "all_reduce": 2}
    assert run_world(collectives_of_the_ends, 2) == [ends] * 2


class Mixer(nn.Module):
    """A user's attention-like block: shares of the heads, a scale of its own, biases everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(12, 16), nn.Linear(12, 16)
        self.output = nn.Linear(16, 12)
        self.head_scale = nn.Parameter(torch.linspace(0.5, 2.0, 4))
        self.norm = nn.LayerNorm(4)

    def forward(self, hidden: Tensor) -> Tensor:
        split = (*hidden.shape[:2], -1, 4)
        heads = self.norm(self.query(hidden).view(split)).sigmoid() * self.value(hidden).view(split)
        return hidden + self.output((heads * self.head_scale.view(-1, 1)).flatten(2))


class UserNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12, padding_idx=13)
        self.wide = nn.Embedding(20, 12)
        self.blocks = nn.ModuleList(Mixer() for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 20)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.wide(ids)
        for block in self.blocks:
            hidden = block(hidden=hidden)
        return self.head(self.norm(hidden + self.mlp(hidden)))


USER_RULES = (
    ShardingRule("embed.weight", 0),
    ShardingRule("wide.weight", 1),
    ShardingRule("blocks.*.query.weight", 0),
    ShardingRule("blocks.*.value.*", 0),
    ShardingRule("blocks.*.output.weight", 1),
    ShardingRule("blocks.*.head_scale", 0),
    ShardingRule("blocks.*.norm.*", None, sequence=True),
    ShardingRule("mlp.0.weight", 0),
    ShardingRule("mlp.2.weight", 1),
    ShardingRule("head.weight", 0),
)
USER_CROSSINGS = (
    ActivationCollectives("wide", on_output="whole"),
    ActivationCollectives("head", on_input="copy", on_output="whole"),
)


def user_net_matches(batch: int) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    torch.manual_seed(0)
    whole = UserNet().double()
    part = UserNet().double()
    part.load_state_dict(whole.state_dict())
    shares = split_here(part, USER_RULES, USER_CROSSINGS)
    ids = tokens(batch, 5, 20)
    ids[0, 0] = 13
    losses = [F.cross_entropy(module(ids).flatten(0, 1), ids.flatten(), reduction="sum") for module in (whole, part)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
    compare_gradients(whole, part, shares)
    return losses[1].item(), {name: share.piece.size for name, share in shares.items()}


@pytest.mark.world
@pytest.mark.parametrize("size", [2, 4])
def test_a_users_module_splits_by_its_table(size: int) -> None:
    results = run_world(user_net_matches, size, 3)
    assert len({loss for loss, _ in results}) == 1
    for _, sizes in results:
        assert sizes["blocks.1.query.bias"] == (16 // size,), "the bias of split outputs follows its weight"
        assert sizes["blocks.1.output.bias"] == (12,), "the bias of split inputs stays whole"
        assert sizes["embed.weight"] == (20 // size, 12)
        assert sizes["wide.weight"] == (20, 12 // size)


class OwnScatter(nn.Module):
    """A row split with a bias in the sequence region: the bias has a share of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).tanh())


def bias_on_a_share_of_the_sequence() -> None:
    torch.manual_seed(0)
    whole, part = OwnScatter().double(), OwnScatter().double()
    part.load_state_dict(whole.state_dict())
    rules = (ShardingRule("up.weight", 0), ShardingRule("down.weight", 1))
    shares = split_here(
        part,
        rules,
        (ActivationCollectives("up", on_input="gather"), ActivationCollectives("down", on_output="scatter")),
    )
    assert shares["down.bias"].is_partial
    assert not shares["up.bias"].is_partial
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    weights = torch.randn(2, 4, 6, dtype=torch.float64)
    rank = dist.get_rank()
    (whole(x) * weights).sum().backward()
    (part(x[:, 2 * rank : 2 * rank + 2]) * weights[:, 2 * rank : 2 * rank + 2]).sum().backward()
    compare_gradients(whole, part, shares)


@pytest.mark.world
def test_a_bias_in_the_sequence_region_is_partial() -> None:
    run_world(bias_on_a_share_of_the_sequence, 2)


def ids_outside(token: int) -> str:
    spec = llama_spec()
    module = filled(spec)
    split_here(module, spec.sharding_rules, spec.activation_collectives)
    embed = module.model.embed_tokens
    embed._forward_hooks.clear()  # the lookup alone: the other rank would wait in the collective
    try:
        embed(torch.full((1, 2), token))
    except IndexError:
        return "refused"
    return "found"


@pytest.mark.world
@pytest.mark.parametrize(
    ("token", "expected"), [(40, ["found", "refused"]), (-1, ["refused", "found"]), (39, ["found", "found"])]
)
def test_an_id_outside_the_vocabulary_fails_on_the_rank_at_that_end(token: int, expected: list[str]) -> None:
    assert run_world(ids_outside, 2, token) == expected


def loss_alone(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    axis = TensorAxisGroup.of(world())
    generator = torch.Generator().manual_seed(2)
    logits = (50 * torch.randn(6, 12, generator=generator)).to(dtype)  # far apart: a sum without the peak overflows
    targets = torch.randint(12, (6,), generator=generator)
    whole, part = (
        logits.clone().requires_grad_(),
        logits.tensor_split(axis.size, -1)[axis.rank].clone().requires_grad_(),
    )
    weights = torch.rand(6, generator=generator)
    wide = whole if dtype == torch.float64 else whole.float()
    expected = F.cross_entropy(wide, targets, reduction="none")
    found = vocab_parallel_cross_entropy(part, targets, axis)
    for each in (expected, found):
        (each * weights).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    assert part.grad.dtype == dtype
    return found.detach(), expected.detach(), part.grad, whole.grad.tensor_split(axis.size, -1)[axis.rank]


@pytest.mark.world
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_loss_of_a_split_vocabulary_is_cross_entropy_in_float32_at_least(dtype: torch.dtype) -> None:
    for found, expected, gradient, true in run_world(loss_alone, 3, dtype):
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradient, true)


class Bare(nn.Module):
    """Forgets that its inner width is split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(self.up(hidden).view(-1, 2, 5).flatten(1))


def misfit() -> str:
    module = Bare()
    shares = split_here(module, (ShardingRule("up.weight", 0), ShardingRule("down.weight", 1)))
    with pytest.raises(ModelError) as caught, explain_sharding_errors(share.piece for share in shares.values()):
        module(torch.zeros(3, 6))
    return str(caught.value)


@pytest.mark.world
def test_a_shape_that_forgets_the_split_is_told_with_its_entry() -> None:
    for text in run_world(misfit, 2):
        assert "'up.weight' [10, 6] is split along dim 0 into 5 each" in text
        assert "-1 in view" in text


def test_errors_that_are_no_misfit_pass_untouched() -> None:
    pieces = [Piece("w", (8, 4), (0, 0), (4, 4))]
    assert explain_sharding_error(RuntimeError("connection reset by peer 8"), pieces) is None
    assert explain_sharding_error(RuntimeError("shape '[2, 3]' is invalid for input of size 7"), pieces) is None
    assert explain_sharding_error(RuntimeError("shape '[3, 2, 2]' is invalid for input of size 7"), pieces) is None
    assert (
        explain_sharding_error(RuntimeError("shape '[3, 2, 2, 2]' is invalid for input of size 12"), pieces) is not None
    )
    with pytest.raises(RuntimeError, match="reset"), explain_sharding_errors(pieces):
        raise RuntimeError("connection reset by peer 8")


def positions_that_do_not_split() -> None:
    spec = llama_spec()
    module = filled(spec)
    split_here(module, spec.sharding_rules, spec.activation_collectives)
    with pytest.raises(ModelError, match="7 positions of a sample do not split over 2 tensor ranks"):
        spec.loss(module, {"tokens": tokens(2, 8)})
    with pytest.raises(ModelError, match="does not say how it splits"):
        split_here(filled(spec), ())


@pytest.mark.world
def test_what_does_not_split_is_refused() -> None:
    run_world(positions_that_do_not_split, 2)


def compiled_matches(backend: str) -> float:
    torch._dynamo.reset()
    spec = llama_spec()
    eager, compiled = filled(spec, torch.float32), filled(spec, torch.float32)
    for module in (eager, compiled):
        split_here(module, spec.sharding_rules, spec.activation_collectives)
    for unit in spec.compile_units:
        compiled.get_submodule(unit).compile(backend=backend, fullgraph=True)
    losses = []
    for module in (eager, compiled):
        loss = spec.loss(module, {"tokens": tokens(2, 9)}).total
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0.0)
    for (name, found), expected in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    return losses[1].item()


@traced
@pytest.mark.world
def test_blocks_and_loss_trace_as_one_graph_with_their_collectives() -> None:
    assert len(set(run_world(compiled_matches, 2, "aot_eager", timeout_s=300.0))) == 1


@traced
@pytest.mark.slow
@pytest.mark.world
@pytest.mark.timeout(600)
def test_compiled_with_inductor_over_ranks_equals_eager() -> None:
    run_world(compiled_matches, 2, "inductor", timeout_s=580.0)


def test_the_part_of_a_whole_is_its_box() -> None:
    assert part_of(torch.arange(12).view(3, 4), Piece("w", (3, 4), (1, 2), (1, 2))).tolist() == [[6, 7]]
