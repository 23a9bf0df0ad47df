"""What the documentation shows is true: blocks run, quotes match, commands parse, jobs load and links lead.

A block of Python is marked by what follows the language: ``run`` is executed (the marked blocks of a page are one
program), ``from FILE`` is compared with that file, and one without a mark must at least be Python.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

import closeranks
from closeranks.cli.main import build_app
from closeranks.elastic.config import ElasticConfig
from closeranks.elastic.faults.fault import KINDS
from closeranks.facts.shapes import digits, llama, pairs, recommender
from closeranks.lab.compare.config import CompareConfig, load_compare
from closeranks.run.components.component import Component
from closeranks.run.job.job import Job, load_job
from tests.docs.pages import (
    ADDED,
    PAGES,
    ROOT,
    Block,
    all_blocks,
    anchors,
    blocks,
    code_spans,
    commands,
    links,
    name_of,
    prose,
    shown_lines,
    spoken_commands,
)
from tests.sync.compress.names import COMPRESSORS

README = ROOT / "README.md"
RUNNABLE = [page for page in PAGES if any(block.mark == "run" for block in blocks(page))]
BASE: dict[str, Any] = {"model": {"name": "llama"}, "data": {"name": "text"}, "train": {"steps": 10}}
DRIVER = """
import json, os, sys, traceback, warnings
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*pin_memory.*")
failures = {}
for name, text in json.load(sys.stdin).items():
    try:
        exec(compile(text, name, "exec"), {"__name__": "__main__"})
    except BaseException:
        failures[name] = traceback.format_exc()
json.dump(failures, open(sys.argv[1], "w"))
"""


def program_of(page: Path) -> str:
    """The runnable blocks of a page at the lines where they stand, so that a traceback names the page's own line."""
    text = ""
    for block in blocks(page):
        if block.mark == "run":
            text += "\n" * (block.line - text.count("\n")) + block.text
    return text


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """All pages run in one process of their own: torch is imported once, and no registry of ours is changed."""
    folder = tmp_path_factory.mktemp("docs")
    programs = json.dumps({name_of(page): program_of(page) for page in RUNNABLE})
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "failures.json"], input=programs, cwd=folder, text=True, timeout=300, check=False
    )
    assert done.returncode == 0
    told: dict[str, str] = json.loads((folder / "failures.json").read_text())
    return told


@pytest.mark.parametrize("page", RUNNABLE, ids=name_of)
def test_marked_python_runs(page: Path, failures: dict[str, str]) -> None:
    assert name_of(page) not in failures, failures[name_of(page)]


def test_there_is_python_that_runs() -> None:
    assert {"docs/config.md", "docs/models.md", "docs/python.md", "docs/rooms.md"} <= {name_of(p) for p in RUNNABLE}


@pytest.mark.parametrize("block", all_blocks("python"), ids=lambda block: block.place)
def test_python_is_quoted_as_it_is(block: Block) -> None:
    if block.mark.startswith("from "):
        source = (ROOT / block.mark.removeprefix("from ")).read_text()
        assert block.text.strip() in source, f"{block.place} is not what {block.mark} says"
    else:
        assert block.mark in ("", "run"), f"{block.place} has the unknown mark '{block.mark}'"
        compile(block.text, block.place, "exec")


def test_the_diff_leads_from_a_plain_loop_to_the_example(tmp_path: Path) -> None:
    (block,) = [block for block in blocks(README) if block.language == "diff"]
    lines = [line or " " for line in block.text.splitlines()]
    after = "\n".join(line[1:] for line in lines if line[0] in " +")
    assert after in (ROOT / "examples" / "own_loop.py").read_text()
    assert len([line for line in lines if line[0] == "+" and line[1:].strip()]) == 5
    before = "\n".join(line[1:] for line in lines if line[0] in " -")
    compile(before, block.place, "exec")
    assert "closeranks" not in before


@pytest.mark.parametrize("block", [b for b in all_blocks("toml") if b.mark == "compare"], ids=lambda block: block.place)
def test_comparisons_load(block: Block, tmp_path: Path) -> None:
    (tmp_path / "compare.toml").write_text(block.text)
    assert load_compare(tmp_path / "compare.toml").setting


@pytest.mark.parametrize("block", [b for b in all_blocks("toml") if b.mark != "compare"], ids=lambda block: block.place)
def test_job_files_load(block: Block, tmp_path: Path) -> None:
    """README's is complete; elsewhere a page may show the tables it speaks of."""
    (tmp_path / "job.toml").write_text(block.text)
    missing = {name: table for name, table in BASE.items() if name not in tomllib.loads(block.text)}
    assert block.page != README or not missing
    load_job(tmp_path / "job.toml", extra=missing)


@pytest.mark.parametrize(("place", "words"), commands(), ids=lambda value: value if isinstance(value, str) else None)
def test_commands_parse(place: str, words: list[str]) -> None:
    if not words[0].startswith("-"):
        params = verb(place, words[0]).make_context(words[0], words[1:]).params
        assert words[0] not in ("train", "config") or settings_are_known(params)


def test_commands_in_running_text_have_a_verb() -> None:
    assert spoken_commands()
    for place, words in spoken_commands():
        if words[0] not in ("--help", "--version"):
            verb(place, words[0])


def test_scripts_that_are_shown_take_the_options_they_are_shown_with() -> None:
    shown = [(place, re.match(r"(?:\w+=\S+ )*(?:\S*/)?python (\S+\.py)(.*)", line)) for place, line in shown_lines()]
    found = [(place, ROOT / match[1], match[2]) for place, match in shown if match]
    assert len(found) >= 20
    for place, script, words in found:
        assert script.is_file(), f"{place} runs {script}"
        for option in re.findall(r" (--[\w-]+)", words):
            assert f'"{option}"' in script.read_text(), f"{place} passes {option} to {script}"


