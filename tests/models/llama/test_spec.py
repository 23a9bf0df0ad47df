"""The Llama against an independent one, its arithmetic, and the ways a run handles it."""

from __future__ import annotations

from fnmatch import fnmatch
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.errors import ModelError
from closeranks.core.protocols import Batch, Loss, ModelSpec, PipelineSpec
from closeranks.facts.shapes.llama import PRESETS, flops_per_token, num_params, parameter_shapes
from closeranks.models.build import spec_for
from closeranks.models.config import LlamaConfig
from closeranks.models.llama.spec import Llama, LlamaSpec
from closeranks.parallel.recompute import KEEP, recompute
from tests.models import reference
from tests.models.making import materialised, small_llama, tokens

# Dynamo touches .grad of non-leaf tensors while it traces, and hides the warning only where warnings are not errors.
traced = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_builds_on_meta_with_the_names_and_shapes_that_facts_say(preset: str) -> None:
    with torch.device("meta"):
        module = LlamaSpec(LlamaConfig(preset=preset), 16).build()
    found = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert list(found.items()) == list(parameter_shapes(PRESETS[preset]).items())
    assert sum(prod(dims) for dims in found.values()) == num_params(PRESETS[preset])


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"num_kv_heads": 4},
        {"num_kv_heads": 1},
        {"tied": True},
        {"rope_factor": 4.0, "rope_original_len": 64, "rope_theta": 1000.0},
        {"attention": "math"},
        {"attention": "flash"},
    ],
)
def test_forward_equals_the_reference(overrides: dict[str, object]) -> None:
    spec, module = small_llama(**overrides)
    batch = tokens(2, 11)
    expected = torch.stack(
        [reference.logits(row, dict(module.named_parameters()), spec.shape) for row in batch.tolist()]
    )
    torch.testing.assert_close(module(batch), expected, rtol=1e-11, atol=1e-11)


def test_loss_is_the_sum_over_targets() -> None:
    spec, module = small_llama()
    batch = tokens(3, 9)
    loss = spec.loss(module, {"tokens": batch.to(torch.uint8)})
    expected = sum(reference.summed_loss(row, dict(module.named_parameters()), spec.shape) for row in batch.tolist())
    assert loss.total.dtype == torch.float64
    assert loss.total.item() == pytest.approx(expected, rel=1e-12)
    assert loss.weight == 3 * 8


def test_micro_batches_add_up() -> None:
    spec, module = small_llama()
    batch = tokens(5, 9)
    whole = spec.loss(module, {"tokens": batch})
    parts = [spec.loss(module, {"tokens": part}) for part in (batch[:2], batch[2:])]
    assert sum(part.total.item() for part in parts) == pytest.approx(whole.total.item(), rel=1e-12)
    assert sum(float(part.weight) for part in parts) == whole.weight


def test_mask_weighs_targets() -> None:
    spec, module = small_llama()
    batch = tokens(2, 9)
    mask = torch.zeros(2, 8)
    mask[0, 2], mask[1, 5] = 1.0, 0.5
    each = F.cross_entropy(module(batch[:, :-1]).transpose(1, 2), batch[:, 1:], reduction="none")
    loss = spec.loss(module, {"tokens": batch, "mask": mask})
    assert loss.total.item() == pytest.approx((each[0, 2] + 0.5 * each[1, 5]).item(), rel=1e-12)
    assert float(loss.weight) == 1.5


def test_a_position_never_sees_later_ones() -> None:
    _, module = small_llama()
    batch = tokens(1, 10)
    changed = batch.clone()
    changed[0, 6:] = (changed[0, 6:] + 1) % 40
    torch.testing.assert_close(module(batch)[:, :6], module(changed)[:, :6], rtol=1e-12, atol=1e-12)
    assert (module(batch)[:, 6:] - module(changed)[:, 6:]).abs().max() > 1e-3


