"""The parameter of a kernel: a struct that its source declares, filled by name.

The struct stands in the .cu file, where the kernel reads it, and nowhere else: the order, the types and the alignment in which
the host packs follow from that text. What is called ``unused`` there fills words and is given by nobody. An array is a struct
whose fields are its elements.
"""

from __future__ import annotations

import functools
import operator
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

from opfuse.errors import KernelError, describe
from opfuse.kernels.engine.compiling import Variant, assemble

FieldValue = int | float | tuple[int | float, ...] | list[Any]
"""Of a field: a number, the values of a struct, the elements of an array."""

_ADDRESS = "P"
_CODES = {"long long": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}
_UNUSED = "unused"

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_DECLARATION = re.compile(r"(const\s+)?(long\s+long|[\w:]+)\s*(\*?.*)", re.S)
_DECLARATOR = re.compile(r"(\*?)\s*(?:const\s+)?(\w+)(?:\[(\w+)\])?")


@dataclass(frozen=True, eq=False)
class CStruct:
    """A struct of a source: its fields in order, each with its code in ``struct`` formats, or with the struct that it is.

    read: names of the addresses behind which nothing is written. alignas: bytes on which it begins and ends, where it says so.
    """

    name: str
    fields: tuple[tuple[str, str | CStruct], ...]
    read: frozenset[str] = frozenset()
    alignas: int = 1

    def __call__(self, **values: FieldValue) -> tuple[int | float, ...]:
        """Values in the order of the struct; one for a struct inside is what that was called for. KernelError for others.

        For an array a list of its elements; behind its end are zeros.
        """
        if values.keys() != self._given:
            self._refuse(f"the fields {', '.join(sorted(self._given))}", ", ".join(sorted(values)), "name each once")
        values[_UNUSED] = self._nothing
        if self._is_flat and tuple not in map(type, plain := self._in_order(values)):  # as of most, several times a launch
            return plain
        filled: list[int | float] = []
        for name, kind in self.fields:
            filled += self._words(name, kind, values[name])
        return tuple(filled)

    def _words(self, name: str, kind: str | CStruct, value: FieldValue) -> Sequence[int | float]:
        if isinstance(value, list) and isinstance(kind, CStruct):
            whole = [word for element in value for word in (element if isinstance(element, tuple) else (element,))]
            value = (*whole, *[0] * (kind.count - len(whole)))
        if isinstance(value, tuple) == isinstance(kind, str) or isinstance(value, list):
            self._refuse(f"what a {kind} takes as {name}", repr(value), "call the struct of the field for it, and no other")
        given = value if isinstance(value, tuple) else (value,)
        if len(given) != _count(kind):
            self._refuse(f"{_count(kind)} values as {name}", len(given), "call the struct of the field for it")
        return given

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
    def _nothing(self) -> FieldValue:
        """What fills the words that nobody gives."""
        return 0 if isinstance(dict(self.fields).get(_UNUSED, ""), str) else []

    @cached_property
    def count(self) -> int:
        """How many values it has, with those of the structs inside."""
        return sum(_count(kind) for _, kind in self.fields)

    @cached_property
    def _aligned(self) -> str:
        """What ends a format on the boundary that C gives the struct's widest number."""
        widest = max((kind if isinstance(kind, str) else kind._aligned[1:] for _, kind in self.fields), key=struct.calcsize)
        return f"0{widest}"

    @cached_property
    def _boundary(self) -> int:
        """Bytes on which the struct begins, where that is more than a number wants."""
        return max(self.alignas, *(1 if isinstance(kind, str) else kind._boundary for _, kind in self.fields))

    @cached_property
    def packing(self) -> str:
        """Its format, from one boundary to the next."""
        *_, whole = (before for before, _, _ in self._parts(""))
        return f"{whole}{self._aligned}{_up_to(self._boundary, whole + self._aligned)}"

    def _parts(self, before: str) -> Iterator[tuple[str, str, str | CStruct]]:
        """What is packed up to each field, its name and its kind; at last all of it."""
        before += self._aligned
        for name, kind in self.fields:
            before += "" if isinstance(kind, str) else _up_to(kind._boundary, before)
            yield before, name, kind
            before += kind if isinstance(kind, str) else kind.packing
        yield before, "", ""

    @cached_property
    def read_words(self) -> tuple[int, ...]:
        """The words of 8 bytes, of what is packed, with the addresses behind which nothing is written."""
        return tuple(self._read_words(""))

    def _read_words(self, packed: str) -> Iterator[int]:
        for before, name, kind in self._parts(packed):
            if not isinstance(kind, str):
                yield from kind._read_words(before)
            elif name in self.read:
                yield struct.calcsize(before + kind) // struct.calcsize(_ADDRESS) - 1

    @cached_property
    def layout(self) -> struct.Struct:
        """What packs it."""
        return struct.Struct(self.packing)

    def __str__(self) -> str:
        return self.name


