"""What a file says once and means several times: parameters, fragments, repeated blocks and residual branches.

They are written out on the document's nodes, each of which stays where it is written, before anything else reads them: so
findings and sources speak of the line that a person wrote. There is no template language; ``${name}`` is a whole value.

- ``parameters: {hidden: 256}`` and ``size: ${hidden}``
- ``fragments: {mlp: [...]}`` and, among ops, ``{use: mlp}``, or ``{use: mlp, with: {hidden: 512}}``
- ``{repeat: 4, ops: [...]}``; channels that begin and end in a block are its own in each copy
- ``{residual: [...]}``, whose input is added to its output
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from opfuse.config.document import Document, YamlNode
from opfuse.config.findings import Span, guesses, shown, similar
from opfuse.config.operations import CHANNELS, MAX_OPS

PARAMETERS, FRAGMENTS, PIPELINE = "parameters", "fragments", "pipeline"
USE, WITH, REPEAT, RESIDUAL, OPS = "use", "with", "repeat", "residual", "ops"
BLOCKS: Mapping[str, tuple[str, ...]] = {USE: (WITH,), REPEAT: (OPS,), RESIDUAL: ()}
"""Entries that stand for several ops, by the key that tells them, and their other keys."""

_PARAMETER = re.compile(r"\$\{(\w*)\}")
_MOST = 64 * MAX_OPS
"""Entries that blocks stand for, and values in place of names: what a file of a few lines could otherwise have without an end."""


class _TooMuch(Exception):
    """More than a file stands for."""


@dataclass
class _Expansion:
    document: Document
    parameters: Mapping[str, YamlNode]
    fragments: Mapping[str, YamlNode]
    used: set[tuple[str, str]] = field(default_factory=set)
    ops_made: int = 0
    written: int = 0
    numbers: int = 0

    # -- values ----------------------------------------------------------------------------------------------------------

    def value(self, node: YamlNode, given: Mapping[str, YamlNode]) -> YamlNode:
        """The node with parameters in place of their names; each value stands where its name is written."""
        if isinstance(node.value, dict):
            return replace(node, value={key: self.value(each, given) for key, each in node.value.items()})
        if isinstance(node.value, list):
            return replace(node, value=[self.value(each, given) for each in node.value])
        found = _PARAMETER.fullmatch(node.value) if isinstance(node.value, str) else None
        if found is None:
            return node
        name = found[1]
        if (known := given.get(name)) is None:
            self.report(node.span, "unknown-parameter", f"there is no parameter {shown(name)}", similar(name, given))
            return node
        self.used.add((PARAMETERS, name))
        self.write(known)
        return replace(known, span=node.span)

    def write(self, node: YamlNode) -> None:
        """Count a value that is written once more, with all values inside it."""
        self.count()
        inside = node.value.values() if isinstance(node.value, dict) else node.value if isinstance(node.value, list) else ()
        for each in inside:
            self.write(each)

    # -- ops -------------------------------------------------------------------------------------------------------------

    def ops(self, node: YamlNode, given: Mapping[str, YamlNode], around: tuple[str, ...] = ()) -> list[YamlNode]:
        """The ops that a list of entries stands for. around: the fragments that it is in."""
        if not isinstance(node.value, list):
            self.report(node.span, "bad-value", f"ops wants a list, got {shown(node.plain())}")
            return []
        return [op for entry in node.value for op in self.entry(entry, given, around)]

    def entry(self, entry: YamlNode, given: Mapping[str, YamlNode], around: tuple[str, ...]) -> Iterator[YamlNode]:
        kind = next((key for key in BLOCKS if isinstance(entry.value, dict) and key in entry.value), None)
        self.count(ops={None: 1, RESIDUAL: 2}.get(kind, 0))
        if kind is None:
            yield self.value(entry, given)
            return
        for key, span in entry.keys.items():
            if key not in (kind, *BLOCKS[kind]):
                self.report(span, "unknown-key", f"unknown key {shown(key)} beside {shown(kind)}", similar(key, BLOCKS[kind]))
        entry = _as_meant(entry, guesses(entry.value.keys() - {kind}, BLOCKS[kind]))
        yield from {USE: self.used_fragment, REPEAT: self.repeated, RESIDUAL: self.residual}[kind](entry, given, around)

    def used_fragment(self, entry: YamlNode, given: Mapping[str, YamlNode], around: tuple[str, ...]) -> Iterator[YamlNode]:
        name = entry.value[USE].value
        if not isinstance(name, str) or name not in self.fragments:
            known = similar(str(name), self.fragments)
            self.report(entry.value[USE].span, "unknown-fragment", f"there is no fragment {shown(name)}", known)
            return
        if name in around:
            self.report(entry.value[USE].span, "bad-value", f"fragment {shown(name)} uses itself", "take it out of itself")
            return
        self.used.add((FRAGMENTS, name))
        own = entry.value.get(WITH)
        if own is not None and not isinstance(own.value, dict):
            self.report(own.span, "bad-value", f"with wants a mapping, got {shown(own.plain())}")
            return
        asked = {key: self.value(each, given) for key, each in (own.value if own is not None else {}).items()}
        yield from self.scoped(self.ops(self.fragments[name], {**given, **asked}, (*around, name)))

    def repeated(self, entry: YamlNode, given: Mapping[str, YamlNode], around: tuple[str, ...]) -> Iterator[YamlNode]:
        times, inside = self.value(entry.value[REPEAT], given), entry.value.get(OPS)
        if type(times.value) is not int or times.value < 1:
            self.report(times.span, "bad-value", f"repeat wants an integer of at least 1, got {shown(times.plain())}")
        elif inside is None:
            self.report(entry.span, "missing-key", "'repeat' needs a key 'ops'", "add `ops: [...]`")
        else:
            for _ in range(times.value):
                self.count()
                yield from self.scoped(self.ops(inside, given, around))

    def residual(self, entry: YamlNode, given: Mapping[str, YamlNode], around: tuple[str, ...]) -> Iterator[YamlNode]:
        inside, span = entry.value[RESIDUAL], entry.span
        self.numbers += 1
        name = f"residual {self.numbers}"
        yield _op(span, "make_extra_output", extra_output=name)
        yield from self.ops(inside, given, around)
        yield _op(span, "add_extra_input", extra_input=name)

    def scoped(self, ops: list[YamlNode]) -> list[YamlNode]:
        """The ops of one copy of a block, whose own channels have names of their own."""
        made = {name for op in ops for name in _channels(op, "extra_output")}
        own = made & {name for op in ops for name in _channels(op, "extra_input")}
        if not own:
            return ops
        self.numbers += 1
        names = {name: f"{name} of copy {self.numbers}" for name in own}
        return [_renamed(op, names) for op in ops]

    def count(self, *, ops: int = 0) -> None:
        """One entry or value more, which is so many ops."""
        self.written += 1
        self.ops_made += ops
        if self.written > _MOST or self.ops_made > MAX_OPS:
            raise _TooMuch

    def report(self, span: Span, code: str, message: str, help: str = "") -> None:
        self.document.report(span, code, message, help)


def _as_meant(node: YamlNode, guessed: Mapping[str, str]) -> YamlNode:
    """The mapping under known keys in place of misspelt ones, where it has not both, so that nothing follows from the slip."""
    taken = {key: known for key, known in guessed.items() if known not in node.value}
    return replace(node, value={taken.get(key, key): each for key, each in node.value.items()})


def _op(span: Span, op: str, **channels: str) -> YamlNode:
    return YamlNode({key: YamlNode(value, span) for key, value in {"op": op, **channels}.items()}, span)


def _channels(op: YamlNode, side: str) -> tuple[str, ...]:
    node = op.child(side)
    written = [] if node is None else [part.value for part in node.value] if isinstance(node.value, list) else [node.value]
    return tuple(name for name in written if isinstance(name, str))


def _renamed(op: YamlNode, names: Mapping[str, str]) -> YamlNode:
    def renamed(node: YamlNode) -> YamlNode:
        if isinstance(node.value, list):
            return replace(node, value=[renamed(part) for part in node.value])
        return replace(node, value=names.get(node.value, node.value)) if isinstance(node.value, str) else node

    if not isinstance(op.value, dict):
        return op
    return replace(op, value={key: renamed(value) if key in CHANNELS else value for key, value in op.value.items()})


Expanded = Literal["all", "in part", "not"]


def expand(document: Document, sections: Iterable[str]) -> Expanded:
    """Write out what the document says once and means several times; what is wrong with it is among its findings.

    How much of it is written out: without an op that stands for nothing known, in part. sections: the names of others.
    """
    root = document.root
    if not isinstance(root.value, dict):
        return "all"
    known = (*sections, PARAMETERS, FRAGMENTS)
    guessed = {key: name for key, name in guesses(root.value, known).items() if name in (PARAMETERS, FRAGMENTS)}
    for key in guessed:
        document.report(root.keys[key], "unknown-key", f"unknown key {shown(key)}", similar(key, known))
    root = document.root = _as_meant(root, guessed)
    own = {name: _section(document, name) for name in (PARAMETERS, FRAGMENTS)}
    made = _Expansion(document, own[PARAMETERS], own[FRAGMENTS])
    try:
        value = {key: _expanded(made, key, node) for key, node in root.value.items() if key not in own}
    except _TooMuch:
        message = f"ops wants at most {MAX_OPS} ops, with all that it repeats, and {_MOST} entries and values on the way"
        made.report(_place_of_ops(root), "bad-value", message, "repeat less")
        return "not"
    written: Expanded = "in part" if document.findings else "all"
    told = not document.findings and _all_ops(value.get(PIPELINE))  # what was left out, or is no op, may use it
    for name, written_once in own.items():
        for each in written_once if told else ():
            if (name, each) not in made.used:
                span = root.value[name].keys.get(each, root.value[name].span)
                made.report(span, f"unused-{name[:-1]}", f"nothing uses {name[:-1]} {shown(each)}", "take it out, or use it")
    document.root = replace(root, value=value)
    return written


def _expanded(made: _Expansion, key: str, node: YamlNode) -> YamlNode:
    """A section of the file, of which the pipeline's ops are written out."""
    ops = node.child(OPS) if key == PIPELINE else None
    if ops is None or not isinstance(ops.value, list):
        return made.value(node, made.parameters)
    found = made.ops(ops, made.parameters)
    others = {name: made.value(each, made.parameters) for name, each in node.value.items() if name != OPS}
    return replace(node, value={**others, OPS: replace(ops, value=found)})


def _all_ops(pipeline: YamlNode | None) -> bool:
    """Whether all that a pipeline holds are ops."""
    ops = None if pipeline is None else pipeline.child(OPS)
    return ops is not None and isinstance(ops.value, list) and all(entry.child("op") is not None for entry in ops.value)


def _place_of_ops(root: YamlNode) -> Span:
    """Where the pipeline's ops stand, or what there is of them."""
    pipeline = root.child(PIPELINE) or root
    return (pipeline.child(OPS) or pipeline).span


def _section(document: Document, name: str) -> Mapping[str, YamlNode]:
    node = document.root.child(name)
    if node is None:
        return {}
    values = [part.value for part in node.value.values()] if isinstance(node.value, dict) else [{}]
    if not any(isinstance(value, dict) or (name == FRAGMENTS and not isinstance(value, list)) for value in values):
        return dict(node.value)
    wanted = "a mapping from names to values" if name == PARAMETERS else "a mapping from names to lists of ops"
    document.report(node.span, "bad-value", f"{name} wants {wanted}, got {shown(node.plain())}")
    return {}