def test_tied_gradient_is_the_sum_of_both_uses() -> None:
    tied_spec, tied = small_llama(tied=True)
    spec, untied = small_llama(tied=False)
    untied.load_state_dict({**tied.state_dict(), "lm_head.weight": tied.model.embed_tokens.weight})
    batch = {"tokens": tokens(2, 9)}
    tied_spec.loss(tied, batch).total.backward()
    spec.loss(untied, batch).total.backward()
    embed, head = untied.model.embed_tokens.weight.grad, untied.lm_head.weight.grad
    assert embed is not None
    assert head is not None
    assert min(embed.abs().max(), head.abs().max()) > 1e-3
    torch.testing.assert_close(tied.model.embed_tokens.weight.grad, embed + head, rtol=1e-11, atol=1e-11)


def test_the_tie_survives_materialising_and_moving() -> None:
    spec = LlamaSpec(LlamaConfig(preset="tiny", tied=True), 16)
    module = materialised(spec)
    assert isinstance(module, Llama)
    assert module.lm_head.weight is module.model.embed_tokens.weight
    assert module.double().lm_head.weight is module.model.embed_tokens.weight
    with torch.device("meta"):
        by_hand = spec.build()
    assert isinstance(by_hand, Llama)
    by_hand.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(256, 128))
    by_hand.model.rope_cos, by_hand.model.rope_sin = torch.empty(16, 4), torch.empty(16, 4)
    spec.init_buffers(by_hand)
    assert by_hand.lm_head.weight is by_hand.model.embed_tokens.weight


def test_weights_do_not_depend_on_precision_or_way_of_building() -> None:
    spec = LlamaSpec(LlamaConfig(preset="tiny"), 16)
    single, double = materialised(spec), materialised(spec, dtype=torch.float64)
    for (name, wide), narrow in zip(double.named_parameters(), single.parameters(), strict=True):
        assert torch.equal(wide, narrow.double()), name
    assert (materialised(spec, seed=1).lm_head.weight != single.lm_head.weight).any()  # type: ignore[union-attr]