def _count(kind: str | CStruct) -> int:
    return 1 if isinstance(kind, str) else kind.count


def _up_to(boundary: int, packed: str) -> str:
    """What fills a format up to a multiple of so many bytes."""
    missing = -struct.calcsize(packed) % boundary
    return f"{missing}x" * bool(missing)


@functools.cache
def parameter_of(
    source: str, name: str = "Parameters", *, generated: str = "", types: tuple[tuple[str, CStruct], ...] = (), **sizes: int
) -> CStruct:
    """The struct ``name`` of a source, or ``Outer::Inner``.

    generated: the text in the place of generated.cuh. types, sizes: what names of types and of lengths of arrays stand for that
    the text leaves open. KernelError for a struct that is not there, or a type or an array whose bytes are not known here.
    """
    text = _COMMENT.sub("", assemble(Variant(source, (), generated)))
    return _read(text, f"{source} {name}", name, {**dict(types), **sizes})


def _read(text: str, where: str, name: str, given: dict[str, CStruct | int]) -> CStruct:
    body, alignas = text, 1
    for part in name.split("::"):
        body, alignas = _body(body, part, where)
    fields: list[tuple[str, str | CStruct]] = []
    read = set[str]()
    for c_type, is_const, is_address, field, length in _declared(body, where):
        kind: str | CStruct = _ADDRESS if is_address else _CODES.get(c_type, "")
        if not kind:
            known = given.get(c_type)
            kind = known if isinstance(known, CStruct) else _read(text, f"{where} {field}", c_type, given)
        fields.append((field, _array(kind, length, given, f"{where} {field}") if length else kind))
        if is_const and is_address:
            read.add(field)
    return CStruct(name, tuple(fields), frozenset(read), alignas)


def _array(kind: str | CStruct, length: str, given: dict[str, CStruct | int], where: str) -> CStruct:
    number = int(length) if length.isdigit() else given.get(length)
    if not isinstance(number, int):
        raise KernelError(describe(where, wanted=f"the number {length}", got="none", cure="pass it by name to parameter_of"))
    return CStruct(f"{kind}[{number}]", tuple((str(i), kind) for i in range(number)))


def _body(text: str, name: str, where: str) -> tuple[str, int]:
    """What stands between the braces of a struct, and the bytes that it is aligned to by its own words."""
    found = re.search(rf"\bstruct (?:alignas\((\d+)\) )?{name}\b[^{{;]*{{", text)
    if found is None:
        raise KernelError(describe(where, wanted=f"a struct {name}", got="none", cure="declare it in the source, or in a header"))
    depth, start = 1, found.end()
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()], int(found[1] or 1)
    raise KernelError(describe(where, wanted=f"the end of struct {name}", got="none", cure="close its brace"))


def _declared(body: str, where: str) -> Iterator[tuple[str, bool, bool, str, str]]:
    """Type, whether that is const, whether it is an address, name and length in brackets of each field."""
    for line in filter(None, (each.strip() for each in body.split(";"))):
        declaration = _DECLARATION.fullmatch(line)
        for each in declaration[3].split(",") if declaration else ():
            declarator = _DECLARATOR.fullmatch(each.strip())
            if declarator is None:
                break
            c_type, is_const = " ".join(declaration[2].split()), bool(declaration[1])  # type: ignore[index]
            yield c_type, is_const, bool(declarator[1]), declarator[2], declarator[3] or ""
        else:
            if declaration:
                continue
        wanted, cure = "fields such as `const IN* x;` and `long long rows, columns;`", "write plain fields"
        raise KernelError(describe(where, wanted=wanted, got=line, cure=cure))
