from __future__ import annotations

from closeranks.core.config.explain import ExplainLine, explain
from closeranks.core.config.load import load
from closeranks.core.config.origin import COMMAND_LINE, DEFAULT, ValueOrigin

from .conftest import Load
from .job_shapes import Job


def test_every_leaf_has_value_origin_and_help(load_text: Load) -> None:
    lines = explain(load_text("[train]\nsteps = 5\n", "optim.lr=3e-4"))
    by_key = {line.key: line for line in lines}
    assert by_key["train.steps"] == ExplainLine(
        "train.steps", "5", ValueOrigin("file", "job.toml:2"), "Optimizer steps to take."
    )
    assert by_key["optim.lr"] == ExplainLine("optim.lr", "0.0003", COMMAND_LINE, "Peak learning rate.")
    assert by_key["run.threads"] == ExplainLine("run.threads", "(not set)", DEFAULT, "")
    assert by_key["optim.betas"].value == "[0.9, 0.95]"
    assert by_key["optim.groups"].value == "[]"
    assert by_key["model.preset"].value == '"tiny"'


def test_keys_come_in_the_order_of_the_job(load_text: Load) -> None:
    keys = [line.key for line in explain(load_text("[train]\nsteps = 5\n"))]
    assert keys[0] == "run.name"
    assert len(keys) == len(set(keys))
    tables = list(dict.fromkeys(key.partition(".")[0] for key in keys))
    assert tables == ["run", "model", "train", "optim", "layout"]


def test_arrays_of_tables_and_own_arguments_are_taken_apart(load_text: Load) -> None:
    text = '[train]\nsteps=1\n[model]\nname="a:b"\n[model.args]\nx = 1\n[[optim.groups]]\npattern="p"\n'
    by_key = {line.key: line for line in explain(load_text(text))}
    assert by_key["model.args.x"].help == "Handed to the factory as keyword arguments."
    assert str(by_key["model.args.x"].origin) == "job.toml:6"
    assert by_key["optim.groups.0.pattern"].value == '"p"'


def test_what_only_python_can_hold_is_still_shown() -> None:
    loaded = load(Job, None, ("train.steps=1",), extra={"model": {"name": "a:b", "args": {"f": {1, 2}}}})
    by_key = {line.key: line.value for line in explain(loaded)}
    assert by_key["model.args.f"] == "{1, 2}"
