from __future__ import annotations

from typing import Any, Literal

import pytest

from closeranks.core.config.table import ConfigTable
from closeranks.core.config.validation.schema_tree import node_at, node_of_error, options_of, root_node, tables_under
from tests.core.config.job_shapes import DigitsConfig, Job, LlamaConfig, UserModelConfig


@pytest.mark.parametrize(
    ("location", "place"),
    [
        (("train", "steps"), "train.steps"),
        (("model", "llama", "preset"), "model.preset"),
        (("model", "user", "args", "user"), "model.args.user"),
        (("model",), "model"),
        (("model", "user"), "model"),
        (("optim", "schedule", "warmup", "int"), "optim.schedule.warmup"),
        (("optim", "groups", 1, "weight_decay"), "optim.groups.1.weight_decay"),
        (("optim", "betas", 1), "optim.betas.1"),
        (("nobody",), "nobody"),
        ((), ""),
    ],
)
def test_union_members_never_show_in_a_place(location: tuple[str | int, ...], place: str) -> None:
    assert node_of_error(Job, location).place == place


def test_an_error_inside_a_union_knows_the_kind_it_is_about() -> None:
    owner = node_of_error(Job, ("model", "digits", "preset")).owner
    assert owner is not None
    assert owner.tables == (DigitsConfig,)


def test_a_dotted_key_looks_into_every_kind_of_a_union() -> None:
    assert node_at(Job, ("model",)).tables == (LlamaConfig, DigitsConfig, UserModelConfig)
    assert [option.type for option in node_at(Job, ("model", "preset")).options] == [str]
    assert [option.type for option in node_at(Job, ("model", "args", "x", "y")).options] == [Any]
    assert node_at(Job, ("train", "steps", "x")).options == ()
    assert node_at(Job, ("optim", "betas", "2")).options == ()


def test_the_key_that_chooses_is_found() -> None:
    assert node_at(Job, ("model",)).tag_key == "name"
    assert node_at(Job, ("model", "name")).choices == ("llama", "digits")


def test_none_is_no_option_of_a_file() -> None:
    assert [option.type for option in options_of(int | None)] == [int]


def test_every_table_is_listed_once() -> None:
    assert [spot.place for spot in tables_under(root_node(Job))] == [
        "run",
        "model",
        "train",
        "optim",
        "optim.groups.0",
        "optim.schedule",
        "layout",
    ]


class Common(ConfigTable):
    order: Literal["full", "none"] = "full"


class First(Common):
    kind: Literal["first"] = "first"


class Second(Common):
    kind: Literal["second"] = "second"


class Mine(Common):
    kind: str


class Chosen(ConfigTable):
    part: First | Second | Mine


def test_choices_that_all_kinds_share_choose_nothing() -> None:
    assert node_at(Chosen, ("part",)).tag_key == "kind"
