"""The declared math: its validation, its values against fp64, and its CUDA expressions built for the host."""

from __future__ import annotations

import ctypes
import keyword
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import opfuse.kernels
from opfuse.errors import KernelError, SpecError
from opfuse.kernels.engine import compiling
from opfuse.numerics.activations import (
    ACTIVATIONS,
    ARITHMETIC,
    CLAMPED_SWIGLU,
    DROPOUT,
    GATED,
    POINTWISE,
    SCALED,
    SIGMOID,
    SITUGLU,
    TANH_SRELU,
    sigmoid,
)
from opfuse.numerics.formula import formula
from opfuse.numerics.pointwise import Pointwise, compute_dtype, gated, scaled, substitute, variables
from tests.numerics.constants import CONSTANTS

CUDA_SOURCES = Path(opfuse.kernels.__file__).parent / "cuda"

MISH = formula("mish", lambda x: x * x.softplus().tanh())

SOFTSIGN = Pointwise(
    "softsign",
    forward="x / (1.0f + fabsf(x))",
    backward=("dy / ((1.0f + fabsf(x)) * (1.0f + fabsf(x)))",),
    value=lambda x: x / (1 + x.abs()),
    grad=lambda dy, x: (dy / (1 + x.abs()).square(),),
)
USERS_OWN = {p.name: p for p in (MISH, gated(MISH, "gated_mish"), SOFTSIGN, scaled(SOFTSIGN, "scaled_softsign"))}


def constants_of(p: Pointwise) -> dict[str, float]:
    return {name: CONSTANTS[name] for name in p.constants}


# -- independent fp64 formulas ---------------------------------------------------------------------------------------------


def sigmoid64(t):
    small = np.exp(-np.abs(t))
    return np.where(t < 0, small, 1.0) / (1.0 + small)


def gelu_argument64(x):
    return np.sqrt(8 / np.pi) * (x + 0.044715 * x**3)


def sech2_64(t):
    return 4 * sigmoid64(2 * t) * sigmoid64(-2 * t)


def swish_slope64(x, alpha):
    return sigmoid64(alpha * x) + alpha * x * sigmoid64(alpha * x) * sigmoid64(-alpha * x)


def gelu_slope64(x):
    t = gelu_argument64(x)
    inner = np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x**2)
    return sigmoid64(t) + x * inner * sigmoid64(t) * sigmoid64(-t)


erfc64 = np.vectorize(math.erfc, otypes=[float])


VALUE64 = {
    "gelu": lambda x: x * sigmoid64(gelu_argument64(x)),
    "gelu_erf": lambda x: x * erfc64(-x / np.sqrt(2)) / 2,
    "qgelu": lambda x: x * sigmoid64(1.702 * x),
    "relu": lambda x: np.maximum(x, 0),
    "srelu": lambda x: np.maximum(x, 0) ** 2,
    "silu": lambda x: x * sigmoid64(x),
}
SLOPE64 = {
    "gelu": gelu_slope64,
    "gelu_erf": lambda x: erfc64(-x / np.sqrt(2)) / 2 + x * np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi),
    "qgelu": lambda x: swish_slope64(x, 1.702),
    "relu": lambda x: (x > 0) * 1.0,
    "srelu": lambda x: np.maximum(2 * x, 0),
    "silu": lambda x: swish_slope64(x, 1.0),
}


def clamped_halves64(a, b):
    return np.minimum(a, 7.0), np.clip(b, -7.0, 7.0) + 1.0


def clamped64(a, b):
    a, b = clamped_halves64(a, b)
    return a * sigmoid64(1.702 * a) * b


def clamped_slopes64(a, b):
    gate, linear = clamped_halves64(a, b)
    return linear * swish_slope64(gate, 1.702) * (a <= 7), gate * sigmoid64(1.702 * gate) * (np.abs(b) <= 7)


