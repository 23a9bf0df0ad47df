"""Llamas to transformers and back: equal logits there, equal bits here; a broken way leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from closeranks.checkpoint.weights.hf_shards import ExportTensor, NoProgress, plan_export, plan_shards
from closeranks.checkpoint.weights.open import open_weights
from closeranks.checkpoint.weights.save_weights import save_weights
from closeranks.checkpoint.weights.torch_file import TorchFile
from closeranks.core.errors import CheckpointError, ModelError, SetupError, UserError
from closeranks.core.pieces import Piece
from closeranks.run.dry_run.live_bytes import LiveBytes
from closeranks.run.huggingface.convert import export_hf, import_hf
from closeranks.run.job.job import load_job
from tests.models.making import materialised
from tests.models.published import KINDS, fetched, in_double, logits_of, publish, published, some_tokens
from tests.run.loading import job_of, whole_tensors

TABLE: dict[str, Any] = {
    "name": "llama",
    "dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 96,
    "vocab_size": 300,
    "rope_theta": 1000.0,
}
OURS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "stretched": {"rope_factor": 4.0, "rope_original_len": 32},
}


def trained(place: Path, table: dict[str, Any], dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A checkpoint with weights that are not initial ones, and the module they belong to."""
    from closeranks.models.build import spec_for

    job = job_of({**TABLE, **table})
    module = materialised(spec_for(job.model, seq_len=128), seed=4, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)
    weights = TorchFile("memory", {name: one.detach() for name, one in module.named_parameters()}, ())
    tensors = plan_export(weights, {name: name for name in weights.names()})
    tree = {"config": job.model_dump(mode="json"), "progress": {"step": 3, "position": 12}}
    save_weights(str(place / "checkpoints"), weights, tensors, tree, NoProgress())
    return module.eval()


