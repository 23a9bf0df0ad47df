"""How many parameters does a pipeline rank hold? Of a transformer's shape, or of a module that was traced.

Invariant: over all ranks of one tensor rank, blocks and ends add up to the model; experts are counted apart, because
the expert axis divides them.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.shapes.module_trace import ModuleTrace
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.plan.step_time.stage_loads import RankLoad


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Parameters by part; ``matrix`` parts are divided by the tensor axis, the rest is on every tensor rank."""

    block_matrices: float
    """Of one block, on average, without its experts."""
    block_rest: float
    block_experts: float
    embedding: float
    head: float
    """0 where it is tied to the embedding; a pipeline then holds it twice."""
    tied_head: float
    rest: float
    """On the last stage: the last norm."""
    largest_block_matrix: float

    def of_rank(self, load: RankLoad, tensor: int, expert: int) -> RankParams:
        ends = load.num_embeddings * self.embedding / tensor + load.num_heads * (self.head / tensor + self.rest)
        if load.num_heads and not load.num_embeddings:
            ends += self.tied_head / tensor
        head = (self.head or self.tied_head) / tensor if load.num_heads else 0.0
        embedding = load.num_embeddings * self.embedding / tensor
        return RankParams(
            blocks=load.num_blocks * (self.block_matrices / tensor + self.block_rest),
            ends=ends,
            experts=load.num_blocks * self.block_experts / expert / tensor,
            block=self.block_matrices / tensor + self.block_rest + self.block_experts / expert / tensor,
            matrices=load.num_blocks * self.block_matrices / tensor,
            head=head,
            embedding=embedding,
            is_tied=bool(self.tied_head and head and embedding),
            largest=max(self.largest_block_matrix, self.embedding * load.num_embeddings, head * tensor) / tensor,
            largest_block_matrix=self.largest_block_matrix / tensor,
        )


@dataclass(frozen=True, slots=True)
class RankParams:
    """Parameters of one pipeline rank, on one tensor rank."""

    blocks: float
    ends: float
    experts: float
    block: float
    """One block, with its experts."""
    matrices: float
    """Of the products of its blocks."""
    head: float
    embedding: float
    is_tied: bool
    """Whether head and embedding are one weight of this rank."""
    largest: float
    """The largest single weight."""
    largest_block_matrix: float

    @property
    def dense(self) -> float:
        return self.blocks + self.ends

    @property
    def total(self) -> float:
        return self.dense + self.experts


def sizes_of(shape: TransformerShape | ModuleTrace) -> ModelSizes:
    return _of_trace(shape) if isinstance(shape, ModuleTrace) else _of_transformer(shape)


def _of_transformer(shape: TransformerShape) -> ModelSizes:
    share = shape.num_expert_layers / shape.num_layers
    shared = share * shape.num_shared_experts * shape.expert_params
    feed = (1 - share) * shape.dense_ffn_params + shared
    return ModelSizes(
        block_matrices=shape.attention_params + feed,
        block_rest=2 * shape.dim + share * shape.dim * shape.num_experts,
        block_experts=share * shape.num_experts * shape.expert_params,
        embedding=shape.head_params + shape.learned_positions * shape.dim,
        head=0 if shape.tied else shape.head_params,
        tied_head=shape.head_params if shape.tied else 0,
        rest=shape.dim,
        largest_block_matrix=shape.dim * max(shape.ffn_dim, shape.attention_dim),
    )


def _of_trace(trace: ModuleTrace) -> ModelSizes:
    """What lies around the blocks is counted with the first stage; a module without blocks is one block."""
    blocks = list(trace.blocks) or list(trace.units)
    num_blocks = sum(1 for _ in trace.blocks) or 1
    num_params = sum(unit.num_params for unit in blocks)
    # Products read the weights of which half-precision copies were kept.
    cast = min(sum(unit.fixed_saved_bytes for unit in blocks) / 2, num_params)
    largest = max((product.n * product.k for unit in blocks for product in unit.products), default=0)
    return ModelSizes(
        block_matrices=cast / num_blocks,
        block_rest=(num_params - cast) / num_blocks,
        block_experts=0.0,
        embedding=float(trace.num_params - num_params),
        head=0.0,
        tied_head=0.0,
        rest=0.0,
        largest_block_matrix=min(float(largest), num_params / num_blocks),
    )
