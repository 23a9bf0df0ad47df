"""Generates text with a trained language model.

Recomputes the whole window for every token: right for a sample at the end of a run, not for serving.
Invariant: the tokens depend on weights, prompt and seed alone; the draw is made on the CPU whatever the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from closeranks.core.errors import UserError


def generate(
    module: nn.Module,
    prompt: Sequence[int],
    *,
    num_tokens: int,
    max_len: int,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
) -> Iterator[int]:
    """Yields tokens one by one; the model sees at most the last ``max_len``.

    ``temperature`` 0 takes the likeliest token each time; ``top_k`` 0 draws from all of them. The arguments are checked
    when this is called, not when the first token is requested.
    """
    if not prompt:
        raise UserError("the prompt is empty, and the model continues text", "Give it at least one token.")
    if max_len < 1 or temperature < 0 or top_k < 0:
        what = f"cannot sample with max_len {max_len}, temperature {temperature}, top_k {top_k}"
        raise UserError(what, "max_len is at least 1, the other two at least 0.")
    return _tokens(module, list(prompt), num_tokens, max_len, temperature, top_k, seed)


def _tokens(
    module: nn.Module, seen: list[int], num_tokens: int, max_len: int, temperature: float, top_k: int, seed: int
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        token = draw(_next_logits(module, seen[-max_len:]), temperature, top_k, generator)
        seen.append(token)
        yield token


@torch.no_grad()
def _next_logits(module: nn.Module, window: list[int]) -> Tensor:
    """Switches to evaluation mode for this one call: the caller may train between two tokens."""
    was_training = module.training
    module.eval()
    try:
        logits: Tensor = module(torch.tensor([window], device=next(module.parameters()).device))
    finally:
        module.train(was_training)
    return logits[0, -1].float().cpu()


def draw(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """One token from the logits of one position, on the CPU."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.shape[0]:
        best, tokens = logits.topk(top_k)
        return int(tokens[torch.multinomial((best / temperature).softmax(dim=-1), 1, generator=generator)])
    return int(torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator))
