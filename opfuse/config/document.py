"""YAML text to plain values that know where they stand.

Built from the parser's events, so that no object is ever constructed: no tags, no anchors, no keys but text. Scalars follow
the core schema of YAML 1.2.2 (section 10.3.2): ``1e-5`` is a number, ``no`` is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    Event,
    MappingStartEvent,
    NodeEvent,
    ScalarEvent,
)

from opfuse.config.findings import Finding, Loc, Span, printable, shown

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_FINDINGS = 100

CORE_SCHEMA: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = (
    (re.compile(r"null|Null|NULL|~|"), lambda text: None),
    (re.compile(r"true|True|TRUE"), lambda text: True),
    (re.compile(r"false|False|FALSE"), lambda text: False),
    (re.compile(r"[-+]?[0-9]{1,640}"), int),
    (re.compile(r"0o[0-7]{1,700}"), lambda text: int(text, 8)),
    (re.compile(r"0x[0-9a-fA-F]{1,530}"), lambda text: int(text, 16)),
    (re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"), float),
    (re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"), lambda text: float(text.replace(".", ""))),
)
"""What a plain scalar means, first match. Anything else is text, also a number of more digits than Python prints."""

_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class YamlNode:
    """A value of the document. value: a scalar, ``dict[str, YamlNode]`` or ``list[YamlNode]``. keys: where each key stands."""

    value: Any
    span: Span
    keys: dict[str, Span] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without positions."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def child(self, step: str | int) -> YamlNode | None:
        """The node under a key or an index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(step)
        inside = isinstance(self.value, list) and isinstance(step, int) and 0 <= step < len(self.value)
        return self.value[step] if inside else None


@dataclass
class Document:
    """A file's text, its values, and the findings so far."""

    path: str
    text: str
    findings: list[Finding] = field(default_factory=list)
    root: YamlNode = field(default_factory=lambda: YamlNode(None, Span(1, 1)))

    def __post_init__(self) -> None:
        self.lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", self.text)

    def report(self, span: Span, code: str, message: str, help: str = "") -> None:
        """Add a finding, once; beyond :data:`MAX_FINDINGS` they are no longer kept."""
        source = self.lines[span.line - 1] if span.line <= len(self.lines) else ""
        found = Finding(self.path, span, code, printable(message), printable(help), source)
        if len(self.findings) < MAX_FINDINGS and found not in self.findings:
            self.findings.append(found)

    def find(self, loc: Loc, *, on: str = "value") -> Span:
        """Where the value at ``loc``, or its key, stands; of what is absent, the nearest thing around it."""
        node, key = self.root, None
        for step in loc:
            below = node.child(step)
            if below is None:
                continue
            node, key = below, node.keys.get(str(step))
        empty = node.value is None and node.span.width == 0
        return key if key is not None and (on == "key" or empty) else node.span

    def source(self, loc: Loc) -> str:
        """``file.yaml:7:12`` of the value at ``loc``."""
        span = self.find(loc)
        return f"{self.path}:{span.line}:{span.column}"


