from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from closeranks.core.config.load import load
from closeranks.core.config.origin import COMMAND_LINE, DEFAULT, PYTHON, ValueOrigin
from closeranks.core.errors import ConfigError, Problem

from .conftest import Load, Problems
from .job_shapes import DigitsConfig, GroupConfig, Job, LlamaConfig, UserModelConfig, batches_divide, layout_fits_seed

MINIMAL = "[train]\nsteps = 5\n"


def test_defaults_fill_what_the_file_leaves_out(load_text: Load) -> None:
    loaded = load_text(MINIMAL)
    assert loaded.value.train.steps == 5
    assert loaded.value.optim.betas == (0.9, 0.95)
    assert loaded.path is not None
    assert loaded.path.name == "job.toml"


def test_sources_merge_in_order(load_text: Load) -> None:
    text = MINIMAL + "global_batch = 16\nmicro_batch = 2\n[run]\nseed = 1\n"
    loaded = load_text(text, "train.micro_batch=4", extra={"train": {"micro_batch": 3, "global_batch": 12}})
    assert (loaded.value.train.global_batch, loaded.value.train.micro_batch, loaded.value.run.seed) == (12, 4, 1)
    assert loaded.origins["train.steps"] == ValueOrigin("file", "job.toml:2")
    assert loaded.origins["train.global_batch"] == PYTHON
    assert loaded.origins["train.micro_batch"] == COMMAND_LINE
    assert loaded.origins["train.precision"] == DEFAULT
    assert loaded.origins["run.seed"] == ValueOrigin("file", "job.toml:6")


def test_the_last_of_equal_overrides_wins(load_text: Load) -> None:
    assert load_text("", "train.steps=1", "train.steps=2").value.train.steps == 2


def test_a_key_can_be_unset_on_the_command_line(load_text: Load, problems: Problems) -> None:
    text = MINIMAL + "global_batch = 16\n[run]\nseed = 1\n[optim]\nlr = 0.5\n"
    loaded = load_text(text, "~train.global_batch", "~run", "~optim.betas", extra={"optim": {"lr": 0.25}})
    assert loaded.value.train.global_batch == load_text(MINIMAL).value.train.global_batch
    assert loaded.value.run.seed == 0
    assert loaded.value.optim.lr == 0.25
    assert loaded.origins["train.global_batch"] == loaded.origins["run.seed"] == DEFAULT
    # in the order of the command line, and what Python said too
    assert load_text(text, "optim.lr=2", "~optim.lr", extra={"optim": {"lr": 0.25}}).origins["optim.lr"] == DEFAULT
    assert load_text(text, "~optim.lr", "optim.lr=2").value.optim.lr == 2
    # what must be set is asked for again
    assert any(problem.place == "train.steps" for problem in problems(text, "~train.steps"))


def test_an_element_of_an_array_cannot_be_unset(problems: Problems) -> None:
    text = MINIMAL + '[[optim.groups]]\npattern = "*.bias"\n'
    (problem,) = problems(text, "~optim.groups.0")
    assert str(problem) == (
        "optim.groups.0 [command line]: optim.groups is an array, and its elements cannot be unset one by one. "
        "Give the whole array, as optim.groups=[...]."
    )


def test_every_value_has_exactly_one_origin(load_text: Load) -> None:
    text = '[train]\nsteps=1\n[model]\nname="a:b"\nargs={x=1, "y.z"=2}\n[[optim.groups]]\npattern="*"\n'
    origins = load_text(text).origins
    assert str(origins["model.args.x"]) == "job.toml:5"
    assert str(origins['model.args."y.z"']) == "job.toml:5"
    assert str(origins["optim.groups.0.pattern"]) == "job.toml:7"
    assert origins["optim.groups.0.lr_scale"] == DEFAULT
    assert origins["model.metrics"] == DEFAULT
    assert "model.args" not in origins


def test_an_array_replaced_on_the_command_line_takes_its_origins_along(load_text: Load) -> None:
    text = MINIMAL + '[[optim.groups]]\npattern="a"\n[[optim.groups]]\npattern="b"\n'
    loaded = load_text(text, 'optim.groups=[{pattern="c", lr_scale=2}]')
    assert loaded.value.optim.groups == (GroupConfig(pattern="c", lr_scale=2.0),)
    assert loaded.origins["optim.groups.0.pattern"] == COMMAND_LINE
    assert "optim.groups.1.pattern" not in loaded.origins


def test_an_override_reaches_into_an_array_of_tables(load_text: Load, problems: Problems) -> None:
    text = MINIMAL + '[[optim.groups]]\npattern="a"\n'
    loaded = load_text(text, "optim.groups.0.lr_scale=3")
    assert loaded.value.optim.groups[0].lr_scale == 3.0
    assert str(loaded.origins["optim.groups.0.pattern"]) == "job.toml:4"
    (problem,) = problems(text, "optim.groups.1.lr_scale=3")
    assert str(problem) == (
        "optim.groups.1.lr_scale [command line]: optim.groups has 1 element, counted from 0. "
        "Give the whole array, as optim.groups=[...]."
    )


def test_a_table_from_python_stands_for_the_whole_table(load_text: Load) -> None:
    loaded = load_text(MINIMAL + '[model]\npreset="8b"\n', extra={"model": DigitsConfig(channels=(4,))})
    assert loaded.value.model == DigitsConfig(channels=(4,))
    assert loaded.origins["model.name"] == PYTHON


