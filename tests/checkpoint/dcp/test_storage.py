"""Do DCP's own calls save into our format and load from it, in one process, and refuse what they should?"""

from __future__ import annotations

import json
import math
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from closeranks.checkpoint.dcp.names import Names
from closeranks.checkpoint.dcp.storage_reader import CheckpointStorageReader
from closeranks.checkpoint.dcp.storage_writer import CheckpointStorageWriter
from closeranks.checkpoint.load.resharding_reader import open_newest
from closeranks.checkpoint.save.retention import RetentionPolicy, apply_retention
from closeranks.core.errors import CheckpointError
from closeranks.storage.local import LocalStorage
from closeranks.storage.protocol import DeniedError
from tests.checkpoint.making import a_state, by_ranges, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(6, 5, generator=generator)
    return {
        "model": {
            "w": weight,
            "turned": torch.randn(4, 3, generator=generator).t(),
            "half": torch.randn(7, generator=generator).bfloat16(),
            "flags": torch.tensor([True, False, True]),
            "none": torch.empty(0, 3),
            "one": torch.tensor(seed),
            "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
            "eighth": torch.randn(5, generator=generator).to(torch.float8_e4m3fn),
        },
        "optimizer": {
            "state": {"w": {"exp_avg": weight * 2, "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "fused": None, "params": ["w"]}],
        },
        "rng": torch.get_rng_state(),
        "best": -math.inf,
        "words": {"a": "ü", "b": [1, [2.5, True]]},
    }


def blank(value: Any) -> Any:
    """The same with nothing in it."""
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return [blank(one) for one in value] if isinstance(value, list) else None


def check_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            check_equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))
    else:
        assert found == expected


def save(place: Path, number: int = 1, seed: int = 0, **options: Any) -> dict[str, Any]:
    saved = state(seed)
    dcp.save(saved, storage_writer=CheckpointStorageWriter(place, number, **options))
    return saved


def load(place: Path, into: dict[str, Any], names: Names | None = None, **options: Any) -> None:
    dcp.load(into, storage_reader=CheckpointStorageReader(place, names), **options)


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    saved = save(tmp_path)
    found = blank(state())
    found["optimizer"]["param_groups"][0] = dict.fromkeys(saved["optimizer"]["param_groups"][0])
    load(tmp_path, found)
    check_equal(found, saved)