def read(data: bytes, path: str) -> Document:
    """The document in ``data``, YAML in UTF-8; what is wrong with it is among its findings."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        document = Document(path, data.decode("utf-8", "replace"))
        span = _after(data[: error.start].decode("utf-8", "replace"))
        document.report(span, "not-utf-8", f"byte 0x{data[error.start]:02x} is not UTF-8", "save the file as UTF-8")
        return document
    document = Document(path, text)
    if len(data) > MAX_BYTES:
        document.report(Span(1, 1), "too-large", f"the file has more than {MAX_BYTES // 1024} KiB", "a configuration is shorter")
    else:
        _parse(document)
    return document


def _after(before: str) -> Span:
    """The place of the character that follows ``before``."""
    return Span(before.count("\n") + 1, len(before) - before.rfind("\n"))


def _parse(document: Document) -> None:
    text = document.text
    if bad := _UNPRINTABLE.search(text):
        span = _after(text[: bad.start()])
        document.report(span, "yaml-syntax", f"character {bad[0]!a} has no place in YAML", "remove it")
        return
    builder = _TreeBuilder(document)
    try:
        for event in YAML(typ="safe", pure=True).parse(text):
            if not builder.take(event):
                break
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        span = builder.last if mark is None else Span(mark.line + 1, mark.column + 1)
        what = [part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part]
        message = " ".join(" ".join(what).split()) or "this is not YAML"
        document.report(span, "yaml-syntax", message, _syntax_help(error, span, message))
    except (ValueError, OverflowError):  # the scanner makes characters of escapes such as "\\UFFFFFFFF"
        document.report(builder.last, "yaml-syntax", "an escape after this stands for no character", "write the character itself")


def _syntax_help(error: YAMLError, span: Span, message: str) -> str:
    if r"'\t'" in message:
        return "indent with spaces: YAML takes no tabs there"
    began = getattr(error, "context_mark", None)
    return "" if began is None or began.line + 1 == span.line else f"it begins at {began.line + 1}:{began.column + 1}"


@dataclass
class _Open:
    """A collection that has begun but not ended. key: the one whose value comes next."""

    value: dict[str, YamlNode] | list[YamlNode]
    span: Span
    keys: dict[str, Span] = field(default_factory=dict)
    key: str | None = None


class _TreeBuilder:
    """Makes nodes of events without recursion."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.last = Span(1, 1)
        self.documents = 0
        self.stack: list[_Open] = []

    def take(self, event: Event) -> bool:
        """Use one event; False ends the reading."""
        self.last = _span(event)
        if isinstance(event, DocumentStartEvent):
            return self._begin(event)
        if isinstance(event, NodeEvent):
            self._refuse_magic(event)
        if isinstance(event, CollectionStartEvent):
            return self._open(event)
        if isinstance(event, CollectionEndEvent):
            done = self.stack.pop()
            end = event.end_mark
            on_one_line = end.line + 1 == done.span.line
            width = end.column + 1 - done.span.column if on_one_line else WHOLE_LINE
            self._place(YamlNode(done.value, replace(done.span, width=width), done.keys))
        elif isinstance(event, ScalarEvent):
            self._scalar(event)
        elif isinstance(event, AliasEvent):
            self._place(YamlNode(None, self.last))
        return True

    def _begin(self, event: DocumentStartEvent) -> bool:
        self.documents += 1
        if self.documents > 1:
            self.document.report(self.last, "yaml-syntax", "a second document begins", "one file holds one document")
        if event.version not in (None, (1, 2)):
            self.document.report(self.last, "yaml-syntax", "the version of YAML is 1.2", "remove the %YAML line")
        return self.documents == 1

    def _refuse_magic(self, event: NodeEvent) -> None:
        tag = getattr(event, "tag", None)
        if isinstance(event, AliasEvent):
            self.document.report(
                self.last, "yaml-alias", f"alias {shown(event.anchor)}: aliases are not read", "write the value out"
            )
        elif event.anchor is not None:
            self.document.report(self.last, "yaml-alias", f"anchor {shown(event.anchor)}: anchors are not read", "remove it")
        if tag is not None:
            self.document.report(self.last, "yaml-tag", f"tag {shown(str(tag))}: tags are not read", "remove it")

    def _open(self, event: CollectionStartEvent) -> bool:
        if len(self.stack) == MAX_DEPTH:
            self.document.report(self.last, "yaml-depth", f"more than {MAX_DEPTH} levels", "no setting lies so deep")
            return False
        if not self._expects_value():
            self.document.report(self.last, "yaml-syntax", "a key must be text", "write `key: value`")
            return False
        self.stack.append(_Open({} if isinstance(event, MappingStartEvent) else [], self.last))
        return True

    def _expects_value(self) -> bool:
        return not self.stack or isinstance(self.stack[-1].value, list) or self.stack[-1].key is not None

    def _scalar(self, event: ScalarEvent) -> None:
        if self._expects_value():
            self._place(YamlNode(meaning(event.value) if event.implicit[0] else event.value, self.last))
            return
        top, key = self.stack[-1], event.value
        if key in top.keys:
            first = top.keys[key].line
            self.document.report(
                self.last, "duplicate-key", f"key {shown(key)} is given twice", f"the first one is on line {first}"
            )
        top.key, top.keys[key] = key, self.last

    def _place(self, node: YamlNode) -> None:
        if not self.stack:
            self.document.root = node
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            top.value.append(node)
        elif top.key is None:  # an alias as a key, which is reported
            top.key = ""
        else:
            top.value[top.key], top.key = node, None


def _span(event: Event) -> Span:
    start, end = event.start_mark, event.end_mark
    return Span(start.line + 1, start.column + 1, end.column - start.column if end.line == start.line else WHOLE_LINE)


WHOLE_LINE = 1 << 20
"""Width of what goes on beyond its first line; shown up to the end of that line."""


def meaning(text: str) -> Any:
    """What a plain scalar of this text stands for."""
    return next((read for pattern, read in CORE_SCHEMA if pattern.fullmatch(text)), str)(text)
