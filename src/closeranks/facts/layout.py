"""Layouts: how a model is distributed over ranks, and whether the model and the batch allow it.

A layout is a value (``data=2 tensor=2``); whether a model and a batch allow it is a pure function of both. Invariant:
``Layout.parse(str(layout)) == layout``, and ``legal_problems`` names every obstacle at once, each with its fix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from closeranks.core.errors import ConfigError, Problem
from closeranks.core.registry import did_you_mean

SCHEDULES: dict[str, int] = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved-1f1b": 2,
    "looped-bfs": 2,
    "interleaved-zero-bubble": 2,
    "zbv": 2,
    "dualpipev": 2,
}
"""Pipeline schedules, and how many stages each gives a pipeline rank."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The table ``[layout]`` of a job: the size of every axis, and which state is sharded over the data ranks."""

    data: int = 1
    """Number of ranks that split the batch."""
    zero: int = 0
    """What the data ranks shard of the model's state: 1 optimizer, 2 gradients too, 3 weights too."""
    shard: int = 0
    """Number of data ranks over which the state is sharded; 0: all of them."""
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    schedule: str = "1f1b"

    @property
    def num_ranks(self) -> int:
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def num_stages(self) -> int:
        return self.pipeline * SCHEDULES.get(self.schedule, 1) if self.pipeline > 1 else 1

    def __str__(self) -> str:
        entries = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return " ".join(entries) or "data=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read ``data=2 tensor=2``, spaces or commas between; raises ConfigError with all that is wrong."""
        values: dict[str, int | str] = {}
        problems: list[Problem] = []
        for word in text.replace(",", " ").split():
            key, _, value = word.partition("=")
            problem = _word_problem(word, key, value, values)
            if problem is not None:
                problems.append(problem)
            else:
                values[key] = value if key == "schedule" else int(value)
        if problems:
            raise ConfigError(problems)
        return replace(cls(), **values)  # type: ignore[arg-type]  # keys and types were checked word by word


def _word_problem(word: str, key: str, value: str, seen: dict[str, int | str]) -> Problem | None:
    axes = [f.name for f in fields(Layout)]
    if key not in axes:
        return Problem("layout", f"'{word}' is not an axis", did_you_mean(key, axes))
    if key in seen:
        return Problem(f"layout.{key}", "it is given twice", "Give it once.")
    if key != "schedule" and not (value.isascii() and value.isdecimal()):
        return Problem(f"layout.{key}", f"'{value}' is not a whole number", f"Write {key}=2, say.")
    return None