def test_python_alone_is_enough() -> None:
    loaded = load(Job, None, (), extra={"train": {"steps": 3}, "optim": {"groups": (GroupConfig(pattern="x"),)}})
    assert loaded.value.optim.groups == (GroupConfig(pattern="x"),)
    assert loaded.path is None


def test_problems_from_python_say_so() -> None:
    with pytest.raises(ConfigError) as caught:
        load(Job, None, (), extra={"train": {"steps": "3"}})
    assert [str(p) for p in caught.value.problems] == [
        "train.steps [python]: expected a whole number, got the text '3'. Write train.steps = 3."
    ]


def test_a_loaded_job_does_not_change(load_text: Load) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_text(MINIMAL).value.train.steps = 6  # type: ignore[misc]


def test_a_job_of_all_sources_does_not_share_state_with_them() -> None:
    args = {"hidden": [1, 2]}
    loaded = load(Job, None, ("train.steps=1",), extra={"model": {"name": "a:b", "args": args}})
    args["hidden"].append(3)
    assert loaded.value.model == UserModelConfig(name="a:b", args={"hidden": [1, 2]})


def test_checks_run_on_a_sound_job_and_learn_their_origin(problems: Problems) -> None:
    (problem,) = problems("[train]\nsteps = 1\nmicro_batch = 3\n", checks=[batches_divide, layout_fits_seed])
    assert (problem.place, problem.origin) == ("train.micro_batch", "job.toml:3")


def test_a_check_that_needs_a_broken_table_is_skipped_and_the_others_run(problems: Problems) -> None:
    text = "[train]\nsteps = 0\nmicro_batch = 3\n[layout]\ndata = 3\n[run]\nseed = 3\n"
    found = problems(text, checks=[batches_divide, layout_fits_seed])
    assert [p.place for p in found] == ["train.steps", "layout.data"]


def test_a_check_with_a_defect_of_its_own_is_not_silenced(load_text: Load) -> None:
    def broken(job: Job) -> list[object]:
        return [job.run.no_such_field]  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="no_such_field"):
        load_text("[train]\nsteps = 0\n", checks=[broken])


def test_a_line_that_is_not_toml_does_not_echo(problems: Problems) -> None:
    """The kind of the model is not known, so nothing is said of its other keys, nor is it called missing."""
    text = "[model]\nname = digits\nchannels = [1]\n[train]\nsteps = many\nglobl_batch = 1\n"
    found = problems(text, checks=[batches_divide])
    assert [p.place for p in found] == ["model.name", "train.steps", "train.globl_batch"]


def test_all_problems_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    text = "[train]\nsteps = 0\n[optim]\nlr = -1.0\n[run]\nsede = 1\n"
    found = problems(text, "run.name", "layout.data=0")
    assert [(p.place, p.origin) for p in found] == [
        ("train.steps", "job.toml:2"),
        ("optim.lr", "job.toml:4"),
        ("run.sede", "job.toml:6"),
        ("run.name", "command line"),
        ("layout.data", "command line"),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.one_of(
        st.text(max_size=80),
        st.lists(
            st.sampled_from(
                [
                    "[train]",
                    "[[optim.groups]]",
                    "[model",
                    "steps = 1",
                    "steps = ",
                    "a = [",
                    '"',
                    "= 1",
                    "name = 'x",
                    "]",
                    "{",
                ]
            ),
            max_size=8,
        ).map("\n".join),
    ),
    overrides=st.lists(
        st.one_of(
            st.text(max_size=20),
            st.builds(
                "{}={}".format,
                st.sampled_from(
                    ["train.steps", "model", "layout", "optim.groups", "optim.groups.0", "model.args.x", "x"]
                ),
                st.text(max_size=12),
            ),
        ),
        max_size=3,
    ),
)
def test_whatever_is_written_the_answer_is_a_job_or_its_problems(
    tmp_path: Path, text: str, overrides: list[str]
) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    found: tuple[Problem, ...] | None = None
    try:
        load(Job, path, overrides)
    except ConfigError as error:
        found = error.problems
    assert found is None or found
    for problem in found or ():
        assert problem.place
        assert problem.what
        assert not problem.what.endswith(".")


def test_loading_imports_neither_torch_nor_numpy_nor_rich() -> None:
    code = (
        "import sys, closeranks.core.config.load, closeranks.core.config.explain, closeranks.core.config.json_schema;"
        "print(sorted({'torch', 'numpy', 'rich', 'typer'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_a_union_keeps_its_kind(load_text: Load) -> None:
    assert load_text(MINIMAL).value.model == LlamaConfig()
    assert load_text(MINIMAL, "model.name=digits").value.model == DigitsConfig()
    assert load_text(MINIMAL, "model.name=mine.py:make").value.model == UserModelConfig(name="mine.py:make")


@pytest.mark.parametrize("text", [f"[{'.'.join('a' * 5000)}]\nx = 1\n", "[run]\nhooks = " + "[" * 5000 + "]" * 5000])
def test_a_file_that_nests_too_deeply_is_refused_in_one_sentence(load_text: Load, text: str) -> None:
    with pytest.raises(ConfigError, match=r"1 problem in the job:\n.*(nests|nested)"):
        load_text(text)
