"""Which data does a job train on? The table ``[data]``.

Invariant: every variant has the keys that any loop reads (``_CommonData`` and ``seq_len``), so that nobody asks which
variant it is.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from closeranks.core.config.table import ConfigTable
from closeranks.core.registry import did_you_mean, is_import_path
from closeranks.facts.shapes.recommender import RecommenderShape

EvalFraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class ChecksConfig(ConfigTable):
    """What every sample must satisfy; one that does not is a bad record (``data.on_bad``)."""

    ranges: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Smallest and largest value allowed, by name of the batch's tensor: ``{image = [0, 255]}``."""
    lengths: dict[str, tuple[int, int]] = Field(default_factory=dict)
    """Fewest and most elements along the first dim of a sample's tensor."""
    fields: dict[str, str] = Field(default_factory=dict)
    """The schema: each tensor's dtype and shape, ``{image = "uint8[28,28]"}``; ``?`` allows any size."""
    hooks: tuple[str, ...] = ()
    """``package.module:function`` of your own checks: called with one sample (a dict of tensors), each returns the
    reason why the sample is bad, or nothing."""


class _CommonData(ConfigTable):
    yields: ClassVar[str] = ""
    """What its batches hold; a model says the same of itself in ``reads``. Empty: the user knows."""
    vocab_size: ClassVar[int] = 0
    """Distinct tokens; 0 where there are none or only the user knows."""
    prefetch: int = Field(default=2, ge=0)
    """Steps read ahead in the background; 0 reads inside the step."""
    workers: int = Field(default=0, ge=0)
    """Processes of each rank that read ahead. 0: a thread of the rank itself, which is best where reading is cheap."""
    shuffle: Literal["full", "blocks", "none"] = "full"
    """``full``: any sample may follow any other. ``blocks``: samples that are stored together are read within a short
    time, for data on remote storage or slow disks. ``none``: in the order they are stored."""
    shuffle_block: int = Field(default=0, ge=0)
    """With ``blocks``: number of neighbouring samples in a block. 0: as many as most files hold, or 1024."""
    shuffle_window: int = Field(default=16, ge=1)
    """With ``blocks``: how many blocks are mixed with each other at a time."""
    check_finite: bool = True
    """Samples with NaN or infinity are bad records."""
    checks: ChecksConfig = ChecksConfig()
    """Further checks of every sample."""
    on_bad: Literal["stop", "skip"] = "stop"
    """A bad record (damaged, or refused by a check) stops the run, or is skipped (weight zero) and recorded."""
    max_bad: int = Field(default=100, ge=0)
    """With ``on_bad = "skip"``: the run stops when more records than this were skipped."""
    log_samples: bool = False
    """Log which samples every step took, in the run's ``metrics/samples-*.jsonl``."""


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
    """1797 handwritten digits of 8x8 pixels, from scikit-learn."""

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


class ClicksDataConfig(_CommonData):
    """A synthetic click log of any size, nothing stored: dense values, ids with Zipf frequencies and a click, drawn
    from a known model, so that the best reachable AUC is known."""

    yields: ClassVar[str] = "clicks"
    name: Literal["clicks"] = "clicks"
    num_samples: int = Field(default=262_144, ge=1)
    """Training samples; evaluation samples are drawn beyond them."""
    eval_fraction: EvalFraction = 0.1
    """Evaluation samples as a share of ``num_samples``."""
    num_dense: int = Field(default=RecommenderShape().num_dense, ge=1)
    """Dense values of a sample."""
    features: int = Field(default=RecommenderShape().features, ge=1)
    """Categorical features of a sample."""
    rows: int = Field(default=RecommenderShape().rows, ge=1)
    """Different ids of a feature."""
    max_ids: int = Field(default=1, ge=1)
    """A feature has between one and this many ids."""
    zipf: float = Field(default=1.05, ge=0.0, le=4.0)
    """How fast the frequency of ids falls: as (id + 1) to this power. 0: all are equally frequent."""
    signal: float = Field(default=1.5, ge=0.0)
    """Spread of the log-odds between samples: at 0 nothing can be learned."""
    bias: float = -1.0
    """Log-odds of a click where nothing else speaks."""
    log_seed: int = 0
    """Another seed is another log, with other effects of ids."""
    seq_len: ClassVar[int] = 0


class _StoredConfig(_CommonData):
    path: str
    """A file or folder, or the URL of one (``s3://bucket/folder``)."""
    format: str = ""
    """Empty: detected from the files. Else ``shards``, ``webdataset``, ``parquet``, ``arrow``, ``jsonl``,
    ``megatron``, ``mds``, ``images``, ``numpy`` or ``tfrecord``."""
    eval_path: str = ""
    """Data for evaluation. Empty: ``eval_fraction`` of the data itself."""
    eval_fraction: EvalFraction = 0.0
    """Share of the samples, at the end of the data, that is kept for evaluation."""
    cache: str = ""
    """Cache folder on this host for remote files, shared by its ranks. Empty: ``~/.cache/closeranks/data``."""
    cache_bytes: int = Field(default=64 << 30, ge=1)
    """Maximum size of the cache; the least recently used file is evicted first."""
    index: str = ""
    """Folder for the indexes of formats that have none. Empty: beside the data if that can be written, else in the
    cache."""


