"""Whole modules and their shares, to hold one against the other on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from closeranks.core.pieces import Piece
from closeranks.core.protocols import ActivationCollectives, ModelSpec, ShardingRule
from closeranks.core.seeds import derive_seed
from closeranks.models.build import spec_for
from closeranks.models.config import LlamaConfig
from closeranks.parallel.process_group import RankGroup
from closeranks.parallel.tensor.tensor_parallel import TensorShard, shard_module

SHAPE = {
    "dim": 32,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "ffn_dim": 48,
    "vocab_size": 40,
    "rope_theta": 100.0,
}


def world() -> RankGroup:
    return RankGroup(dist.get_rank(), dist.get_world_size())


def llama_spec(seq_len: int = 8, **overrides: object) -> ModelSpec:
    return spec_for(LlamaConfig.model_validate(SHAPE | overrides), seq_len=seq_len)


def filled(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Weights large enough for every part to matter."""
    with torch.device("meta"):
        module = spec.build()
    module = module.to(dtype).to_empty(device="cpu")
    for name, parameter in module.named_parameters():
        spec.init_parameter(name, parameter, torch.Generator().manual_seed(derive_seed(1, name)))
        with torch.no_grad():
            parameter.mul_(10 if parameter.ndim == 2 else 1)
    spec.init_buffers(module)
    return module


def tokens(batch: int, length: int, vocab_size: int = 40) -> Tensor:
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(3))


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    for dim, (start, size) in enumerate(zip(piece.start, piece.size, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole


def split_here(
    module: nn.Module, rules: Sequence[ShardingRule], activation_collectives: Sequence[ActivationCollectives] = ()
) -> dict[str, TensorShard]:
    return shard_module(module, rules, activation_collectives, world())


def compare_gradients(
    whole: nn.Module, part: nn.Module, shares: Mapping[str, TensorShard], tolerance: float = 1e-11
) -> None:
    """Every gradient of ``part``, summed over ranks where it is partial, against its piece of the whole's."""
    expected = dict(whole.named_parameters())
    assert [name for name, _ in part.named_parameters()] == list(shares) == list(expected)
    for name, parameter in part.named_parameters():
        gradient, share = parameter.grad, shares[name]
        assert gradient is not None, name
        assert tuple(parameter.shape) == share.piece.size, name
        if share.is_partial:
            dist.all_reduce(gradient)
        true = part_of(expected[name].grad, share.piece)  # type: ignore[arg-type]
        assert true.abs().max() > 1e-6, name
        torch.testing.assert_close(gradient, true, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
