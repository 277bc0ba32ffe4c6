"""Every kernel compiled as it will run: without spills, without flushed subnormals. No GPU is needed.

A kernel has as many variants as its definitions have products. At every run as many are compiled as hold each definition and each
op of a chain once; ``-m slow`` compiles all of them for all architectures, and tests/gpu those that its cases launch.
"""

import functools
import re

import pytest
import torch

from opfuse.errors import KernelError, PlanMissError
from opfuse.kernels.engine import compiling, launch
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.compiling import ARCHITECTURES, Variant
from tests.kernels.catalogue import CASES

FLUSHES = re.compile(r"^.*\b(?:add|sub|mul|div|sqrt|rcp\.rn|cvt|min|max)\b\S*\.ftz.*$", re.MULTILINE)
WAITS = re.compile(r"\(C75\d\d\)[^\n]*")
"""What the compiler says where it waits for the matrix unit in a kernel's place, which then is slow, or wrong."""

USUAL = 64
"""Registers with which four blocks of 256 threads share a multiprocessor: what a kernel may use of which nothing else is said."""

MOST_REGISTERS = {
    "amax.cu": {"amax": 40},
    "cast_tensor.cu": {"cast_rows": 40},
    "combine.cu": {"combine_rows_backward": 80},
    "cast_row.cu": {"cast_row": 160},
    "cast_lines.cu": {"cast_lines": 128},
    "cast_block.cu": {"cast_block": 128},
    "cast_block_groups.cu": {"cast_block_groups": 128},
    "row_groups.cu": {"row_groups": 40},
    "cast_mx.cu": {"cast_rows": 48, "cast_tile": 128},
    "cast_nvfp4.cu": {"cast_rows": 128, "cast_tile": 128, "cast_square": 160},
    "amax_nvfp4.cu": {"amax_nvfp4": 80},
    "delayed.cu": {"delayed_update": 40},
    "cast_figures.cu": {"cast_figures": 80},
    "transpose.cu": {"transpose": 40},
    "dequantize.cu": {"dequantize_tile": 48},
    "chain_forward.cu": {"chain_forward": 128},
    "chain_backward.cu": {"chain_backward": 128},
    "chain_tile.cu": {"chain_tile": 255, "row_sums": 32, "column_sums": 32},
    "norm_backward.cu": {"norm_backward": 255},
    "norm_cast.cu": {"norm_cast": 168},
    "norm_forward.cu": {"norm_forward": 168},
    "norm_sums.cu": {"norm_sums": 48},
    "product.cu": {"product": 168},
    "product_chain.cu": {"product_chain": 168},
}
"""Entries that are tuned for more blocks of an sm_90a multiprocessor, or for fewer: what lets as many share it."""

TYPES = ({"IN=bf16", "OUT=E4M3"}, {"IN=float", "OUT=E5M2"})
QUICK = {
    "cross_entropy.cu": ({"OUT=bf16"}, {"OUT=float"}),
    "combine.cu": ({"IO=bf16", "OUT=bf16", "WEIGHT=float"}, {"IO=float", "OUT=float", "WEIGHT=float"}),
    "dequantize.cu": ({"ELEMENT=E4M3", "OUT=bf16"}, {"ELEMENT=E5M2", "OUT=float"}),
    "dequantize_fp4.cu": ({"OUT=bf16"}, {"OUT=float"}),
    "product.cu": ({"RESULT=bf16"},),
    "scaled_sums.cu": ({"OUT=bf16"}, {"OUT=float"}),
    "product_chain.cu": (
        {"RESULT=bf16", "OUT=E4M3", "CAST=TENSOR", "FAST=1", "ROWWISE=1"},
        {"RESULT=bf16", "OUT=E4M3", "CAST=BLOCKS"},
    ),
}
"""Types that are compiled at every run, by source, ``TYPES`` of all others; what is left differs in conversions alone."""

OPS = re.compile(r"\bstage\d+_(\w+)\(")
"""The functions of a chain's ops, in the text written for it."""


HEAVY = {"product_chain.cu": ({"FAST=1", "ROWWISE=1", "TURNED=1"}, {"CAST=BLOCKS"})}
"""Of sources that take seconds to compile, the definitions of variants that are compiled at every run."""

