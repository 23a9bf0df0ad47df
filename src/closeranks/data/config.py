"""Which data does a job train on? The table ``[data]``.

Invariant: every variant has the keys that any loop reads (``prefetch``, ``check_finite``, ``seq_len``), so that nobody
asks which variant it is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from closeranks.core.config.table import Table
from closeranks.core.registry import did_you_mean, is_dotted

EvalFraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class _CommonData(Table):
    yields: ClassVar[str] = ""
    """What its batches hold; a model says the same of itself in ``reads``. Empty: the user knows."""
    vocab_size: ClassVar[int] = 0
    """Distinct tokens; 0 where there are none or only the user knows."""
    prefetch: int = Field(default=2, ge=0)
    """Steps that a background thread reads ahead; 0 reads inside the step."""
    check_finite: bool = True
    """Refuse a batch that holds NaN or infinity, naming the samples."""


class TextConfig(_CommonData):
    """Bytes of text as tokens (a vocabulary of 256)."""

    yields: ClassVar[str] = "tokens"
    vocab_size: ClassVar[int] = 256
    name: Literal["text"] = "text"
    path: str = "stdlib"
    """A text file, a folder of them, or ``stdlib``: the Python standard library's own source."""
    seq_len: int = Field(default=128, ge=1)
    """Target tokens per sample."""
    eval_fraction: EvalFraction = 0.05
    """Share of the text, at its end, that is kept for evaluation."""
    max_bytes: int | None = Field(default=None, ge=2)
    """Read no more than this. Unset: 8 MiB of the standard library, the whole of any other text."""


class DigitsDataConfig(_CommonData):
    """1797 handwritten digits of 8x8 pixels, which scikit-learn carries."""

    yields: ClassVar[str] = "labelled images"
    name: Literal["digits"] = "digits"
    eval_fraction: EvalFraction = 0.2
    """Share of the images that is kept for evaluation, drawn by the run's seed."""
    seq_len: ClassVar[int] = 0


class PairsDataConfig(_CommonData):
    """Synthetic users and items with a click and a rating: two inputs, two targets, nothing stored."""

    yields: ClassVar[str] = "users and items"
    name: Literal["pairs"] = "pairs"
    num_samples: int = Field(default=16384, ge=1)
    """Training samples; evaluation samples are drawn beyond them."""
    num_features: int = Field(default=16, ge=1)
    """Features of a user, and of an item."""
    eval_fraction: EvalFraction = 0.1
    """Evaluation samples as a share of ``num_samples``."""
    seq_len: ClassVar[int] = 0


class UserDataConfig(_CommonData):
    """A dataset of the user's own: any object with a length and items."""

    name: str
    """``package.module:factory``; called with ``args``, it returns a map-style dataset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    eval: str = ""
    """``package.module:factory`` of the evaluation set; empty: none."""
    eval_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the evaluation factory, over those in ``args``."""
    seq_len: int = Field(default=0, ge=0)
    """Tokens per sample, for models that must know; 0 where there are none."""

    @field_validator("name", "eval")
    @classmethod
    def _points_into_code(cls, value: str) -> str:
        if value and not is_dotted(value):
            raise ValueError(f"'{value}' does not name an object. Write it as 'package.module:factory'.")
        return value


_OWN = ("text", "digits", "pairs")


def _name_of(value: Any) -> Any:
    return value.get("name", "text") if isinstance(value, dict) else getattr(value, "name", None)


def _variant(value: Any) -> str:
    name = _name_of(value)
    return str(name) if name in _OWN else "user"


def _known(value: Any) -> Any:
    name = _name_of(value)
    if isinstance(name, str) and name not in _OWN and ":" not in name:
        raise ValueError(f"there is no data '{name}'. {did_you_mean(name, (*_OWN, 'package.module:factory'))}")
    return value


DataConfig: TypeAlias = Annotated[
    Annotated[TextConfig, Tag("text")]
    | Annotated[DigitsDataConfig, Tag("digits")]
    | Annotated[PairsDataConfig, Tag("pairs")]
    | Annotated[UserDataConfig, Tag("user")],
    Discriminator(_variant),
    BeforeValidator(_known),
]
