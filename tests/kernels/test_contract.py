"""Kernels for who launches them: the RawKernel, the contract, and the struct that is its argument. No GPU is needed."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import opfuse
from opfuse.errors import KernelError, UnsupportedError
from opfuse.kernels.engine import contract
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.compiling import compile_variant


@pytest.fixture
def loads(monkeypatch):
    """The variants that are loaded, on a device that only notes them."""
    noted = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)

    def loaded(*asked):
        noted.append(asked)
        return SimpleNamespace(kernel="kernel")

    monkeypatch.setattr(contract, "loaded", loaded)
    return noted


@pytest.mark.parametrize("source", sorted(path.name for path in SOURCES.glob("*.cu")))
def test_every_contract_says_grid_blocks_and_definition(source):
    text, cure = contract.contract_of(source), "begin the source with its contract, as docs/kernels.md shows"
    assert re.match(r"\w+: ", text), cure
    assert "\nGrid" in text, cure
    assert "Defined by" in text, cure
    assert "block" in text, cure


def test_a_contract_has_the_headers_that_it_names():
    text = contract.contract_of("cast_row.cu")
    assert "PACKS            how many eights of columns each thread holds" in text  # of row.cuh
    assert "row.cuh" in text


TYPES = [
    ("transpose", "transpose", {"ALIGNED": 1}),
    ("amax", "amax", {"ALIGNED": 0, "IN": torch.bfloat16}),
    ("delayed", "delayed_update", {"MOST": 4}),
]


@pytest.mark.parametrize(("name", "entry", "macros"), TYPES)
def test_a_kernel_is_compiled_as_its_macros_say(name, entry, macros, loads):
    made = opfuse.kernels.raw(name, **macros)
    ((variant, asked, device),) = loads
    assert (made.kernel, asked, device) == ("kernel", entry, 3)
    assert compile_variant(variant, "sm_90a").entries.keys() == {entry}
    assert made.contract == contract.contract_of(f"{name}.cu")


def test_one_kernel_of_several_is_named(loads):
    opfuse.kernels.raw("scaled_sums")
    opfuse.kernels.raw("cast_mx.cast_rows", IN=torch.float16)
    variant, entry, _ = loads[-1]
    assert entry == "cast_rows"
    assert {"ENTRY_cast_rows=1", "IN=fp16"} <= set(variant.defines)


def test_the_argument_is_the_struct_by_value(loads):
    made = opfuse.kernels.raw("transpose", ALIGNED=0)
    packed = made.argument(x=16, turned=32, rows=3, columns=5)
    assert packed.size == 1
    assert packed.tobytes() == np.array([16, 32, 3, 5], np.int64).tobytes()
    with pytest.raises(KernelError, match="struct Parameters: wants the fields columns, rows, turned, x, got x"):
        made.argument(x=16)


def test_the_block_of_the_page_launches_by_the_contract(monkeypatch):
    """Of kernels.md, on a device that only notes launches."""
    queued, told = [], []

    def kernel(grid, block, arguments, *, stream):
        queued.append((grid, block, *arguments, stream))

    monkeypatch.setattr(contract, "loaded", lambda *_: SimpleNamespace(kernel=kernel))
    for name, value in {"is_available": True, "current_device": 0, "current_stream": 7}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    cupy = SimpleNamespace(cuda=SimpleNamespace(Stream=SimpleNamespace(from_external=lambda stream: stream)))
    page = Path(opfuse.__file__).parents[1] / "docs" / "kernels.md"
    (block,) = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    x = torch.zeros(300, 70, dtype=torch.uint8)
    names = {"opfuse": opfuse, "torch": torch, "cupy": cupy, "x": x, "print": told.append}
    exec(block, names)
    assert told == [contract.contract_of("transpose.cu")]
    ((grid, threads, struct, stream),) = queued
    assert (grid, threads, stream) == ((4,), (512,), 7)
    assert struct.tobytes() == np.array([x.data_ptr(), names["turned"].data_ptr(), 300, 70], np.int64).tobytes()


REFUSED = [
    ("transposed", {}, r"wants the name of a source, got 'transposed'; did you mean 'transpose'\?"),
    ("cast_mx", {}, r"wants one kernel of its source, got 2\. Cure: name one: cast_mx\.cast_rows, cast_mx\.cast_tile"),
    ("cast_mx.cast", {}, r"kernel cast_mx\.cast: wants one kernel"),
    ("chain_forward", {}, "wants a source with all of its text, got a chain of ops"),
    ("amax", {"IN": torch.int8}, r"kernel amax IN: wants an integer or a C\+\+ name, got torch\.int8"),
    ("delayed", {}, "wants the number MOST, got none"),
]


@pytest.mark.parametrize(("name", "macros", "said"), REFUSED)
def test_what_is_no_kernel_is_refused(name, macros, said, loads):
    with pytest.raises(KernelError, match=said):
        opfuse.kernels.raw(name, **macros)
    assert loads == []


def test_without_a_gpu_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="kernel transpose: wants an NVIDIA GPU, got none"):
        opfuse.kernels.raw("transpose", ALIGNED=1)
