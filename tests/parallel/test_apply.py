"""The order of transforms, as it stands in the one file that has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from closeranks.facts.layout import Layout
from closeranks.models.build import spec_for
from closeranks.models.config import DigitsConfig, LlamaConfig
from closeranks.parallel import apply as module_under_test
from closeranks.parallel.apply import DistributedModel, ParallelSettings, parallelize
from closeranks.parallel.mesh_groups import open_mesh_groups
from closeranks.parallel.precision import Precision
from closeranks.parallel.process_group import RankGroup

LLAMA = spec_for(LlamaConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=64), seq_len=16)
DIGITS = spec_for(DigitsConfig(), seq_len=0)


ONE = RankGroup(0, 1)


def applied(
    spec: Any, *, group: RankGroup = ONE, batch_norm: str = "micro", compiled: bool = False, recompute: str = "none"
) -> DistributedModel:
    layout, device = Layout(data=group.size), torch.device("cpu")
    settings = ParallelSettings(
        layout=layout,
        hold="shards",
        batch_norm=batch_norm,
        prefetch=1,
        overlap=True,
        precision=Precision("float32"),
        seed=3,
        micro_batch=4,
        compiled=compiled,
        recompute=recompute,
        recompute_keep=(),
    )
    return parallelize(
        spec, settings, open_mesh_groups(group, layout, device, 60.0), device, prepare=lambda module: None
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The transforms in the order they were made."""
    made: list[str] = []

    def note(name: str) -> None:
        real = getattr(module_under_test, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(module_under_test, name, noted)

    for name in (
        "build_module",
        "shard_module",
        "convert_sync_batch_norm",
        "recompute",
        "recompute_compiled",
        "to_empty",
        "init_targets",
        "BatchStatistics",
    ):
        note(name)
    monkeypatch.setattr(nn.Module, "compile", lambda self: made.append(f"compile {type(self).__name__}"))
    return made


def test_built_cut_replaced_wrapped_compiled_then_filled(calls: list[str]) -> None:
    DIGITS.compile_units = ("stem", "body")
    try:
        # A group of two as far as this process knows: nothing travels, as a spec on meta needs no broadcast.
        result = applied(DIGITS, group=RankGroup(0, 2), batch_norm="sync", compiled=True)
    finally:
        DIGITS.compile_units = ()
    assert calls[:3] == ["build_module", "shard_module", "convert_sync_batch_norm"]
    assert (
        calls.index("convert_sync_batch_norm")
        < calls.index("recompute")
        < calls.index("compile ConvBlock")
        < calls.index("init_targets")
    )
    assert type(result.module.stem.norm).__name__ == "SyncBatchNorm"


def test_each_unit_of_the_spec_is_compiled_and_nothing_else(calls: list[str]) -> None:
    applied(LLAMA, compiled=True)
    assert len([call for call in calls if call.startswith("compile")]) == len(LLAMA.compile_units) > 0
    calls.clear()
    applied(LLAMA)
    assert calls == ["build_module", "shard_module", "recompute", "to_empty", "init_targets", "BatchStatistics"]


def test_full_recompute_goes_around_what_is_compiled(calls: list[str]) -> None:
    applied(LLAMA, compiled=True, recompute="full")
    assert "recompute" not in calls
    assert calls.index("compile Block") < calls.index("recompute_compiled") < calls.index("to_empty")


def test_one_rank_has_nobody_to_synchronise_with(calls: list[str]) -> None:
    applied(DIGITS, batch_norm="sync")
    assert "convert_sync_batch_norm" not in calls


def weights(result: DistributedModel) -> dict[str, Tensor]:
    return dict(result.module.state_dict())


def test_names_and_values_do_not_depend_on_what_was_applied(calls: list[str]) -> None:
    plain = weights(applied(DIGITS))
    for other in (
        applied(DIGITS, group=RankGroup(1, 2), batch_norm="sync"),
        applied(DIGITS, group=RankGroup(0, 4)),
        applied(DIGITS, compiled=True),
    ):
        assert list(weights(other)) == list(plain)
        assert all(torch.equal(tensor, plain[name]) for name, tensor in weights(other).items())


def test_the_person_is_told_of_small_micro_batches() -> None:
    (warning,) = applied(DIGITS).warnings
    assert "micro-batches of 4" in warning
    assert applied(LLAMA).warnings == ()
