"""``closeranks config`` says of every example what ``train`` would do, and its schema lets each one pass."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from closeranks.run.job.job import load_job
from tests.cli.calling import call
from tests.cli.commands import ROOT, TINY

NO_JOBS = ("compare", "failures")
EXAMPLES = sorted(path for path in (ROOT / "examples").rglob("*.toml") if path.parent.name not in NO_JOBS)
Node = dict[str, Any]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_what_config_prints_is_the_same_job(path: Path, tmp_path: Path) -> None:
    changes = ["optim.lr=0.25", "telemetry.profile=2:4", 'run.name=it\'s "mine"']
    printed = call("config", path, *changes, cwd=tmp_path).out
    (tmp_path / "again.toml").write_text(printed)
    assert load_job(tmp_path / "again.toml").value == load_job(path, changes).value


def leaves(table: Node, place: str = "") -> set[str]:
    """Dotted names of all values; a list or an empty table is one."""
    found: set[str] = set()
    for key, value in table.items():
        inside = isinstance(value, dict) and value
        found |= leaves(value, f"{place}{key}.") if inside else {f"{place}{key}"}
    return found


def test_every_value_is_explained_with_one_origin(tmp_path: Path) -> None:
    done = call("config", TINY, "--explain", "optim.lr=0.25", "train.precision=bf16", cwd=tmp_path)
    origins = {}
    for line in done.out.splitlines():
        key, _, rest = line.partition(" = ")
        (origins[key],) = re.findall(r"  (default|command line|\S*tiny\.toml:\d+)(?=  |$)", rest)
    assert {key for key, origin in origins.items() if origin == "command line"} == {"optim.lr", "train.precision"}
    written = leaves(tomllib.loads(Path(TINY).read_text()))
    lines = Path(TINY).read_text().splitlines()
    for key in written - {"optim.lr"}:
        number = int(origins[key].rpartition(":")[2])
        assert lines[number - 1].split("=")[0].strip() == key.rpartition(".")[2], "the very line"
    assert {key for key, origin in origins.items() if ":" in origin} == written - {"optim.lr"}
    assert leaves(load_job(Path(TINY)).value.model_dump(mode="json")) <= set(origins)


# Just enough of JSON Schema to check a job: what our schema uses, and an error for what it does not.

_KINDS: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_IGNORED = {"$schema", "$defs", "title", "description", "default", "required", "additionalProperties", "$ref"}


def problems(node: Node, value: Any, root: Node, place: str = "") -> list[str]:
    found = problems(resolved(node, root), value, root, place) if "$ref" in node else []
    kind = node.get("type")
    if kind and (not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{place} is no {kind}"]
    for word, limit in node.items():
        if word == "type" or word in _IGNORED:
            continue
        found += [f"{place} {word} {limit}"] if not _holds(word, limit, value, root) else []
    if isinstance(value, dict):
        found += [f"{place}.{key} is missing" for key in node.get("required", []) if key not in value]
        known = node.get("properties", {})
        for key, child in value.items():
            if key in known:
                found += problems(known[key], child, root, f"{place}.{key}")
            elif node.get("additionalProperties") is False:
                found.append(f"{place}.{key} is unknown")
    return found


def resolved(node: Node, root: Node) -> Node:
    return root["$defs"][node["$ref"].removeprefix("#/$defs/")]  # type: ignore[no-any-return]


def _holds(word: str, limit: Any, value: Any, root: Node) -> bool:
    match word:
        case "properties":
            return True
        case "const":
            return bool(value == limit)
        case "enum":
            return value in limit
        case "minimum" | "ge":  # pydantic's own word where it could not say it in the schema's: see below
            return bool(value >= limit)
        case "maximum":
            return bool(value <= limit)
        case "exclusiveMinimum":
            return bool(value > limit)
        case "exclusiveMaximum":
            return bool(value < limit)
        case "anyOf":
            return any(not problems(one, value, root) for one in limit)
        case "not":
            return bool(problems(limit, value, root))
        case "items":
            return not any(problems(limit, item, root) for item in value)
        case "prefixItems":
            return not any(problems(one, item, root) for one, item in zip(limit, value, strict=False))
        case "minItems" | "minLength":
            return len(value) >= limit
        case "maxItems" | "maxLength":
            return len(value) <= limit
    raise AssertionError(f"the schema says {word!r}, which this check does not know")


@cache
def schema() -> Node:
    return json.loads(call("config", "--schema", cwd=ROOT).out)  # type: ignore[no-any-return]


def test_an_editor_understands_every_word_of_the_schema() -> None:
    assert '"ge":' not in json.dumps(schema())


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_lets_the_examples_pass(path: Path) -> None:
    assert problems(schema(), tomllib.loads(path.read_text()), schema()) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_schema_lets_whole_jobs_pass(path: Path, tmp_path: Path) -> None:
    """With every default written out."""
    whole = tomllib.loads(call("config", path, cwd=tmp_path).out)
    assert problems(schema(), whole, schema()) == []


@pytest.mark.parametrize(
    "text",
    [
        "[trian]\nsteps = 5",
        '[train]\nsteps = "many"',
        "[train]\nsteps = 0",
        "[train]\nstepz = 5",
        '[train]\nprecision = "int8"',
        "[optim]\nclip = -1.0",
        "[layout]\nzero = 4",
        '[model]\nname = "digits"\npreset = "tiny"',
    ],
)
def test_the_schema_marks_mistakes(text: str) -> None:
    whole = {"model": {}, "data": {}, "train": {"steps": 1}}
    assert problems(schema(), whole, schema()) == []
    assert problems(schema(), {**whole, **tomllib.loads(text)}, schema()) != []
