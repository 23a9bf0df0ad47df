"""FLOPs of a user's module are those counted by hand and by torch where it computes, and counting changes nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from closeranks.core.protocols import Batch, Loss
from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig, LlamaConfig, ModelConfig, PairsConfig
from closeranks.models.flop_count import NotCountable, copy_without_data, count_flops
from closeranks.models.losses import as_loss
from tests.models.making import materialised, tokens

CPU = torch.device("cpu")
PAIRS: dict[str, tuple[int, ...]] = {"user": (3,), "item": (5,), "click": (), "rating": ()}


class ConvNet(nn.Module):
    """As a user writes it: convolutions, batch norm, dropout, a hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Conv2d(16, 32, 3, padding=1, stride=2)
        self.norm = nn.BatchNorm2d(32)
        self.drop = nn.Dropout(0.5)
        self.output = nn.Linear(32 * 4 * 4, 10)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.norm(self.body(self.stem(image).relu())).relu()
        return self.output(self.drop(hidden.flatten(1)))


class Transformer(nn.Module):
    """Two of torch's own layers between an embedding and an output."""

    def __init__(self, width: int = 32, heads: int = 4, hidden: int = 64, vocab: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.output = nn.Linear(width, vocab)

    def forward(self, ids: Tensor) -> Tensor:
        return self.output(self.layers(self.embed(ids)))


class Attending(nn.Module):
    """Attention by torch's fused function, causal, with twice as many query heads as key-value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 16 + 8 + 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).split([16, 8, 8], dim=-1)
        heads = (each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (query, key, value))
        return F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.cell(x)[0]
        return hidden


def digits(num: int) -> Batch:
    return {"x": torch.randn(num, 1, 8, 8), "y": torch.randint(10, (num,))}


def words(num: int) -> Batch:
    return {"x": torch.randint(50, (num, 12)), "y": torch.randint(50, (num, 12))}


def cross_entropy(module: nn.Module, batch: Batch) -> Loss:
    answers = module(batch["x"])
    return as_loss(F.cross_entropy(answers.flatten(0, -2), batch["y"].flatten()), len(batch["y"]), ())


def mean(module: nn.Module, batch: Batch) -> Loss:
    return as_loss(module(batch["x"]).mean(), len(batch["x"]), ())


def counted(module: nn.Module, batch: Batch, loss: Any = mean) -> int:
    copy = copy_without_data(module, CPU)
    return count_flops(copy, copy.without_data(batch), CPU, loss)


def computed(module: nn.Module, batch: Batch, loss: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        loss(module, batch).total.backward()
    return int(counter.get_total_flops())


def test_a_convnet() -> None:
    """The image needs no gradient: the stem has two products, all others three."""
    stem, body, output = 16 * 9 * 64, 32 * 16 * 9 * 16, 512 * 10
    by_hand = 8 * (4 * stem + 6 * (body + output))
    assert counted(ConvNet(), digits(8), cross_entropy) == pytest.approx(by_hand, rel=0.02)
    assert counted(ConvNet(), digits(8), cross_entropy) == computed(ConvNet(), digits(8), cross_entropy)


def test_a_transformer() -> None:
    """Six for each weight that a token is multiplied with, and attention of every query with every key."""
    width, hidden, vocab, length = 32, 64, 50, 12
    weights = 2 * (4 * width * width + 2 * width * hidden) + width * vocab
    by_hand = 3 * length * (6 * weights + 12 * 2 * width * length)
    assert counted(Transformer(), words(3), cross_entropy) == pytest.approx(by_hand, rel=0.02)


def test_fused_attention_counts_every_query_with_every_key() -> None:
    """On a CPU torch's counter does not see it; the copy computes it by products. Keys are repeated for their queries,
    and the first product needs no gradient of its input."""
    batch, length = 2, 10
    by_hand = batch * length * (4 * 16 * 32 + 12 * 16 * length)
    assert counted(Attending(), {"x": torch.randn(batch, length, 16)}) == pytest.approx(by_hand, rel=0.02)


def test_a_recurrent_layer() -> None:
    """Four gates at each place; the input needs no gradient, and the first place has no earlier state."""
    by_hand = 3 * 5 * 64 * (4 * 8 + 6 * 16)
    assert counted(Recurrent(), {"x": torch.randn(3, 5, 8)}) == pytest.approx(by_hand, rel=0.1)


@pytest.mark.parametrize(
    ("config", "batch", "items"),
    [
        (LlamaConfig(preset="tiny"), {"tokens": tokens(2, 17)}, 32),
        (DigitsConfig(), {"image": torch.ones(4, 1, 8, 8), "label": torch.zeros(4)}, 4),
        (
            PairsConfig(user_dim=3, item_dim=5),
            {name: torch.ones(4, *dims) for name, dims in PAIRS.items()},
            4,
        ),
    ],
    ids=["llama", "digits", "pairs"],
)
def test_our_own_models_have_what_their_specs_say(config: ModelConfig, batch: Batch, items: int) -> None:
    spec = spec_for(config, seq_len=16)
    assert counted(materialised(spec), batch, spec.loss) == pytest.approx(items * spec.flops_per_item, rel=0.02)


def test_frozen_weights_cost_a_third_less() -> None:
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    whole = counted(module, {"x": torch.randn(4, 8)})
    module[1].requires_grad_(False)
    assert whole - counted(module, {"x": torch.randn(4, 8)}) == 4 * 2 * 64


def test_a_module_without_data_is_counted_as_with_it() -> None:
    with torch.device("meta"):
        module = Transformer()
    assert counted(module, words(2), cross_entropy) == counted(Transformer(), words(2), cross_entropy)


class Stateful(ConvNet):
    """Changes itself in its forward, and draws from every stream there is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[int] = []
        self.plain = torch.ones(10)
        self.register_buffer("total", torch.zeros(10))

    def forward(self, image: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(image))
        self.plain += 1
        self.total += 1
        torch.manual_seed(random.randrange(100) + np.random.randint(100))
        return super().forward(image) + self.plain + self.total


def streams() -> str:
    return repr((torch.get_rng_state().tolist(), random.getstate(), [str(part) for part in np.random.get_state()]))


def test_nothing_changes() -> None:
    module, batch = Stateful(), digits(4)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    values = {name: tensor.clone() for name, tensor in batch.items()}
    before_it = streams()
    assert counted(module, batch, cross_entropy) > 0
    assert streams() == before_it
    assert (module.calls, module.seen, module.plain.tolist()) == (0, [], [1.0] * 10)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert all(torch.equal(tensor, values[name]) for name, tensor in batch.items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.mkldnn.enabled


def reading(module: nn.Module, batch: Batch) -> Loss:
    loss = mean(module, batch)
    return loss if loss.total.item() < 1e9 else mean(module, batch)


def communicating(module: nn.Module, batch: Batch) -> Loss:
    loss = mean(module, batch)
    dist.all_reduce(loss.total.detach())
    return loss


@torch.library.custom_op("closeranks_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_autograd(lambda _, grad: grad * 2)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (reading, "depends on the values of a tensor .*test_flop_count.py:"),
        (lambda module, batch: mean(module, {"x": batch["x"][batch["x"][:, 0] > 0]}), "depends on the values"),
        (lambda module, batch: mean(module, {"x": doubled(batch["x"])}), "no formula for .*closeranks_tests::doubled"),
        (lambda module, batch: mean(module, {"x": batch["z"]}), "KeyError.*test_flop_count.py:"),
        (lambda module, batch: as_loss(module[0].weight.sum(), 1, ()), "no products"),
    ],
    ids=["a value is read", "a mask", "a kernel", "a mistake", "no products"],
)
def test_what_cannot_be_counted_says_why(loss: Any, why: str) -> None:
    with pytest.raises(NotCountable, match=why):
        counted(nn.Sequential(nn.Linear(8, 8)), {"x": torch.randn(4, 8)}, loss)


def test_the_original_is_not_touched_by_a_loss_that_reaches_for_it() -> None:
    """Its hooks would run on what has no data, and its parameters would get such gradients."""
    module = nn.Sequential(nn.Linear(8, 8))
    calls: list[str] = []
    module.register_forward_pre_hook(lambda *_: calls.append("module"))
    module[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("weight"))
    for loss in (
        lambda _, batch: mean(module, batch),
        lambda _, batch: as_loss(F.linear(batch["x"], module[0].weight).mean(), 4, ()),
    ):
        with pytest.raises(NotCountable, match="not of the module it is given"):
            counted(module, {"x": torch.randn(4, 8)}, loss)
    assert calls == []
    assert module[0].weight.grad is None


def test_a_frozen_teacher_beside_it_counts_and_keeps_its_statistics() -> None:
    teacher = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)).requires_grad_(False)

    def distilled(module: nn.Module, batch: Batch) -> Loss:
        return as_loss((module(batch["x"]) - teacher(batch["x"])).square().mean(), 4, ())

    assert counted(nn.Linear(8, 8, bias=False), {"x": torch.randn(4, 8)}, distilled) == 4 * (4 + 2) * 64
    assert teacher[1].running_mean.tolist() == [0.0] * 8  # type: ignore[operator,union-attr]


def test_a_collective_is_refused_before_it_waits_for_the_others() -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with pytest.raises(NotCountable, match="c10d"):
            counted(nn.Sequential(nn.Linear(8, 8)), {"x": torch.randn(4, 8)}, communicating)
    finally:
        dist.destroy_process_group()


def test_a_module_that_cannot_be_copied_says_why() -> None:
    module = nn.Linear(8, 8)
    module.stream = (number for number in range(3))  # type: ignore[assignment]
    with pytest.raises(NotCountable, match="cannot be copied: TypeError"):
        copy_without_data(module, CPU)
