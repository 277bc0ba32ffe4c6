"""Loading: a file in, a :class:`Config` or all of its findings out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import opfuse
from opfuse import ops
from opfuse.compiler.registry import RuleSet
from opfuse.config.document import MAX_BYTES, Document, read
from opfuse.config.expand import expand
from opfuse.config.expect import PlannedCall, unmet
from opfuse.config.findings import Finding, Loc, Span, guesses, refuse, shown, similar
from opfuse.config.models import DATA, Text, Train, UserFile, Watching
from opfuse.config.operations import PipelineEntry
from opfuse.config.policies import Choices, is_policy, loads_policy
from opfuse.config.report import report
from opfuse.config.root import SECTIONS, Root
from opfuse.config.trial import input_columns
from opfuse.errors import ConfigError
from opfuse.recipes import Recipe
from opfuse.sources import DEFAULT


@dataclass(frozen=True)
class Config:
    """A configuration that has no findings.

    recipe: None is high precision. dtype: of parameters and activations. rules: the active rule set with the file's changes.
    data: None if the file names none. watch: None: nobody looks. places: where the file gives what, by path. sha256: of the file.
    """

    path: str
    recipe: Recipe | None
    dtype: torch.dtype
    rules: RuleSet
    pipeline: tuple[PipelineEntry, ...] = field(repr=False)
    data: Text | None
    train: Train
    watch: Watching | None = None
    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    sha256: str = field(default="", compare=False, repr=False)

    @property
    def name(self) -> str:
        """The name of the file without its suffix."""
        return Path(self.path).stem

    @property
    def folder(self) -> Path:
        """Where the file is, from which paths in it count."""
        return Path(self.path).parent

    @property
    def columns(self) -> int | None:
        """Columns of the pipeline's input, from its data or its first sized op; None where neither tells."""
        return self.data.columns if self.data is not None else input_columns(self.pipeline)

    def build(self, device: Any = None) -> ops.Sequential:
        """The pipeline with new parameters, initialised with torch's generator."""
        built = [entry.build(dtype=self.dtype, device=device) for entry in self.pipeline]
        return ops.Sequential(*built, rules=self.rules)


def load(path: str | Path) -> Config:
    """The configuration in the file at ``path``, or of the package under that name. ConfigError with every finding, if any."""
    return loads(*text_at(path))


def load_policy(path: str | Path) -> Choices:
    """Recipe and policy of a YAML file, for ``opfuse.fuse_(model, **opfuse.load_policy(path))``.

    ConfigError with every finding. fuse_ checks whether patterns fit the model.
    """
    return loads_policy(*text_at(path, {}))


def check(path: str | Path) -> tuple[Finding, ...]:
    """Every finding of the file at ``path``: those of :func:`load` and, where there are none, what rules expect in vain."""
    try:
        data, name = text_at(path)
        if is_policy(data, name):
            loads_policy(data, name)
            return ()
        return checked(data, name)
    except ConfigError as error:
        return error.findings


def text_at(path: str | Path, known: Mapping[str, Path] | None = None) -> tuple[bytes, str]:
    """The text of the file at ``path``, or of the example of that name, and its path. ConfigError if there is neither.

    known: the examples by their names; None: those of configurations.
    """
    if not isinstance(path, (str, Path)):
        got, help = f"a path is a text, got {type(path).__name__}", "write the path of a file, or the name of an example"
        raise ConfigError(Finding("load", Span(1, 1), "no-file", got, help))
    file, known = Path(path), examples() if known is None else known
    if not file.exists():
        file = known.get(str(path), file)
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_BYTES + 1), str(file)
    except OSError as error:
        example = f", or an example: {', '.join(known)}" if known else ""
        help = similar(str(path), known) or f"write the path of a file{example}"
        raise ConfigError(Finding(str(path), Span(1, 1), "no-file", error.strerror or str(error), help)) from None


def loads(data: str | bytes, path: str = "<text>") -> Config:
    """The configuration in ``data``, YAML in UTF-8; ``path`` is how findings call it. ConfigError with all findings."""
    return _validated(data, path)[0]


def checked(data: str | bytes, path: str = "<text>") -> tuple[Finding, ...]:
    """What ``opfuse check`` finds in ``data``. ConfigError with all findings if it cannot be loaded."""
    config, root, document = _validated(data, path, beside=_report_outside)
    call = PlannedCall(config.pipeline, config.rules, config.recipe, config.dtype, config.train.batch_size, config.columns)
    _report_outside(document)
    for problem in unmet(root.fusions.rules, call):
        document.report(document.find(problem.loc), problem.code, problem.message, problem.help)
    return tuple(document.findings)


