"""The parameter of a kernel: a struct that its source declares, filled by name.

The struct stands in the .cu file, where the kernel reads it, and nowhere else: the order and the types in which the host packs
follow from that text. What is called ``unused`` there fills a word and is given by nobody.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from opfuse.errors import KernelError, describe
from opfuse.kernels.engine.compiling import Variant, assemble

_ADDRESS = "P"
_CODES = {"long long": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}
_UNUSED = "unused"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DECLARATION = re.compile(r"(const\s+)?(long\s+long|[\w:]+)\s*(\*?.*)", re.S)
_DECLARATOR = re.compile(r"(\*?)\s*(?:const\s+)?(\w+)")


@dataclass(frozen=True, eq=False)
class CStruct:
    """A struct of a source: its fields in order, each with its code in ``struct`` formats, or with the struct that it is.

    read: names of the addresses behind which nothing is written.
    """

    name: str
    fields: tuple[tuple[str, str | CStruct], ...]
    read: frozenset[str] = frozenset()

    def __call__(self, **values: int | float | tuple[int | float, ...]) -> tuple[int | float, ...]:
        """Values in the order of the struct; one for a struct inside is what that was called for. KernelError for others."""
        if values.keys() != self._given:
            self._refuse(f"the fields {', '.join(sorted(self._given))}", ", ".join(sorted(values)), "name each once")
        values[_UNUSED] = 0
        if self._is_flat and tuple not in map(type, plain := self._in_order(values)):  # as of most, several times a launch
            return plain
        filled: list[int | float] = []
        for name, kind in self.fields:
            value = values[name]
            if isinstance(kind, str) if isinstance(value, tuple) else not isinstance(kind, str):
                self._refuse(f"what a {kind} takes as {name}", repr(value), "call the struct of the field for it, and no other")
            filled += value if isinstance(value, tuple) else (value,)
        if len(filled) != self.count:
            self._refuse(f"{self.count} values", len(filled), "call the struct of each field for it")
        return tuple(filled)

    def of(self, fields: Mapping[str, int | float]) -> tuple[int | float, ...]:
        """Its values out of those by name that several structs choose from, also for the structs inside."""
        return self(**{n: fields[n] if isinstance(kind, str) else kind.of(fields) for n, kind in self.fields if n != _UNUSED})

    def _refuse(self, wanted: str, got: object, cure: str) -> NoReturn:
        raise KernelError(describe(f"struct {self.name}", wanted=wanted, got=got, cure=cure))

    @cached_property
    def _given(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.fields) - {_UNUSED}

    @cached_property
    def _is_flat(self) -> bool:
        return all(isinstance(kind, str) for _, kind in self.fields) and len(self.fields) > 1

    @cached_property
    def _in_order(self) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
        return operator.itemgetter(*(name for name, _ in self.fields))

    @cached_property
    def count(self) -> int:
        """How many values it has, with those of the structs inside."""
        return sum(1 if isinstance(kind, str) else kind.count for _, kind in self.fields)

    @cached_property
    def _aligned(self) -> str:
        """What ends a format on the boundary that C gives the struct."""
        widest = max((kind if isinstance(kind, str) else kind._aligned[1:] for _, kind in self.fields), key=struct.calcsize)
        return f"0{widest}"

    @cached_property
    def packing(self) -> str:
        """Its format, from one boundary to the next."""
        codes = "".join(kind if isinstance(kind, str) else kind.packing for _, kind in self.fields)
        return f"{self._aligned}{codes}{self._aligned}"

    @cached_property
    def read_words(self) -> tuple[int, ...]:
        """The words of 8 bytes, of what is packed, with the addresses behind which nothing is written."""
        return tuple(self._read_words(""))

    def _read_words(self, before: str) -> Iterator[int]:
        before += self._aligned
        for name, kind in self.fields:
            if not isinstance(kind, str):
                yield from kind._read_words(before)
            elif name in self.read:
                yield struct.calcsize(before + kind) // struct.calcsize(_ADDRESS) - 1
            before += kind if isinstance(kind, str) else kind.packing

    @cached_property
    def layout(self) -> struct.Struct:
        """What packs it."""
        return struct.Struct(self.packing)

    def __str__(self) -> str:
        return self.name


@functools.cache
def parameter_of(
    source: str, name: str = "Parameters", *, generated: str = "", types: tuple[tuple[str, CStruct], ...] = ()
) -> CStruct:
    """The struct ``name`` of a source, or ``Outer::Inner``.

    generated: the text in the place of generated.cuh. types: what names stand for that the text leaves open. KernelError for a
    struct that is not there, or a type whose bytes are not known here.
    """
    return _read(_COMMENT.sub("", assemble(Variant(source, (), generated))), f"{source} {name}", name, dict(types))


def _read(text: str, where: str, name: str, types: dict[str, CStruct]) -> CStruct:
    body = text
    for part in name.split("::"):
        body = _body(body, part, where)
    fields: list[tuple[str, str | CStruct]] = []
    read = set[str]()
    for c_type, is_const, is_address, field in _declared(body, where):
        if is_address or c_type in _CODES:
            fields.append((field, _ADDRESS if is_address else _CODES[c_type]))
        else:
            fields.append((field, types.get(c_type) or _read(text, f"{where} {field}", c_type, types)))
        if is_const and is_address:
            read.add(field)
    return CStruct(name, tuple(fields), frozenset(read))


def _body(text: str, name: str, where: str) -> str:
    """What stands between the braces of a struct."""
    found = re.search(rf"\bstruct {name}\b[^{{;]*{{", text)
    if found is None:
        raise KernelError(describe(where, wanted=f"a struct {name}", got="none", cure="declare it in the source, or in a header"))
    depth, start = 1, found.end()
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()]
    raise KernelError(describe(where, wanted=f"the end of struct {name}", got="none", cure="close its brace"))


def _declared(body: str, where: str) -> Iterator[tuple[str, bool, bool, str]]:
    """Type, whether that is const, whether it is an address, and name of each field."""
    for line in filter(None, (each.strip() for each in body.split(";"))):
        declaration = _DECLARATION.fullmatch(line)
        for each in declaration[3].split(",") if declaration else ():
            declarator = _DECLARATOR.fullmatch(each.strip())
            if declarator is None:
                break
            yield " ".join(declaration[2].split()), bool(declaration[1]), bool(declarator[1]), declarator[2]  # type: ignore[index]
        else:
            if declaration:
                continue
        wanted, cure = "fields such as `const IN* x;` and `long long rows, columns;`", "write plain fields"
        raise KernelError(describe(where, wanted=wanted, got=line, cure=cure))