class TokensConfig(_StoredConfig):
    """Token ids for language models: shards of ``closeranks data build``, Megatron's ``.bin``/``.idx``, NumPy arrays,
    or a field of any format of records."""

    yields: ClassVar[str] = "tokens"
    name: Literal["tokens"] = "tokens"
    seq_len: int = Field(default=1024, ge=1)
    """Target tokens per sample."""
    packing: Literal["stream", "documents"] = "stream"
    """``stream``: windows over all documents in a row. ``documents``: whole documents are packed into samples and do
    not attend to each other; long ones are split."""
    field: str = ""
    """For formats of records: which field holds the tokens, or text whose bytes are the tokens. Empty: ``tokens``,
    ``input_ids`` or ``text``."""


class RecordsConfig(_StoredConfig):
    """Records as samples: images with labels, features, anything with named fields."""

    name: Literal["records"] = "records"
    fields: dict[str, str] = Field(default_factory=dict)
    """Which of a record's fields the batch holds, and under which name: ``{x = "jpg", y = "cls"}``. Empty: all."""
    image_size: int = Field(default=0, ge=0)
    """Images are cropped and scaled to this many pixels square. 0: unchanged; all must then have the same size."""
    transform: str = ""
    """``package.module:function``: called with the list of a batch's decoded records, returns the batch, a dict of
    tensors."""
    seq_len: int = Field(default=0, ge=0)
    """Tokens per sample, for models that need it; 0 if there are none."""


class UserDataConfig(_CommonData):
    """A dataset of the user's own: any object with a length and items."""

    name: str
    """``package.module:factory``; called with ``args``, it returns a map-style dataset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""
    eval: str = ""
    """``package.module:factory`` of the evaluation set; empty: none."""
    eval_args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the evaluation factory; they override those in ``args``."""
    collate: str = ""
    """``package.module:function`` that makes a batch of a list of samples, as in torch's DataLoader, such as one that
    pads samples of unequal length; empty: samples are stacked."""
    seq_len: int = Field(default=0, ge=0)
    """Tokens per sample, for models that need it; 0 if there are none."""

    @field_validator("name", "eval", "collate")
    @classmethod
    def _points_into_code(cls, value: str) -> str:
        if value and not is_import_path(value):
            raise ValueError(f"'{value}' does not name an object. Write it as 'package.module:factory'.")
        return value


SingleData: TypeAlias = Annotated[
    Annotated[TextConfig, Tag("text")]
    | Annotated[DigitsDataConfig, Tag("digits")]
    | Annotated[PairsDataConfig, Tag("pairs")]
    | Annotated[ClicksDataConfig, Tag("clicks")]
    | Annotated[TokensConfig, Tag("tokens")]
    | Annotated[RecordsConfig, Tag("records")]
    | Annotated[UserDataConfig, Tag("user")],
    Discriminator(lambda value: _variant(value)),
    BeforeValidator(lambda value: _known(value, _SINGLE)),
]


class MixturePart(ConfigTable):
    """One source of a mixture."""

    weight: float = Field(gt=0.0, allow_inf_nan=False)
    """Its share of the mixture, relative to the other weights."""
    data: SingleData
    """Any other data table. What applies to all (shuffling, checks, workers) is set once, in ``[data]``."""


class MixtureConfig(_CommonData):
    """Several sources in fixed proportions throughout the run."""

    name: Literal["mixture"] = "mixture"
    parts: dict[str, MixturePart] = Field(min_length=1)
    """``[data.parts.web]`` with ``weight`` and ``[data.parts.web.data]``, and so on."""

    @property
    def yields(self) -> str:  # type: ignore[override]
        """What all of its parts hold, where they agree."""
        kinds = {part.data.yields for part in self.parts.values()}
        return kinds.pop() if len(kinds) == 1 else ""

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return max(part.data.vocab_size for part in self.parts.values())

    @property
    def seq_len(self) -> int:
        return max(part.data.seq_len for part in self.parts.values())


_SINGLE = ("text", "digits", "pairs", "clicks", "tokens", "records")
_OWN = (*_SINGLE, "mixture")


def _name_of(value: Any) -> Any:
    return value.get("name", "text") if isinstance(value, dict) else getattr(value, "name", None)


def _variant(value: Any) -> str:
    name = _name_of(value)
    return str(name) if name in _OWN else "user"


def _known(value: Any, names: tuple[str, ...] = _OWN) -> Any:
    name = _name_of(value)
    if isinstance(name, str) and name not in names and ":" not in name:
        raise ValueError(f"there is no data '{name}'. {did_you_mean(name, (*names, 'package.module:factory'))}")
    return value


DataConfig: TypeAlias = Annotated[
    Annotated[TextConfig, Tag("text")]
    | Annotated[DigitsDataConfig, Tag("digits")]
    | Annotated[PairsDataConfig, Tag("pairs")]
    | Annotated[ClicksDataConfig, Tag("clicks")]
    | Annotated[TokensConfig, Tag("tokens")]
    | Annotated[RecordsConfig, Tag("records")]
    | Annotated[MixtureConfig, Tag("mixture")]
    | Annotated[UserDataConfig, Tag("user")],
    Discriminator(_variant),
    BeforeValidator(_known),
]
