"""The scalar functions of common.cuh, compiled for the host, against the integer oracle: every 16-bit input, patterns of fp32.

The text is the one that kernels are compiled from. Where a C++ compiler is missing, the tests say so and do not run.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

import opfuse
from tests.oracles import inputs, integer
from tests.oracles.rules import CASES, MAX, SOURCED, amax_arrangements, check_equal

HERE = Path(__file__).parent
HEADERS = Path(opfuse.__path__[0]) / "kernels" / "cuda"
SOURCE = HERE / "host_common.cpp"
COMPILERS = ("c++", "g++", "clang++")
HOST_FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-shared", "-fPIC")
NVCC_FLAGS = (
    "-x",
    "cu",
    "-std=c++17",
    "-O2",
    "-fmad=false",
    "-Werror=all-warnings",
    "-Xcompiler=-fPIC,-ffp-contract=off",
    "-shared",
)

ELEMENTS = ("e4m3", "e5m2", "e2m1")
FLOATS = ("bf16", "fp16")
U8, U16, U32 = np.uint8, np.uint16, np.uint32


class Host:
    """The compiled header, with the functions of an oracle."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def each(self, name: str, out: type, x: np.ndarray, constants: np.ndarray | None = None) -> np.ndarray:
        """The probe ``name`` over an array; a float is passed as its bits."""
        x = np.ascontiguousarray(x)
        constants = np.zeros(4, U32) if constants is None else np.ascontiguousarray(constants, U32)
        result = np.empty(x.shape, out)
        pointers = (ctypes.c_void_p(array.ctypes.data) for array in (result, x, constants))
        error = getattr(self.library, name)(*pointers, ctypes.c_longlong(x.size), ctypes.c_longlong(constants.size))
        assert error == 0, f"{name}: CUDA error {error}"
        return result

    def count(self, name: str, *points: np.ndarray) -> int:
        """A walk over all of fp32."""
        walk = getattr(self.library, name)
        walk.restype = ctypes.c_uint64
        arguments = [argument for p in points for argument in (ctypes.c_void_p(p.ctypes.data), ctypes.c_longlong(p.size))]
        return int(walk(*arguments))

    def encode(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.each(f"encode_{name}", U16 if name in FLOATS else U8, x)

    def decode(self, codes: np.ndarray, name: str) -> np.ndarray:
        return self.each(f"decode_{name}", U32, codes)

    def encode_e2m1_stochastic(self, x: np.ndarray, random: int) -> np.ndarray:
        return self.each("encode_e2m1_stochastic", U8, x, np.float32([random]).view(U32))

    def encode_e8m0(self, v: np.ndarray) -> np.ndarray:
        return self.each("encode_e8m0", U8, v)

    def decode_e8m0(self, codes: np.ndarray) -> np.ndarray:
        return self.each("decode_e8m0", U32, codes)

    def e8m0_multiplier(self, codes: np.ndarray) -> np.ndarray:
        return self.each("e8m0_multiplier", U32, codes)

    def e8m0_from_amax(self, amax: np.ndarray, name: str) -> np.ndarray:
        return self.each(f"e8m0_from_amax_{name}", U8, amax)

    def multiply(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return self.each("multiply", U32, a, b)

    def scale_from_amax(
        self, amax: np.ndarray, largest: int, *, eps: int = 0, pow2: bool = False, inf_value: int = integer.LARGEST
    ) -> np.ndarray:
        name = "pow2_scale_from_amax" if pow2 else "scale_from_amax"
        return self.each(name, U32, amax, np.array([largest, eps, inf_value], U32))

    def decode_scale(self, scale: np.ndarray, amax: np.ndarray) -> np.ndarray:
        return self.each("decode_scale", U32, scale, amax)

    def nvfp4_global_scale(self, amax: np.ndarray, encode_max: int) -> np.ndarray:
        return self.each("nvfp4_global_scale", U32, amax, np.float32([encode_max]).view(U32))

    def nvfp4_block_scale(self, block_amax: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
        return self.each("nvfp4_block_scale", U8, block_amax, global_scale)

    def nvfp4_multiplier(self, block_scale: np.ndarray, global_scale: np.ndarray) -> np.ndarray:
        return self.each("nvfp4_multiplier", U32, block_scale, global_scale)


def built(compiler: str, flags: tuple[str, ...], out: Path) -> Path:
    """``host_common.cpp`` compiled to ``out``; a compiler's complaint is a failure."""
    command = [compiler, *flags, f"-I{HEADERS}", str(SOURCE), "-o", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, f"{' '.join(command)}\n{run.stderr}"
    return out


def first_found(*names: str) -> str:
    """The first compiler on PATH; without one there is nothing to test, and the test says which were looked for."""
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"common.cuh was not tested here: no {' or '.join(names)} on PATH")
    return found


@pytest.fixture(scope="module", params=["host", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nvcc", "device"))])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The header as the C++ compiler builds it for the host, as nvcc does, and as nvcc builds it for a GPU that is here."""
    library = tmp_path_factory.mktemp("common") / "common.so"
    match request.param:
        case "host":
            return Host(built(first_found(*COMPILERS), HOST_FLAGS, library))
        case "nvcc":
            return Host(built(first_found("nvcc"), NVCC_FLAGS, library))
    header = Host(built(first_found("nvcc"), (*NVCC_FLAGS, "-DON_DEVICE", "-arch=native"), library))
    if header.library.devices() == 0:
        pytest.skip("common.cuh was not tested on a GPU: no CUDA device")
    return header


def all_inputs() -> np.ndarray:
    """Every bf16 and fp16 value, and the edges of fp32."""
    return np.concatenate([inputs.all_bf16(), inputs.all_fp16(), inputs.fp32_edges()])


@pytest.mark.parametrize("name", ELEMENTS + FLOATS)
def test_r1_host_encodes_every_16_bit_input_as_the_oracle_says(host, name):
    x = all_inputs()
    check_equal(host.encode(x, name), integer.encode(x, name), x)


@pytest.mark.parametrize("low", inputs.LOW_12_BITS)
@pytest.mark.parametrize("name", ELEMENTS + FLOATS)
def test_r2_host_encodes_fp32_patterns_as_the_oracle_says(host, name, low):
    x = inputs.fp32_patterns(low)
    check_equal(host.encode(x, name), integer.encode(x, name), x)


@pytest.mark.parametrize("name", ELEMENTS + FLOATS)
def test_r1_host_decodes_every_code_as_the_oracle_says(host, name):
    bits = integer.ENCODINGS[name].bits
    codes = np.arange(1 << bits, dtype=U16 if bits > 8 else U8)
    check_equal(host.decode(codes, name), integer.decode(codes, name), codes)


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("name", "source"), [pair for pair in SOURCED if not pair[0].endswith("floor")])
def test_r1_host_casts_every_16_bit_input_by_every_scale_rule_as_the_oracle_says(host, name, source):
    x = inputs.ALL[source]()
    for amax in amax_arrangements(x):
        check_equal(CASES[name].run(host, x, amax), CASES[name].run(integer, x, amax), x, amax)


@pytest.mark.few
@pytest.mark.parametrize("low", inputs.LOW_12_BITS[::2])
@pytest.mark.parametrize("name", ["tensor_e4m3", "tensor_e5m2_pow2", "mx_e4m3_ceil", "nvfp4_448"])
def test_r2_host_casts_fp32_patterns_by_scale_rules_as_the_oracle_says(host, name, low):
    x = np.concatenate([inputs.fp32_patterns(low)[:: 1 << 4], inputs.fp32_edges()])
    amax = np.random.default_rng(low).permutation(x) & U32(integer.MAGNITUDE)
    check_equal(CASES[name].run(host, x, amax), CASES[name].run(integer, x, amax), x, amax)


@pytest.mark.few
@pytest.mark.parametrize("pow2", [False, True], ids=["fp32 scales", "pow2"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_r1_host_scales_of_blocks_of_every_16_bit_amax_are_those_of_the_oracle(host, name, pow2):
    amax = all_inputs() & U32(integer.MAGNITUDE)
    for eps in (0, 0x2B8CBCCC, 0x3E800000):  # 0, 1e-12, 0.25
        for inf_value in (integer.LARGEST, 0x7F7F0000, 0x477FE000):  # of fp32, bf16 and fp16
            scale = integer.scale_from_amax(amax, MAX[name], eps=eps, pow2=pow2, inf_value=inf_value)
            constants = np.array([eps, inf_value, np.float32(pow2).view(U32)], U32)
            check_equal(host.each(f"block_scale_{name}", U32, amax, constants), scale, amax)
            check_equal(host.each(f"block_decode_scale_{name}", U32, amax, constants), integer.decode_scale(scale, amax), amax)


@pytest.mark.parametrize(("rounding", "bias"), [("ceil", 0x1FFFFF), ("floor", 0)])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_r1_host_e8m0_from_the_bits_of_every_16_bit_amax(host, name, rounding, bias):
    """Blocks of 16-bit values take the integer rule, which is that of fp32 ones for these."""
    sixteen_bits = np.concatenate([inputs.all_bf16(), inputs.all_fp16()])
    for dtype, values in (("bf16", sixteen_bits), ("fp32", all_inputs())):
        amax = values & U32(integer.MAGNITUDE)
        codes = host.each(f"e8m0_of_block_{name}_{dtype}", U8, amax, np.array([bias], U32))
        check_equal(codes, integer.e8m0_from_amax(amax, name, rounding), amax)


def test_r1_host_e8m0_codes_and_multipliers(host):
    codes = np.arange(256, dtype=U8)
    for name in ("decode_e8m0", "e8m0_multiplier"):
        check_equal(getattr(host, name)(codes), getattr(integer, name)(codes), codes)
    for low in inputs.LOW_12_BITS:
        v = inputs.fp32_patterns(low)[: 2**19]
        check_equal(host.encode_e8m0(v), integer.encode_e8m0(v), v)


def test_r1_host_stochastic_e2m1_of_every_16_bit_input(host):
    x = all_inputs()
    for random in (0, 1, 63, 127, 128, 129, 254, 255):
        check_equal(host.encode_e2m1_stochastic(x, random), integer.encode_e2m1_stochastic(x, random), x)


def test_r18_host_shows_non_finite_values(host):
    special = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001], U32)
    assert host.each("encode_nonfinite_e4m3", U8, special).tolist() == [0x7F, 0x7F, 0x7F, 0x7F]
    assert host.each("encode_nonfinite_e5m2", U8, special).tolist() == [0x7C, 0xFC, 0x7F, 0x7F]


def test_host_magnitudes_and_their_maxima(host):
    x = all_inputs()
    check_equal(host.each("magnitude_of", U32, x), x & U32(integer.MAGNITUDE), x)
    check_equal(host.each("is_finite", U8, x), ((x & U32(integer.MAGNITUDE)) < integer.INF).astype(U8), x)
    rng = np.random.default_rng(7)
    best, pair = rng.integers(0, 2**16, (2, 2**16, 2), dtype=U16)
    got = host.each("larger_magnitudes", U32, pair.view(U32).ravel(), best.view(U32).ravel())
    check_equal(got, np.maximum(best & 0x7FFF, pair & 0x7FFF).view(U32).ravel())


def test_host_packs_the_even_index_in_the_low_nibble(host):
    even, odd = np.divmod(np.arange(256, dtype=U16), 16)
    assert host.each("pack_e2m1", U8, even | odd << 8).tolist() == (even | odd << 4).tolist()


def test_host_philox_gives_the_words_of_the_oracle(host):
    rng = np.random.default_rng(11)
    for key in ((0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0xA4093822, 0x299F31D0)):
        counters = np.concatenate([np.zeros((1, 4), U32), rng.integers(0, 2**32, (50, 4), dtype=U32)])
        records = counters.view([("word", U32, 4)]).ravel()
        words = host.each("philox_counter", records.dtype, records, np.array(key, U32))["word"]
        assert words.tolist() == [list(integer.philox4x32(tuple(map(int, counter)), key)) for counter in counters]


def test_host_random_bytes_are_those_of_the_oracle(host):
    blocks = (0, 1, 2, 2**32, 2**32 + 7)
    elements = np.array([16 * block + byte for block in blocks for byte in range(16)], np.uint64)
    for seed, stream in ((0, 0), (2**64 - 5, 1)):
        got = host.each("random_byte", U8, elements, np.array([seed % 2**32, seed >> 32, stream], U32))
        assert got.tolist() == [byte for block in blocks for byte in integer.random_bytes(seed, stream, block)]


def test_host_contracts_nothing(host):
    """x y + z takes two roundings: the flags of the build hold."""
    rng = np.random.default_rng(13)
    x, (y, z) = rng.standard_normal(10_000, np.float32), np.float32([1.1, -0.7])
    got = host.each("product_then_sum", U32, x.view(U32), np.array([y, z]).view(U32))
    check_equal(got, (x * y + z).view(U32), x.view(U32))


WALKS = pytest.mark.parametrize("host", ["host", "nvcc"], indirect=True)


@pytest.mark.slow
@WALKS
@pytest.mark.parametrize("name", ELEMENTS + FLOATS)
def test_r2_host_encodes_every_fp32_value_as_the_oracle_says(host, name):
    """All 2^32 values, both signs and every NaN."""
    points = integer.passing_points(name)
    assert host.count(f"wrong_codes_{name}", points) == 0
    shifted = points.copy()
    shifted[2] += 1
    assert host.count(f"wrong_codes_{name}", shifted) == 2


@pytest.mark.slow
@WALKS
def test_r2_host_e8m0_of_every_fp32_value(host):
    """All 2^31 values >= 0: the least power of two that is not below, by comparison in fp64."""
    assert host.count("wrong_e8m0_codes") == 0


@pytest.mark.slow
def test_device_code_flushes_no_subnormal_and_contracts_nothing(tmp_path):
    flags = tuple(flag for flag in NVCC_FLAGS if flag != "-shared")
    ptx = built(first_found("nvcc"), (*flags, "-DON_DEVICE", "-arch=sm_90a", "-ptx"), tmp_path / "common.ptx").read_text()
    assert ptx.count(".entry") > 30
    assert not re.findall(r"^.*(?:\.ftz|fma\.|div\.full|\.approx).*$", ptx, re.MULTILINE)