def situ_slopes64(a, b):
    slope = sech2_64(a / 4) * sigmoid64(a) + 4 * np.tanh(a / 4) * sigmoid64(a) * sigmoid64(-a)
    return 25 * np.tanh(b / 25) * slope, 4 * np.tanh(a / 4) * sigmoid64(a) * sech2_64(b / 25)


def product64(act: str):
    value, slope = VALUE64[act], SLOPE64[act]
    return lambda a, b: value(a) * b, lambda a, b: (b * slope(a), value(a))


GATED64 = {
    "glu": (
        lambda a, b: sigmoid64(a) * b,
        lambda a, b: (b * sigmoid64(a) * sigmoid64(-a), sigmoid64(a)),
    ),
    "geglu": product64("gelu"),
    "geglu_erf": product64("gelu_erf"),
    "qgeglu": product64("qgelu"),
    "reglu": product64("relu"),
    "sreglu": product64("srelu"),
    "swiglu": product64("silu"),
    "clamped_swiglu": (clamped64, clamped_slopes64),
    "situglu": (lambda a, b: 4 * np.tanh(a / 4) * sigmoid64(a) * 25 * np.tanh(b / 25), situ_slopes64),
}


def round_bf16(x: np.ndarray) -> np.ndarray:
    """fp64 values rounded once to the nearest bf16, ties to even (torch's own cast goes through fp32)."""
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent - 8, -133))
    rounded = np.rint(x / quantum) * quantum
    return np.where(np.abs(rounded) < 2.0**128, rounded, np.copysign(np.inf, x))


def all_finite_bf16() -> torch.Tensor:
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return codes[torch.isfinite(codes)]


def in_bf16(p: Pointwise, x: torch.Tensor) -> torch.Tensor:
    return p.value(x.float(), **constants_of(p)).to(torch.bfloat16)


# -- values ----------------------------------------------------------------------------------------------------------------


# For how many of all finite bf16 inputs the result is not the fp64 value rounded once: (below 2e-37, where exp(-x) or x^3
# has overflowed and the result is 0; elsewhere).
MISROUNDED = {"gelu": (5, 0), "gelu_erf": (0, 0), "qgelu": (19, 1), "relu": (0, 0), "srelu": (0, 0), "silu": (17, 0)}


def test_every_activation_is_compared_with_fp64():
    told = {"VALUE64": VALUE64, "SLOPE64": SLOPE64, "MISROUNDED": MISROUNDED}
    lacking = {table: without for table, known in told.items() if (without := {*ACTIVATIONS} - {*known})}
    assert lacking == {}, "add these to the tables of this file"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_r1_every_finite_bf16_input_against_fp64(name):
    x = all_finite_bf16()
    assert x.numel() == 65280
    y = in_bf16(ACTIVATIONS[name], x).double().numpy()
    with np.errstate(over="ignore", under="ignore"):
        wanted = round_bf16(VALUE64[name](x.double().numpy()))
    wrong, tail = y != wanted, np.abs(wanted) < 2e-37
    in_tail, elsewhere = MISROUNDED[name]
    assert (wrong & tail).sum() <= in_tail
    assert (wrong & ~tail).sum() <= elsewhere
    assert (y[wrong & tail] == 0).all()
    np.testing.assert_allclose(y[wrong & ~tail], wanted[wrong & ~tail], rtol=2.0**-7)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_r1_every_finite_bf16_gradient_against_fp64(name):
    x = all_finite_bf16()
    dy = torch.full_like(x, 0.75).float()
    (dx,) = ACTIVATIONS[name].grad(dy, x.float())
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        slope = SLOPE64[name](x.double().numpy())
    fits = np.abs(slope) < 2.0**128
    assert (~fits).sum() == (128 if name == "srelu" else 0)  # 2 x from 2^127 on
    np.testing.assert_allclose(dx.double().numpy()[fits], 0.75 * slope[fits], rtol=2e-6, atol=2e-7)


