"""How long does one rank compute on one block of the model, on its head, and on its embedding, per micro-batch?

Communication is not in these times. Invariant: they are a function of shapes, device and constants alone, so that all
layouts with the same tensor, context and expert axes share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.facts.timing.attention import AttentionShape, ForwardBackward
from closeranks.facts.timing.memory_bound import block_forward_bytes, head_bytes
from closeranks.plan.step_time.operation_times import OperationTimes
from closeranks.plan.step_time.workload import PlanChoice, Recompute


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Seconds of one micro-batch in one block on one rank."""

    products: ForwardBackward
    attention: ForwardBackward
    memory: ForwardBackward
    skipped_s: float = 0.0
    """Of the forward: the last product, before which a second forward ends."""

    @property
    def forward(self) -> float:
        return self.products.forward + self.attention.forward + self.memory.forward

    @property
    def backward(self) -> float:
        return self.products.backward + self.attention.backward + self.memory.backward

    def recompute_s(self, kind: Recompute, *, fused_attention: bool) -> float:
        """What backward computes again. Selective recompute repeats what is cheap for the memory it frees: unfused
        attention, and with a fused one everything that is neither product nor attention."""
        if kind == "full":
            return self.forward - self.skipped_s
        if kind == "selective":
            return self.memory.forward if fused_attention else self.attention.forward
        return 0.0


class BlockTimer(Protocol):
    """Times the parts of one model on one device."""

    def tokens(self, choice: PlanChoice) -> int:
        """Positions of a micro-batch on one rank of the context axis."""

    def block(self, choice: PlanChoice, *, is_expert: bool) -> BlockTime: ...

    def head(self, choice: PlanChoice) -> BlockTime:
        """What comes after the blocks, and the loss."""

    def embedding_s(self, choice: PlanChoice) -> float: ...


class TransformerTimer:
    """Times a transformer by its shape."""

    def __init__(self, shape: TransformerShape, seq_len: int, times: OperationTimes) -> None:
        self._shape, self._seq_len, self._times = shape, seq_len, times

    def tokens(self, choice: PlanChoice) -> int:
        return choice.micro_batch * -(-self._seq_len // choice.layout.context)

    def block(self, choice: PlanChoice, *, is_expert: bool) -> BlockTime:
        shape, tensor, tokens = self._shape, choice.layout.tensor, self.tokens(choice)
        queries, keys = shape.attention_dim // tensor, max(shape.kv_dim // tensor, shape.head_dim)
        entry = self._product(tokens, queries + 2 * keys, shape.dim, choice)
        leave = self._product(tokens, shape.dim, queries, choice)
        feed, last_s = self._experts(tokens, choice) if is_expert else self._dense(tokens, choice)
        products = ForwardBackward(
            entry.forward + leave.forward + feed.forward, entry.backward + leave.backward + feed.backward
        )
        skipped_s = last_s if self._times.constants.of(choice.software).stops_recompute else 0.0
        return BlockTime(products, self._attention(choice), self._memory(tokens, choice, is_expert), skipped_s)

    def head(self, choice: PlanChoice) -> BlockTime:
        shape, tokens, tensor = self._shape, self.tokens(choice), choice.layout.tensor
        plain = choice.precision if choice.precision != "fp8" else "bf16"
        products = self._product(tokens, -(-shape.vocab_size // tensor), shape.dim, choice, plain)
        loss = self._times.moved(head_bytes(shape, tokens, tensor=tensor, is_fused=choice.compiled))
        return BlockTime(products, ForwardBackward(0.0, 0.0), ForwardBackward(loss / 2, loss / 2))

    def embedding_s(self, choice: PlanChoice) -> float:
        """Lookup, and the sum of its gradients into the table."""
        return self._times.moved(5.0 * self.tokens(choice) * self._shape.dim * _width(choice))

    def _dense(self, tokens: int, choice: PlanChoice) -> tuple[ForwardBackward, float]:
        shape, inner = self._shape, -(-self._shape.ffn_dim // choice.layout.tensor)
        first = self._product(tokens, (2 if shape.gated else 1) * inner, shape.dim, choice)
        last = self._product(tokens, shape.dim, inner, choice)
        return ForwardBackward(first.forward + last.forward, first.backward + last.backward), last.forward

    def _experts(self, tokens: int, choice: PlanChoice) -> tuple[ForwardBackward, float]:
        """The routed experts of this rank, one product after the other, and the shared ones; the router is small."""
        shape, expert = self._shape, choice.layout.expert
        inner = -(-(shape.expert_ffn_dim or shape.ffn_dim) // choice.layout.tensor)
        here = max(1, shape.num_experts // expert)
        rows = max(1, tokens * expert * shape.experts_per_token // shape.num_experts)
        wide = 2 if shape.gated else 1
        first, last = (
            self._product(rows, wide * inner, shape.dim, choice),
            self._product(rows, shape.dim, inner, choice),
        )
        model = self._times.constants.experts
        forward = here * (first.forward + last.forward) / model.efficiency + model.layer_s
        backward = here * (first.backward + last.backward) / model.efficiency + model.layer_s
        if shape.num_shared_experts:
            shared = shape.num_shared_experts * inner
            one = self._product(tokens, wide * shared, shape.dim, choice)
            two = self._product(tokens, shape.dim, shared, choice)
            forward, backward = forward + one.forward + two.forward, backward + one.backward + two.backward
        return ForwardBackward(forward, backward), here * last.forward

    def _product(self, m: int, n: int, k: int, choice: PlanChoice, precision: str = "") -> ForwardBackward:
        """Forward, and the two of backward: the gradients of the input and of the weight."""
        product = self._times.product
        backward = product(m, k, n, choice, precision) + product(k, n, m, choice, precision)
        return ForwardBackward(product(m, n, k, choice, precision), backward)

    def _attention(self, choice: PlanChoice) -> ForwardBackward:
        heads = max(1, self._shape.num_heads // choice.layout.tensor)
        queries = -(-self._seq_len // choice.layout.context)
        sizes = (choice.micro_batch, heads, self._shape.head_dim, queries, self._seq_len)
        shape = AttentionShape(*sizes, is_causal=self._shape.is_causal)
        return self._times.attention(shape, choice)

    def _memory(self, tokens: int, choice: PlanChoice, is_expert: bool) -> ForwardBackward:
        shape = self._shape
        moved = block_forward_bytes(
            shape,
            tokens,
            _width(choice),
            tensor=choice.layout.tensor,
            sequence_parallel=choice.sequence_parallel,
            is_fused=choice.compiled,
        )
        if is_expert:  # tokens are permuted to their experts and back, once for each expert they go to
            moved += 4 * shape.experts_per_token * tokens * shape.dim * _width(choice) / choice.layout.tensor
        forward = self._times.moved_in_block(moved, choice)
        return ForwardBackward(forward, forward * self._times.constants.memory.backward)


def _width(choice: PlanChoice) -> int:
    return 4 if choice.precision == "fp32" else 2
