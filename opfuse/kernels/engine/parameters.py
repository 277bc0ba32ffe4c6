"""The parameter of a kernel: a struct that its source declares, and that launches fill by name.

Only the .cu file declares the struct; the host reads order, types and alignment from that text and packs accordingly. A field
called ``unused`` is filled with zeros. An array counts as a struct whose fields are its elements.

The text of a generated kernel, a chain's, is read in the same way. Lengths of arrays, as of groups, are given by the launch.
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
from opfuse.kernels.engine.compiling import Variant, code_of

FieldValue = int | float | tuple[int | float, ...] | list[Any]
"""The value of a field: a number, the values of a struct, or the elements of an array."""

_ADDRESS = "P"
_CODES = {"long long": "q", "u64": "Q", "int": "i", "u32": "I", "float": "f"}
_UNUSED = "unused"

_DECLARATION = re.compile(r"(const\s+)?(long\s+long|[\w:]+)\s*(\*?.*)", re.S)
_DECLARATOR = re.compile(r"(\*?)\s*(?:const\s+)?(\w+)(?:\[(\w+)\])?")


@dataclass(frozen=True, eq=False)
class CStruct:
    """A struct of a source.

    fields: names in order, each with its code in formats of Python's ``struct``, or with the struct that it is. read: names of
    the addresses that a kernel only reads (``const``). alignas: bytes of which its address and size are multiples, if it says so.
    """

    name: str
    fields: tuple[tuple[str, str | CStruct], ...]
    read: frozenset[str] = frozenset()
    alignas: int = 1

    def __call__(self, **values: FieldValue) -> tuple[int | float, ...]:
        """The values in the order of the struct. KernelError for a missing or unknown field, and for a value of another kind.

        The value of a struct inside is the result of a call of that struct; that of an array is a list of elements, which zeros
        fill up.
        """
        if values.keys() != self._given:
            self._refuse(f"the fields {', '.join(sorted(self._given))}", ", ".join(sorted(values)), "name each once")
        values[_UNUSED] = self._nothing
        if self._is_flat and tuple not in map(type, plain := self._in_order(values)):  # most structs, fast
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
        """The values of the struct and of the structs inside, chosen by name from ``fields``, which may have more."""
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
        """The value of the field ``unused``."""
        return 0 if isinstance(dict(self.fields).get(_UNUSED, ""), str) else []

    @cached_property
    def count(self) -> int:
        """How many values it has, with those of the structs inside."""
        return sum(_count(kind) for _, kind in self.fields)

    @cached_property
    def _aligned(self) -> str:
        """The end of a format that pads it to the alignment of the struct's widest number, as C does."""
        widest = max((kind if isinstance(kind, str) else kind._aligned[1:] for _, kind in self.fields), key=struct.calcsize)
        return f"0{widest}"

    @cached_property
    def _boundary(self) -> int:
        """The largest ``alignas`` of the struct and of those inside; 1 without any."""
        return max(self.alignas, *(1 if isinstance(kind, str) else kind._boundary for _, kind in self.fields))

    @cached_property
    def packing(self) -> str:
        """The struct's format, padded at its end."""
        *_, whole = (before for before, _, _ in self._parts(""))
        return f"{whole}{self._aligned}{_up_to(self._boundary, whole + self._aligned)}"

    def _parts(self, before: str) -> Iterator[tuple[str, str, str | CStruct]]:
        """For each field: the format of all before it, its name and its kind; last, the format of all fields."""
        before += self._aligned
        for name, kind in self.fields:
            before += "" if isinstance(kind, str) else _up_to(kind._boundary, before)
            yield before, name, kind
            before += kind if isinstance(kind, str) else kind.packing
        yield before, "", ""

    @cached_property
    def read_words(self) -> tuple[int, ...]:
        """The numbers of the 8-byte words of the packed struct that are addresses which the kernel only reads."""
        return tuple(self._read_words(""))

    def _read_words(self, packed: str) -> Iterator[int]:
        for before, name, kind in self._parts(packed):
            if not isinstance(kind, str):
                yield from kind._read_words(before)
            elif name in self.read:
                yield struct.calcsize(before + kind) // struct.calcsize(_ADDRESS) - 1

    @cached_property
    def layout(self) -> struct.Struct:
        """The packer of the struct."""
        return struct.Struct(self.packing)

    def __str__(self) -> str:
        return self.name


def _count(kind: str | CStruct) -> int:
    return 1 if isinstance(kind, str) else kind.count


def _up_to(boundary: int, packed: str) -> str:
    """The padding that fills a format up to a multiple of ``boundary`` bytes."""
    missing = -struct.calcsize(packed) % boundary
    return f"{missing}x" * bool(missing)


@functools.cache
def parameter_of(
    source: str, name: str = "Parameters", *, generated: str = "", types: tuple[tuple[str, CStruct], ...] = (), **sizes: int
) -> CStruct:
    """The struct ``name`` of a source, or ``Outer::Inner``.

    generated: the text in place of generated.cuh. types, sizes: the types and the lengths of arrays that the text names but does
    not define. KernelError if there is no such struct, or if a type or a length is not known.
    """
    return _read(code_of(Variant(source, (), generated)), f"{source} {name}", name, {**dict(types), **sizes})


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
    """The text between the braces of a struct, and its ``alignas``, by default 1."""
    found = re.search(rf"struct (?:alignas\((\d+)\) )?{name}\b[^{{;]*{{", text)
    if found is None:
        raise KernelError(describe(where, wanted=f"a struct {name}", got="none", cure="declare it in the source, or in a header"))
    depth, start = 1, found.end()
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start : start + brace.start()], int(found[1] or 1)
    raise KernelError(describe(where, wanted=f"the end of struct {name}", got="none", cure="close its brace"))


def _declared(body: str, where: str) -> Iterator[tuple[str, bool, bool, str, str]]:
    """For each field: its type, whether that is const, whether it is an address, its name, and its length in brackets."""
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
