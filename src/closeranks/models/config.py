"""Which model does a job name, and in what shape?

The table ``[model]`` is one of these by its ``name``; a name with a colon points into the user's own code. Invariant: a
config that validates describes a model that can be built, and reading it never imports torch.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from closeranks.core.config.table import ConfigTable
from closeranks.core.protocols import ActivationCollectives, ShardingRule
from closeranks.core.registry import did_you_mean, is_import_path
from closeranks.facts.layout import LayoutConstraints
from closeranks.facts.shapes.digits import DigitsShape
from closeranks.facts.shapes.llama import PRESETS, LlamaShape, shape_problems
from closeranks.facts.shapes.pairs import PairsShape
from closeranks.facts.shapes.recommender import RecommenderShape

Attention = Literal["auto", "cudnn", "flash", "math"]
Width = Annotated[int, Field(ge=1)]


class LlamaConfig(ConfigTable):
    """A decoder-only transformer of the Llama family."""

    reads: ClassVar[str] = "tokens"
    name: Literal["llama"] = "llama"
    """A built-in model (llama, digits, pairs, recommender), or package.module:factory for your own."""
    preset: str = "tiny"
    """The shape to start from: tiny, small, 160m, 1b, 1b_untied, 3b, 8b, 70b or 405b; the keys below override it."""
    dim: int | None = Field(default=None, gt=0)
    """Width of the residual stream."""
    num_layers: int | None = Field(default=None, gt=0)
    """Number of blocks."""
    num_heads: int | None = Field(default=None, gt=0)
    """Query heads; they must divide dim."""
    num_kv_heads: int | None = Field(default=None, gt=0)
    """Key-value heads; they must divide num_heads."""
    ffn_dim: int | None = Field(default=None, gt=0)
    """Width of the feed-forward layer."""
    vocab_size: int | None = Field(default=None, gt=0)
    """Number of token ids; text read as bytes needs 256."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary frequencies."""
    rope_factor: float | None = Field(default=None, ge=1)
    """RoPE scaling: the factor by which the trained context is extended; 1: none."""
    rope_low_freq_factor: float | None = Field(default=None, gt=0)
    """Rotations per original context below which a frequency is scaled in full."""
    rope_high_freq_factor: float | None = Field(default=None, gt=0)
    """Rotations per original context above which a frequency is not scaled."""
    rope_original_len: int | None = Field(default=None, gt=0)
    """The context the weights were first trained at."""
    norm_eps: float | None = Field(default=None, gt=0)
    """Epsilon of the norms."""
    tied: bool | None = None
    """Whether the output projection shares the embedding's weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of each block's contributions to the residual stream that is dropped in training."""
    attention: Attention = "auto"
    """The attention kernel: auto takes the fastest that fits; a named one is the only one tried."""

    @field_validator("preset")
    @classmethod
    def _preset_is_known(cls, preset: str) -> str:
        if preset not in PRESETS:
            raise ValueError(f"there is no preset '{preset}'. The presets are {', '.join(PRESETS)}")
        return preset

    @model_validator(mode="after")
    def _shape_is_possible(self) -> LlamaConfig:
        problems = shape_problems(self.shape())
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def shape(self) -> LlamaShape:
        """The preset with this table's overrides."""
        given = {f.name: getattr(self, f.name) for f in fields(LlamaShape)}
        return replace(PRESETS[self.preset], **{key: value for key, value in given.items() if value is not None})

    def layout_constraints(self, *, seq_len: int, global_batch: int, micro_batch: int) -> LayoutConstraints:
        shape = self.shape()
        return LayoutConstraints(
            global_batch=global_batch,
            micro_batch=micro_batch,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            num_layers=shape.num_layers,
            vocab_size=shape.vocab_size,
            ffn_dim=shape.ffn_dim,
            seq_len=seq_len,
        )


class _WithoutAxes(ConfigTable):
    """A model that splits along the batch alone."""

    reads: ClassVar[str] = ""
    """What its batches must hold; data says the same of itself in ``yields``. Empty: the user knows."""

    def layout_constraints(self, *, seq_len: int, global_batch: int, micro_batch: int) -> LayoutConstraints:
        return LayoutConstraints(global_batch=global_batch, micro_batch=micro_batch)


class DigitsConfig(_WithoutAxes):
    """A small convnet with batch normalisation for 8x8 digits."""

    reads: ClassVar[str] = "labelled images"
    name: Literal["digits"] = "digits"
    """A built-in model (llama, digits, pairs, recommender), or package.module:factory for your own."""
    channels: int = Field(default=16, gt=0)
    """Channels of the first convolution; the second has twice as many."""
    hidden_dim: int = Field(default=64, gt=0)
    """Width of the layer before the output."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the hidden layer that is dropped in training."""

    def shape(self) -> DigitsShape:
        return DigitsShape(channels=self.channels, hidden_dim=self.hidden_dim)


class PairsConfig(_WithoutAxes):
    """Two towers, one for users and one for items, with two losses: clicks and ratings."""

    reads: ClassVar[str] = "users and items"
    name: Literal["pairs"] = "pairs"
    """A built-in model (llama, digits, pairs, recommender), or package.module:factory for your own."""
    user_dim: int = Field(default=PairsShape().user_dim, gt=0)
    """Width of a user's features."""
    item_dim: int = Field(default=PairsShape().item_dim, gt=0)
    """Width of an item's features."""
    hidden_dim: int = Field(default=64, gt=0)
    """Width of the hidden layer in each tower."""
    vector_dim: int = Field(default=32, gt=0)
    """Width of the towers' output vectors."""
    rating_weight: float = Field(default=1.0, ge=0)
    """Weight of the rating's squared error relative to the click's cross-entropy."""

    def shape(self) -> PairsShape:
        return PairsShape(self.user_dim, self.item_dim, self.hidden_dim, self.vector_dim)


