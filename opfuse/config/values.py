"""What a file means: every setting with the value that it comes to, and where that was given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from opfuse.config.document import Document, read
from opfuse.config.load import Config, loads, text_at
from opfuse.config.policies import Choices, is_policy, loads_policy
from opfuse.formats import dtype_name
from opfuse.recipes import Recipe
from opfuse.sources import DEFAULT


class SettingValue(NamedTuple):
    """A setting by its path in the file. source: line and column, a variable, or ``default``."""

    path: str
    value: Any
    source: str


def values_in(path: str | Path) -> list[SettingValue]:
    """The settings of the configuration or the policy at ``path``. ConfigError with every finding."""
    data, name = text_at(path)
    if is_policy(data, name):
        return [*_choices(loads_policy(data, name), read(data, name))]
    return values_of(loads(data, name))


def values_of(config: Config) -> list[SettingValue]:
    """The settings of all sections; of the rules those that the file speaks of."""
    recipe = _recipe("recipe", config.recipe, config.places.get("recipe", DEFAULT))
    return [*recipe, *_pipeline(config), *_rules(config), *_sections(config)]


def _choices(choices: Choices, document: Document) -> Iterator[SettingValue]:
    """What a policy says, pattern by pattern."""
    yield from _recipe("recipe", choices["recipe"], document.source(("recipe",)))
    for pattern, said in choices["policy"].items():
        path, source = f"policy.{pattern}", document.source(("policy", pattern))
        yield from [SettingValue(path, said, source)] if isinstance(said, str) else _recipe(path, said, source)


def _recipe(path: str, recipe: Recipe | None, source: str) -> Iterator[SettingValue]:
    yield SettingValue(path, "none" if recipe is None else recipe.kind, source)
    for name, value in () if recipe is None else recipe.values().items():
        yield SettingValue(f"{path}.{name}", value, recipe.sources[name])  # type: ignore[union-attr]


def _pipeline(config: Config) -> Iterator[SettingValue]:
    yield SettingValue("pipeline.dtype", dtype_name(config.dtype), config.places.get("pipeline.dtype", DEFAULT))
    for i, entry in enumerate(config.pipeline):
        channels = [f"{way} {name}" for way, names in (("<-", entry.extra_input), ("->", entry.extra_output)) for name in names]
        label = entry.build(dtype=config.dtype, device="meta").label
        yield SettingValue(f"pipeline.ops[{i}]", " ".join([label, *channels]), entry.source)


def _rules(config: Config) -> Iterator[SettingValue]:
    yield SettingValue("fusions.level", f"O{config.rules.level}", config.rules.source)
    for rule in config.rules.rules:
        if rule.source != DEFAULT:
            guards = ", ".join(f"{guard.reads} {guard.wanted_text}" for guard in rule.when)
            yield SettingValue(f"fusions.rules.{rule.name}", f"{rule.direction}, when {guards or 'always'}", rule.source)
    for name, source in config.places.items():
        if name.startswith("disabled."):
            yield SettingValue(f"fusions.rules.{name.removeprefix('disabled.')}", "disabled", source)


def _sections(config: Config) -> Iterator[SettingValue]:
    for name, section in (("data", config.data), ("train", config.train), ("watch", config.watch)):
        for field, value in () if section is None else section.model_dump().items():
            yield SettingValue(f"{name}.{field}", value, config.places.get(f"{name}.{field}", DEFAULT))
