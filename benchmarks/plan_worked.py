"""Writes docs/plan-worked.md: worked plans, each made by the command that stands above it.

python benchmarks/plan_worked.py             # write the page
python benchmarks/plan_worked.py --check     # compare it; exit 1 if it is not what the commands print
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
import sys
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from unittest.mock import patch

from closeranks.cli.main import main as closeranks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "plan-worked.md"
HEAD = """# Worked plans

Plans of real sizes, made by the commands that stand above them; `python benchmarks/plan_worked.py` makes this page.
What the columns mean: [plan.md](plan.md). Nothing here was run on these clusters: times and memory are estimates.
"""


@dataclass(frozen=True, slots=True)
class WorkedPlan:
    title: str
    text: str
    commands: tuple[str, ...]


PLANS = (
    WorkedPlan(
        "A perception model of 2B parameters on 64 GPUs",
        "Six cameras, lidar and a map: a module of your own "
        "([model.py](../examples/plans/perception/model.py)). Its products, its attention and what its other "
        "operations move are traced on tensors without data; `data` and `zero` are the axes that it can use.",
        ("closeranks plan examples/plans/perception/job.toml --cluster 64xh100 --limit 6",),
    ),
    WorkedPlan(
        "A transformer of 300B parameters on hundreds of GPUs",
        "512 GPUs and a trillion tokens, and how much cheaper fewer GPUs would be.",
        (
            "closeranks plan examples/plans/transformer-300b.toml --cluster 512xh100 --tokens 1T --limit 6 --why",
            "closeranks plan examples/plans/transformer-300b.toml --cluster 512xh100 --tokens 1T --sort cost --limit 1",
        ),
    ),
    WorkedPlan(
        "175B parameters as data 64 x tensor 4 x pipeline 2 on 512 GPUs",
        "The layout that was asked for, beside one with tensor 8. The table of states shows both conventions: 16 bytes "
        "a parameter (mixed precision with float32 master weights) and 12 (lean states). closeranks keeps weights and "
        "gradients in float32, which ZeRO-1 does not divide, so it needs more here; below stands what fits instead.",
        (
            'closeranks plan examples/plans/gpt-175b.toml --cluster 512xh200 --compare "data=64 tensor=4 pipeline=2 '
            'zero=1 recompute=full" "data=32 tensor=8 pipeline=2 zero=1 recompute=full"',
            "closeranks plan examples/plans/gpt-175b.toml --cluster 512xh100 --tokens 300B --limit 6",
        ),
    ),
    WorkedPlan(
        "70B parameters on 1,024 GPUs",
        "Two trillion tokens; then the same job on 8 to 1,024 GPUs.",
        (
            "closeranks plan examples/plans/llama-70b.toml --cluster 1024xh100 --tokens 2T --limit 6",
            "closeranks plan scale examples/plans/llama-70b.toml --cluster h100 --from 8 --to 1024 --batch-at 1024",
        ),
    ),
    WorkedPlan(
        "The same fine-tuning of 13B parameters on 1, 2, 4 and 8 GPUs",
        "All weights are trained. Where nothing fits, the plan says by how much, and what would help.",
        tuple(
            f"closeranks plan examples/plans/finetune-13b.toml --cluster {number}xh100 --limit 4"
            for number in (1, 2, 4, 8)
        ),
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the page instead of writing it")
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE} is not what its commands print: run python benchmarks/plan_worked.py")


def page() -> str:
    return "\n".join([HEAD, *map(section, PLANS)])


def section(plan: WorkedPlan) -> str:
    """A title, a text, and each command with what it prints."""
    shown = (f"```bash\n{command}\n```\n\n```text\n{printed(command)}\n```\n" for command in plan.commands)
    return "\n".join([f"## {plan.title}\n", f"{fill(plan.text, 120)}\n", *shown])


def printed(command: str) -> str:
    """What a command prints into a pipe, in the repository's root."""
    out = io.StringIO()
    with chdir(ROOT), redirect_stdout(out), patch.object(sys, "argv", shlex.split(command)):
        try:
            closeranks()
        except SystemExit as leave:
            if leave.code:
                raise
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
