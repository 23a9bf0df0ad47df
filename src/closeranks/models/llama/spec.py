"""The model spec of a Llama: its loss, and how it is sharded along the tensor and pipeline axes.

Sharding is described by data (sharding rules, activation collectives, a pipeline spec); ``model`` has the modules.
Invariant: ``loss`` is what the units of the pipeline spec compute one after the other, however they are divided into
stages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor, nn

from closeranks.core.errors import ModelError
from closeranks.core.protocols import ActivationCollectives, Batch, Loss, PipelineSpec, ShardingRule
from closeranks.facts.shapes.llama import LlamaShape, flops_per_token, recompute_flops_per_token, unit_costs
from closeranks.models.batches import batch_tensor
from closeranks.models.config import LlamaConfig
from closeranks.models.llama.document_mask import DocumentAttention, target_mask
from closeranks.models.llama.model import Llama
from closeranks.models.parameter_init import fill_constant, fill_normal
from closeranks.models.registry import MODELS

INIT_STD = 0.02


class LlamaSpec:
    """A Llama as a run sees it (``core.protocols.ModelSpec``)."""

    def __init__(self, config: LlamaConfig, seq_len: int) -> None:
        self.config = config
        self.shape = config.shape()
        self.name = "llama"
        self.metrics: tuple[str, ...] = ()
        self.builds_on_meta = True
        self.item = "token"
        self.items_per_sample = seq_len
        self.flops_per_item = flops_per_token(self.shape, seq_len)
        self.blocks = tuple(f"model.layers.{layer}" for layer in range(self.shape.num_layers))
        self.compile_units = (*self.blocks, "model.norm", "token_loss")
        self.sharding_rules = SHARDING_RULES
        self.activation_collectives = ACTIVATION_COLLECTIVES
        self.pipeline_spec: PipelineSpec | None = LlamaPipelineSpec(self.shape, seq_len)

    def recompute_flops_per_item(self, recompute: str, keep: Collection[str]) -> float:
        return recompute_flops_per_token(self.shape, self.items_per_sample, recompute, keep)

    def build(self) -> nn.Module:
        return Llama(
            self.shape,
            max_len=self.items_per_sample,
            dropout=self.config.dropout,
            attention=self.config.attention,
        )

    def init_parameter(self, name: str, parameter: Tensor, generator: torch.Generator) -> None:
        """Projections back into the residual stream start smaller, so that its scale does not grow with depth."""
        if "norm" in name:
            fill_constant(parameter, 1.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            fill_normal(parameter, INIT_STD / sqrt(2 * self.shape.num_layers), generator)
        else:
            fill_normal(parameter, INIT_STD, generator)

    def init_buffers(self, module: nn.Module) -> None:
        """Fill the rotary tables, and restore the tie in case the parameters were set one by one."""
        assert isinstance(module, Llama)
        module.model.fill_rope()
        module.tie()

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """``tokens`` [B, S+1]: each position predicts the next.

        Optional: ``mask`` [B, S] weights the targets; ``documents`` [B, S+1] numbers the documents of each row, which
        then do not attend to each other, -1 for padding.
        """
        split = _split(batch)
        with _vocabulary_named(self.shape):
            total = module(split.tokens, split.targets, split.mask, split.documents)
        return split.weighed(total)


class LlamaPipelineSpec:
    """Embedding, blocks, norm and output projection in a row (``core.protocols.PipelineSpec``)."""

    def __init__(self, shape: LlamaShape, seq_len: int) -> None:
        self.shape = shape
        blocks = [f"model.layers.{layer}" for layer in range(shape.num_layers)]
        self.units = ("model.embed_tokens", *blocks, "model.norm", "lm_head")
        self.costs = unit_costs(shape, seq_len)

    def first_input(self, module: nn.Module, batch: Batch) -> Tensor:
        return _split(batch).tokens

    def shared_inputs(self, module: nn.Module, batch: Batch) -> DocumentAttention | None:
        assert isinstance(module, Llama)
        return module.model.document_attention(_split(batch).documents)

    def run_unit(
        self, module: nn.Module, number: int, hidden: Tensor, shared: DocumentAttention | None = None
    ) -> Tensor:
        assert isinstance(module, Llama)
        if number == 0:
            with _vocabulary_named(self.shape):
                return module.model.embed(hidden)
        if number <= self.shape.num_layers:
            return module.model.run_block(number - 1, hidden, shared)
        output: Tensor = module.get_submodule(self.units[number])(hidden)
        return output

    def loss_from_output(self, module: nn.Module, output: Tensor, batch: Batch) -> Loss:
        assert isinstance(module, Llama)
        split = _split(batch)
        with _vocabulary_named(self.shape):
            total = module.token_loss(output, split.targets, split.mask)
        return split.weighed(total)


@dataclass(frozen=True, slots=True)
class _SplitBatch:
    """A batch split into the model's inputs and targets, [B, S] each."""

    tokens: Tensor
    targets: Tensor
    mask: Tensor | None
    """The weight of each target; None: all the same."""
    documents: Tensor | None
    """Of the inputs."""

    def weighed(self, total: Tensor) -> Loss:
        return Loss(total=total, weight=float(self.targets.numel()) if self.mask is None else self.mask.sum())


