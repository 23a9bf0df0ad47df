"""What the pages call proven is collected by CI in full: in ``make test``, or in a part of ``make test-part``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import MARKS
from tests.docs.pages import ADDED, PAGES, ROOT, name_of, prose
from tests.parts import NUM_PARTS, assign, file_of, read_durations

pytestmark = pytest.mark.timeout(600)  # where this file is run alone, it collects all others

COLLECT = """
import json, pytest, sys
from pathlib import Path

class Tell:
    def pytest_collection_finish(self, session):
        from tests.conftest import MARKS
        marks = {node: sorted(names) for node, names in session.config.stash[MARKS].items()}
        Path(sys.argv[1]).write_text(json.dumps(marks))

sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider"], plugins=[Tell()]))
"""


@dataclass(frozen=True)
class Claim:
    """A row of a table, or a paragraph, that names tests."""

    page: str
    text: str

    @property
    def is_row(self) -> bool:
        return self.text.startswith("|")

    @property
    def tests(self) -> list[str]:
        """Folders only in tables: elsewhere a folder is named as a place."""
        name = r"tests/[\w/]+(?:\.py(?:::.+)?)?" if self.is_row else r"tests/[\w/]*test_\w+\.py(?:::.+)?"
        spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", self.text))
        return [span for span in spans if re.fullmatch(name, span) and span not in ADDED]

    @property
    def counts(self) -> list[tuple[int, str]]:
        """As in "in 17 cases", "64 pairs of layouts", "2,000 of 2,000 flips"."""
        found = re.findall(r"(\d[\d,]*) (cases|pairs|layouts|flips)\b", self.text)
        return [(int(number.replace(",", "")), noun) for number, noun in found]


def claims(page: Path) -> Iterator[Claim]:
    for paragraph in prose(page).split("\n\n"):
        rows = paragraph.splitlines() if paragraph.startswith("|") else [paragraph]
        yield from (claim for row in rows if (claim := Claim(name_of(page), row)).tests)


CLAIMS = [claim for page in PAGES for claim in claims(page)]


@pytest.fixture(scope="module")
def marks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The marks of all tests there are: those of this session if it collected all files, else collected for this."""
    here = pytestconfig.stash[MARKS]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    if {file_of(node) for node in here} >= files:
        return here
    told = tmp_path_factory.mktemp("collected") / "marks.json"
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, str(told)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {node: set(names) for node, names in json.loads(told.read_text()).items()}


def selections(target: str) -> list[str]:
    """What a target of the Makefile passes to pytest's ``-m``."""
    recipe = re.search(rf"(?m)^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text())
    assert recipe, target
    return [quoted or word for quoted, word in re.findall(r"""\$\(PYTEST\).*? -m (?:"([^"]+)"|(\w+))""", recipe[1])]


def selects(expression: str, marks: Iterable[str]) -> bool:
    names = {name: name in marks for name in re.findall(r"\w+", expression)}
    return bool(eval(expression, {"__builtins__": {}}, names))


@pytest.fixture(scope="module")
def runs(marks: dict[str, set[str]]) -> dict[str, set[str]]:
    """Where CI runs each test: ``test``, and parts of the slow tier by number. Where it is always skipped: nowhere."""
    part = {node: str(number) for node, number in assign(marks, read_durations()).items()}
    fast, slow = selections("test"), selections("test-part")

    def where(node: str) -> set[str]:
        if "skip" in marks[node]:
            return set()
        in_parts = {part[node] for expression in slow if selects(expression, marks[node])}
        return in_parts | {"test" for expression in fast if selects(expression, marks[node])}

    return {node: where(node) for node in marks}


def named(test: str, nodes: Iterable[str]) -> list[str]:
    """The cases of a test, the tests of a file, or those of a folder."""
    return [node for node in nodes if node == test or node.startswith((f"{test}[", f"{test}::", f"{test}/"))]


def test_ci_runs_the_tests_and_a_part_of_the_slow_ones() -> None:
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert script[-2:] == ["make test", "make test-part"]
    assert selections("test") == ["not slow and not gpu"]
    assert selections("test-part") == ["slow and not gpu"]


def test_every_test_but_those_that_need_a_gpu_runs_once(marks: dict[str, set[str]], runs: dict[str, set[str]]) -> None:
    assert not [node for node, where in runs.items() if len(where) != (0 if "gpu" in marks[node] else 1)]
    assert {where for one in runs.values() for where in one} == {"test", *map(str, range(NUM_PARTS))}


@pytest.mark.parametrize("page", sorted({claim.page for claim in CLAIMS}))
def test_tests_that_a_page_names_are_run(page: str, runs: dict[str, set[str]]) -> None:
    """All of their cases; of a file that running text names, those that need no GPU."""
    for claim in CLAIMS:
        for test in claim.tests if claim.page == page else ():
            cases = named(test, runs)
            assert cases, f"{page} names {test}, which is not collected"
            left_out = [case for case in cases if not runs[case]]
            in_full = "::" in test or claim.is_row
            assert len(left_out) < (1 if in_full else len(cases)), (
                f"{page} names {test}, of which CI never runs {left_out}"
            )


def test_every_row_of_what_is_proven_names_a_test() -> None:
    tables = re.findall(r"(?m)^\| claim \|.*\n\|[-|]+\n((?:\|.*\n)+)", (ROOT / "docs" / "proofs.md").read_text())
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) >= 28
    assert all(Claim("docs/proofs.md", row).tests for row in rows)


def test_stated_numbers_of_cases_are_those_collected(marks: dict[str, set[str]]) -> None:
    stated = [(claim, number, noun) for claim in CLAIMS for number, noun in claim.counts]
    assert len(stated) >= 6
    for claim, number, noun in stated:
        per_case = import_module(module_of(claim.tests[0])).NUM_FLIPS if noun == "flips" else 1
        counted = {test: per_case * len(named(test, marks)) for test in claim.tests}
        assert number in counted.values(), f"{claim.page} says {number} {noun}: {counted}"


def module_of(test: str) -> str:
    return file_of(test).removesuffix(".py").replace("/", ".")


def test_the_table_of_layouts_is_what_was_tested(marks: dict[str, set[str]]) -> None:
    table = re.search(r"(?ms)^\| layout \| ranks \|.*?\n\n", (ROOT / "docs" / "layouts.md").read_text())
    assert table
    rows = re.findall(r"(?m)^\| `([^`]+)` \|", table[0])
    test = "tests/run/test_layouts.py::test_trains_the_same_model_as_one_process"
    assert sorted(f"{test}[{row}]" for row in rows) == sorted(named(test, marks))
