"""The actions of a pipeline schedule, and the dependencies between them.

An action is one stage's work on one micro-batch: ``2F0`` is stage 2, forward, micro-batch 0. Invariant:
``Action.parse(str(action)) == action``, and ``dependencies`` names everything that an action waits for, on whatever
rank.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from closeranks.core.errors import UserError

ActionKind = Literal["F", "B", "I", "W"]
"""F: forward; B: whole backward; I, W: the two halves of a split backward, input gradients, then weight gradients."""

ACTION_KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


class Action(NamedTuple):
    """One stage's work on one micro-batch. A tuple, since large schedules look up hundreds of thousands of them."""

    stage: int
    kind: ActionKind
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F0``."""
        word = ActionText.parse(text)
        for kind in ACTION_KINDS:
            if kind == word.kind:
                return cls(word.stage, kind, word.micro)
        raise UserError(f"'{text}' is not an action of a schedule", "Write 2F0, 2B0, 2I0 or 2W0, say.")


class ActionText(NamedTuple):
    """The three parts of an action's or an instruction's text, before its kind is checked."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"

    @classmethod
    def parse(cls, text: str) -> ActionText:
        found = re.fullmatch(r"([0-9]+)([A-Z_]+)([0-9]+)", text)
        if found is None:
            raise UserError(f"'{text}' is not a stage, a kind and a micro-batch", "Write 2F0, say.")
        return cls(int(found[1]), found[2], int(found[3]))


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """The actions that must be done before; a whole backward of another stage counts as its ``I``."""
    stage, micro = action.stage, action.micro
    match action.kind:
        case "F":
            return (Action(stage - 1, "F", micro),) if stage > 0 else ()
        case "W":
            return (Action(stage, "I", micro),)
        case _:
            own = Action(stage, "F", micro)
            return (own, Action(stage + 1, "I", micro)) if stage < num_stages - 1 else (own,)


def completed_actions(action: Action) -> tuple[Action, ...]:
    """What an action completes: itself, and for a whole backward both its halves."""
    if action.kind == "B":
        return Action(action.stage, "I", action.micro), Action(action.stage, "W", action.micro)
    return (action,)
