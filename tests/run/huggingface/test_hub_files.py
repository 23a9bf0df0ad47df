"""What a Hugging Face folder says beside its weights comes back out of an export, also after the folder is gone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from closeranks.core.errors import ModelError
from closeranks.core.system.environment import set_world
from closeranks.core.world import World
from closeranks.models.llama.hf_conversion import llama_config_from_hf
from closeranks.run.huggingface.convert import export_hf, import_hf
from closeranks.run.huggingface.hub_files import read_hub_metadata, validate_hub_metadata
from closeranks.run.job.job import load_job
from closeranks.run.loop import train_job
from tests.data.building.material import tiny_tokenizer
from tests.models.published import publish
from tests.models.published import published as llama
from tests.run.small import open_session

IDS = {"bos_token_id": 5, "eos_token_id": [6, 7], "pad_token_id": 8}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    publish(llama(**IDS, max_position_embeddings=512), folder)
    GenerationConfig(**IDS, temperature=0.6, do_sample=True, top_p=0.9).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny_tokenizer(tmp_path / "t.json")), bos_token="<s>")
    tokenizer.save_pretrained(folder)
    return folder


def trained(folder: Path, weights: Path, table: dict[str, Any], **checkpoint: Any) -> None:
    set_world(World(launcher="testing"))
    tables = {
        "model": table,
        "data": {"name": "text", "seq_len": 16, "max_bytes": 20_000},
        "train": {"steps": 1, "global_batch": 2, "micro_batch": 1, "eval_samples": 1},
        "checkpoint": {"weights": str(weights), **checkpoint},
    }
    train_job(load_job(None, extra=tables).value, folder)


@pytest.mark.parametrize("way", ["weights", "import"])
def test_a_fine_tune_keeps_what_the_publisher_said(source: Path, tmp_path: Path, way: str) -> None:
    table = llama_config_from_hf(json.loads((source / "config.json").read_text()))
    weights = source
    if way == "import":
        import_hf(str(source), tmp_path / "imported")
        weights = tmp_path / "imported"
    trained(tmp_path / "run", weights, table)
    shutil.copytree(source, tmp_path / "copy")
    with_source, without = tmp_path / "with", tmp_path / "without"
    told = export_hf(str(tmp_path / "run"), with_source, shard_bytes=1 << 30)
    assert any("tokenizer.json" in note for note in told.notes)
    shutil.rmtree(source)
    told = export_hf(str(tmp_path / "run"), without, shard_bytes=1 << 30)
    assert any("No tokenizer is written" in note for note in told.notes)
    for folder in (with_source, without):
        config = AutoConfig.from_pretrained(folder)
        assert {key: getattr(config, key) for key in IDS} == IDS
        assert config.max_position_embeddings == 512
        generation = GenerationConfig.from_pretrained(folder)
        assert (generation.temperature, generation.top_p, generation.eos_token_id) == (0.6, 0.9, [6, 7])
        assert (folder / "tokenizer_config.json").read_text() == (tmp_path / "copy/tokenizer_config.json").read_text()
        assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == [6, 7]
    again = PreTrainedTokenizerFast.from_pretrained(with_source)
    assert (
        again("some words").input_ids
        == PreTrainedTokenizerFast.from_pretrained(tmp_path / "copy")("some words").input_ids
    )


def test_a_model_of_the_users_is_refused_with_the_command_that_writes_its_weights(tmp_path: Path) -> None:
    set_world(World(launcher="testing"))
    with open_session(tmp_path / "my run") as session:
        for step in session:
            step.run()
    place = str(tmp_path / "my run")
    command = f"closeranks ckpt convert '{place}' OUT.safetensors --to safetensors"
    with pytest.raises(ModelError, match="for Llama models") as caught:
        export_hf(place, tmp_path / "out", shard_bytes=1 << 30)
    assert command in caught.value.fix


def test_only_what_is_sound_is_kept(tmp_path: Path) -> None:
    hostile = {"bos_token_id": "x", "eos_token_id": [1, "a"], "pad_token_id": 2**40, "max_position_embeddings": -1}
    assert validate_hub_metadata({**hostile, "files": {"../../x": "y", "generation_config.json": 3}, "source": 5}) == {
        "files": {}
    }
    assert validate_hub_metadata(None) == validate_hub_metadata([1]) == {}
    assert read_hub_metadata(str(tmp_path / "nothing")) == {}
    (tmp_path / "config.json").write_text("[" * 100_000)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert read_hub_metadata(str(tmp_path)) == {}
