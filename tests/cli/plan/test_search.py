"""``closeranks plan job.toml --cluster``: what it prints, writes and draws, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from closeranks.plan.search.plan_text import percent
from closeranks.run.job.job import load_job
from tests.cli.calling import call
from tests.cli.commands import FAST, ROOT, TINY, closeranks

BIG = ROOT / "examples" / "plans" / "llama-70b.toml"


def said(*words: object) -> str:
    done = call("plan", *words)
    assert done.code == 0, done.err
    return done.out


def figures(*words: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*words, "--json"))
    return found


def refused(*words: object) -> str:
    done = call("plan", *words)
    assert done.code == 2
    assert done.out == ""
    assert "Traceback" not in done.err
    return done.err


def test_it_ranks_layouts_and_says_why() -> None:
    text = said(BIG, "--cluster", "64xh100", "--tokens", "300B", "--why", "--limit", 4)
    for part in (
        "llama-70b.toml on 64 H100", "on 8 hosts", "choices of", "layout", "recompute", "MFU", "fits", "goodput",
        "to 300B tokens, with goodput", "The job's own plan (data=64, ", "misses by", "the fastest of the layouts that",
        "slower, mostly", "time of a step", "compute: products", "memory of a device, GiB", "optimizer", "one change",
        "planned only", "$",
    ):  # fmt: skip
        assert part in text, part


def test_json_has_every_figure() -> None:
    found = figures(BIG, "--cluster", "64xh100", "--tokens", "300B", "--limit", 4)
    best = found["plans"][found["advised"]]
    assert sum(best["step_parts_s"].values()) == pytest.approx(best["step_s"])
    assert sum(best["memory_parts_bytes"].values()) == best["memory_bytes"]
    assert best["verdict"] == "fits"
    seconds = 300e9 / (1024 * 8192) * best["step_s"] / best["goodput"]
    assert best["days"] == pytest.approx(seconds / 86400)
    assert best["money"] == pytest.approx(best["days"] * 24 * 64 * found["cluster"]["price_per_hour"])
    assert 0.9 < best["goodput"] < 1


def test_options_narrow_the_search() -> None:
    kept = figures(TINY, "--cluster", "2xcpu", "--keep", "micro-batch", "--keep", "recompute", "--keep", "zero")
    assert {(plan["micro_batch"], plan["recompute"]) for plan in kept["plans"]} == {(3, "none")}
    only = figures(TINY, "layout.tensor=2", "--cluster", "2xcpu", "--keep", "layout")
    assert {plan["layout"] for plan in only["plans"]} == {"tensor=2"}
    assert figures(TINY, "--cluster", "2xcpu", "--margin", 0)["advised"] == 0


def test_two_layouts_side_by_side() -> None:
    job = ROOT / "examples" / "plans" / "gpt-175b.toml"
    words = ("data=64 tensor=4 pipeline=2 zero=1 recompute=full", "tensor=16 zero=3 recompute=full")
    text = said(job, "--cluster", "512xh100", "--compare", *words)
    assert "the tensor axis crosses hosts: 16 ranks" in text
    assert "Use tensor=8" in text
    assert "slower, mostly" in text
    assert words[0] in text
    first, second = json.loads(said(job, "--cluster", "512xh100", "--compare", *words, "--json"))
    assert (first["layout"], second["layout"]) == ("data=64 zero=1 tensor=4 pipeline=2", "data=32 zero=3 tensor=16")


def test_two_layouts_are_drawn_and_not_written(tmp_path: Path) -> None:
    picture, words = tmp_path / "two.png", (TINY, "--cluster", "2xcpu", "--compare", "data=2", "data=1 tensor=2")
    assert f"picture: {picture}" in said(*words, "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(json.loads(said(*words, "--picture", picture, "--json"))) == 2
    text = refused(*words, "--out", tmp_path / "planned.toml")
    assert "--out writes the plan that is advised, and --compare advises none" in text
    assert [path.name for path in tmp_path.iterdir()] == ["two.png"]
    for option in (("--sort", "cost"), ("--days", "3"), ("--budget", "100")):
        assert "--compare stays on the cluster's devices" in refused(*words, *option)


def test_a_job_whose_tensor_axis_crosses_hosts_is_told() -> None:
    words = (
        ROOT / "examples" / "plans" / "gpt-175b.toml",
        "--cluster",
        "512xh100",
        "--keep",
        "layout",
        "layout.zero=3",
    )
    across = said(*words, "layout.data=32", "layout.tensor=16", "layout.pipeline=1")
    assert "In the job's own layout the tensor axis crosses hosts: 16 ranks" in across
    assert "crosses hosts" not in said(*words, "layout.data=64", "layout.tensor=8", "layout.pipeline=1")


def test_nothing_fits() -> None:
    text = said(BIG, "--cluster", "8xa100")
    assert "Nothing fits." in text
    assert "GiB too much" in text
    done = call("plan", BIG, "--cluster", "8xa100", "--out", "planned.toml")
    assert done.code == 2
    assert "no plan fits" in done.err


def test_where_nothing_fits_more_devices_fill_their_hosts() -> None:
    """Twice seven devices do not."""
    assert "On 16 devices" in said(BIG, "--cluster", "7xh100")


def test_the_job_it_writes_keeps_the_users_file(tmp_path: Path) -> None:
    out = tmp_path / "planned.toml"
    text = said(TINY, "train.steps=7", "--cluster", "2xcpu", "--out", out)
    assert f"closeranks train {out} -n 2" in text
    assert "# The smallest complete job" in out.read_text()
    job = load_job(out).value
    assert job.train.steps == 7
    assert job.layout.data * job.layout.tensor * job.layout.pipeline == 2
    before, after = tomllib.loads(Path(TINY).read_text()), tomllib.loads(out.read_text())
    changed = {key for key in before["train"] if before["train"][key] != after["train"][key]}
    assert changed <= {"steps", "micro_batch", "recompute", "precision", "compile"}
    assert before["data"] == after["data"]


@pytest.mark.world
def test_the_job_it_writes_trains(tmp_path: Path) -> None:
    out = tmp_path / "planned.toml"
    said(TINY, "--cluster", "2xcpu", "--out", out)
    done = closeranks("train", out, "-n", 2, *FAST, "run.folder=run", cwd=tmp_path)
    assert done.code == 0, done.err
    assert (tmp_path / "run" / "config.json").exists()


def test_it_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    assert f"picture: {picture}" in said(TINY, "--cluster", "4xcpu", "--picture", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["out.png"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((TINY,), "no cluster was named"),
        ((TINY, "--cluster", "8xh1000"), "h100"),
        ((TINY, "--cluster", "12xh100"), "do not fill hosts of 8"),
        ((TINY, "--cluster", "0xh100"), "0 devices"),
        ((TINY, "--cluster", "missing.toml"), "missing.toml"),
        ((TINY, "--cluster", "2xcpu", "--tokens", "many"), "no number of tokens"),
        ((TINY, "--cluster", "2xcpu", "--tokens", "100"), "less than one step, which takes 1,536"),
        ((TINY, "--cluster", "2xcpu", "--tokens", "0"), "no number of tokens"),
        ((TINY, "--cluster", "2xcpu", "--days", "0"), "--days 0 leaves nothing to plan. Name a number above 0"),
        ((TINY, "--cluster", "2xcpu", "--budget", "nan"), "--budget nan leaves nothing to plan"),
        ((TINY, "train.global_batch=1", "train.micro_batch=1", "--cluster", "128xh100"), "Use train.global_batch=2 or"),
        ((TINY, "layout.data=3", "--cluster", "4xcpu", "--keep", "layout"), "Leave out --keep layout"),
        ((TINY, "--cluster", "2xcpu", "--keep", "tensors"), "nothing that can be kept"),
        ((TINY, "--cluster", "2xcpu", "--compare", "tensro=2", "data=2"), "'tensro=2' is not an axis"),
        ((TINY, "--cluster", "2xcpu", "--compare", "data=2 recompute=some", "data=2"), "there is no 'some'"),
        ((TINY, "--cluster", "2xcpu", "--out", "nowhere/at/all.toml"), "no folder nowhere/at"),
        (("missing.toml", "--cluster", "2xcpu"), "missing.toml"),
    ],
)
def test_what_it_refuses(words: tuple[object, ...], sentence: str) -> None:
    assert sentence in refused(*words)


def test_small_shares_keep_two_digits() -> None:
    shares = (0.0, 0.4561, 0.0121, 0.000174, 1e-7)
    assert [percent(share) for share in shares] == ["-", "45.6%", "1.2%", "0.017%", "< 0.0001%"]


def test_a_link_without_bandwidth_is_refused(tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('device = "h100"\nnum_devices = 16\n[inter_host]\nlatency_us = 5\ngb_per_s = 0\n')
    assert "above 0" in refused(TINY, "--cluster", cluster)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((TINY, "--cluster", "2xcpu", "--why"), "compute: products"),
        (("scale", TINY, "--cluster", "cpu", "--from", "1", "--to", "2"), "Strong scaling"),
        (("goodput", "--devices", "64", "--days", "1", "--seeds", "1"), "closing ranks"),
        (
            ("validate", "--runs", str(ROOT / "benchmarks" / "plan_runs.csv"), "--source", "litgpt"),
            "Lightning-AI/litgpt",
        ),
    ],
    ids=lambda value: str(value[0]) if isinstance(value, tuple) else "",
)
def test_planning_imports_no_torch(words: tuple[str, ...], shown: str) -> None:
    program = (
        "import sys; sys.argv = ['closeranks', 'plan', *sys.argv[1:]]\n"
        "from closeranks.cli.main import main\n"
        "main()\n"
        "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout


def test_help_teaches() -> None:
    text = said("--help")
    assert "closeranks plan job.toml --cluster 64xh100" in text
    assert "--compare" in said("search", "--help")


def test_the_cheapest_number_of_devices() -> None:
    """With few samples in a step, many devices divide them badly."""
    words = (BIG, "train.global_batch=64", "--cluster", "256xh100", "--tokens", "100B", "--sort", "cost", "--limit", 1)
    found = figures(*words)
    assert found["cluster"]["num_devices"] < 256
    best = found["plans"][0]
    hurried = figures(*words, "--days", 0.9 * best["days"])
    assert hurried["cluster"]["num_devices"] > found["cluster"]["num_devices"]
    assert hurried["plans"][0]["days"] <= 0.9 * best["days"]
    assert hurried["plans"][0]["money"] >= best["money"]
    assert f"{found['cluster']['num_devices']}*" in said(*words)


def test_a_budget_or_a_deadline_that_is_too_small() -> None:
    words = (BIG, "--cluster", "256xh100", "--tokens", "2T")
    assert "a budget of 100 is too small: the cheapest plan costs" in refused(*words, "--budget", 100)
    assert "no plan ends within 1 days: the fastest takes" in refused(*words, "--days", 1)


def test_a_module_of_the_users_own(tmp_path: Path) -> None:
    job = ROOT / "examples" / "own_model" / "job.toml"
    found = figures(job, "--cluster", "4xcpu")
    assert {plan["layout"] for plan in found["plans"]} >= {"data=4", "data=4 zero=1", "data=4 zero=3"}
    assert all(plan["step_s"] > 0 for plan in found["plans"])
    assert "to 3.2k samples, with goodput" in said(job, "--cluster", "4xcpu")


def test_a_hugging_face_config_is_planned_without_torch(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    mixtral = {
        "model_type": "mixtral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 32_000, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    config.write_text(json.dumps(mixtral))
    words = [str(TINY), "--cluster", "64xh100", "--limit", "2", "--model", str(config), "train.global_batch=256"]
    code = f"import sys\nsys.argv = ['closeranks', 'plan', *{words!r}]\n"
    code += "sys.modules['torch'] = sys.modules['transformers'] = None\n"
    code += "from closeranks.cli.main import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "GiB" in done.stdout
    assert "not the job's model: closeranks trains Llamas" in done.stdout
    assert "A token uses 2 of the 8 experts of a layer: 12.7B of 46.7B weights" in done.stdout
    assert "an expert axis is planned only" in done.stdout
    plain = figures(TINY, "--cluster", "64xh100", "--limit", 1, "train.global_batch=256")
    assert figures(*words)["plans"][0]["memory_bytes"] > 2 * plain["plans"][0]["memory_bytes"]


def test_an_encoder_is_not_planned_as_causal(tmp_path: Path) -> None:
    bert = {
        "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30_522, "max_position_embeddings": 2048,
    }  # fmt: skip
    attention = []
    for is_decoder in (False, True):
        (tmp_path / "config.json").write_text(json.dumps({**bert, "is_decoder": is_decoder}))
        words = (TINY, "--cluster", "1xh100", "--model", tmp_path, "data.seq_len=2048", "train.global_batch=64")
        words = (*words, "train.micro_batch=8", "--keep", "micro-batch", "--keep", "recompute", "--limit", 1)
        attention.append(figures(*words)["plans"][0]["step_parts_s"]["compute: attention"])
        assert ("Its attention is not causal" in said(*words)) is not is_decoder
    assert attention[0] == pytest.approx(2 * attention[1])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"model_type": "t5"}', "has an encoder and a decoder: no stack of equal blocks"),
        ('{"model_type": "vit"}', "patches of images instead of tokens"),
        ('{"model_type": "gpt3"}', "whose shape is not known here"),
        ("{", "is not JSON"),
    ],
)
def test_a_config_that_cannot_be_planned_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert said in refused(TINY, "--cluster", "8xh100", "--model", tmp_path)
    assert "Leave out --out" in refused(
        TINY, "--cluster", "8xh100", "--model", tmp_path, "--out", tmp_path / "planned.toml"
    )


OWN_MODELS = """
from torch import nn
from torch.nn.functional import cross_entropy


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(128, 2))

    def loss(self, batch):
        return cross_entropy(self.net(batch["x"].view(-1, 1, 2, 4)), batch["y"])


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 32), nn.Linear(32, 2)
        self.between = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    def loss(self, batch):
        hidden = self.first(batch["x"].unsqueeze(-1))
        return cross_entropy(self.last(self.between(hidden[:, :4], hidden[:, 4:])).mean(1), batch["y"])


