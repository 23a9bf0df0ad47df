"""Writes the job file of a plan: the user's file, comments included, with the values that the plan changes.

Invariant: what is written loads, with exactly the plan's layout, and holds nothing that this version does not train.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from closeranks.core.errors import ConfigError, SetupError, UserError

if TYPE_CHECKING:
    from closeranks.plan.step_time.workload import PlanChoice
    from closeranks.run.job.job import Job

JOB_PRECISIONS = {"fp32": "float32", "bf16": "bf16", "fp16": "fp16"}
"""What a job calls the precisions of a plan."""


def check_out(out: Path | None) -> None:
    if out is not None and not out.parent.is_dir():
        raise SetupError(f"there is no folder {out.parent} to write the job into", "Make it, or name another.")


def job_values(choice: PlanChoice) -> dict[str, Any]:
    """The values of a job that follow from a choice, by dotted key."""
    layout = choice.layout
    axes = {f"layout.{name}": getattr(layout, name) for name in ("data", "zero", "shard", "tensor", "pipeline")}
    return {
        **axes,
        "layout.schedule": layout.schedule,
        "train.micro_batch": choice.micro_batch,
        "train.precision": JOB_PRECISIONS[choice.precision],
        "train.recompute": choice.recompute,
        "train.compile": choice.compiled,
    }


def changed_values(job: Job, choice: PlanChoice) -> dict[str, tuple[Any, Any]]:
    """What the plan changes in the job: dotted key, value of the job, value of the plan."""
    found = {}
    for key, value in job_values(choice).items():
        table, _, name = key.partition(".")
        had = getattr(getattr(job, table), name)
        if had != value and not (key == "layout.schedule" and choice.layout.pipeline == 1):
            found[key] = (had, value)
    return found


def write_job(source: Path, overrides: Sequence[str], job: Job, choice: PlanChoice, out: Path, comment: str) -> None:
    from tomlkit import TOMLDocument, dumps, parse
    from tomlkit import comment as written_comment

    from closeranks.core.config.overrides import parse_overrides
    from closeranks.run.job.job import Job as JobTable

    document = parse(source.read_text())
    for override in parse_overrides(JobTable, overrides)[0]:
        _set(document, [str(part) for part in override.parts], override.value, is_unset=override.is_unset)
    for key, (_, value) in changed_values(job, choice).items():
        _set(document, key.split("."), value)
    head = TOMLDocument()
    for line in comment.splitlines():
        head.add(written_comment(line))
    text = dumps(head) + dumps(document)
    _check(text, choice, out)
    try:
        out.write_text(text)
    except OSError as error:
        raise SetupError(f"{out} cannot be written: {error.strerror or error}", "Name another place.") from error


def _set(document: Any, parts: Sequence[str], value: Any, *, is_unset: bool = False) -> None:
    from tomlkit import table

    node = document
    for part in parts[:-1]:
        if isinstance(node, list):
            node = node[int(part)]
            continue
        if part not in node:
            if is_unset:
                return
            node[part] = table()
        node = node[part]
    if is_unset:
        if isinstance(node, MutableMapping) and parts[-1] in node:
            del node[parts[-1]]
    else:
        node[parts[-1]] = value
        trivia = node.item(parts[-1]).trivia
        trivia.comment = trivia.comment_ws = ""  # it spoke of the value that was there


def _check(text: str, choice: PlanChoice, out: Path) -> None:
    """Load what is about to be written, and check it against the devices of the plan."""
    import tempfile

    from closeranks.run.job.job import check_workers, layout_for, load_job

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / out.name
        path.write_text(text)
        job = load_job(path).value
    num_ranks = choice.layout.num_ranks
    if problems := check_workers(job, num_ranks):
        raise ConfigError(problems)
    if layout_for(job, num_ranks) != choice.layout:
        raise UserError(f"the job would not train the layout {choice.layout}", "Set the tables [layout] and [sync].")
