"""A policy in a file: which recipe a model is converted with, and which modules have another one, or none.

version: 1
recipe: {kind: fp8_current}
policy:
  model.layers.0: {kind: none}
  model.layers.-1: {kind: none}
  "*.mlp": {kind: mxfp8}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict, Union

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from opfuse.config import recipes
from opfuse.config.document import Document, read
from opfuse.config.findings import Problem, Refused, refuse, sentence
from opfuse.config.models import FileSection
from opfuse.config.report import report
from opfuse.convert.policy import Said
from opfuse.errors import RecipeError, closest
from opfuse.recipes import Recipe


class Default(FileSection):
    """What the other modules have; so a head or a router is converted as well."""

    kind: Literal["default"]


MODELS: Mapping[str, type[FileSection]] = {**recipes.MODELS, "default": Default}
"""The model of what a pattern says, by its kind."""


class PolicyFile(FileSection):
    """What a file with a policy holds."""

    not_here = dict.fromkeys(
        ("pipeline", "fusions", "data", "train"), "a file with a pipeline has no policy: opfuse.load(path), or opfuse run"
    )

    version: Annotated[int, Field(ge=1, le=1)]
    recipe: recipes.RecipeSection
    policy: dict[str, Annotated[Union[tuple(MODELS.values())], Field(discriminator="kind")]] = {}  # type: ignore  # noqa: UP007

    @model_validator(mode="after")
    def _recipes_agree(self, info: ValidationInfo) -> PolicyFile:
        self.said(info.context)
        return self

    def said(self, document: Any) -> dict[str, Said]:
        """What each pattern says, in the order of the file. Refused where the fields of a recipe do not agree."""
        return {pattern: _said(pattern, section, document) for pattern, section in self.policy.items()}


def _said(pattern: str, section: Any, document: Document) -> Said:
    if section.kind == "default":
        return "default"
    place = ("policy", pattern)
    try:
        return recipes.recipe_at(section, document, *place)
    except RecipeError as error:
        raise Refused(Problem("refused-recipe", *sentence(str(error)), place)) from None


class Choices(TypedDict):
    """What a file says of a model, as arguments of :func:`opfuse.fuse_`."""

    recipe: Recipe | None
    policy: dict[str, Said]


def loads_policy(data: str | bytes, path: str = "<text>") -> Choices:
    """Recipe and policy in a text, YAML in UTF-8; ``path`` is how findings call it. ConfigError with every finding."""
    document = read(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"), path)
    refuse(document.findings)
    try:
        file = PolicyFile.model_validate(document.root.plain(), context=document)
    except ValidationError as error:
        report(document, error, _sections(document))
        refuse(document.findings)
        raise
    return Choices(recipe=file.recipe, policy=file.said(document))


def _sections(document: Document) -> Mapping[tuple[str, ...], type[FileSection]]:
    """The model of each place in the file; each pattern is one."""
    policy = document.root.child("policy")
    patterns = policy.value if policy is not None and isinstance(policy.value, dict) else {}
    return {
        (): PolicyFile,
        **{("recipe", kind): model for kind, model in recipes.MODELS.items()},
        **{("policy", pattern, kind): model for pattern in patterns for kind, model in MODELS.items()},
    }


def is_policy(data: bytes, path: str) -> bool:
    """Whether a file chooses for a model instead of describing a pipeline; a mistyped key is taken for the nearer one."""
    root, known = read(data, path).root.value, {"policy", "pipeline"}
    keys = {*root} if isinstance(root, dict) else set()
    return (known & keys or known & {closest(key, known) for key in keys}) == {"policy"}
