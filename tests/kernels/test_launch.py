"""Every kernel compiled as it will run: for each architecture, without spills, without flushed subnormals. No GPU is needed."""

import re

import pytest
import torch

from opfuse.errors import KernelError, PlanMissError
from opfuse.kernels.catalogue import CASES
from opfuse.kernels.engine import compiling, launch
from opfuse.kernels.engine.bindings import SOURCES
from opfuse.kernels.engine.compiling import ARCHITECTURES, Variant

FLUSHES = re.compile(r"^.*\b(?:add|sub|mul|div|sqrt|rcp\.rn|cvt|min|max)\b\S*\.ftz.*$", re.MULTILINE)
MOST_REGISTERS = {
    "amax.cu": {"amax": 40},
    "cast_tensor.cu": {"cast_rows": 40, "cast_tile": 64},
    "amax_lines.cu": {"amax_lines": 64},
    "cast_row.cu": {"cast_row": 160},
    "cast_lines.cu": {"cast_lines": 128},
    "cast_block.cu": {"cast_block": 128},
    "cast_mx.cu": {"cast_rows": 48, "cast_tile": 128},
    "cast_nvfp4.cu": {"cast_rows": 128, "cast_tile": 128, "cast_square": 160},
    "amax_nvfp4.cu": {"amax_nvfp4": 80},
    "delayed.cu": {"delayed_update": 40},
    "dequantize.cu": {"dequantize_rows": 64, "dequantize_tile": 48},
    "dequantize_nvfp4.cu": {"decode_rows": 64, "decode_columns": 64},
    "chain_forward.cu": {"chain_forward": 128},
    "chain_backward.cu": {"chain_backward": 128},
    "chain_tile.cu": {"chain_tile": 255, "row_sums": 32, "column_sums": 32},
    "norm_backward.cu": {"norm_backward": 255, "norm_sums": 40},
    "norm_cast.cu": {"norm_cast": 168},
    "norm_forward.cu": {"norm_forward": 168},
}
"""Entries, and what lets as many of their blocks as they are tuned for share an sm_90a multiprocessor."""

TYPES = ({"IN=bf16", "OUT=E4M3"}, {"IN=float", "OUT=E5M2"})
QUICK = {
    "dequantize.cu": ({"ELEMENT=E4M3", "OUT=bf16"}, {"ELEMENT=E5M2", "OUT=float"}),
    "dequantize_nvfp4.cu": ({"OUT=bf16"}, {"OUT=float"}),
}
"""Types that are compiled at every run, by source, ``TYPES`` of all others; what is left differs in conversions alone."""

VARIANTS = sorted({variant for kernel, cases in CASES.items() for variant, _ in kernel.launches(cases)})


def is_quick(variant):
    types = {define for define in variant.defines if define.startswith(("IN=", "OUT=", "ELEMENT="))}
    return any(types <= each for each in QUICK.get(variant.source, TYPES))


def entries_of(variant):
    """The kernels of a variant: the one that it asks for, or all that its source has."""
    asked = {define.removeprefix("ENTRY_").removesuffix("=1") for define in variant.defines if define.startswith("ENTRY_")}
    return asked or MOST_REGISTERS[variant.source].keys()


def compilations():
    """Each variant for each architecture; sm_90a at every run, and not all types."""
    for variant in VARIANTS:
        for arch in ARCHITECTURES:
            marks = () if arch == "sm_90a" and is_quick(variant) else pytest.mark.slow
            yield pytest.param(variant, arch, id=" ".join((variant.source, *variant.defines[1:], arch)), marks=marks)


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


def compiled(variant, arch):
    return compiling.compile_variant(variant, arch)


@pytest.mark.parametrize(("variant", "arch"), [*compilations()])
def test_every_variant_compiles_without_spills_or_flushed_subnormals(variant, arch):
    made = compiled(variant, arch)
    most = MOST_REGISTERS[variant.source]
    assert made.entries.keys() == entries_of(variant)
    assert {name: used.spills for name, used in made.entries.items()} == dict.fromkeys(made.entries, 0)
    assert not FLUSHES.findall(made.ptx)
    assert made.cubin.startswith(b"\x7fELF")
    assert f".target {arch}" in made.ptx
    if arch == "sm_90a" and "ALIGNED=1" in variant.defines:
        assert all(used.registers <= most[name] for name, used in made.entries.items()), made.entries


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


def test_every_source_is_launched_by_a_kernel():
    assert {path.name for path in SOURCES.glob("*.cu")} == {kernel.source for kernel in CASES}


def test_what_is_launched_is_compiled_alone_where_a_source_has_several_kernels():
    launched = {(variant, entry) for kernel, cases in CASES.items() for variant, entry in kernel.launches(cases)}
    assert all(entry in entries_of(variant) for variant, entry in launched)
    casts = {variant for variant in VARIANTS if variant.source.startswith(("cast_", "dequantize"))}
    assert {len(entries_of(variant)) for variant in casts} == {1}


def test_every_source_is_compiled_at_every_run():
    assert {variant.source for variant in VARIANTS if is_quick(variant)} == {path.name for path in SOURCES.glob("*.cu")}
    assert QUICK.keys() <= MOST_REGISTERS.keys()


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