class Chooser(nn.Module):
    def __init__(self):
        super().__init__()
        self.answer = nn.Linear(8, 2)

    def loss(self, batch):
        chosen = batch["x"].sum(1).nonzero().squeeze(1)
        return cross_entropy(self.answer(batch["x"][chosen]), batch["y"][chosen])
"""


def test_modules_of_other_kinds_are_planned_or_refused_in_a_sentence(tmp_path: Path) -> None:
    own = ROOT / "examples" / "own_model"
    (tmp_path / "job.toml").write_text((own / "job.toml").read_text())
    (tmp_path / "net.py").write_text((own / "net.py").read_text())
    (tmp_path / "planned_models.py").write_text(OWN_MODELS)
    for name in ("Images", "Translator"):
        changes = (f"model.name=planned_models:{name}", "~model.args", "~model.loss")
        found = figures(tmp_path / "job.toml", "--cluster", "8xh100", *changes)
        assert found["plans"][0]["memory_parts_bytes"]["activations of blocks"] > 0
    changes = ("model.name=planned_models:Chooser", "~model.args", "~model.loss")
    said_no = refused(tmp_path / "job.toml", "--cluster", "8xh100", *changes)
    assert "its code depends on the values of a tensor (" in said_no
    assert "planned_models.py:32)" in said_no
