"""Which model does a published run train? Its shape, from the columns of the row.

A row does not say whether the feed-forward is gated, the head tied, or how wide a head is: of the possible shapes the
one whose parameters come nearest to the published number is taken. Invariant: a mixture of experts whose experts are
not described is refused, never planned as a dense model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from closeranks.facts.shapes.transformer import TransformerShape, num_params
from closeranks.plan.validation.run_table import PublishedRun

_EXPERTS = re.compile(r"\bE\s*=\s*(\d+)\D+?top-?\s*(\d+)(?:\D+?shared\s*=\s*(\d+))?", re.IGNORECASE)
_MIXTURE = re.compile(r"\bMoE\b|mixtral|\bA\d+(?:\.\d+)?B\b|\d+x\d+B|\bexperts\b|deepseek-?v[234]", re.IGNORECASE)
_TWO_MATRICES = re.compile(r"gpt(?!-?oss)|mpt|\bopt\b|megatron|turing|neox|bloom|nemotron|pythia|falcon", re.IGNORECASE)
_PRECISE = 0.25
_UNLIKELY = {"gated": 0.05, "head_dim": 0.01, "tied": 0.01}
"""By how much nearer the number of parameters must be for the less usual of two shapes."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    shape: TransformerShape
    penalty: float


def shape_of(run: PublishedRun) -> TransformerShape | str:
    """The reason if the model cannot be known."""
    for name, noun in (("layers", "number of layers"), ("hidden", "width"), ("heads", "number of heads")):
        if getattr(run, name) is None:
            return f"the model's {noun} is not published"
    experts = _EXPERTS.search(run.note)
    if experts is None and (_MIXTURE.search(run.model) or _MIXTURE.search(run.note) or (run.ep or 1) > 1):
        return "its experts are not described"
    candidates = list(_candidates(run, experts))
    if not candidates:
        return "the row describes no model that can exist"

    def distance(candidate: _Candidate) -> float:
        published = run.params_b
        off = abs(num_params(candidate.shape) / 1e9 / published - 1) if published else 0.0
        return off + candidate.penalty

    nearest = min(candidates, key=distance)
    if distance(nearest) - nearest.penalty > _PRECISE:
        return "its columns do not add up to the published number of parameters"
    return nearest.shape


def _candidates(run: PublishedRun, experts: re.Match[str] | None) -> Iterator[_Candidate]:
    hidden, heads, layers = run.hidden or 0, run.heads or 1, run.layers or 0
    ffn = run.ffn_hidden or 4 * hidden
    number, chosen, shared = (int(text or 0) for text in experts.groups()) if experts else (0, 0, 0)
    usual = hidden // heads if hidden % heads == 0 and hidden // heads % 8 == 0 else 0
    is_llama = "llama" in run.model.lower()
    has_two = bool(_TWO_MATRICES.search(run.model)) or (ffn == 4 * hidden and not is_llama)
    positions = (run.seq_len or 0) if re.search(r"learned pos", run.note) else 0
    dense_layers = [count for count in (0, 1, 3) if count <= layers] if experts else [0]
    for head_dim, gated, tied, dense in product(
        dict.fromkeys((usual, 128, 64, 192)), (False, True), (False, True), dense_layers
    ):
        if not head_dim or chosen > number:
            continue
        penalty = _UNLIKELY["gated"] * (gated == has_two) + _UNLIKELY["head_dim"] * (head_dim != usual)
        yield _Candidate(
            TransformerShape(
                layers,
                hidden,
                heads,
                run.kv_heads or heads,
                head_dim,
                9 * ffn if dense else ffn,
                run.vocab or 51200,
                gated=gated,
                tied=tied,
                num_experts=number,
                experts_per_token=chosen,
                expert_ffn_dim=ffn if experts else 0,
                num_shared_experts=shared,
                num_dense_layers=dense,
                learned_positions=positions,
            ),
            penalty + _UNLIKELY["tied"] * (tied != (has_two and not experts)),
        )
