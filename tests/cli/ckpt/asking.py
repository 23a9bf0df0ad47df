"""Ask one verb of ``closeranks ckpt`` in this process, through the front door that turns errors into exit codes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
import typer

from closeranks.cli import main


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str


class Asker:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def ask(self, verb: ModuleType, *words: object) -> Answer:
        app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
        verb.register(app)
        app.callback()(lambda: None)  # with one command alone typer would take its name for an argument
        name = verb.__name__.rpartition(".")[2].replace("_", "-")
        self._monkeypatch.setattr(main, "app", app)
        self._monkeypatch.setattr(sys, "argv", ["closeranks", name, *map(str, words)])
        code = 0
        try:
            main.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        told = self._capsys.readouterr()
        return Answer(code, told.out, told.err)