TYPED = ("IN=", "OUT=", "ELEMENT=", "RESULT=")


def is_quick(variant):
    types = {define for define in variant.defines if define.startswith(TYPED)}
    heavy = HEAVY.get(variant.source, (set(),))
    return any(types <= each for each in QUICK.get(variant.source, TYPES)) and any(each <= {*variant.defines} for each in heavy)


@functools.cache
def parts(variant):
    """What can go wrong in it: a definition, an op. How many bytes it has of anything follows from the rest."""
    defines = [define for define in variant.defines if not define.startswith(("PARAMETER_BYTES=", "SHARED="))]
    return {(variant.source, each) for each in (*defines, *OPS.findall(variant.generated))} or {variant.source}


def few(variants):
    """Some of the variants, with every part of any in one of them: the one with most that is new comes next."""
    left = set().union(*map(parts, variants))
    while left:
        chosen = max(variants, key=lambda variant: len(left & parts(variant)))
        left -= parts(chosen)
        yield chosen


ENTRY = re.compile(r'^extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(', re.M)


def entries_of(variant):
    """The kernels of a variant: the one that it asks for, or all that its source has."""
    asked = {define.removeprefix("ENTRY_").removesuffix("=1") for define in variant.defines if define.startswith("ENTRY_")}
    return asked or {*ENTRY.findall(compiling.assemble(variant))}


