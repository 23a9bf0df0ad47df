"""Lets ``closeranks plan job.toml`` stand for ``closeranks plan search job.toml``: the group's own action."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

OWN_VERB = "search"


class PlanGroup(TyperGroup):
    """A group whose first word may be a job file or an option of the search instead of a verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in self.get_help_option_names(ctx):
            args = [OWN_VERB, *args]
        return super().parse_args(ctx, args)
