"""Every message a person can meet, whole: a change of wording shows here."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from closeranks.core.config.load import load
from closeranks.core.config.table import ConfigTable
from closeranks.core.errors import ConfigError
from tests.core.config.conftest import Problems

STEPS = "[train]\nsteps = 1\n"

CASES = {
    "text for a number": (
        '[train]\nsteps = "many"',
        "train.steps [job.toml:2]: expected a whole number, got the text 'many'. Write train.steps = 1.",
    ),
    "a number in quotes": (
        STEPS + '[optim]\nlr = "3e-4"',
        "optim.lr [job.toml:4]: expected a number, got the text '3e-4'. Write optim.lr = 0.0003.",
    ),
    "a fraction for a whole number": (
        "[train]\nsteps = 2.5",
        "train.steps [job.toml:2]: expected a whole number, got the number 2.5. Write train.steps = 1.",
    ),
    "a whole number written as a fraction": (
        "[train]\nsteps = 1e6",
        "train.steps [job.toml:2]: expected a whole number, got the number 1000000.0. Write train.steps = 1000000.",
    ),
    "true for a number": (
        "[train]\nsteps = true",
        "train.steps [job.toml:2]: expected a whole number, got true. Write train.steps = 1.",
    ),
    "a number for true": (
        STEPS + "[run]\ndeterministic = 0",
        "run.deterministic [job.toml:4]: expected true or false, got the number 0. Write run.deterministic = false.",
    ),
    "a number for text": (
        STEPS + "[run]\nname = 7",
        'run.name [job.toml:4]: expected text in quotes, got the number 7. Write run.name = "7".',
    ),
    "a date for text": (
        STEPS + "[run]\nname = 2030-01-31",
        "run.name [job.toml:4]: expected text in quotes, got the date or time 2030-01-31. "
        'Write run.name = "2030-01-31".',
    ),
    "one of several types": (
        STEPS + '[optim.schedule]\nwarmup = "x"',
        "optim.schedule.warmup [job.toml:4]: expected a number, got the text 'x'. Write optim.schedule.warmup = 0.05.",
    ),
    "a scalar for a table": (
        "train = 5",
        "train [job.toml:1]: expected a table, got the number 5. Write its keys under [train], such as steps = 1.",
    ),
    "a scalar for a union of tables": (
        "model = 'llama'\n" + STEPS,
        "model [job.toml:1]: expected a table, got the text 'llama'. "
        'Write its keys under [model], such as name = "llama".',
    ),
    "double brackets for one table": (
        "[[train]]\nsteps = 1",
        "train [job.toml:1]: expected a table, got an array of tables. Write [train] with single brackets, once.",
    ),
    "single brackets for an array": (
        STEPS + '[optim.groups]\npattern = "x"',
        "optim.groups [job.toml:3]: expected an array of tables, got a table. "
        "Write [[optim.groups]] with double brackets.",
    ),
    "too few in a pair": (
        STEPS + "[optim]\nbetas = [0.9]",
        "optim.betas [job.toml:4]: expected an array of 2 numbers, got an array of 1 value. "
        "Write optim.betas = [0.9, 0.95].",
    ),
    "too many in a pair": (
        STEPS + "[optim]\nbetas = [1, 2, 3]",
        "optim.betas [job.toml:4]: expected an array of 2 numbers, got an array of 3 values. "
        "Write optim.betas = [0.9, 0.95].",
    ),
    "a bad element": (
        STEPS + '[optim]\nbetas = [0.9, "0.95"]',
        "optim.betas.1 [job.toml:4]: expected a number, got the text '0.95'. Write 0.95 there.",
    ),
    "missing": (
        "[train]\n",
        "train.steps [job.toml:1]: it must be set (optimizer steps to take). Write train.steps = 1.",
    ),
    "missing table": ("", "train: the table [train] is missing. Add [train] and set steps."),
    "missing in an array": (
        STEPS + "[[optim.groups]]\nlr_scale = 2.0",
        "optim.groups.0.pattern [job.toml:3]: it must be set (which parameters, as a shell pattern on their names). "
        'Write pattern = "text" there.',
    ),
    "unknown key": (STEPS + "stepz = 3", "train.stepz [job.toml:3]: no such key. Did you mean 'steps'?"),
    "unknown key like none": (
        STEPS + "zzz = 3",
        "train.zzz [job.toml:3]: no such key. Known: steps, global_batch, micro_batch, precision.",
    ),
    "a key of another table": (
        STEPS + "lr = 0.1",
        "train.lr [job.toml:3]: no such key; `lr` is a key of [optim]. Write optim.lr = 0.1.",
    ),
    "a key of a nested table": (
        STEPS + "warmup = 10",
        "train.warmup [job.toml:3]: no such key; `warmup` is a key of [optim.schedule]. "
        "Write optim.schedule.warmup = 10.",
    ),
    "a key of an array": (
        STEPS + "pattern = 10",
        "train.pattern [job.toml:3]: no such key; `pattern` is a key of [[optim.groups]].",
    ),
    "a key outside any table": (
        "seed = 3\n" + STEPS,
        "seed [job.toml:1]: no such key; `seed` is a key of [run]. Write run.seed = 3.",
    ),
    "an unknown key outside any table": (
        "zzz = 3\n" + STEPS,
        "zzz [job.toml:1]: it is outside any table, and no table has such a key. "
        "Known: run, model, train, optim, layout.",
    ),
    "unknown table": (STEPS + "[optin]\nlr = 1.0", "optin [job.toml:3]: there is no such table. Did you mean [optim]?"),
    "unknown table inside one": (
        STEPS + "[optim.shedule]\n",
        "optim.shedule [job.toml:3]: no such key. Did you mean 'schedule'?",
    ),
    "below ge": (
        "[train]\nsteps = 0",
        "train.steps [job.toml:2]: it must be at least 1, but is 0. Write train.steps = 1.",
    ),
    "not above gt": (
        STEPS + "micro_batch = 0",
        "train.micro_batch [job.toml:3]: it must be above 0, but is 0. Write a number above 0.",
    ),
    "above le": (
        STEPS + "global_batch = 5000",
        "train.global_batch [job.toml:3]: it must be at most 4096, but is 5000. Write train.global_batch = 4096.",
    ),
    "not below lt": (
        STEPS + "[model]\ndropout = 1.5",
        "model.dropout [job.toml:4]: it must be below 1, but is 1.5. Write a number below 1.",
    ),
    "choice, near": (
        STEPS + 'precision = "bf61"',
        "train.precision [job.toml:3]: expected one of float32, bf16, fp16, float64, got the text 'bf61'. "
        "Did you mean 'bf16'?",
    ),
    "choice, far": (
        STEPS + 'precision = "half"',
        "train.precision [job.toml:3]: expected one of float32, bf16, fp16, float64, got the text 'half'. "
        'Write train.precision = "float32".',
    ),
    "unknown kind of table": (
        STEPS + '[model]\nname = "lama"\nwhatever = 1',
        "model.name [job.toml:4]: there is no model 'lama'. Did you mean 'llama'? "
        "Write your own as 'package.module:name'.",
    ),
    "a key of another kind of table": (
        STEPS + '[model]\nname = "digits"\npreset = "8b"',
        "model.preset [job.toml:5]: no such key where model.name is digits. Known: name, channels.",
    ),
    "a key that a kind of one's own lacks": (
        STEPS + '[model]\nname = "mine:net"\nchannels = 3',
        "model.channels [job.toml:5]: no such key where model.name is mine:net. Known: name, args, metrics.",
    ),
    "a validator of one key": (
        STEPS + '[model]\npreset = "tny"',
        "model.preset [job.toml:4]: there is no preset 'tny'. Did you mean 'tiny'?",
    ),
    "a validator of a whole table": (
        STEPS + '[optim.schedule]\nname = "constant"',
        "optim.schedule [job.toml:3]: a constant schedule has no warmup. Set warmup = 0.",
    ),
    "inside an inline table": (
        STEPS + '[optim]\nschedule = { name = "cosin" }',
        "optim.schedule.name [job.toml:4]: expected one of constant, cosine, got the text 'cosin'. "
        "Did you mean 'cosine'?",
    ),
    "under a dotted key": (
        STEPS + "optim.lr = 3",
        "train.optim [job.toml:3]: no such key. Known: steps, global_batch, micro_batch, precision.",
    ),
}


@pytest.mark.parametrize(("text", "message"), CASES.values(), ids=CASES)
def test_one_broken_file_one_clear_sentence(problems: Problems, text: str, message: str) -> None:
    assert [str(problem) for problem in problems(text)] == [message]


COMMAND_LINE_CASES = {
    "train.steps=many": "expected a whole number, got the text 'many'. Write train.steps=1.",
    "train.steps=": "expected a whole number, got an empty text. Write train.steps=1.",
    "run.deterministic=True": "expected true or false, got the text 'True'. Write run.deterministic=true.",
    "optim.lr=.001": "expected a number, got the text '.001'. Write optim.lr=0.001.",
    "optim.betas=0.9,0.99": "expected an array of 2 numbers, got the text '0.9,0.99'. Write optim.betas=[0.9, 0.95].",
    "train.lr=1": "no such key; `lr` is a key of [optim]. Write optim.lr=1.",
    "model.name=lama": "there is no model 'lama'. Did you mean 'llama'? Write your own as 'package.module:name'.",
    "layout.tensr=2": "no such key. Did you mean 'tensor'?",
}


@pytest.mark.parametrize(("override", "message"), COMMAND_LINE_CASES.items(), ids=COMMAND_LINE_CASES)
def test_the_fix_is_written_the_way_it_was_set(problems: Problems, override: str, message: str) -> None:
    text = "" if override.startswith("train.steps") else STEPS
    (problem,) = problems(text, override)
    assert f"{problem.what}. {problem.fix}" == message
    assert problem.origin == "command line"


def test_one_problem_per_place(problems: Problems) -> None:
    """A union of types gives the library one error for each member; a person gets one."""
    assert len(problems(STEPS + "[optim.schedule]\nwarmup = [1]\n")) == 1


def test_no_word_of_the_validation_library_shows(problems: Problems) -> None:
    for text, _ in CASES.values():
        for problem in problems(text):
            said = str(problem).lower()
            assert not any(
                word in said for word in ("input should", "pydantic", "dict", "nonetype", "tuple", "literal")
            )


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Rare(ConfigTable):
    """Constraints that the small job has no use for."""

    steps: int = Field(default=1, examples=[200])
    heads: int = Field(default=8, multiple_of=8)
    word: str = Field(default="abc", min_length=2, max_length=4, pattern="^[a-z]+$")
    sizes: tuple[int, ...] = Field(default=(1,), min_length=1)
    path: Path = Path("data")
    colour: Colour = Colour.RED
    finite: float = Field(default=1.0, allow_inf_nan=False)


class RareJob(ConfigTable):
    rare: Rare = Rare()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("steps", "many", "expected a whole number, got the text 'many'. Write rare.steps = 200."),
        ("heads", 12, "it must be a multiple of 8, but is 12. Write a multiple of 8."),
        ("word", "a", 'it must hold at least 2 characters, but has 1. Write rare.word = "abc".'),
        ("word", "abcde", 'it must hold at most 4 characters, but has 5. Write rare.word = "abc".'),
        ("word", "A1", "the text 'A1' does not have the right form (^[a-z]+$). "),
        ("sizes", [], "it must hold at least 1 values, but has 0. Write rare.sizes = [1]."),
        ("path", 5, 'expected a path in quotes, got the number 5. Write rare.path = "data".'),
        ("colour", "green", "it should be 'red' or 'blue', but is the text 'green'. "),
        ("finite", float("inf"), "it should be a finite number, but is the number inf. "),
    ],
)
def test_rare_constraints_read_as_plainly(key: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(RareJob, None, (), extra={"rare": {key: value}})
    (problem,) = caught.value.problems
    assert problem.place == f"rare.{key}"
    assert f"{problem.what}. {problem.fix}" == message
