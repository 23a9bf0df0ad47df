"""``closeranks ckpt``: lists, verifies, compares, converts and prunes checkpoints; one file per verb."""

from __future__ import annotations

import importlib

import typer

HELP = """List, verify, compare, convert and prune the checkpoints of a run.

\b
  closeranks ckpt ls runs/tiny                      what is there, and which one a resumed run takes
  closeranks ckpt verify runs/tiny                  read every byte, and name what is damaged
  closeranks ckpt diff runs/a runs/b                tensor by tensor, whatever layout saved them
  closeranks ckpt export-hf runs/tiny tiny-hf       weights that transformers loads
  closeranks ckpt policy --mtbf 3h --state 14GB     how often to save, and what it costs

A place is a run folder, its checkpoints folder, one checkpoint in it, or a URL of those (s3://bucket/run).
"""
VERBS = ("ls", "show", "verify", "diff", "export_hf", "import_hf", "convert", "prune", "policy")


def register(app: typer.Typer) -> None:
    ckpt = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)
    for verb in VERBS:
        importlib.import_module(f"closeranks.cli.ckpt.{verb}").register(ckpt)
    app.add_typer(ckpt, name="ckpt", short_help="List, verify, compare, convert and prune checkpoints.")