def as_saved(place: Path) -> dict[str, Tensor]:
    weights = open_weights(str(place))
    return {name: weights.read(name, Piece.whole(name, tuple(shape))) for name, shape in weights.names().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", OURS)
def test_transformers_computes_our_logits_from_an_exported_folder(tmp_path: Path, kind: str) -> None:
    ours, tokens = trained(tmp_path / "run", OURS[kind]), some_tokens()
    moved = export_hf(str(tmp_path / "run"), tmp_path / "hf", shard_bytes=60_000)
    assert len(moved.files) > 2
    theirs, told = fetched(tmp_path / "hf")
    assert not any(told.values()), told
    expected = ours(tokens)
    assert (logits_of(theirs, tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
    with in_double():
        exact = ours.double()
        exact.model.fill_rope()  # the tables were rounded to float32
        assert (logits_of(theirs.double(), tokens) - exact(tokens)).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_trip_keeps_every_bit_and_the_config(tmp_path: Path, kind: str) -> None:
    hf = publish(published(**KINDS[kind]).bfloat16(), tmp_path / "hf")
    import_hf(str(hf), tmp_path / "run")
    assert same(as_saved(tmp_path / "run"), whole_tensors(hf))
    export_hf(str(tmp_path / "run"), tmp_path / "back", shard_bytes=50_000)
    assert same(whole_tensors(tmp_path / "back"), whole_tensors(hf))
    import_hf(str(tmp_path / "back"), tmp_path / "again")
    assert same(as_saved(tmp_path / "again"), as_saved(tmp_path / "run"))
    first, back = (json.loads((folder / "config.json").read_text()) for folder in (hf, tmp_path / "back"))
    for key in ("max_position_embeddings", "eos_token_id", "bos_token_id", "vocab_size", "tie_word_embeddings"):
        assert first[key] == back[key]


def test_an_imported_folder_has_a_job_that_starts_from_it(tmp_path: Path) -> None:
    hf = publish(published(**KINDS["stretched"]), tmp_path / "hf")
    import_hf(str(hf), tmp_path / "run")
    job = load_job(tmp_path / "run" / "job.toml").value
    assert job.checkpoint.weights == str(tmp_path / "run")
    assert job.model.shape().rope_original_len == 32  # type: ignore[union-attr]
    assert open_weights(job.checkpoint.weights).names().keys() == whole_tensors(hf).keys()


def test_a_torch_file_with_a_config_beside_it_is_imported(tmp_path: Path) -> None:
    model = published()
    model.config.save_pretrained(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "hf" / "weights.pt")
    import_hf(str(tmp_path / "hf" / "weights.pt"), tmp_path / "run")
    assert same(as_saved(tmp_path / "run"), dict(model.state_dict()))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_weights_are_written_in_the_format_that_is_asked_for(tmp_path: Path, dtype: str) -> None:
    ours = trained(tmp_path / "run", {})
    export_hf(str(tmp_path / "run"), tmp_path / "hf", dtype=dtype, shard_bytes=10**9)
    assert (tmp_path / "hf" / "model.safetensors").is_file()
    found = whole_tensors(tmp_path / "hf")
    expected = {name: one.detach().to(getattr(torch, dtype)) for name, one in ours.named_parameters()}
    assert same(found, expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == dtype


def test_the_model_is_never_whole_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("hf_shards", "save_weights"):
        monkeypatch.setattr(f"closeranks.checkpoint.weights.{module}.CHUNK_BYTES", 16_384)
    monkeypatch.setattr("closeranks.checkpoint.load.resharding_reader._KEPT_BYTES", 16_384)
    changes = {"num_hidden_layers": 24}
    hf = publish(published(**changes), tmp_path / "hf")
    whole = sum(one.numel() * 4 for one in whole_tensors(hf).values())
    with LiveBytes() as live:
        import_hf(str(hf), tmp_path / "run")
    assert live.peak < 0.2 * whole
    with LiveBytes() as live:
        export_hf(str(tmp_path / "run"), tmp_path / "back", shard_bytes=50_000)
    assert live.peak < 0.2 * whole


def test_files_are_filled_in_order_and_never_beyond_their_size() -> None:
    tensors = [ExportTensor(str(n), str(n), (size,), torch.uint8) for n, size in enumerate([4, 5, 20, 1, 9, 1, 0])]
    assert [[int(one.name) for one in shard] for shard in plan_shards(tensors, 10)] == [[0, 1], [2], [3, 4], [5, 6]]


# What is refused


def refused(folder: Path, said: str, kind: type[UserError] = CheckpointError) -> None:
    out = folder / "out"
    with pytest.raises(kind, match=said) as error:
        import_hf(str(folder / "hf"), out)
    assert "\n" not in str(error.value)
    assert not out.exists()
    assert [path.name for path in folder.iterdir()] in (["hf"], [])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    hf = publish(published(), tmp_path / "hf")
    next(hf.glob("model-00002*")).unlink()
    refused(tmp_path, "is incomplete: model-00002")


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    (publish(published(), tmp_path / "hf") / "config.json").unlink()
    refused(tmp_path, r"there is no config\.json")


def test_a_folder_without_weights_and_a_place_without_anything_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "there is nothing at")
    published().config.save_pretrained(tmp_path / "hf")
    refused(tmp_path, "holds no weights")


@pytest.mark.parametrize(
    ("change", "said", "kind"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "model_type = 'qwen2'", ModelError),
        ({"hidden_size": 128}, "has shape", CheckpointError),
        ({"num_hidden_layers": 3}, "no 'model.layers.2.", CheckpointError),
        ({"num_hidden_layers": 1}, "has 'model.layers.1.", CheckpointError),
        ({"tie_word_embeddings": True}, "'lm_head.weight' and 'model.embed_tokens.weight' differ", CheckpointError),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str, kind: type[UserError]
) -> None:
    path = publish(published(), tmp_path / "hf") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": None, **change}))
    refused(tmp_path, said, kind)


def test_what_stands_in_the_place_stays(tmp_path: Path) -> None:
    hf = publish(published(), tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(SetupError, match="already exists"):
        import_hf(str(hf), tmp_path / "out")
    trained(tmp_path / "run", {})
    with pytest.raises(SetupError, match="already exists"):
        export_hf(str(tmp_path / "run"), tmp_path / "out", shard_bytes=10**9)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_damage_that_is_met_half_way_leaves_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "run", {})
    data = next((tmp_path / "run").glob("checkpoints/*/data*"))
    octets = bytearray(data.read_bytes())
    octets[-100] ^= 4
    data.write_bytes(octets)
    with pytest.raises(CheckpointError, match=r"damaged|checksum|digest"):
        export_hf(str(tmp_path / "run"), tmp_path / "out", shard_bytes=60_000)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_only_a_llama_becomes_a_hugging_face_folder(tmp_path: Path) -> None:
    weights = TorchFile("memory", {"x": torch.ones(3)}, ())
    tree = {"config": {"model": {"name": "digits"}}}
    save_weights(str(tmp_path / "run" / "checkpoints"), weights, plan_export(weights, {"x": "x"}), tree, NoProgress())
    with pytest.raises(ModelError, match="holds the model 'digits'"):
        export_hf(str(tmp_path / "run"), tmp_path / "out", shard_bytes=10**9)
    with pytest.raises(CheckpointError, match="is already a closeranks checkpoint"):
        import_hf(str(tmp_path / "run"), tmp_path / "out")
