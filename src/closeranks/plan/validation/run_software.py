"""Which training software ran a published run, and how does that software compute? From what the row names.

Invariant: decided from names and hardware alone, never from a measured time; a family stands for all software that
works in the same way.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from closeranks.facts.layout import Layout
from closeranks.plan.step_time.workload import Precision
from closeranks.plan.validation.run_table import PublishedRun

SHARDED = re.compile(r"fsdp|zero-?3|foundry|torchtitan|litgpt|automodel|fms|axolotl|accelerate", re.IGNORECASE)
_PYTORCH = re.compile(r"nanotron|huggingface|colossal", re.IGNORECASE)
_COMPOSER = re.compile(r"foundry|composer|mosaic", re.IGNORECASE)
"""FSDP with the attention kernels of before FlashAttention-2."""
_REORDERED = re.compile(r"korthikanti|2205\.05198|megatron-?core|transformer engine|nemo|bridge", re.IGNORECASE)
"""Megatron since 2022, which overlaps the tensor axis in backward; the first two name the paper that introduced it."""
_COMPILES = re.compile(r"compile|thunder", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RunSoftware:
    name: str
    """A profile of ``plan.step_time.constants.toml``."""
    compiled: bool
    fused_attention: bool
    sequence_parallel: bool


def software_of(run: PublishedRun, layout: Layout, precision: Precision, *, is_a100_or_older: bool) -> RunSoftware:
    name = _name(run, layout, is_a100_or_older=is_a100_or_older)
    # Megatron's sources on A100 and V100, and those in fp16, are older than FlashAttention.
    is_old = is_a100_or_older and (name.startswith("megatron") or name == "deepspeed" or precision == "fp16")
    says_flash = bool(re.search(r"flash", run.note, re.IGNORECASE))
    # The kernels of Megatron-Core fuse what a compiler would.
    compiled = (name == "megatron-core" and not is_old) or bool(_COMPILES.search(run.note))
    return RunSoftware(name, compiled, says_flash or not is_old, _splits_positions(run, is_old=is_old))


def _name(run: PublishedRun, layout: Layout, *, is_a100_or_older: bool) -> str:
    text = f"{run.source} {run.table_or_figure} {run.note}"
    if layout.zero == 3 and re.search(r"deepspeed", text, re.IGNORECASE):
        return "deepspeed"
    if re.search(r"nemo|bridge", run.source, re.IGNORECASE) and "automodel" not in run.source.lower():
        return "megatron-core"
    if layout.pipeline == 1 and (layout.zero == 3 or SHARDED.search(f"{run.source} {run.note}")):
        return "composer" if _COMPOSER.search(text) else "fsdp"
    if _PYTORCH.search(text):
        return "fsdp"
    return "megatron-core" if not is_a100_or_older or _REORDERED.search(text) else "megatron"


def _splits_positions(run: PublishedRun, *, is_old: bool) -> bool:
    """With selective recompute, which came with it, and everywhere since."""
    text = run.note.lower()
    if "no sequence parallel" in text or "no sp" in text:
        return False
    return not is_old or "sequence parallel" in text or run.recompute == "selective"