def gated_samples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(20000, generator=generator) * 6
    b = torch.randn(20000, generator=generator) * 6
    edges = torch.tensor([-7.0, 7.0, 0.0, -0.0, 7.0000005, -7.0000005, 30.0, -30.0])
    grid = torch.cartesian_prod(edges, edges)
    return torch.cat([a, grid[:, 0]]), torch.cat([b, grid[:, 1]])


@pytest.mark.parametrize("name", GATED)
def test_gated_values_and_gradients_against_fp64(name):
    p, (value, slopes) = GATED[name], GATED64[name]
    a, b = gated_samples()
    a64, b64 = a.double().numpy(), b.double().numpy()
    np.testing.assert_allclose(p.value(a, b, **constants_of(p)).numpy(), value(a64, b64), rtol=4e-6, atol=1e-12)
    dy = torch.full_like(a, 1.25)
    for got, wanted in zip(p.grad(dy, a, b, **constants_of(p)), slopes(a64, b64)):
        np.testing.assert_allclose(got.numpy(), 1.25 * wanted, rtol=4e-6, atol=4e-5)


@pytest.mark.parametrize("name", SCALED)
def test_scaled_is_the_plain_op_times_its_scale(name):
    plain = {
        "scaled_swiglu": GATED["swiglu"],
        "scaled_geglu": GATED["geglu"],
        "scaled_situglu": SITUGLU,
        "scaled_clamped_qgeglu": CLAMPED_SWIGLU,
        "scaled_srelu": ACTIVATIONS["srelu"],
        "scaled_tanh_srelu": TANH_SRELU,
    }[name]
    p, constants = SCALED[name], constants_of(SCALED[name])
    inputs = [v.reshape(-1, 8) for v in gated_samples()][: len(p.inputs)]
    scale = torch.linspace(-2, 2, inputs[0].shape[0]).unsqueeze(-1)
    dy = torch.randn_like(inputs[0])
    assert torch.equal(p.value(*inputs, scale=scale, **constants), plain.value(*inputs, **constants) * scale)
    for got, wanted in zip(p.grad(dy, *inputs, scale=scale, **constants), plain.grad(dy * scale, *inputs, **constants)):
        assert torch.equal(got, wanted)
    assert torch.equal(p.operand_grad(dy, *inputs, scale=scale, **constants)["scale"], dy * plain.value(*inputs, **constants))


def test_the_clamped_square_against_fp64():
    """No more than the square of its bound; where x is large, no gradient."""
    x = torch.cat([torch.linspace(-3, 30, 20001), torch.tensor([0.0, -0.0, 1e-20, 3e38, torch.inf, -torch.inf, torch.nan])])
    cap, slope = 2.5 * np.tanh(np.maximum(x.double().numpy(), 0) / 2.5), sech2_64(np.maximum(x.double().numpy(), 0) / 2.5)
    np.testing.assert_allclose(TANH_SRELU.value(x, tanh_clamp_scale=2.5).numpy(), cap**2, rtol=1e-6, atol=1e-38)
    (dx,) = TANH_SRELU.grad(torch.full_like(x, 0.75), x, tanh_clamp_scale=2.5)
    np.testing.assert_allclose(dx.numpy(), 0.75 * 2 * cap * slope, rtol=1e-6, atol=1e-6)


def test_first_half_is_the_gated_one():
    a, b = torch.tensor([2.0, -2.0]), torch.tensor([-3.0, 5.0])
    assert GATED["reglu"].value(a, b).tolist() == [-6.0, 0.0]


