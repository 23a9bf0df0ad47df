"""``closeranks data``: prepares, verifies and inspects training data; one file per verb."""

from __future__ import annotations

import importlib

import typer

HELP = """Prepare and verify training data, and see what a run will read.

\b
  closeranks data build books/ --out books-shards             text, byte by byte, in shards
  closeranks data build web/*.jsonl.gz --out web --tokenizer tokenizer.json --processes 8
  closeranks data verify web                                  read every block, and name what is damaged
  closeranks data stats web --seq-len 2048 --picture web.png  counts, lengths, duplicates
  closeranks data show 123 job.toml                           the sample at position 123 of the run
  closeranks data assign -n 8 -n 3 job.toml --step 40         who reads what at a step, before and after a resize

Training reads shards, and WebDataset tars, Parquet, Arrow, JSONL, Megatron, MDS, TFRecord, image folders and NumPy
files in place; `build` is for raw text, for tokenizing once instead of in every run, and for compressed files.
"""
VERBS = ("build", "verify", "stats", "show", "assign")


def register(app: typer.Typer) -> None:
    data = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)
    for verb in VERBS:
        importlib.import_module(f"closeranks.cli.data.{verb}").register(data)
    app.add_typer(data, name="data", short_help="Prepare, verify and inspect training data.")