def _split(batch: Batch) -> _SplitBatch:
    tokens = batch_tensor(batch, "tokens", "llama").long()
    documents: Tensor | None = batch.get("documents")
    mask: Tensor | None = batch.get("mask")
    if documents is None:
        return _SplitBatch(tokens[:, :-1], tokens[:, 1:], mask, None)
    if documents.shape != tokens.shape:
        what = f"'documents' of a batch is {list(documents.shape)} and its tokens are {list(tokens.shape)}"
        raise ModelError(what, "Number the document of every token, -1 for padding.")
    own = target_mask(documents)
    return _SplitBatch(tokens[:, :-1], tokens[:, 1:], own if mask is None else mask * own, documents[:, :-1])


@contextmanager
def _vocabulary_named(shape: LlamaShape) -> Iterator[None]:
    try:
        yield
    except IndexError as error:
        what = f"a token id lies outside the model's vocabulary of {shape.vocab_size}"
        raise ModelError(what, "Set model.vocab_size to the tokenizer's size (256 for bytes).") from error


SHARDING_RULES = (
    ShardingRule("model.embed_tokens.weight", 0),
    ShardingRule("model.layers.*.self_attn.[qkv]_proj.weight", 0),
    ShardingRule("model.layers.*.self_attn.o_proj.weight", 1),
    ShardingRule("model.layers.*.mlp.gate_proj.weight", 0),
    ShardingRule("model.layers.*.mlp.up_proj.weight", 0),
    ShardingRule("model.layers.*.mlp.down_proj.weight", 1),
    ShardingRule("*norm.weight", None, sequence=True),
    ShardingRule("lm_head.weight", 0),
)
"""Column-parallel where a module reads the residual stream, row-parallel where it writes it; patterns as in fnmatch,
the first match counts."""

ACTIVATION_COLLECTIVES = (
    ActivationCollectives("model.embed_tokens", on_output="scatter"),
    ActivationCollectives("model.layers.*.self_attn", on_input="gather", on_output="scatter"),
    ActivationCollectives("model.layers.*.mlp", on_input="gather", on_output="scatter"),
    ActivationCollectives("lm_head", on_input="gather"),
)
"""Sequence parallel: between blocks each rank has its shard of the sequence, and one all-gather serves a block's
queries, keys and values. The logits stay sharded by vocabulary, which ``TokenLoss`` supports."""


@MODELS.register("llama")
def llama_spec(config: LlamaConfig, *, seq_len: int) -> LlamaSpec:
    if seq_len < 1:
        raise ModelError(
            "a Llama reads sequences, and this data has no seq_len", "Set data.seq_len, or name text data."
        )
    return LlamaSpec(config, seq_len)
