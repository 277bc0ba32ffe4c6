"""The parameter of a kernel: the struct of its source is the one declaration, and the host fills it by name."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

import opfuse.kernels
from opfuse.errors import KernelError
from opfuse.kernels.engine.parameters import CStruct, parameter_of

KERNELS = Path(opfuse.kernels.__file__).parent
SOURCES = sorted(path.name for path in (KERNELS / "cuda").glob("*.cu"))
CHAIN = "struct Chain { const bf16* x; bf16 *y, *kept0;  // what is kept\n long long rows, columns; Cut cut; float c0_scale; };"
OPEN = {
    "chain_tile.cu": (("Encode", parameter_of("mx_tile.cuh", "MxPlanes")),),
    "product_chain.cu": (("Encode", parameter_of("encode.cuh", "Encode")),),
    "norm_cast.cu": (("CAST::Target", parameter_of("norm_cast.cu", "Blocks::Target")),),
}
ARRAYS = {
    "cast_tensor_groups.cu": {"GROUPS": 8},
    "delayed.cu": {"MOST": 3},
    "product.cu": {"GROUPS": 8, "MAPS": 1},
    "product_chain.cu": {"GROUPS": 1, "MAPS": 1},
}
"""Sources whose parameter has arrays, as long as a launch makes them."""


def read(text: str) -> CStruct:
    return parameter_of("chain_forward.cu", "Chain", generated=text)


def test_what_is_only_read_is_declared_const():
    inner = "struct Inner { float *amax; const float *scale, *other; }; "
    found = read(inner + "struct Chain { float size; const bf16 *x, *z; bf16* y; u32 n; Inner inner; };")
    assert found.read_words == (1, 2, 6, 7)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_declares_its_parameter(source):
    """Its size is the one that the source asserts when it is compiled, which test_launch.py does."""
    name = "Product" if source == "product.cu" else "Parameters"
    found = parameter_of(source, name, generated=CHAIN, types=OPEN.get(source, ()), **ARRAYS.get(source, {}))
    assert found.layout.size % 8 == 0
    assert len(struct.unpack(found.packing, bytes(found.layout.size))) == found.count


def test_no_other_place_says_how_fields_are_packed():
    packages = ("casts", "chains", "norms", "products")
    texts = {path.name: path.read_text() for package in packages for path in (KERNELS / package).glob("*.py")}
    assert not [name for name, text in texts.items() if re.search(r"\bstruct\.", text)]


def test_fields_are_packed_in_the_order_and_with_the_alignment_of_the_source():
    chain = read(CHAIN)
    cut = parameter_of("chain.cuh", "Cut")
    assert [name for name, _ in chain.fields] == ["x", "y", "kept0", "rows", "columns", "cut", "c0_scale"]
    values = {"x": 1, "y": 2, "kept0": 3, "rows": 4, "columns": 5, "c0_scale": 0.5}
    sizes = {name: 10 + i for i, (name, _) in enumerate(cut.fields)}
    packed = chain.layout.pack(*chain(**values, cut=cut(**sizes)))
    assert packed == struct.pack("PPPqqqqIIIIIIf0q", 1, 2, 3, 4, 5, *sizes.values(), 0.5)
    assert parameter_of("chain_forward.cu", generated=CHAIN).layout.size == len(packed) + 8  # and the amax behind it


def test_what_is_swapped_in_the_source_is_swapped_on_the_host():
    one, other = read("struct Chain { long long rows, columns; };"), read("struct Chain { long long columns, rows; };")
    sizes = {"rows": 3, "columns": 7}
    assert (one(**sizes), other(**sizes)) == ((3, 7), (7, 3))


def test_an_unused_word_is_filled_and_never_given():
    found = read("struct Chain { const float* x; u32 packs, unused; };")
    assert found(x=1, packs=2) == (1, 2, 0)


def test_arrays_are_filled_by_their_elements_and_end_in_zeros():
    text = "struct Each { const float* x; u32 n; }; struct Chain { Each each[MOST]; u32 packs, unused[3]; };"
    found = parameter_of("chain_forward.cu", "Chain", generated=text, MOST=3)
    each = dict(found.fields)["each"].fields[0][1]
    values = found(each=[each(x=7, n=2), each(x=8, n=3)], packs=5)
    assert values == (7, 2, 8, 3, 0, 0, 5, 0, 0, 0)
    assert found.layout.pack(*values) == struct.pack("PIxxxxPIxxxxPIxxxxIIII", *values)
    assert found.read_words == (0, 2, 4)


def test_what_is_aligned_by_its_own_words_lies_so():
    text = "struct alignas(64) Map { u64 words[2]; }; struct Chain { u32 first; Map maps[2]; u32 last; };"
    found = read(text)
    values = found(first=1, maps=[(2, 3), (4, 5)], last=6)
    assert found.layout.pack(*values) == struct.pack("I60xQQ48xQQ48xI60x", *values)
    assert struct.calcsize(found.packing) == 256


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"x": 1, "rows": 2}, "wants the fields cut, rows, x, got rows, x"),
        ({"x": 1, "row": 2, "cut": ()}, "wants the fields cut, rows, x, got cut, row, x"),
        ({"x": 1, "rows": 2, "cut": 3}, "wants what a Cut takes as cut, got 3"),
        ({"x": 1, "rows": (2,), "cut": (1,) * 8}, "wants what a q takes as rows"),
        ({"x": 1, "rows": 2, "cut": (1,) * 7}, "values as cut, got 7"),
        ({"x": 1, "rows": [2], "cut": (1,) * 8}, "wants what a q takes as rows"),
        ({"x": 1, "rows": 2, "cut": [1] * 9}, "values as cut, got 9"),
    ],
    ids=["missing", "mistyped", "no struct", "a struct", "another struct", "an array", "a longer array"],
)
def test_what_does_not_fit_is_refused(values, told):
    with pytest.raises(KernelError, match=re.escape(told)):
        read("struct Chain { const float* x; long long rows; Cut cut; };")(**values)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "wants a struct Chain"),
        ("struct Chain { float x; ", "wants the end of struct Chain"),
        ("struct Chain { u8* x, y; };", "wants a struct u8"),  # as C reads it, y is a byte
        ("struct Chain { float x[MOST]; };", "wants the number MOST"),
        ("struct Chain { OPFUSE_FN int f() const { return 1; } };", "wants fields such as"),
    ],
    ids=["none", "open", "a byte", "no length", "a method"],
)
def test_a_struct_that_cannot_be_packed_is_refused(text, told):
    with pytest.raises(KernelError, match=re.escape(told)):
        read(text)
