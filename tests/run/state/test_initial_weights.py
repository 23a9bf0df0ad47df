"""Runs that start from weights: transformers' logits from our model, every layout, never a whole model on one rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from closeranks.checkpoint.weights.open import open_weights
from closeranks.core.errors import CheckpointError
from closeranks.core.pieces import Piece
from closeranks.models.llama.hf_conversion import llama_config_from_hf
from closeranks.run.builder.build import BuiltRun
from closeranks.run.components.sync.local_sgd import LocalSgd
from closeranks.run.huggingface.convert import import_hf
from closeranks.run.job.job import Job, load_job
from closeranks.run.state.initial_weights import load_weights
from closeranks.run.state.resume import load_initial_state
from closeranks.sync.config import LocalConfig, SyncConfig
from closeranks.testing import run_world
from tests.models.published import KINDS, in_double, logits_of, publish, published, some_tokens
from tests.run.loading import assembled, job_of, load_here

Saved = dict[str, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """One folder of several files for each kind of model."""
    root = tmp_path_factory.mktemp("published")
    return {kind: publish(published(**changes), root / kind.replace(" ", "-")) for kind, changes in KINDS.items()}


def job_for(folder: Path, *arguments: Any, **changes: Any) -> Job:
    return job_of(llama_config_from_hf(json.loads((folder / "config.json").read_text())), *arguments, **changes)


@torch.no_grad()
def put(built: BuiltRun, place: str) -> tuple[str, ...]:
    """Weights of a file into a run."""
    return load_weights(built.engine.model, built.engine.context.groups.pipeline, open_weights(place))


def named(built: BuiltRun) -> Iterator[tuple[str, Tensor]]:
    return built.engine.model.module.named_parameters()


def our_logits(built: BuiltRun, tokens: Tensor) -> Tensor:
    logits: Tensor = built.engine.model.module.eval()(tokens)
    return logits


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", KINDS)
def test_our_logits_are_those_of_transformers(saved: Saved, kind: str) -> None:
    tokens, theirs = some_tokens(), published(**KINDS[kind])
    assert len(list(saved[kind].glob("*.safetensors"))) > 2
    with assembled(job_for(saved[kind])) as built:
        before = our_logits(built, tokens)
        put(built, str(saved[kind]))
        after = our_logits(built, tokens)
    expected = logits_of(theirs, tokens)
    scale = expected.abs().max()
    assert (before - expected).abs().max() > 0.1 * scale
    assert (after - expected).abs().max() < 1e-5 * scale
    with in_double(), assembled(job_for(saved[kind], precision="float64")) as built:
        put(built, str(saved[kind]))
        exact = our_logits(built, tokens)
        assert (exact - logits_of(theirs.double(), tokens)).abs().max() < 1e-10 * scale


@pytest.mark.usefixtures("alone")
def test_bfloat16_weights_become_what_the_run_computes_in(saved: Saved, tmp_path: Path) -> None:
    publish(published().bfloat16(), tmp_path)
    with assembled(job_for(tmp_path)) as built:
        put(built, str(tmp_path))
        expected = published().bfloat16().state_dict()
        for name, tensor in named(built):
            assert tensor.dtype == torch.float32
            assert torch.equal(tensor, expected[name].float())


@pytest.mark.world
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("untied", "data=2 zero=3"),
        ("untied", "tensor=2"),
        ("tied", "pipeline=2"),
        pytest.param("tied", "data=2 zero=3 pipeline=2", marks=pytest.mark.slow),
        pytest.param("untied", "data=2 zero=1 tensor=2", marks=pytest.mark.slow),
        pytest.param("tied and stretched", "data=3 zero=3", marks=pytest.mark.slow),
    ],
)
def test_no_rank_holds_more_than_its_pieces_while_it_loads(saved: Saved, kind: str, layout: str) -> None:
    job = job_for(saved[kind], layout, seq_len=16)
    size = job.layout.data * job.layout.tensor * job.layout.pipeline
    for loaded in run_world(load_here, size, job, str(saved[kind])):
        assert loaded.num_wrong == 0
        assert loaded.num_tensors > 8
        # Columns are cut out of bands of whole rows, and a band has room for all rows of a tensor this small.
        assert loaded.extra <= 2 * loaded.largest + 4096
        assert loaded.own + loaded.extra < 0.9 * loaded.whole


@pytest.mark.usefixtures("alone")
def test_a_run_starts_from_a_torch_file(saved: Saved, tmp_path: Path) -> None:
    theirs = published()
    torch.save({"model": {f"module.{name}": one for name, one in theirs.state_dict().items()}}, tmp_path / "w.pt")
    with assembled(job_for(saved["untied"])) as built:
        notes = put(built, str(tmp_path / "w.pt"))
        assert all(torch.equal(one, theirs.get_parameter(name)) for name, one in named(built))
    assert len(notes) == 2


@pytest.mark.usefixtures("alone")
def test_a_run_starts_from_a_checkpoint_of_ours(saved: Saved, tmp_path: Path) -> None:
    import_hf(str(saved["tied"]), tmp_path / "run")
    theirs = published(**KINDS["tied"])
    with assembled(job_for(saved["tied"])) as built:
        put(built, str(tmp_path / "run"))
        assert all(torch.equal(one, theirs.get_parameter(name)) for name, one in named(built))


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_no_llama_gets_its_buffers_too(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        "model": {"name": "digits"},
        "data": {"name": "digits"},
        "train": {"steps": 1, "global_batch": 8, "eval_samples": 1},
        "run": {"seed": 1},
    }
    with assembled(load_job(None, extra=tables).value) as built:
        built.engine.model.module(torch.randn(16, 1, 8, 8))  # moves the statistics of its norms
        expected = {name: one.clone() for name, one in built.engine.model.module.state_dict().items()}
        torch.save(built.engine.model.module.state_dict(), tmp_path / "w.pt")
    with assembled(load_job(None, extra={**tables, "run": {"seed": 2}}).value) as built:
        put(built, str(tmp_path / "w.pt"))
        found = built.engine.model.module.state_dict()
    assert found.keys() == expected.keys()
    assert any(not one.is_floating_point() for one in expected.values())
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def rewritten(folder: Path, **changes: Tensor | None) -> Path:
    """A folder with one file, some of whose tensors are others or gone (None)."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
        path.unlink()
    for path in folder.glob("*.index.json"):
        path.unlink()
    for name, tensor in changes.items():
        found.pop(name, None)
        if tensor is not None:
            found[name] = tensor
    save_file(found, folder / "model.safetensors")
    return folder


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_equal", [True, False])
def test_a_tied_weight_that_is_stored_twice_must_be_the_same(tmp_path: Path, is_equal: bool) -> None:
    model = published(**KINDS["tied"])
    embedding = model.get_parameter(EMBEDDING).detach()
    other = embedding.clone()
    other[-1, -1] += 0.0 if is_equal else 1e-3
    publish(model, tmp_path)
    rewritten(tmp_path, **{HEAD: other})
    with assembled(job_for(tmp_path)) as built:
        if is_equal:
            put(built, str(tmp_path))
            assert torch.equal(built.engine.model.module.get_parameter(EMBEDDING), embedding)
        else:
            with pytest.raises(CheckpointError, match=r"'lm_head\.weight' and .* differ"):
                put(built, str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_a_tied_weight_may_be_stored_under_its_other_name(tmp_path: Path) -> None:
    model = published(**KINDS["tied"])
    embedding = model.get_parameter(EMBEDDING).detach()
    publish(model, tmp_path)
    rewritten(tmp_path, **{HEAD: embedding.clone(), EMBEDDING: None})
    with assembled(job_for(tmp_path)) as built:
        put(built, str(tmp_path))
        assert torch.equal(built.engine.model.module.get_parameter(EMBEDDING), embedding)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.norm.weight": torch.ones(65)}, r"'model\.norm\.weight' has shape \(65,\)"),
        ({"model.norm.weight": None}, r"no 'model\.norm\.weight'"),
        ({"model.extra": torch.ones(2)}, r"has 'model\.extra', which the model does not have"),
        ({"model.norm.weight": torch.ones(64, dtype=torch.int8)}, "is stored as int8"),
        ({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}, "is stored as float8_e4m3fn"),
    ],
)
def test_weights_that_do_not_fit_leave_the_model_as_it_was(
    tmp_path: Path, changes: dict[str, Tensor | None], said: str
) -> None:
    publish(published(), tmp_path)
    rewritten(tmp_path, **changes)  # type: ignore[arg-type]
    with assembled(job_for(tmp_path)) as built:
        before = {name: one.detach().clone() for name, one in named(built)}
        with pytest.raises(CheckpointError, match=said):
            put(built, str(tmp_path))
        assert all(torch.equal(one, before[name]) for name, one in named(built))


