"""The shape of a configuration file: strict pydantic models whose validators make core objects, once.

What one section holds is checked here; how recipes, ops and rules are spelled is derived from their classes in
``recipes``, ``operations`` and ``rules`` beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from opfuse.inspect.watch import ALARMS


class FileSection(BaseModel):
    """A mapping with exactly these keys, values of exactly these types, that never changes.

    not_here: keys that a reader may expect and that a file does not take, each with what to do instead.
    """

    not_here: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True, allow_inf_nan=False)


AtLeastOne = Annotated[int, Field(ge=1, le=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Text(FileSection):
    """Bytes of a text: predict the next byte from the ``context`` bytes before it.

    embedding: columns that stand for one byte, so that a sample has ``context * embedding`` columns.
    validation_fraction: part of the text, its end, that is kept for validation.
    """

    kind: str
    context: AtLeastOne = 16
    embedding: AtLeastOne = 16
    validation_fraction: float = Field(default=0.1, gt=0, lt=1)

    @property
    def classes(self) -> int:
        """What comes next is one of so many."""
        return 256

    @property
    def columns(self) -> int:
        """Columns of one sample."""
        return self.context * self.embedding


class PydocTopics(Text):
    """The help texts that come with Python, about 0.46 MB."""

    kind: Literal["pydoc_topics"]


class UserFile(Text):
    """A file of one's own. path: where it is; from the folder of the configuration, if it is not absolute."""

    path: Annotated[str, Field(min_length=1)]


class TextFile(UserFile):
    """A text of one's own, read as bytes."""

    kind: Literal["text"]


class TokenFile(UserFile):
    """Tokens of one's own: 16-bit numbers, little-endian and without a header, as nanoGPT's ``train.bin`` has them.

    vocabulary: how many tokens there are; each number is below. A token stands where otherwise a byte does.
    """

    kind: Literal["tokens"]
    vocabulary: Annotated[int, Field(ge=2, le=2**16)]

    @property
    def classes(self) -> int:
        return self.vocabulary


DATA: Mapping[str, type[Text]] = {"pydoc_topics": PydocTopics, "text": TextFile, "tokens": TokenFile}
"""The model of a data section by its kind."""


Share = Annotated[float, Field(ge=0, le=1)]


class Alarms(FileSection):
    """Limits beyond which a warning names op, tensor, step, value and cure: shares at most, ``sqnr`` in dB at least."""

    nonfinite: Share = ALARMS["nonfinite"]
    saturated: Share = ALARMS["saturated"]
    flushed: Share = ALARMS["flushed"]
    sqnr: float = ALARMS["sqnr"]


class Watching(FileSection):
    """What casts do to values, looked at in every so many steps of the run under the recipe.

    to: jsonl, values.jsonl beside the report; tensorboard or wandb, by their own writers, which are installed by themselves.
    """

    every: AtLeastOne = 100
    to: Literal["jsonl", "tensorboard", "wandb"] = "jsonl"
    alarms: Alarms = Alarms()


class Train(FileSection):
    """How to train.

    learning_rate: the highest one. It is risen to in equal steps within the first ``warm_up`` of all steps, one at least, and
    schedule says what comes then: half a cosine or a line down to 0 at the end, or no change. eval_every: steps between two
    evaluations. checkpoint_every: between two checkpoints; null: those of evaluations.
    """

    steps: AtLeastOne = 300
    batch_size: AtLeastOne = 128
    learning_rate: float = Field(default=3e-3, gt=0)
    warm_up: Share = 0.05
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    weight_decay: float = Field(default=0.0, ge=0)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    seed: Seed = 0
    eval_every: AtLeastOne = 50
    checkpoint_every: AtLeastOne | None = None