def test_targets_and_modules_that_are_shown_exist() -> None:
    targets = set(re.findall(r"(?m)^([a-z][\w-]*):", (ROOT / "Makefile").read_text()))
    for place, line in shown_lines():
        if made := re.match(r"(?:\w+=\S+ )*make ([a-z][\w-]*)", line):
            assert made[1] in targets, f"{place} shows make {made[1]}"
        if module := re.match(r"(?:\S*/)?python -m (tests\.[\w.]+)", line):
            path = ROOT / module[1].replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), f"{place} runs {module[1]}"


@functools.cache
def all_verbs() -> dict[str, Any]:
    return typer.main.get_command(build_app()).commands  # type: ignore[attr-defined, no-any-return]


def verb(place: str, name: str) -> Any:
    assert name in all_verbs(), f"{place} shows `closeranks {name}`, which is no verb"
    return all_verbs()[name]


def settings_are_known(params: dict[str, Any]) -> bool:
    """The file that is named, if it is one of ours, with the settings that are shown."""
    job, overrides = params["job"], list(params["overrides"] or [])
    if job is not None and (ROOT / job).is_file():
        load_job(ROOT / job, overrides)
    return True


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links to {link}, a heading that is not there"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for span in code_spans(page):
        path, _, test = span.partition("::")
        if path in ADDED or not re.fullmatch(r"(src|tests|examples|benchmarks)/[\w./-]+", path):
            continue
        assert (ROOT / path).exists(), f"{name_of(page)} names {path}"
        assert not test or f"def {test}(" in (ROOT / path).read_text(), f"{name_of(page)} names {span}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = {README}, [README]
    while waiting:
        page = waiting.pop()
        for link in links(page):
            target = (page.parent / link.partition("#")[0]).resolve()
            if target in PAGES and target not in reached:
                reached.add(target)
                waiting.append(target)
    assert not set(PAGES) - reached


def test_the_tables_of_a_job_are_all_told() -> None:
    told = set(re.findall(r"(?m)^\| `\[(\w+)\]`", (ROOT / "docs" / "config.md").read_text()))
    assert told == set(Job.model_fields)


def test_the_keys_of_elastic_are_all_told_with_their_defaults() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    told = dict(re.findall(r"(?m)^\| `(\w+)` \| ([^|]+) \|", page))
    keys = {name: json.dumps(field.default) for name, field in ElasticConfig.model_fields.items()}
    assert {name: json.dumps(json.loads(value)) for name, value in told.items()} == {
        name: value.removesuffix(".0") for name, value in keys.items()
    }


def test_the_keys_of_a_comparison_are_all_told() -> None:
    told = set(re.findall(r"(?m)^\| `\[?\[?(\w+)", (ROOT / "docs" / "compare.md").read_text()))
    assert set(CompareConfig.model_fields) <= told


def test_compressors_and_faults_are_all_told() -> None:
    rows = {page: (ROOT / "docs" / f"{page}.md").read_text() for page in ("sync", "drills")}
    assert set(COMPRESSORS) <= set(re.findall(r"(?m)^\| `(\w+)` \|", rows["sync"]))
    assert set(KINDS) <= set(re.findall(r"(?m)^\| `(\w+)\(", rows["drills"]))


def test_the_methods_of_a_component_are_all_told() -> None:
    told = {re.split(r"\W", span)[0] for span in code_spans(ROOT / "docs" / "components.md")}
    assert {name for name in vars(Component) if not name.startswith("_")} <= told


def test_public_names_are_all_told() -> None:
    text = prose(ROOT / "docs" / "python.md").rpartition("## What is public")[2]
    told = set(re.findall(r"`(\w+)`", text))
    assert set(closeranks.__all__) <= told


def test_parameters_are_counted_right() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \|(.*)$", (ROOT / "docs" / "models.md").read_text())
    counts = {name: {int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*\b", rest)} for name, rest in rows}
    for name, shape in llama.PRESETS.items():
        figures = {llama.num_params(shape), shape.dim, shape.num_layers, shape.num_heads, shape.num_kv_heads}
        assert figures | {shape.ffn_dim, shape.vocab_size} <= counts[name], name
    assert sum(map(math.prod, digits.parameter_shapes(digits.DigitsShape()).values())) in counts["digits"]
    assert sum(map(math.prod, pairs.parameter_shapes(pairs.PairsShape()).values())) in counts["pairs"]
    shape = recommender.RecommenderShape()
    assert sum(map(math.prod, recommender.parameter_shapes(shape).values())) in counts["recommender"]


def test_the_readme_stays_short_and_shows_one_table() -> None:
    text = README.read_text()
    assert 900 <= len(text.split()) <= 1200
    (table,) = re.findall(r"(?m)^\|[-|]+\n((?:\|.*\n)+)", text)
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    assert [row[0].partition(":")[0] for row in rows] == ["recovery", "GPU", "overhead", "checkpoint", "data"]
    assert all(re.fullmatch(r"`[^`]+`", row[-1]) for row in rows), "each has its command"


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    named = {(index.parent / link.partition("#")[0]).resolve() for link in links(index)}
    assert not {page for page in PAGES if page.parent == index.parent} - named - {index}


def test_the_picture_is_small() -> None:
    assert (ROOT / "docs" / "demo.png").stat().st_size < 150_000


def test_the_pages_speak_plainly() -> None:
    for page in PAGES:
        text = page.read_text()
        assert text.isascii() or not re.search("[\U0001f000-\U0001faff\u2600-\u27bf]", text), name_of(page)
        assert str(ROOT) not in text
        assert "/tmp/" not in text