def test_initial_weights_have_the_sizes_they_should() -> None:
    spec = LlamaSpec(LlamaConfig(preset="tiny"), 16)
    parameters = dict(materialised(spec).named_parameters())
    assert parameters["model.layers.3.self_attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.03)
    assert parameters["model.layers.3.mlp.down_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert parameters["model.layers.3.self_attn.o_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.03)
    assert torch.equal(parameters["model.norm.weight"], torch.ones(128))


def test_rotary_tables_are_exact_and_not_saved() -> None:
    spec, module = small_llama(torch.float32, seq_len=4096, rope_theta=10.0)
    position, pair = 4000, 3
    expected = torch.tensor(reference.angle(spec.shape, position, pair), dtype=torch.float64)
    assert module.model.rope_cos[position, pair] == expected.cos().float()
    assert module.model.rope_sin[position, pair] == expected.sin().float()
    assert not [name for name in module.state_dict() if "rope" in name]


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_torch_counts(tied: bool) -> None:
    """With all scores computed torch counts full attention, the convention of ``flops_per_token``."""
    spec, module = small_llama(torch.float32, attention="math", tied=tied)
    with FlopCounterMode(display=False) as counter:
        spec.loss(module, {"tokens": tokens(2, 17)}).total.backward()
    assert counter.get_total_flops() == 2 * 16 * flops_per_token(spec.shape, 16)
    assert spec.flops_per_item == flops_per_token(spec.shape, 16)


@pytest.mark.parametrize(
    ("mode", "keep"),
    [
        ("none", KEEP),
        ("full", KEEP),
        ("selective", KEEP),
        ("selective", ("attention",)),
        ("selective", ("collective",)),
    ],
)
@pytest.mark.parametrize("preset", ["", "tiny"])
def test_recomputed_flops_are_those_torch_counts(mode: str, keep: tuple[str, ...], preset: str) -> None:
    """Torch does not count fused attention on a CPU, and only fused attention can be kept."""
    attention = "flash" if mode == "selective" and "attention" in keep else "math"
    spec, module = small_llama(torch.float32, attention=attention, **({"preset": preset} if preset else {}))
    counts = []
    for each in ("none", mode):
        recompute(module, spec.blocks if each != "none" else (), each, keep)
        with FlopCounterMode(display=False) as counter:
            spec.loss(module, {"tokens": tokens(2, 17)}).total.backward()
        counts.append(counter.get_total_flops())
    added = 2 * 16 * spec.recompute_flops_per_item(mode, keep)
    assert counts[1] - counts[0] == pytest.approx(added, rel=0.02)
    assert (added > 0) == (mode == "full" or (mode == "selective" and keep != KEEP))


def test_bf16_autocast_stays_near_float32_and_sums_in_float32() -> None:
    spec, module = small_llama(torch.float32)
    batch = {"tokens": tokens(2, 9)}
    exact = spec.loss(module, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert module(batch["tokens"]).dtype == torch.bfloat16
        rough = spec.loss(module, batch)
    assert rough.total.dtype == torch.float32
    assert rough.total.item() == pytest.approx(exact.total.item(), rel=0.03)
    rough.total.backward()
    assert all(
        parameter.grad is not None and parameter.grad.dtype == torch.float32 for parameter in module.parameters()
    )


@pytest.mark.parametrize(("autocast", "stream"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)])
def test_the_residual_stream_is_bf16_but_never_fp16(autocast: torch.dtype, stream: torch.dtype) -> None:
    spec, module = small_llama(torch.float32)
    kinds: list[torch.dtype] = []
    for block in module.model.layers:
        block.register_forward_pre_hook(lambda _, inputs: kinds.append(inputs[0].dtype))
    with torch.autocast("cpu", dtype=autocast):
        spec.loss(module, {"tokens": tokens(2, 9)})
    assert kinds == [stream, stream]


def test_dropout_follows_the_seed_and_stops_in_evaluation() -> None:
    spec, module = small_llama(dropout=0.3)
    batch = {"tokens": tokens(2, 9)}

    def total(seed: int) -> float:
        torch.manual_seed(seed)
        return spec.loss(module, batch).total.item()

    assert total(1) == total(1) != total(2)
    module.eval()
    assert total(1) == total(2)


@traced
@pytest.mark.parametrize("attention", ["auto", "math"])
def test_blocks_and_loss_compile_without_a_break(attention: str) -> None:
    """Traced as one graph each, the choice of kernel inside; run eagerly, so that the test needs no compiler."""
    torch._dynamo.reset()
    spec, module = small_llama(attention=attention)
    _, plain = small_llama(attention=attention)
    for unit in spec.compile_units:
        module.get_submodule(unit).compile(backend="eager", fullgraph=True)
    batch = {"tokens": tokens(2, 9)}
    for model in (module, plain):
        spec.loss(model, batch).total.backward()
    for (name, compiled), expected in zip(module.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(compiled.grad, expected.grad, msg=name)


@traced
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler loads parts of torch that are old
def test_blocks_and_loss_compile_with_inductor() -> None:
    torch._dynamo.reset()
    spec, module = small_llama(torch.float32)
    batch = {"tokens": tokens(2, 9)}
    expected = spec.loss(module, batch).total.item()
    for unit in spec.compile_units:
        module.get_submodule(unit).compile()
    loss = spec.loss(module, batch)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(expected, rel=1e-5)


def test_every_parameter_has_a_sharding_rule_that_divides_it() -> None:
    spec = LlamaSpec(LlamaConfig(preset="tiny"), 16)
    for name, dims in parameter_shapes(spec.shape).items():
        rule = next(rule for rule in spec.sharding_rules if fnmatch(name, rule.pattern))
        assert (rule.dim is None) == (len(dims) == 1), name
        assert rule.dim is None or dims[rule.dim] % 8 == 0, name


def in_a_row(chain: PipelineSpec, module: nn.Module, batch: Batch) -> Loss:
    hidden = chain.first_input(module, batch)
    for number in range(len(chain.units)):
        hidden = chain.run_unit(module, number, hidden)
    return chain.loss_from_output(module, hidden, batch)


@pytest.mark.parametrize("overrides", [{}, {"dropout": 0.4}, {"tied": True}])
def test_the_units_of_the_chain_in_a_row_are_the_loss(overrides: dict[str, object]) -> None:
    spec, module = small_llama(**overrides)
    assert spec.pipeline_spec is not None
    batch = {"tokens": tokens(3, 9), "mask": torch.rand(3, 8)}
    torch.manual_seed(4)
    whole = spec.loss(module, batch)
    torch.manual_seed(4)
    parted = in_a_row(spec.pipeline_spec, module, batch)
    assert torch.equal(parted.total, whole.total)
    assert torch.equal(torch.as_tensor(parted.weight), torch.as_tensor(whole.weight))


def test_a_stage_that_lacks_other_units_draws_what_the_whole_draws() -> None:
    """Units of other stages are None; what is left runs, moves and ties as ever."""
    spec, module = small_llama(dropout=0.4, tied=True)
    _, late = small_llama(dropout=0.4, tied=True)
    chain = spec.pipeline_spec
    assert chain is not None
    batch = {"tokens": tokens(3, 9)}
    torch.manual_seed(4)
    expected = spec.loss(module, batch)
    torch.manual_seed(4)
    sent = chain.run_unit(module, 1, chain.run_unit(module, 0, chain.first_input(module, batch)))
    late.model._modules["embed_tokens"] = late.model.layers._modules["0"] = None
    spec.init_buffers(late.double())
    torch.manual_seed(4)
    for number in range(2, len(chain.units)):
        sent = chain.run_unit(late, number, sent)
    assert torch.equal(chain.loss_from_output(late, sent, batch).total, expected.total)
    assert "model.layers.1.mlp.up_proj.weight" in dict(late.named_parameters())
    early = small_llama(tied=True)[1]
    early._modules["lm_head"] = None
    spec.init_buffers(early.float())
    assert early.model.embed_tokens.weight.dtype == torch.float32


def test_every_forward_drops_something_else_even_if_nobody_seeds() -> None:
    spec, module = small_llama(dropout=0.4)
    batch = {"tokens": tokens(2, 9)}
    assert spec.loss(module, batch).total.item() != spec.loss(module, batch).total.item()


def test_units_hold_every_parameter_and_their_costs_are_the_models_flops() -> None:
    spec, module = small_llama(num_layers=3)
    chain = spec.pipeline_spec
    assert chain is not None
    assert chain.units == ("model.embed_tokens", *spec.blocks, "model.norm", "lm_head")
    for name, _ in module.named_parameters():
        assert sum(name.startswith(f"{unit}.") for unit in chain.units) == 1, name
    work = [cost for unit, cost in zip(chain.units, chain.costs, strict=True) if unit in (*spec.blocks, "lm_head")]
    assert sum(work) == spec.flops_per_item
    assert min(chain.costs) > 0


def test_every_module_that_reads_split_weights_has_a_crossing_around_it() -> None:
    spec = LlamaSpec(LlamaConfig(preset="tiny"), 16)
    for name in parameter_shapes(spec.shape):
        rule = next(rule for rule in spec.sharding_rules if fnmatch(name, rule.pattern))
        around = [".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)]
        crossed = [c for c in spec.activation_collectives if any(fnmatch(module, c.pattern) for module in around)]
        assert len(crossed) == (0 if rule.dim is None else 1), name
        assert rule.sequence == (rule.dim is None), name


def test_the_spec_is_what_a_run_expects() -> None:
    spec = spec_for(LlamaConfig(preset="tiny"), seq_len=64)
    assert isinstance(spec, ModelSpec)
    assert (spec.name, spec.item, spec.items_per_sample, spec.builds_on_meta) == ("llama", "token", 64, True)
    assert spec.blocks == tuple(f"model.layers.{layer}" for layer in range(8))
    module = materialised(spec)
    assert [type(module.get_submodule(name)).__name__ for name in spec.blocks] == ["Block"] * 8


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"image": torch.zeros(2, 1, 8, 8)}, "reads 'tokens', but the data gives image"),
        ({"tokens": torch.full((2, 9), 40)}, "outside the model's vocabulary of 40"),
        ({"tokens": torch.zeros(2, 18, dtype=torch.int64)}, "17 positions are more than the 16"),
    ],
)
def test_data_that_does_not_fit_is_explained(batch: dict[str, torch.Tensor], words: str) -> None:
    spec, module = small_llama()
    with pytest.raises(ModelError, match=words):
        spec.loss(module, batch)


def test_a_llama_needs_sequences() -> None:
    with pytest.raises(ModelError, match="seq_len"):
        spec_for(LlamaConfig(), seq_len=0)