def test_sigmoid_does_not_depend_on_position_or_layout():
    """Sharding or reshaping must not change a bit, which torch.sigmoid on a CPU does not promise."""
    x = torch.linspace(-20, 20, 4099)
    whole = sigmoid(x)
    assert torch.equal(torch.cat([sigmoid(part.clone()) for part in x.split(13)]), whole)
    assert torch.equal(sigmoid(torch.stack([x, x], -1)[:, 0]), whole)
    assert torch.equal(sigmoid(x[1:]), whole[1:])


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "x", "y", "slope"),
    [
        ("relu", 0.0, 0.0, 0.0),
        ("relu", -0.0, 0.0, 0.0),
        ("relu", INF, INF, 1.0),
        ("relu", -INF, 0.0, 0.0),
        ("relu", NAN, NAN, 1.0),
        ("srelu", -3.0, 0.0, 0.0),
        ("srelu", 3.0, 9.0, 6.0),
        ("srelu", NAN, NAN, NAN),
        ("gelu", 0.0, 0.0, 0.5),
        ("gelu", -0.0, -0.0, 0.5),
        ("gelu", 3.0e38, 3.0e38, 1.0),
        ("gelu", -3.0e38, -0.0, 0.0),
        ("gelu", INF, INF, NAN),
        ("gelu", -INF, NAN, NAN),
        ("gelu_erf", 0.0, 0.0, 0.5),
        ("gelu_erf", -0.0, -0.0, 0.5),
        ("gelu_erf", 3.0e38, 3.0e38, 1.0),
        ("gelu_erf", -3.0e38, -0.0, 0.0),
        ("gelu_erf", -INF, NAN, NAN),
        ("silu", 0.0, 0.0, 0.5),
        ("silu", 3.0e38, 3.0e38, 1.0),
        ("silu", -3.0e38, -0.0, 0.0),
        ("silu", -INF, NAN, NAN),
        ("qgelu", 3.0e38, 3.0e38, 1.0),
        ("qgelu", -3.0e38, -0.0, 0.0),
    ],
)
def test_r18_special_values(name, x, y, slope):
    p, at = ACTIVATIONS[name], torch.tensor([x])
    (got_slope,) = p.grad(torch.ones(1), at)
    for got, wanted in ((p.value(at), y), (got_slope, slope)):
        expected = torch.tensor([wanted])
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    assert math.isnan(y) or math.copysign(1, p.value(at).item()) == math.copysign(1, y)


@pytest.mark.parametrize("name", POINTWISE)
def test_r18_nan_in_any_input_or_operand_is_visible(name):
    p = POINTWISE[name]
    names = (*p.inputs, *p.operands)
    for poisoned in names:
        tensors = {n: torch.tensor([NAN if n == poisoned else 0.5]) for n in names}
        inputs = [tensors.pop(n) for n in p.inputs]
        assert p.value(*inputs, **tensors, **constants_of(p)).isnan().all(), poisoned


def test_clamped_swiglu_gradient_stops_where_it_is_cut():
    a, b = torch.tensor([7.0, 7.001, -9.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, 1.0, 1.0, 7.0, 7.001, -7.001])
    da, db = CLAMPED_SWIGLU.grad(torch.ones(6), a, b, **constants_of(CLAMPED_SWIGLU))
    assert (da == 0).tolist() == [False, True, False, False, False, False]
    assert (db == 0).tolist() == [False, False, False, False, True, True]
    y = CLAMPED_SWIGLU.value(a, b, **constants_of(CLAMPED_SWIGLU))
    assert y[4] == y[3]  # b is limited to 7 before the offset, so both see 8
    assert CLAMPED_SWIGLU.value(a[:1], b[:1], limit=7.0, alpha=1.0, glu_linear_offset=0.0) == 7 * sigmoid(torch.tensor(7.0))


