"""The patches of docs/extending.md: each applies, touches the files that the page lists, and passes its tests.

A patch is applied to a copy of the working tree, and its tests run there, on the copy's package.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import ADDED, ROOT

PAGE = ROOT / "docs" / "extending.md"


@dataclass(frozen=True)
class Patch:
    """One section of the page."""

    name: str
    num_files: int
    files: frozenset[str]
    commands: tuple[tuple[str, ...], ...]
    """Arguments of pytest."""

    @classmethod
    def of(cls, section: str) -> Patch:
        (name,) = re.findall(r"\]\(patches/([\w-]+)\.patch\)", section)
        (number,) = re.findall(r"touches\s+\*\*(\d+) files\*\*", section)
        files = re.findall(r"(?m)^\| `([^`]+)` \|", section)
        commands = re.findall(r"(?m)^\.venv/bin/python -m pytest (.+)$", section)
        return cls(name, int(number), frozenset(files), tuple(tuple(shlex.split(command)) for command in commands))

    @property
    def path(self) -> Path:
        return ROOT / "docs" / "patches" / f"{self.name}.patch"


PATCHES = [Patch.of(section) for section in PAGE.read_text().split("\n## ")[1:]]
COMMANDS = [(patch, command) for patch in PATCHES for command in patch.commands]


def run(command: Sequence[str], folder: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
    env |= {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-5000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def sources() -> list[str]:
    """Tracked and new files of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copied(folder: Path) -> Path:
    for name in sources():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    run(["git", "init", "-q"], folder)  # git apply takes no file outside the repository it is called in
    return folder


def patched(patch: Patch, folder: Path) -> Path:
    """A copy of the working tree with the patch applied."""
    copied(folder)
    run(["git", "apply", "--check", str(patch.path)], folder)
    run(["git", "apply", str(patch.path)], folder)
    return folder


def differences(folder: Path) -> set[str]:
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    names = {name for name in found if not name.startswith(".git/")}
    assert names >= set(sources()), "a patch adds, it removes nothing"
    return {name for name in names if not is_same(ROOT / name, folder / name)}


def is_same(one: Path, other: Path) -> bool:
    return one.exists() and one.read_bytes() == other.read_bytes()


def test_every_patch_is_on_the_page() -> None:
    assert {patch.name for patch in PATCHES} == {path.stem for path in (ROOT / "docs" / "patches").iterdir()}
    assert len(PATCHES) == 3
    assert all(patch.commands for patch in PATCHES)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_applies_and_touches_what_the_page_says(tmp_path: Path, patch: Patch) -> None:
    folder = patched(patch, tmp_path)
    touched = differences(folder)
    assert touched == patch.files
    assert len(touched) == patch.num_files
    code = sorted(name for name in touched if name.endswith(".py"))
    run([sys.executable, "-m", "ruff", "check", "--no-cache", *code], folder)
    run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *code], folder)


@pytest.mark.parametrize(
    ("patch", "command"), COMMANDS, ids=[f"{one.name}-{1 + one.commands.index(words)}" for one, words in COMMANDS]
)
def test_the_tests_of_a_patch_pass(tmp_path: Path, patch: Patch, command: Sequence[str]) -> None:
    folder = patched(patch, tmp_path)
    used = run([sys.executable, "-c", "import closeranks; print(closeranks.__file__)"], folder)
    assert Path(used.strip()).is_relative_to(folder), "the package of the copy is tested, not this one"
    said = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *command], folder)
    assert re.search(r"\d+ passed", said), said


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_that_no_longer_applies_is_found(tmp_path: Path, patch: Patch) -> None:
    """Every file that it changes is one it must fit."""
    copied(tmp_path)
    for name in sorted(patch.files - ADDED):
        before = (tmp_path / name).read_bytes()
        (tmp_path / name).write_text("another text\n")
        with pytest.raises(AssertionError, match=f"{name}: patch does not apply"):
            run(["git", "apply", "--check", str(patch.path)], tmp_path)
        (tmp_path / name).write_bytes(before)
