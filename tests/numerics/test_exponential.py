"""exp and tanh against fp64, and against the header that kernels compile, bit for bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import opfuse
from opfuse.numerics.exponential import exponential, hyperbolic_tangent

CUDA = Path(opfuse.__path__[0]) / "kernels" / "cuda"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
UNIT = 2.0**-23


def arguments() -> torch.Tensor:
    """Of every size down to 2^-149, dense where results are neither 0 nor 1, and what is special."""
    random = torch.Generator().manual_seed(3)
    uniform = torch.rand(1 << 20, generator=random)
    sizes = [uniform * reach for reach in (1e-3, 0.3, 1.0, 10.0, 90.0)]
    powers = torch.exp2(torch.linspace(-149, 127, 4001, dtype=torch.float64)).float()
    near = (torch.arange(256)[:, None] * 0.5 / 1.4426950408889634 + torch.linspace(-1e-5, 1e-5, 41)).flatten()
    special = torch.tensor([0.0, 87.33654, 87.33655, 88.0, 1e30, torch.finfo(torch.float32).max, torch.inf, torch.nan])
    return torch.cat([*sizes, powers, near.abs(), special])


def test_an_exponential_is_that_of_fp64():
    x = -arguments()
    y, exact = exponential(x), x.double().exp()
    assert torch.equal(y.isnan(), x.isnan())
    normal = exact >= 2.0**-126 * (1 + 64 * UNIT)
    worst = ((y.double() / exact - 1).abs() / ((1.2 + x.abs().double()) * UNIT))[normal].max()
    assert worst <= 1, worst
    assert not y[exact < 2.0**-126 * (1 - 64 * UNIT)].any()
    assert torch.equal(exponential(torch.tensor([0.0, -0.0])), torch.ones(2))


def test_a_tanh_is_that_of_fp64():
    x = torch.cat([arguments(), -arguments()])
    y, exact = hyperbolic_tangent(x), x.double().tanh()
    assert torch.equal(y.isnan(), x.isnan())
    normal = x.abs() >= 2.0**-120
    worst = ((y.double() - exact).abs() / (2.5 * UNIT * exact.abs()))[normal & x.isfinite()].max()
    assert worst <= 1, worst
    assert torch.equal(y[x.isinf()].abs(), torch.ones(2))
    assert torch.equal(hyperbolic_tangent(torch.tensor([0.0, -0.0])).signbit(), torch.tensor([False, True]))


def test_fp64_is_computed_by_torch():
    x = -arguments().double()
    for own, of_torch in ((exponential, torch.exp), (hyperbolic_tangent, torch.tanh)):
        assert torch.equal(own(x).view(torch.int64), of_torch(x).view(torch.int64))


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_the_text_of_kernels_has_the_same_bits(tmp_path):
    loops = "".join(
        f'extern "C" void {name}_of(float* y, const float* x, long n) {{ for (long i = 0; i < n; ++i) y[i] = {name}(x[i]); }}\n'
        for name in ("exponential", "hyperbolic_tangent")
    )
    source, library = tmp_path / "exponential.cpp", tmp_path / "exponential.so"
    source.write_text(f'#include "exponential.cuh"\n{loops}')
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
    subprocess.run([COMPILER, *flags, "-shared", "-fPIC", f"-I{CUDA}", "-o", library, source], check=True)
    compiled, x = ctypes.CDLL(str(library)), arguments()
    for name, own, sign in (("exponential", exponential, -1), ("hyperbolic_tangent", hyperbolic_tangent, 1)):
        given = (torch.cat([x, -x]) if sign > 0 else -x).contiguous()
        y = torch.empty_like(given)
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (y, given))
        getattr(compiled, f"{name}_of")(*pointers, ctypes.c_long(y.numel()))
        wanted = own(given)
        assert torch.equal(y.isnan(), wanted.isnan())
        assert torch.equal(y.view(torch.int32)[~y.isnan()], wanted.view(torch.int32)[~y.isnan()])
