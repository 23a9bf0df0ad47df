"""``closeranks doctor``: what holds a run back, how that shows, what to change, and what it would gain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from closeranks.cli.terminal import safe_echo

if TYPE_CHECKING:
    from closeranks.doctor.diagnose import Diagnosis
    from closeranks.doctor.finding import Rule
    from closeranks.doctor.run_facts import RunFacts

HELP = """Say what holds a run back: findings, worst first, with the change to make and the gain to expect.

\b
  closeranks doctor runs/tiny                      during the run or after it
  closeranks doctor runs/tiny runs/tiny-2          did the change that was advised help?
  closeranks doctor runs/tiny --json               for programs
  closeranks doctor runs/tiny --rule my_rules:slow_tokenizer

It reads the metrics that every run records (docs/phases.md) and, if NCCL_DEBUG=INFO was set, which transports NCCL uses
(docs/nccl.md). It changes nothing. A change is printed as a line that `closeranks train` takes: closeranks train
job.toml data.workers=2. A rule of your own is a function that takes the facts of a run and yields findings
(docs/doctor.md). Exit status 0, whether or not something was found.
"""


def register(app: typer.Typer) -> None:
    app.command("doctor", help=HELP, short_help="Say what holds a run back, and what to change.")(doctor)


def doctor(
    run: Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")],
    after: Annotated[
        Path | None, typer.Argument(help="A later run, to see whether the advice helped.", metavar="[RUN2]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for programs.")] = False,
    rule: Annotated[
        list[str] | None, typer.Option("--rule", help="A rule of your own, as module:function.", metavar="RULE")
    ] = None,
) -> None:
    import json

    from closeranks.doctor.diagnosis_text import diagnosis_json, diagnosis_text
    from closeranks.doctor.run_comparison import compare_runs, comparison_text

    rules = {name: _own_rule(name) for name in rule or ()}
    facts, found = _diagnosed(run, rules)
    if after is None:
        text = json.dumps(diagnosis_json(str(run), facts, found)) if as_json else diagnosis_text(str(run), facts, found)
        safe_echo(text)
        return
    later, found_later = _diagnosed(after, rules)
    compared = compare_runs(facts, later, found.findings, found_later.findings)
    if as_json:
        both = [diagnosis_json(str(run), facts, found), diagnosis_json(str(after), later, found_later)]
        safe_echo(json.dumps({"runs": both, "expected": compared.expected, "measured": compared.measured}))
    else:
        safe_echo(comparison_text((str(run), str(after)), compared))


def _diagnosed(folder: Path, rules: dict[str, Rule]) -> tuple[RunFacts, Diagnosis]:
    from closeranks.core.errors import UserError
    from closeranks.doctor.diagnose import diagnose
    from closeranks.run.diagnosis import load_facts
    from closeranks.telemetry.run_log.run_folder import RunFolder

    if not folder.is_dir() or not RunFolder(folder).is_run:
        raise UserError(f"{folder} is not a run folder", "Name the folder that `closeranks train` printed.")
    facts = load_facts(folder)
    return facts, diagnose(facts, rules)


def _own_rule(name: str) -> Rule:
    import sys

    from closeranks.core.errors import UserError
    from closeranks.core.registry import is_import_path, load_object

    if not is_import_path(name):
        raise UserError(f"'{name}' does not name a rule", "Write it as module:function.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    found = load_object(name, place="--rule")
    if not callable(found):
        raise UserError(f"{name} is not a function", "A rule takes the facts of a run and yields findings.")
    return found  # type: ignore[no-any-return]