class Filled:
    """A saved state that is the same value everywhere."""

    def __init__(self, value: float) -> None:
        self.value = value

    def shapes(self, section: str) -> dict[str, tuple[int, ...]]:
        return {}

    def read_into(self, section: str, key: str, piece: Piece, out: Tensor) -> None:
        assert section == "model"
        out.fill_(self.value)


def with_meetings(job: Job) -> Job:
    return job.model_copy(update={"sync": SyncConfig(local=LocalConfig(every=2))})


@pytest.mark.usefixtures("alone")
def test_replicas_that_train_apart_start_from_the_weights_they_were_given(saved: Saved, tmp_path: Path) -> None:
    """Meetings are held against where all stood: were that where the model began, it would come back."""
    kind = next(iter(KINDS))
    job = with_meetings(job_for(saved[kind]))
    given = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"weights": str(saved[kind])})})
    with assembled(given) as built:
        outer = built.engine.components.get(LocalSgd).outer
        before = [kept.anchor.clone() for kept in outer.states()]
        load_initial_state(built.engine.context, built.state, tmp_path)
        kept = list(outer.states())
        assert all(torch.equal(one.anchor, one.shard.tensor) for one in kept)
        assert any(not torch.equal(one.anchor, then) for one, then in zip(kept, before, strict=True))


@pytest.mark.usefixtures("alone")
def test_where_all_stood_is_read_and_not_taken_from_weights_that_may_be_on_their_way(saved: Saved) -> None:
    with assembled(with_meetings(job_for(saved[next(iter(KINDS))]))) as built:
        local = built.engine.components.get(LocalSgd)
        local.restore(Filled(7.0))
        assert all(one.anchor.eq(7.0).all() and not one.shard.tensor.eq(7.0).all() for one in local.outer.states())