class RecommenderConfig(_WithoutAxes):
    """A recommender of dense values and ids, as DLRM: tables, two MLPs, dot products; reports the AUC."""

    reads: ClassVar[str] = "clicks"
    name: Literal["recommender"] = "recommender"
    """A built-in model (llama, digits, pairs, recommender), or package.module:factory for your own."""
    num_dense: int = Field(default=RecommenderShape().num_dense, ge=1)
    """Dense values of a sample."""
    features: int = Field(default=RecommenderShape().features, ge=1)
    """Categorical features of a sample; each has a table of its own."""
    rows: int = Field(default=RecommenderShape().rows, ge=1)
    """Rows of each table."""
    hashed: bool = False
    """Hash ids to rows: ids may then be larger than the tables, and some share a row."""
    dim: int = Field(default=RecommenderShape().dim, ge=1)
    """Width of a row, and of the vector of the dense values."""
    bottom: tuple[Width, ...] = RecommenderShape().bottom
    """Widths of the hidden layers between the dense values and their vector."""
    top: tuple[Width, ...] = RecommenderShape().top
    """Widths of the hidden layers between the dot products and the log-odds."""

    def shape(self) -> RecommenderShape:
        return RecommenderShape(self.num_dense, self.features, self.rows, self.dim, self.bottom, self.top)


class TensorEntry(ConfigTable):
    """How a user's parameters split along the tensor axis; the first entry whose pattern matches one takes it."""

    pattern: str = Field(min_length=1)
    """Shell-style pattern on the parameter's full name: ``blocks.*.up.weight``."""
    dim: int | None = Field(default=None, ge=0)
    """Along which dim: 0 splits the outputs of a Linear or the rows of an Embedding, 1 a Linear's inputs."""
    whole: bool = False
    """Gather the split outputs after the module, for code that needs all of them."""
    partial: bool = False
    """Not split, but used on split outputs (a norm within heads, say): its gradient is a sum over the tensor ranks."""

    @model_validator(mode="after")
    def _says_one_thing(self) -> TensorEntry:
        if (self.dim is None) != self.partial:
            raise ValueError("an entry has either a dim, or partial = true")
        if self.whole and (self.dim is None or not self._module):
            raise ValueError(
                "whole = true gathers a module's outputs: give a dim, and a pattern that ends in '.weight'"
            )
        return self

    @property
    def _module(self) -> str:
        module, _, attribute = self.pattern.rpartition(".")
        return module if attribute == "weight" else ""

    def sharding_rule(self) -> ShardingRule:
        return ShardingRule(self.pattern, self.dim, sequence=self.partial)

    def activation_collectives(self) -> ActivationCollectives | None:
        return ActivationCollectives(self._module, on_input="copy", on_output="whole") if self.whole else None


class UserModelConfig(_WithoutAxes):
    """Any torch module, built by the user's own factory."""

    name: str
    """package.module:factory; the factory returns the module and is called once on each worker."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for the factory."""
    loss: str = ""
    """package.module:function of (module, batch); empty: module.loss(batch) or module(batch) is the loss."""
    metrics: tuple[str, ...] = ()
    """Names of the sums that a returned Loss carries besides the loss."""
    stages: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Modules in the order they run, each called with what the one before returned: what a pipeline is cut from."""
    tensor: tuple[TensorEntry, ...] = ()
    """How weights split along the tensor axis."""

    @model_validator(mode="before")
    @classmethod
    def _name_is_ours_or_dotted(cls, table: Any) -> Any:
        """Before the fields, so that a misspelt name of ours is the one problem reported."""
        name = str(table.get("name", "")) if isinstance(table, dict) else ""
        if isinstance(table, dict) and not is_import_path(name):
            hint = did_you_mean(name, _OURS)
            raise ValueError(f"there is no model '{name}'. {hint} A model of your own is package.module:factory.")
        return table

    @field_validator("loss")
    @classmethod
    def _loss_is_dotted(cls, loss: str) -> str:
        if loss and not is_import_path(loss):
            raise ValueError(f"'{loss}' does not name a function. Write package.module:function.")
        return loss

    def layout_constraints(self, *, seq_len: int, global_batch: int, micro_batch: int) -> LayoutConstraints:
        """How many stages a pattern stands for, and what a table's dims must divide, is known when it is built."""
        has_pattern = any(set("*?[") & set(stage) for stage in self.stages)
        return LayoutConstraints(
            global_batch=global_batch,
            micro_batch=micro_batch,
            num_layers=_MANY if has_pattern else len(self.stages),
            has_tensor_rules=bool(self.tensor),
        )


_MANY = 1 << 20
"""Stages that a pattern may stand for: more than any pipeline has."""

_OURS = ("llama", "digits", "pairs", "recommender")


def _kind(table: Any) -> str:
    """The tag of a ``[model]`` table; a table without a name is a Llama."""
    name = table.get("name", "llama") if isinstance(table, dict) else getattr(table, "name", "")
    return name if name in _OURS else "user"


ModelConfig = Annotated[
    Annotated[LlamaConfig, Tag("llama")]
    | Annotated[DigitsConfig, Tag("digits")]
    | Annotated[PairsConfig, Tag("pairs")]
    | Annotated[RecommenderConfig, Tag("recommender")]
    | Annotated[UserModelConfig, Tag("user")],
    Discriminator(_kind),
]
