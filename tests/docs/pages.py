"""What do the pages of the documentation hold? Markdown in, blocks, links and commands out. Pure, and no torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/decisions/*.md")), key=lambda path: path.as_posix()
)


ADDED = frozenset(
    name
    for path in ROOT.glob("docs/patches/*.patch")
    for name in re.findall(r"(?m)^--- /dev/null\n\+\+\+ b/(.+)$", path.read_text())
)
"""Files that the patches of docs/extending.md would add: the page names them, and they are not here."""


@dataclass(frozen=True)
class Block:
    """A fenced block; ``mark`` is what follows the language: ``run``, ``from FILE``, or nothing."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def place(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        fence = re.fullmatch(r"( *)```(\w*) ?(.*)", lines[number])
        number += 1
        if fence is None:
            continue
        first = number
        while lines[number].strip() != "```":
            number += 1
        text = "".join(f"{line.removeprefix(fence[1])}\n" for line in lines[first:number])
        yield Block(page, first, fence[2], fence[3].strip(), text)
        number += 1


def all_blocks(*languages: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language in languages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page.read_text())


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"(?m)^#+ (.+)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower().replace(" ", "-") for heading in headings}


def code_spans(page: Path) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def commands() -> list[tuple[str, list[str]]]:
    """Every ``closeranks ...`` of a shell block, as (place, words after it)."""
    found = []
    for block in all_blocks("bash", "sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if "closeranks" in words:
                found.append((block.place, words[words.index("closeranks") + 1 :]))
    return found


def spoken_commands() -> list[tuple[str, list[str]]]:
    """Every ``closeranks ...`` of running text, which may leave away what it is not about."""
    spans = [(name_of(page), span) for page in PAGES for span in code_spans(page)]
    return [(place, shlex.split(span)[1:]) for place, span in spans if re.match(r"closeranks [a-z-]", span)]


def shown_lines() -> list[tuple[str, str]]:
    """Every line of a shell block and every code span, as (place, text): what somebody may copy and run."""
    spans = [(name_of(page), span) for page in PAGES for span in code_spans(page)]
    shell = ((block.place, block.text.replace("\\\n", " ")) for block in all_blocks("bash", "sh"))
    return spans + [(place, line.partition(" #")[0]) for place, text in shell for line in text.splitlines()]