def test_without_a_model_at_hand_it_comes_back_nested(tmp_path: Path) -> None:
    """As ``dcp_to_torch_save`` does: from metadata alone, by the paths that the tree keeps."""
    saved = save(tmp_path)
    found: dict[str, Any] = {}
    reader = CheckpointStorageReader(tmp_path)
    _load_state_dict(found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert torch.equal(found["model"]["w"], saved["model"]["w"])
    assert found["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert found["words"] == saved["words"]


def test_nothing_is_pickled_in_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert sorted(path.name for path in files) == ["data-00000-of-00001.safetensors", "latest", "manifest.json"]
    for name in ("latest", "step-00000001/manifest.json"):
        for line in (tmp_path / name).read_text().splitlines():
            json.loads(line)


def test_a_target_may_be_of_another_type(tmp_path: Path) -> None:
    saved = save(tmp_path)
    found = {"model": {"w": torch.zeros(6, 5, dtype=torch.float64)}}
    load(tmp_path, found)
    assert torch.equal(found["model"]["w"], saved["model"]["w"].double())


def test_prefixes_can_be_given(tmp_path: Path) -> None:
    weight = torch.randn(3, 2)
    dcp.save({"w": weight}, storage_writer=CheckpointStorageWriter(tmp_path, 1, names=Names("")))
    assert open_newest(str(tmp_path)).shapes("model") == {"w": (3, 2)}
    for names, into in (
        (None, {"w": 0}),
        (Names(), {"model": {"w": 0}}),
        (Names("app.net"), {"app": {"net": {"w": 0}}}),
    ):
        target = torch.zeros(3, 2)
        inner: Any = into
        while isinstance(next(iter(inner.values())), dict):
            inner = next(iter(inner.values()))
        inner["w"] = target
        load(tmp_path, into, names)
        assert torch.equal(target, weight)


def test_a_checkpoint_of_training_loads_by_its_names(tmp_path: Path) -> None:
    saved = a_state()
    write(tmp_path / "checkpoints", 7, saved, cut=by_ranges, num_ranks=3)
    found = {
        "model": {"embed.weight": torch.zeros(7, 6), "head.weight": torch.zeros(5, 3, 2, dtype=torch.bfloat16)},
        "optimizer": {"state": {"embed.weight": {"exp_avg": torch.zeros(7, 6, dtype=torch.float64)}}},
        "scale": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "nothing": torch.zeros(0, 4),
    }
    load(tmp_path, found)
    for (section, key), tensor in {
        ("model", "embed.weight"): found["model"]["embed.weight"],  # type: ignore[index]
        ("model", "head.weight"): found["model"]["head.weight"],  # type: ignore[index]
        ("optimizer", "embed.weight/exp_avg"): found["optimizer"]["state"]["embed.weight"]["exp_avg"],  # type: ignore
        ("other", "scale"): found["scale"],
    }.items():
        assert tensor.view(-1).view(torch.uint8).numpy().tobytes() == saved[section, key].values.tobytes()


def test_what_is_not_there_is_missed_by_dcp_itself(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: model\.other"):
        load(tmp_path, {"model": {"other": torch.zeros(1)}})
    found = {"model": {"other": torch.full((1,), 7.0), "w": torch.zeros(6, 5)}}
    load(tmp_path, found, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert found["model"]["other"].item() == 7.0


# Damage.


def flip(path: Path, place: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_a_flipped_bit_makes_the_load_raise(tmp_path: Path, where: float) -> None:
    """Header, tensors and manifest: DCP's own reader would load most of these without a word."""
    weights = {"model": {"w": torch.randn(64, 64)}}
    dcp.save(weights, storage_writer=CheckpointStorageWriter(tmp_path, 1))
    data, manifest = (
        tmp_path / "step-00000001/data-00000-of-00001.safetensors",
        tmp_path / "step-00000001/manifest.json",
    )
    for path in (data, manifest):
        kept = path.read_bytes()
        flip(path, int(where * len(kept)), 3)
        with pytest.raises(dcp.CheckpointException, match=r"damaged|no valid checkpoint"):
            load(tmp_path, {"model": {"w": torch.zeros(64, 64)}})
        path.write_bytes(kept)
    load(tmp_path, {"model": {"w": torch.zeros(64, 64)}})


def test_a_torn_newest_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    save(tmp_path, 2, seed=2)
    data = tmp_path / "step-00000002/data-00000-of-00001.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    found = {"model": {"one": torch.tensor(0)}}
    load(tmp_path, found)
    assert found["model"]["one"].item() == 1


def test_an_empty_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="there is no checkpoint at"):
        load(tmp_path, {"model": {"w": torch.zeros(1)}})


# Saving.


def test_a_checkpoint_is_never_written_over(tmp_path: Path) -> None:
    save(tmp_path, 1, seed=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(dcp.CheckpointException, match="step-00000001 is already a checkpoint"):
        save(tmp_path, 1, seed=2)
    assert all(path.read_bytes() == data for path, data in before.items())


@pytest.mark.parametrize("odd", [{1, 2}, object(), torch.float32])
def test_what_would_be_pickled_is_refused_by_name(tmp_path: Path, odd: Any) -> None:
    with pytest.raises(dcp.CheckpointException, match=r"'extra\.rule' holds a .*, which is not pickled"):
        dcp.save({"extra": {"rule": odd}}, storage_writer=CheckpointStorageWriter(tmp_path, 1))
    assert not (tmp_path / "step-00000001/manifest.json").exists()


def test_a_failed_save_leaves_the_place_free_for_the_next(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException):
        dcp.save({"a": object()}, storage_writer=CheckpointStorageWriter(tmp_path, 1))
    with LocalStorage(tmp_path).lock("the test"):
        pass


def test_a_save_that_another_rank_failed_is_not_in_the_way(tmp_path: Path) -> None:
    """DCP tells the coordinator's writer nothing of it: the next save must take over the lock."""
    CheckpointStorageWriter(tmp_path, 1).prepare_global_plan([SavePlan([])])
    with pytest.raises(DeniedError), LocalStorage(tmp_path).lock("the test"):
        pass
    save(tmp_path, 2)
    with LocalStorage(tmp_path).lock("the test"):
        pass


def test_nothing_is_collected_while_dcp_saves(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    class Meanwhile(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            with pytest.raises(DeniedError, match="step-00000001"), storage.lock("a prune"):
                apply_retention(storage, RetentionPolicy(2), "step-99999999")
            return super().resolve_data(write_item)

    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointStorageWriter(tmp_path, 1), planner=Meanwhile())
    assert open_newest(str(tmp_path)).manifest.step == 1


def test_a_place_may_name_the_checkpoint(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=CheckpointStorageWriter(tmp_path / "step-00000007"))
    writer = CheckpointStorageWriter(tmp_path, 1)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "step-00000008-2", storage_writer=writer)
    assert (tmp_path / "step-00000007/manifest.json").is_file()
    assert (tmp_path / "step-00000008-2/manifest.json").is_file()
    with pytest.raises(CheckpointError, match="is not a checkpoint's path"):
        CheckpointStorageWriter(tmp_path)


def test_saves_that_keep_their_plan(tmp_path: Path) -> None:
    """DCP may hand the writer the plan of an earlier save."""
    for number in (1, 2, 3):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        weights = {"model": {"w": torch.full((4, 4), float(number))}}
        dcp.save(weights, storage_writer=CheckpointStorageWriter(tmp_path, number), planner=planner)
        found = {"model": {"w": torch.zeros(4, 4)}}
        load(tmp_path, found)
        assert torch.equal(found["model"]["w"], weights["model"]["w"])


def test_without_collectives_it_is_refused(tmp_path: Path) -> None:
    writer = CheckpointStorageWriter(tmp_path, 1)
    with pytest.raises(CheckpointError, match="without collectives"):
        dcp.save({"w": torch.ones(2)}, storage_writer=writer, use_collectives=False)


def test_async_save_of_dcp(tmp_path: Path) -> None:
    weights = {"model": {"w": torch.randn(5, 5)}, "epoch": 3}
    kept = weights["model"]["w"].clone()  # type: ignore[index]
    future = dcp.async_save(weights, storage_writer=CheckpointStorageWriter(tmp_path, 1))
    getattr(future, "upload_completion", future).result()
    weights["model"]["w"].zero_()  # type: ignore[index]
    found = {"model": {"w": torch.zeros(5, 5)}, "epoch": 0}
    load(tmp_path, found)
    assert torch.equal(found["model"]["w"], kept)  # type: ignore[index]
    assert found["epoch"] == 3


def test_a_state_of_values_alone(tmp_path: Path) -> None:
    dcp.save({"epoch": 3}, storage_writer=CheckpointStorageWriter(tmp_path, 1))
    found = {"epoch": 0}
    load(tmp_path, found)
    assert found == {"epoch": 3}


def test_a_place_may_be_a_url() -> None:
    place = f"memory://{uuid.uuid4().hex}/checkpoints"
    for number in (1, 2):
        weights = {"model": {"w": torch.full((3,), float(number))}}
        dcp.save(weights, storage_writer=CheckpointStorageWriter(f"{place}/step-0000000{number}"))
    found = {"model": {"w": torch.zeros(3)}}
    dcp.load(found, storage_reader=CheckpointStorageReader(place.removesuffix("/checkpoints")))
    assert torch.equal(found["model"]["w"], torch.full((3,), 2.0))


def test_large_tensors_are_cut_into_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("closeranks.capture.chunk_ranges.CHUNK_BYTES", 256)
    weights = {"model": {"w": torch.randn(40, 9), "turned": torch.randn(30, 20).t()}}
    dcp.save(weights, storage_writer=CheckpointStorageWriter(tmp_path, 1))
    assert len(open_newest(str(tmp_path)).manifest.entries) > 10
    found = blank(weights)
    load(tmp_path, found)
    check_equal(found, weights)
