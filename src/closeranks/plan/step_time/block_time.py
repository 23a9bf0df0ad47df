"""How long does one rank compute on one block of the model, on its head, and on its embedding, per micro-batch?

Communication is not in these times. Invariant: they are a function of shapes, device and constants alone, so that all
layouts with the same tensor, context and expert axes share them.
"""

from __future__ import annotations

from dataclasses import dataclass

from closeranks.facts.device_table import Device
from closeranks.facts.shapes.transformer import TransformerShape
from closeranks.facts.timing.attention import (
    AttentionShape,
    ForwardBackward,
    fused_attention_seconds,
    unfused_attention_seconds,
)
from closeranks.facts.timing.memory_bound import block_forward_bytes, head_bytes, moved_seconds
from closeranks.facts.timing.products import product_seconds
from closeranks.plan.step_time.constants import Constants
from closeranks.plan.step_time.measured_times import MeasuredTimes
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


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """One micro-batch on one rank of the context axis."""

    batch: int
    num_queries: int
    num_keys: int

    @property
    def num_tokens(self) -> int:
        return self.batch * self.num_queries


class BlockTimer:
    """Times the parts of one shape on one device."""

    def __init__(
        self,
        shape: TransformerShape,
        seq_len: int,
        device: Device,
        constants: Constants,
        measured: MeasuredTimes | None = None,
    ) -> None:
        self._shape, self._seq_len, self._device, self._constants = shape, seq_len, device, constants
        self._measured = measured

    def tokens(self, choice: PlanChoice) -> TokenCounts:
        return TokenCounts(choice.micro_batch, -(-self._seq_len // choice.layout.context), self._seq_len)

    def block(self, choice: PlanChoice, *, is_expert: bool) -> BlockTime:
        shape, tensor = self._shape, choice.layout.tensor
        tokens = self.tokens(choice).num_tokens
        queries, keys = shape.attention_dim // tensor, max(shape.kv_dim // tensor, shape.head_dim)
        entry = self._product(tokens, queries + 2 * keys, shape.dim, choice)
        leave = self._product(tokens, shape.dim, queries, choice)
        feed, last_s = self._experts(tokens, choice) if is_expert else self._dense(tokens, choice)
        products = ForwardBackward(
            entry.forward + leave.forward + feed.forward, entry.backward + leave.backward + feed.backward
        )
        skipped_s = last_s if self._constants.of(choice.software).stops_recompute else 0.0
        return BlockTime(products, self._attention(choice), self._memory(tokens, choice, is_expert), skipped_s)

    def head(self, choice: PlanChoice) -> BlockTime:
        """The output projection and the loss."""
        shape, tokens, tensor = self._shape, self.tokens(choice).num_tokens, choice.layout.tensor
        plain = choice.precision if choice.precision != "fp8" else "bf16"
        products = self._product(tokens, -(-shape.vocab_size // tensor), shape.dim, choice, plain)
        loss = self._moved(head_bytes(shape, tokens, tensor=tensor, is_fused=choice.compiled))
        return BlockTime(products, ForwardBackward(0.0, 0.0), ForwardBackward(loss / 2, loss / 2))

    def embedding_s(self, choice: PlanChoice) -> float:
        """Lookup, and the sum of its gradients into the table."""
        tokens, width = self.tokens(choice).num_tokens, _width(choice)
        return self._moved(5.0 * tokens * self._shape.dim * width)

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
        forward, backward = here * (first.forward + last.forward), here * (first.backward + last.backward)
        if shape.num_shared_experts:
            shared = shape.num_shared_experts * inner
            one = self._product(tokens, wide * shared, shape.dim, choice)
            two = self._product(tokens, shape.dim, shared, choice)
            forward, backward = forward + one.forward + two.forward, backward + one.backward + two.backward
        return ForwardBackward(forward, backward), here * last.forward

    def _product(self, m: int, n: int, k: int, choice: PlanChoice, precision: str = "") -> ForwardBackward:
        """Forward, and the two of backward: the gradients of the input and of the weight."""
        times = [self._product_s(*sizes, choice, precision) for sizes in ((m, n, k), (m, k, n), (k, n, m))]
        return ForwardBackward(times[0], times[1] + times[2])

    def _product_s(self, m: int, n: int, k: int, choice: PlanChoice, precision: str) -> float:
        precision = precision or choice.precision
        if self._measured and (seconds := self._measured.product_s(m, n, k, precision)) is not None:
            return seconds
        speed = self._constants.of(choice.software).efficiency
        return product_seconds(m, n, k, self._device, precision, self._constants.products) / speed

    def _attention(self, choice: PlanChoice) -> ForwardBackward:
        tokens, heads = self.tokens(choice), max(1, self._shape.num_heads // choice.layout.tensor)
        shape = AttentionShape(tokens.batch, heads, self._shape.head_dim, tokens.num_queries, tokens.num_keys)
        if self._measured and (measured := self._measured.attention_s(shape, choice.precision)) is not None:
            return measured
        args = shape, self._device, choice.precision, self._constants.attention
        if choice.fused_attention:
            best, speed = fused_attention_seconds(*args), self._constants.of(choice.software).attention
            return ForwardBackward(best.forward / speed, best.backward / speed)
        return unfused_attention_seconds(*args, self._constants.products)

    def _memory(self, tokens: int, choice: PlanChoice, is_expert: bool) -> ForwardBackward:
        shape, memory = self._shape, self._constants.memory
        moved = block_forward_bytes(
            shape, tokens, _width(choice), tensor=choice.layout.tensor, sequence_parallel=choice.sequence_parallel
        )
        if is_expert:  # tokens are permuted to their experts and back, once for each expert they go to
            moved += 4 * shape.experts_per_token * tokens * shape.dim * _width(choice) / choice.layout.tensor
        if self._measured and (found := self._measured.moved_s(moved, is_compiled=choice.compiled)) is not None:
            return ForwardBackward(found, found * memory.backward)
        forward = self._moved(moved) * (1.0 if choice.compiled else self._constants.of(choice.software).eager_passes)
        return ForwardBackward(forward, forward * memory.backward)

    def _moved(self, num_bytes: float) -> float:
        return moved_seconds(num_bytes, self._device, self._constants.memory)


def _width(choice: PlanChoice) -> int:
    return 4 if choice.precision == "fp32" else 2