@dataclass(frozen=True, slots=True)
class LayoutConstraints:
    """Numbers that a layout must divide. A zero means the model has no such structure: the axis that splits it must
    stay 1."""

    global_batch: int
    micro_batch: int
    num_heads: int = 0
    num_kv_heads: int = 0
    num_layers: int = 0
    vocab_size: int = 0
    ffn_dim: int = 0
    seq_len: int = 0
    has_tensor_rules: bool = False
    """Whether the model brings its own table of sharding rules: divisibility is then checked when it is built, not
    here."""
    num_servers: int = 0
    """Data ranks that compute no micro-batch (parameter servers)."""

    @property
    def num_micro(self) -> int:
        """Micro-batches of one step; the last may be short."""
        return -(-self.global_batch // self.micro_batch)


def legal_problems(layout: Layout, constraints: LayoutConstraints) -> tuple[Problem, ...]:
    """Every reason why this layout cannot run, in the order of the table; empty when it can."""
    out_of_range = tuple(_range_problems(layout))
    if out_of_range:
        return out_of_range
    return (
        *_data_problems(layout, constraints),
        *_shard_problems(layout),
        *_tensor_problems(layout, constraints),
        *_pipeline_problems(layout, constraints),
        *_context_problems(layout, constraints),
        *_expert_problems(layout),
    )


def _range_problems(layout: Layout) -> Iterator[Problem]:
    """Values that are out of range; divisibility is checked for the others only."""
    for axis in ("data", "tensor", "pipeline", "context", "expert"):
        if getattr(layout, axis) < 1:
            yield Problem(f"layout.{axis}", f"it is {getattr(layout, axis)}", "An axis has at least 1 rank.")
    if layout.zero not in (0, 1, 2, 3):
        fix = "Choose 0 (nothing is split), 1 (optimizer), 2 (gradients too) or 3 (weights too)."
        yield Problem("layout.zero", f"there is no ZeRO stage {layout.zero}", fix)
    if layout.shard < 0:
        yield Problem("layout.shard", f"it is {layout.shard}", "Leave it out to split over all data ranks.")
    if layout.schedule not in SCHEDULES:
        what = f"there is no schedule '{layout.schedule}'"
        yield Problem("layout.schedule", what, did_you_mean(layout.schedule, SCHEDULES))


def _data_problems(layout: Layout, constraints: LayoutConstraints) -> Iterator[Problem]:
    num_computing = layout.data - constraints.num_servers
    if constraints.num_micro < num_computing:
        who = pluralize(num_computing, "worker" if constraints.num_servers else "data rank")
        what = (
            f"{who} share {pluralize(constraints.num_micro, 'micro-batch', 'es')} a "
            f"step (global_batch {constraints.global_batch} / micro_batch {constraints.micro_batch}), so some would "
            "have none"
        )
        smaller = constraints.global_batch // num_computing
        less = f", train.micro_batch = {smaller}" if smaller else ""
        more = f"train.global_batch = {num_computing} or more" if not smaller else "a larger train.global_batch"
        fix = f"Use data={constraints.num_micro + constraints.num_servers} or fewer{less}, or {more}."
        yield Problem("layout.data", what, fix)


def _shard_problems(layout: Layout) -> Iterator[Problem]:
    if layout.shard > 1 and layout.zero == 0:
        what = f"with zero=0 there is nothing to split over {layout.shard} ranks"
        yield Problem("layout.shard", what, "Set zero to 1, 2 or 3, or leave shard out.")
    if layout.shard and layout.data % layout.shard:
        what = f"{layout.shard} does not divide the {pluralize(layout.data, 'data rank')}"
        yield Problem("layout.shard", what, f"Use one of {divisors(layout.data)}.")


def _tensor_problems(layout: Layout, constraints: LayoutConstraints) -> Iterator[Problem]:
    if layout.tensor == 1 or constraints.has_tensor_rules:
        return
    split = {
        "heads": constraints.num_heads,
        "key-value heads": constraints.num_kv_heads,
        "feed-forward columns": constraints.ffn_dim,
        "vocabulary entries": constraints.vocab_size,
    }
    if not all(split.values()):
        yield Problem(
            "layout.tensor",
            "this model does not say how it splits",
            "Use tensor=1; define it for your own model in model.tensor.",
        )
        return
    # Sequence parallel: between the blocks each tensor rank holds a shard of the positions.
    split["positions of a sample"] = constraints.seq_len
    uneven = [f"{count} {noun}" for noun, count in split.items() if count % layout.tensor]
    if uneven:
        legal = [
            size for size in divisors(constraints.num_kv_heads) if not any(count % size for count in split.values())
        ]
        what = f"{layout.tensor} does not divide the model's {', '.join(uneven)}"
        yield Problem("layout.tensor", what, f"Use one of {legal}.")


def _pipeline_problems(layout: Layout, constraints: LayoutConstraints) -> Iterator[Problem]:
    if layout.pipeline == 1:
        return
    if constraints.num_layers == 0:
        yield Problem(
            "layout.pipeline",
            "this model has no layers to cut into stages",
            "Use pipeline=1; name them for your own model in model.stages.",
        )
    elif layout.num_stages > constraints.num_layers:
        per_rank = SCHEDULES[layout.schedule]
        verb = "does" if constraints.num_layers == 1 else "do"
        what = f"the model's {pluralize(constraints.num_layers, 'layer')} {verb} not fill {layout.num_stages} stages"
        most = max(constraints.num_layers // per_rank, 1)
        yield Problem("layout.pipeline", what, f"Schedule {layout.schedule} allows up to pipeline={most} here.")


def _context_problems(layout: Layout, constraints: LayoutConstraints) -> Iterator[Problem]:
    if layout.context == 1:
        return
    if constraints.seq_len == 0:
        yield Problem("layout.context", "the samples have no sequence to split", "Use context=1.")
    elif constraints.seq_len % layout.context:
        what = f"{layout.context} does not divide the {constraints.seq_len} positions of a sample"
        yield Problem("layout.context", what, f"Use one of {divisors(constraints.seq_len, 64)} or change data.seq_len.")


def _expert_problems(layout: Layout) -> Iterator[Problem]:
    if layout.expert != 1:
        yield Problem("layout.expert", "a dense model has no experts to distribute", "Use expert=1.")


def pluralize(count: int, noun: str, ending: str = "s") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'' if count == 1 else ending}"


def divisors(number: int, most: int | None = None) -> list[int]:
    """In rising order, up to ``most``; in as many steps as the square root of ``number``."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    large = [number // size for size in reversed(small) if size * size != number]
    return [size for size in (*small, *large) if size <= (most or number)]
