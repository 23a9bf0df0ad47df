"""Which parts of a step and of a device's memory does a picture draw as one, and in which colour?

Invariant: a colour means one kind, in every panel of every picture; a part without a kind is drawn as ``other``.
"""

from __future__ import annotations

from closeranks.plan.search.search import Plan

OTHER = "other"
COLORS = {
    "products": "#1f5a99",
    "attention": "#4f9bd9",
    "memory-bound": "#a9cdea",
    "recompute": "#8d6bb8",
    "tensor communication": "#c2601a",
    "data communication": "#e9a54e",
    "context and expert communication": "#f3d9ae",
    "pipeline bubble": "#b33951",
    "pipeline sends": "#e59aa7",
    "weights": "#0e7490",
    "copies of weights": "#7cc4d4",
    "gradients": "#8a5a2b",
    "optimizer": "#2f7d5b",
    "activations": "#d4b106",
    "ends of the model, logits": "#efe08a",
    "overhead": "#5c6770",
    "allocator and libraries": "#b8c1cb",
    OTHER: "#1f2933",
}
"""In the order of stacks and legends."""

_KINDS = {
    "compute: products": "products",
    "compute: attention": "attention",
    "compute: memory-bound": "memory-bound",
    "loss": "memory-bound",
    "context communication": "context and expert communication",
    "expert communication": "context and expert communication",
    "data": "overhead",
    "launches": "overhead",
    "waiting for ranks": "data communication",
    "gathered weights": "copies of weights",
    "gathered weights of the stage": "copies of weights",
    "weights cast for products": "copies of weights",
    "gathered weights of units ahead": "copies of weights",
    "gradients of a unit": "gradients",
    "gradients of the weights at work": "gradients",
    "gradients being scattered": "gradients",
    "gradients in flight": "gradients",
    "slices arriving": "gradients",
    "bucket that is being filled": "gradients",
    "activations of blocks": "activations",
    "hidden states at the ends of stages": "activations",
    "gradients of a block's activations": "activations",
    "activations of embedding, head and loss": "ends of the model, logits",
    "logits and their gradient": "ends of the model, logits",
    "one block computed again": "recompute",
    "allocator reserve": "allocator and libraries",
    "device context and libraries": "allocator and libraries",
}


def kind_of(part: str) -> str:
    return part if part in COLORS else _KINDS.get(part, OTHER)


def time_by_kind(plan: Plan) -> dict[str, float]:
    """Seconds of a step."""
    return _summed([(part.name, part.seconds) for part in plan.step.parts])


def memory_by_kind(plan: Plan) -> dict[str, float]:
    """Bytes of the fullest device."""
    return _summed([(part.name, float(part.num_bytes)) for part in plan.memory.parts])


def _summed(parts: list[tuple[str, float]]) -> dict[str, float]:
    found = dict.fromkeys(COLORS, 0.0)
    for name, amount in parts:
        found[kind_of(name)] += amount
    return {kind: amount for kind, amount in found.items() if amount}