def _report_outside(document: Document) -> None:
    """Report what no section shows by itself: a file of data that is not there, and sections that wait for data."""
    plain = document.root.plain()
    data = plain.get("data") if isinstance(plain, dict) else None
    if isinstance(data, dict) and issubclass(DATA.get(str(data.get("kind")), Text), UserFile):
        file = data.get("path")
        if isinstance(file, str) and file and not (Path(document.path).parent / file).is_file():
            help = "write the path from the folder of this file, or an absolute one"
            document.report(document.find(("data", "path")), "no-file", f"there is no file {shown(file)}", help)
    misspelt = isinstance(plain, dict) and "data" in guesses(plain, Root.model_fields).values()
    for name in () if data is not None or misspelt else _waiting(document):
        help = "add `data: {kind: pydoc_topics}`, or `data: {kind: text, path: FILE}` with a text of yours"
        document.report(document.find((name,), on="key"), "missing-key", f"{name!r} needs a key 'data' in the file", help)


def _waiting(document: Document) -> list[str]:
    """Sections that do nothing without data. A batch size alone is no training: plans are made for its rows."""
    return [name for name in ("train", "watch") if {*_keys(document, name)} - {"batch_size"}]


OF_ALL_OPS: tuple[Loc, ...] = ((), ("pipeline",), ("pipeline", "ops"))
"""Places whose errors are those of the pipeline as a whole, which is not known where it is written out in part."""


def _validated(
    data: str | bytes, path: str, *, beside: Callable[[Document], None] = lambda document: None
) -> tuple[Config, Root, Document]:
    """beside: reports more, where there are findings already."""
    content = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    document = read(content, path)
    refuse(document.findings)
    written, before = expand(document, Root.model_fields), len(document.findings)
    if written == "not":
        refuse(document.findings)
    try:
        root = Root.model_validate(document.root.plain(), context=document)
    except ValidationError as error:
        report(document, error, SECTIONS, skip=OF_ALL_OPS if written == "in part" else ())
        known = {finding.span for finding in document.findings[:before]}
        document.findings[before:] = [finding for finding in document.findings[before:] if finding.span not in known]
        beside(document)
        refuse(document.findings)
        raise
    if document.findings:
        beside(document)
        refuse(document.findings)
    entries = tuple(replace(entry, source=document.source(("pipeline", "ops", i))) for i, entry in enumerate(root.pipeline.ops))
    rules = _with_places(root.fusions.apply(), root, document)
    places = _places(root, document)
    given = (root.recipe, root.pipeline.torch_dtype, rules, entries, root.data, root.train, root.watch, places)
    config = Config(path, *given, sha256=hashlib.sha256(content).hexdigest())
    return config, root, document


def _places(root: Root, document: Document) -> dict[str, str]:
    """Where the settings stand that have no sources of their own."""
    locations = [("recipe",), *((name, key) for name in ("pipeline", "data", "train", "watch") for key in _keys(document, name))]
    disabled = {f"disabled.{change.name}": i for i, change in enumerate(root.fusions.rules) if change.rule is None}
    places = {name: document.source(("fusions", "rules", i)) for name, i in disabled.items()}
    return {".".join(loc): document.source(loc) for loc in locations} | places


def _keys(document: Document, section: str) -> tuple[str, ...]:
    node = document.root.child(section)
    return tuple(node.value) if node is not None and isinstance(node.value, dict) else ()


def _with_places(rules: RuleSet, root: Root, document: Document) -> RuleSet:
    """A copy of the rules that says where the file mentions each."""
    found = {change.name: document.source(("fusions", "rules", i)) for i, change in enumerate(root.fusions.rules)}
    placed = tuple(replace(rule, source=found.get(rule.name, rule.source)) for rule in rules.rules)
    source = document.source(("fusions", "level")) if "level" in _keys(document, "fusions") else DEFAULT
    return replace(rules, rules=placed, source=source)


_PACKAGE = Path(opfuse.__file__).parent

PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
"""Where an installed package has the configurations that come with it, and where a checkout has."""


def examples() -> dict[str, Path]:
    """The configurations that come with the package, which every command takes by name: ``quickstart``."""
    place = next((place for place in PLACES if place.is_dir()), None)
    return {} if place is None else {path.stem: path for path in sorted(place.glob("*.yaml"))}