SMALL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'
SHARING = """
extern "C" __global__ void shares(int* x) {
    __shared__ int s[64];
    s[threadIdx.x] = *x;
    __syncthreads();
    *x = s[63 - threadIdx.x];
}
"""
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(volatile float* x) {
    float v[99];
#pragma unroll
    for (int i = 0; i < 99; ++i) v[i] = x[i];
#pragma unroll
    for (int i = 0; i < 99; ++i) x[i] = v[98 - i] * v[i];
}
"""


def complaints(variant, arch):
    """What is wrong with a variant, by what was looked at; nothing where all is well."""
    made = compiling.compile_variant(variant, arch)
    bounded = arch == "sm_90a" and "ALIGNED=1" in variant.defines
    most = {name: MOST_REGISTERS.get(variant.source, {}).get(name, USUAL) if bounded else 255 for name in made.entries}
    looked = {
        "entries": None if made.entries.keys() == entries_of(variant) else [*made.entries],
        "spills": {name: used.spills for name, used in made.entries.items() if used.spills},
        "registers": {name: used.registers for name, used in made.entries.items() if used.registers > most[name]},
        "waits": WAITS.findall(made.log),
        "flushes": FLUSHES.findall(made.ptx),
        "cubin": None if made.cubin.startswith(b"\x7fELF") else made.cubin[:4],
        "target": None if f".target {arch}" in made.ptx else made.ptx[:200],
    }
    return {name: found for name, found in looked.items() if found}


@functools.cache
def launched():
    """For each kernel the variants that its cases launch, each with its entry; several kernels launch one source."""
    return {kernel: kernel.launches(cases) for kernel, cases in CASES.items()}


@pytest.mark.parametrize("source", sorted(path.name for path in SOURCES.glob("*.cu")))
def test_every_source_compiles_without_spills_or_flushed_subnormals(source):
    """For sm_90a, with the types of ``QUICK``."""
    entries = {(variant, entry) for each in launched().values() for variant, entry in each if variant.source == source}
    assert all(entry in entries_of(variant) for variant, entry in entries)
    variants = {variant for variant, _ in entries}
    if source.startswith(("cast_", "dequantize")):
        assert {len(entries_of(variant)) for variant in variants} == {1}
    chosen = [*few(sorted(filter(is_quick, variants)))]
    assert chosen
    found = {variant.defines: complaints(variant, "sm_90a") for variant in chosen}
    assert {variant: wrong for variant, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("kernel", list(CASES), ids=lambda kernel: kernel.name)
def test_every_variant_compiles_without_spills_or_flushed_subnormals(kernel, arch):
    variants = {variant for variant, _ in kernel.launches(CASES[kernel])}
    found = {(variant.source, *variant.defines): complaints(variant, arch) for variant in sorted(variants)}
    assert {variant: wrong for variant, wrong in found.items() if wrong} == {}


def test_the_few_are_few_and_every_part_is_in_them():
    defines = [("A=0", "B=0", "C=0"), ("A=0", "B=1", "C=0"), ("A=1", "B=0", "C=0"), ("A=1", "B=1", "C=0"), ("A=1", "B=1", "C=1")]
    variants = [Variant("some.cu", (f"PARAMETER_BYTES={8 * i}", *each)) for i, each in enumerate(defines)]
    assert [*few(variants)] == [variants[0], variants[4]]  # each definition of the others is in one of these
    texts = [Variant("some.cu", generated=f"float stage0_{op}(float x);") for op in ("gelu", "relu", "gelu")]
    assert [*few(texts)] == texts[:2]
    assert [*few([Variant("one.cu"), Variant("one.cu"), Variant("other.cu")])] == [Variant("one.cu"), Variant("other.cu")]


def test_the_gate_sees_what_it_is_for():
    flushed = '{ asm("add.ftz.f32 %0, %0, %0;" : "+f"(x[0])); }'
    text = f'extern "C" __global__ void flush(float* x) {flushed}'
    assert FLUSHES.findall(compiling.compile_text(text, "sm_90a").ptx)


def test_no_multiplication_is_contracted_with_an_addition():
    text = 'extern "C" __global__ void f(float* x) { x[3] = x[0] * x[1] + x[2]; x[4] = x[0] / x[1]; x[5] = sqrtf(x[0]); }'
    ptx = compiling.compile_text(text, "sm_90a").ptx
    assert "fma" not in ptx
    for instruction in ("mul.f32", "add.f32", "div.rn.f32", "sqrt.rn.f32"):
        assert instruction in ptx or instruction.replace(".f32", ".rn.f32") in ptx


def test_every_kernel_launches_its_own_source():
    for kernel, variants in launched().items():
        assert kernel.source in {variant.source for variant, _ in variants}, kernel.name


def test_every_bound_is_of_an_entry():
    assert QUICK.keys() <= {path.name for path in SOURCES.glob("*.cu")}
    for source, bounds in MOST_REGISTERS.items():
        assert bounds.keys() <= entries_of(Variant(source))
        assert USUAL not in bounds.values()


def test_resources_are_those_of_the_log():
    made = compiling.compile_text(SHARING + SPILLING, "sm_90a")
    assert made.entries["shares"].shared == 256
    assert made.entries["shares"].spills == 0
    assert made.entries["spills"].shared == 0
    assert made.entries["spills"].spills > 0
    assert made.entries["spills"].registers == 32


def test_one_text_holds_each_header_once_and_knows_its_lines():
    text = compiling.assemble(Variant("cast_tensor.cu", ("IN=bf16", "WIDE")))
    assert text.startswith('#define IN bf16\n#define WIDE\n#line 1 "cast_tensor.cu"\n')
    assert "#include" not in text
    assert "#pragma once" not in text
    for header in ("common.cuh", "vectors.cuh", "tile.cuh"):
        assert text.count(f'#line 1 "{header}"') == 1
    with pytest.raises(KernelError) as error:
        compiling.compile_text(text, "sm_90a", "cast_tensor.cu")
    line = 1 + (SOURCES / "cast_tensor.cu").read_text().splitlines().index("constexpr int THREADS = 256, PACKS = 2;")
    assert "PARAMETER_BYTES" in str(error.value)
    broken = text.replace("constexpr int THREADS = 256, PACKS = 2;", "constexpr int THREADS = nothing;")
    with pytest.raises(KernelError, match=rf"cast_tensor\.cu\({line}\).*nothing"):
        compiling.compile_text(broken, "sm_90a", "cast_tensor.cu")


def test_r12_nothing_is_loaded_during_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(PlanMissError, match="run the same call once before the capture"):
        launch.load(Variant("amax.cu"), "amax", 0)


def test_device_architectures(monkeypatch):
    for capability, name in {(8, 0): "sm_80", (8, 6): "sm_86", (9, 0): "sm_90a", (10, 3): "sm_103a", (12, 0): "sm_120a"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert compiling.architecture(0) == name