def test_dropout_scales_in_fp32():
    """1 / 0.9 is not a bf16 number: a mask scaled in bf16 would be off in most elements, a scale in fp32 in none."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    mask = torch.ones(4096, dtype=torch.uint8)
    exact = round_bf16(x.double().numpy() / 0.9)
    ours = DROPOUT.value(x.float(), mask=mask.float(), scale=1 / 0.9).to(torch.bfloat16)
    prescaled = x * (mask / 0.9).to(torch.bfloat16)
    assert (ours.double().numpy() != exact).sum() == 0
    assert (prescaled.double().numpy() != exact).mean() > 0.2


# -- declaration -----------------------------------------------------------------------------------------------------------


def declare(**changes) -> Pointwise:
    fields = {
        "name": "twice",
        "forward": "2.0f * x",
        "backward": ("2.0f * dy",),
        "value": lambda x: 2 * x,
        "grad": lambda dy, x: (2 * dy,),
    }
    return Pointwise(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "two times"}, "C identifier"),
        ({"inputs": ("u",)}, "inputs"),
        ({"forward": "2.0f * z"}, "'z'"),
        ({"forward": "2.0f * dy"}, "'dy'"),
        ({"forward": "  "}, "one CUDA expression"),
        ({"forward": "x; return"}, "one CUDA expression"),
        ({"backward": ("dy", "dy")}, "one for each of"),
        ({"backward": "dy"}, "one for each of"),
        ({"backward": ("dy * limt",), "constants": ("limit",)}, "did you mean 'limit'"),
        ({"operands": {"bias": "rows"}}, "row"),
        ({"operands": {"x": "row"}}, "distinct"),
        ({"constants": ("dy",)}, "distinct"),
        ({"constants": ("N",)}, "distinct"),
        ({"constants": ("float",)}, "distinct"),
        ({"constants": ("__shared__",)}, "distinct"),
        ({"constants": ("_Pragma",)}, "distinct"),
        ({"operands": {"class": "row"}}, "words of C++"),
        ({"operand_backward": {"bias": "dy"}, "operand_grad": dict}, "declare the operand"),
        ({"operands": {"bias": "row"}, "operand_backward": {"bias": "dy"}}, "operand_grad"),
        ({"operand_grad": dict}, "operand_grad"),
    ],
)
def test_declaration_is_checked(changes, says):
    with pytest.raises(SpecError, match="Pointwise") as caught:
        declare(**changes)
    assert says in str(caught.value)
    assert "Cure" in str(caught.value)


def compiles(name: str) -> bool:
    try:
        compiling.compile_text(f"__device__ float f(float {name}) {{ return {name}; }}", "sm_90a")
    except KernelError:
        return False
    return True


def test_every_word_that_the_compiler_refuses_is_refused_when_it_is_declared():
    """Statements and declarations, types, operators, and what is a keyword of Python as well."""
    of_python = {word for word in keyword.kwlist if not compiles(word)}
    refused = {"new", "auto", "template", "register", "asm", "signed", "wchar_t", "compl", "xor", "operator", "this", *of_python}
    assert {"class", "while", "and", "try"} <= of_python
    for word in refused:
        assert not compiles(word)
        with pytest.raises(SpecError, match=f"got {word}"):
            declare(constants=(word,))


@pytest.mark.parametrize("name", ["news", "klass", "_cap", "beta_1", "override", "lambda"])
def test_other_names_are_taken_and_compile(name):
    declare(constants=(name,), forward=f"x * {name}", value=lambda x, **constants: x * constants[name])
    assert compiles(name)


def test_variables_are_names_read_as_values():
    assert variables("dy * fmaxf(x, 1e-5f) + (float)limit * INFINITY + 0x1p-3f - tanhf (b)") == {"dy", "x", "limit", "b"}
    assert substitute("dy * max(x, xx)", x="(a + dy)", dy="(dy * b)") == "(dy * b) * max((a + dy), xx)"


def test_backward_reads_says_what_must_be_saved():
    assert {name for name, p in POINTWISE.items() if not p.needs_input} == set(ARITHMETIC)
    assert {name: set(p.backward_reads) for name, p in ARITHMETIC.items()} == {
        "bias": set(),
        "constant_scale": set(),
        "add": set(),
        "dropout": {"mask"},
    }
    assert SCALED["scaled_swiglu"].backward_reads == {"a", "b", "scale"}


def test_tables_hold_the_named_ops():
    assert {*ACTIVATIONS} >= {"gelu", "gelu_erf", "qgelu", "relu", "srelu", "silu"}
    assert tuple(GATED) == ("glu", "geglu", "geglu_erf", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu", "situglu")
    gated = ("scaled_swiglu", "scaled_geglu", "scaled_situglu", "scaled_clamped_qgeglu")
    assert tuple(SCALED) == (*gated, "scaled_srelu", "scaled_tanh_srelu")
    assert all(p.is_gated for p in GATED.values())
    assert not any(p.is_gated for p in ACTIVATIONS.values())


def test_gated_and_scaled_refuse_what_they_cannot_derive():
    with pytest.raises(SpecError, match="without operands"):
        gated(GATED["glu"], "twice_gated")
    with pytest.raises(SpecError, match="without operands"):
        scaled(ARITHMETIC["bias"], "scaled_bias")


def test_compute_dtype_is_fp32_unless_fp64_takes_part():
    assert compute_dtype(torch.bfloat16, torch.float16) == torch.float32
    assert compute_dtype(torch.float64, torch.bfloat16) == torch.float64


# -- the CUDA expressions, built for the host ------------------------------------------------------------------------------

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HOST_OPS = {**POINTWISE, "sigmoid": SIGMOID, **USERS_OWN}

# Without exponentials: equal bit for bit.
BITWISE = {"relu", "srelu", "reglu", "sreglu", "scaled_srelu", "softsign", "scaled_softsign", *ARITHMETIC}
# Else, in units of 2^-23: values of the built-in ops within so many of their own magnitude, and twice as many as the argument
# of their exponential is large, which scales the rounding errors of both; gradients, whose terms cancel, and the composed mish
# within so many of the factors they are multiplied by. A sigmoid below 2^-126 has fewer digits.
VALUE_ULPS, GRADIENT_ULPS = 5, 10

ARGUMENT64 = {
    **dict.fromkeys(("gelu", "geglu", "scaled_geglu"), gelu_argument64),
    **dict.fromkeys(("gelu_erf", "geglu_erf"), lambda x: x**2 / 2),
    **dict.fromkeys(("qgelu", "qgeglu", "clamped_swiglu", "scaled_clamped_qgeglu"), lambda x: 1.702 * x),
}
"""What ops with an exponential take the sigmoid of, where that is not the input itself; or the exponent of erfc."""


def host_source() -> str:
    """One C function for each expression: name_part(out, x | a, b, ..., dy, n), all arguments arrays except constants."""
    headers = "\n".join((CUDA_SOURCES / name).read_text() for name in ("common.cuh", "activations.cuh"))
    return (
        "#include <math.h>\n"
        + headers
        + "\n".join(host_function(p, part, e) for p in HOST_OPS.values() for part, e in expressions(p).items())
    )


def expressions(p: Pointwise) -> dict[str, str]:
    gradients = {**dict(zip(p.inputs, p.backward)), **p.operand_backward}
    return {"forward": p.forward, **{f"backward_{name}": expression for name, expression in gradients.items()}}


def host_function(p: Pointwise, part: str, expression: str) -> str:
    arrays = (*p.inputs, *p.operands, "dy")
    parameters = ", ".join([*(f"const float* {n}_" for n in arrays), *(f"float {n}" for n in p.constants)])
    reads = " ".join(f"float {n} = {n}_[i];" for n in arrays if n in variables(expression))
    return (
        f'extern "C" void {p.name}_{part}(float* out_, long n_, {parameters}) '
        f"{{ for (long i = 0; i < n_; ++i) {{ {reads} out_[i] = {expression}; }} }}\n"
    )


@pytest.fixture(scope="module")
def host_library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("pointwise")
    source, library = folder / "pointwise.cpp", folder / "pointwise.so"
    source.write_text(host_source())
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-o", library, source]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


def call_host(library: ctypes.CDLL, p: Pointwise, part: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    out = torch.empty_like(tensors["dy"])
    arrays = [ctypes.c_void_p(tensors[n].data_ptr()) for n in (*p.inputs, *p.operands, "dy")]
    constants = [ctypes.c_float(CONSTANTS[n]) for n in p.constants]
    getattr(library, f"{p.name}_{part}")(ctypes.c_void_p(out.data_ptr()), ctypes.c_long(out.numel()), *arrays, *constants)
    return out


def torch_results(p: Pointwise, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs, operands = [tensors[n] for n in p.inputs], {n: tensors[n] for n in p.operands}
    arguments = {**operands, **constants_of(p)}
    grads = dict(zip(p.inputs, p.grad(tensors["dy"], *inputs, **arguments)))
    if p.operand_grad is not None:
        grads |= p.operand_grad(tensors["dy"], *inputs, **arguments)
    return {"forward": p.value(*inputs, **arguments), **{f"backward_{n}": g for n, g in grads.items()}}


def host_samples(p: Pointwise) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    special = torch.tensor([0.0, -0.0, 7.0, -7.0, 1e-40, -1e-40, 3e38, -3e38, INF, -INF, NAN, 20.0, -20.0])
    values = torch.cat([torch.randn(20000, generator=generator) * 4, special, all_finite_bf16().float()])
    order = [torch.randperm(values.numel(), generator=generator) for _ in range(4)]
    samples = {n: values[o].contiguous() for n, o in zip((*p.inputs, *p.operands), order)}
    return {**samples, "dy": torch.randn(values.numel(), generator=generator)}


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", HOST_OPS)
def test_cuda_expressions_on_the_host_equal_the_torch_definition(name, host_library):
    p = HOST_OPS[name]
    tensors = host_samples(p)
    for part, wanted in torch_results(p, tensors).items():
        got = call_host(host_library, p, part, tensors)
        same = (got.view(torch.int32) == wanted.view(torch.int32)) | (got.isnan() & wanted.isnan())
        if name in BITWISE:
            assert same.all(), (part, got[~same][:5], wanted[~same][:5])
            continue
        assert torch.equal(got.isnan(), wanted.isnan()), part
        finite = wanted.isfinite() & got.isfinite()
        assert torch.equal(got[~finite].nan_to_num(), wanted[~finite].nan_to_num()), part
        relative = part == "forward" and name not in USERS_OWN
        floor = 2.0**-126 * factors(p, tensors) if relative else amplitude(p, part, tensors)
        units = (got - wanted).double().abs() / (torch.maximum(wanted.double().abs(), floor) * 2.0**-23)
        allowed = VALUE_ULPS + 2 * argument(p, tensors) if relative else torch.tensor(GRADIENT_ULPS)
        assert (units / allowed)[finite & (got != wanted)].le(1).all(), part


def argument(p: Pointwise, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The magnitude of what an op takes the sigmoid of; below 89, or the sigmoid is 0."""
    x = tensors[p.inputs[0]].double().clamp(-1e3, 1e3).numpy()
    return torch.from_numpy(np.abs(ARGUMENT64.get(p.name, lambda x: x)(x))).clamp(max=89)


def factors(p: Pointwise, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Product of the magnitudes, at least 1, of all that a value is made of."""
    return math.prod(tensors[name].double().abs().clamp(min=1) for name in (*p.inputs, *p.operands))


def amplitude(p: Pointwise, part: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Product of the magnitudes, at least 1, of what multiplies an expression's bounded terms."""
    read = variables(expressions(p)[part]) & set(tensors) - {"x", "a", part.removeprefix("backward_")}
    return math.prod(tensors[name].abs().clamp(min=1) for name in read) * torch.ones_like(tensors["dy"])
