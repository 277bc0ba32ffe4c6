"""A configuration as a whole: its sections, and whether they fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, model_validator

from opfuse.config import operations, recipes, rules
from opfuse.config.findings import Refused
from opfuse.config.models import DATA, Alarms, FileSection, PydocTopics, TextFile, TokenFile, Train, Watching
from opfuse.config.trial import trial


class Root(FileSection):
    """A configuration of opfuse."""

    not_here = {"policy": "this file is for a model that you convert: opfuse.fuse_(model, **opfuse.load_policy(path))"}

    version: Annotated[int, Field(ge=1, le=1)]
    recipe: recipes.RecipeSection
    pipeline: operations.Pipeline
    fusions: rules.Fusions = rules.Fusions()
    data: Annotated[PydocTopics | TextFile | TokenFile, Field(discriminator="kind")] | None = None
    train: Train = Train()
    watch: Watching | None = None

    @model_validator(mode="after")
    def _runs(self) -> Self:
        problems = trial(self.pipeline.ops, self.recipe, self.pipeline.torch_dtype, rows=self.train.batch_size, data=self.data)
        if problems:
            raise Refused(*problems)
        return self


TAGGED: Mapping[tuple[str, ...], Mapping[str, type[FileSection]]] = {
    ("recipe",): recipes.MODELS,
    ("pipeline", "ops"): operations.MODELS,
    ("fusions", "rules"): rules.ENTRIES,
    ("data",): DATA,
}
"""Sections that are one of several models, by their place in the file."""

SECTIONS: Mapping[tuple[str, ...], type[FileSection]] = {
    (): Root,
    ("pipeline",): operations.Pipeline,
    ("fusions",): rules.Fusions,
    ("train",): Train,
    ("watch",): Watching,
    ("watch", "alarms"): Alarms,
    **{("fusions", "rules", tag, "expect"): rules.Expect for tag in ("use", "name")},
    **{(*place, tag): model for place, models in TAGGED.items() for tag, model in models.items()},
}
"""The model of each place in the file; the name of one of several comes last."""
