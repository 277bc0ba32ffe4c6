"""The block casts in NumPy, one block at a time, written from the number rules and not from opfuse's code.

Everything works on *lines*: the rows of a matrix for a rowwise plane, its columns for a columnwise one. Arithmetic is NumPy's
fp32; nearest codes are found among the values of all codes in fp64.
"""

from __future__ import annotations

import math

import numpy as np

F32 = np.float32
FLT_MAX = np.finfo(np.float32).max


def _values(codes: int, exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    out = []
    for code in range(codes):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        out.append(math.ldexp(mantissa + (2**mantissa_bits if exponent else 0), max(exponent, 1) - bias - mantissa_bits))
    return np.array(out)


VALUES = {"e4m3": _values(127, 4, 3, 7), "e5m2": _values(124, 5, 2, 15), "e2m1": _values(8, 2, 1, 1)}
"""The finite non-negative values of each element, by code."""
SIGN_BIT = {"e4m3": 0x80, "e5m2": 0x80, "e2m1": 0x8}
NAN_CODE = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m1": 0x7}


def encode(x: np.ndarray, element: str) -> np.ndarray:
    """Nearest codes, ties to the even code, saturating."""
    with np.errstate(invalid="ignore"):
        values, magnitude = VALUES[element], np.abs(x.astype(np.float64))
    middles = (values[:-1] + values[1:]) / 2
    below = np.searchsorted(middles, np.where(np.isnan(magnitude), 0, magnitude), side="left")
    tie = (below < len(middles)) & (magnitude == middles[np.minimum(below, len(middles) - 1)])
    code = below + (tie & (below % 2 == 1))
    return np.where(np.isnan(x), NAN_CODE[element], code | np.where(np.signbit(x), SIGN_BIT[element], 0)).astype(np.uint8)


def decode(codes: np.ndarray, element: str) -> np.ndarray:
    """fp64 values of finite codes; NaN for the codes above."""
    values = np.append(VALUES[element], [np.nan] * 4)
    magnitude = values[codes & (SIGN_BIT[element] - 1)]
    return np.where(codes & SIGN_BIT[element], -magnitude, magnitude)


def _blocks(lines: np.ndarray, rows: int, cols: int):
    for i in range(0, lines.shape[0], rows):
        for j in range(0, lines.shape[1], cols):
            yield (slice(i, i + rows), slice(j, j + cols)), (i // rows, j // cols)


def _empty(lines: np.ndarray, rows: int, cols: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    shape = (-(-lines.shape[0] // rows), -(-lines.shape[1] // cols))
    return np.zeros(lines.shape, np.uint8), np.zeros(shape, dtype)


def fp32_scale(amax: np.float32, fp8_max: float, eps: float, pow2: bool, inf_value: float) -> np.float32:
    amax = max(amax, F32(eps))
    if amax == 0 or not np.isfinite(amax):
        scale = F32(1)
    else:
        with np.errstate(over="ignore"):
            scale = F32(fp8_max) / amax
        scale = F32(inf_value) if np.isinf(scale) else scale
    return F32(2.0 ** math.floor(math.log2(float(scale)))) if pow2 else scale


def block(lines: np.ndarray, element: str, rows: int, *, columns=128, eps=0.0, pow2=True, inf_value=FLT_MAX):
    """(codes, decode scales) of ``rows`` x ``columns`` blocks with fp32 scales."""
    codes, scales = _empty(lines, rows, columns, np.float32)
    for where, at in _blocks(lines, rows, columns):
        amax = np.abs(lines[where]).max()
        scale = fp32_scale(amax, VALUES[element][-1], eps, pow2, inf_value)
        codes[where] = encode(lines[where] * scale, element)
        scales[at] = F32(1) / scale if np.isfinite(amax) else np.nan
    return codes, scales


def row(lines: np.ndarray, element: str, *, eps=0.0, pow2=False):
    """(codes, decode scales) with an fp32 scale for each line."""
    codes, scales = block(lines, element, 1, columns=lines.shape[1], eps=eps, pow2=pow2)
    return codes, scales[:, 0]


def e8m0_code(amax: np.float32, element: str, rounding: str) -> int:
    if not np.isfinite(amax):
        return 255
    largest = VALUES[element][-1]
    if amax * F32(1 / largest) == 0:
        return 0
    if rounding == "floor":
        power = math.floor(math.log2(float(amax))) - math.floor(math.log2(largest))
    else:
        mantissa, power = math.frexp(float(amax * F32(1 / largest)))
        power -= mantissa == 0.5
    return max(power + 127, 0)


def mx(lines: np.ndarray, element: str, rows: int = 1, rounding: str = "ceil"):
    """(codes, E8M0 bytes) of ``rows`` x 32 blocks, a byte for each line."""
    codes, scales = _empty(lines, 1, 32, np.uint8)
    for where, (_, j) in _blocks(lines, rows, 32):
        code = e8m0_code(np.abs(lines[where]).max(), element, rounding)
        scales[where[0], j] = code
        multiplier = F32(np.nan) if code == 255 else F32(math.ldexp(1.0, 127 - code))
        codes[where] = encode(lines[where] * multiplier, element)
    return codes, scales


def _nv_candidate(x: np.ndarray, byte: int, global_scale: np.float32) -> np.ndarray:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        inverse = F32(1) / (F32(decode(np.array(byte), "e4m3")) * (F32(1) / global_scale))
        return encode(x * min(inverse, FLT_MAX), "e2m1")


def nv_global_scale(amax: np.float32, encode_max: int) -> np.float32:
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        scale = F32(encode_max * 6) / amax
    return scale if np.isfinite(scale) and scale != 0 else F32(1)


def nv(lines: np.ndarray, amaxes: np.ndarray, rows: int = 1, encode_max: int = 448):
    """(E2M1 codes, E4M3 bytes) of ``rows`` x 16 blocks; ``amaxes`` has the global amax of each line."""
    codes, scales = _empty(lines, 1, 16, np.uint8)
    for where, (_, j) in _blocks(lines, rows, 16):
        global_scale = nv_global_scale(amaxes[where[0]][0], encode_max)
        block_amax = np.abs(lines[where]).max()
        byte = encode(np.array(block_amax * (global_scale * F32(1 / 6))), "e4m3") if np.isfinite(block_amax) else 0x7F
        scales[where[0], j] = byte
        codes[where] = _nv_candidate(lines[where], byte, global_scale)
    return codes, scales


def nv_four_over_six(lines: np.ndarray, amaxes: np.ndarray, rows: int, mode: str, encode_max: int = 256):
    """As :func:`nv`, with the block's largest value mapped to 4 where the sum of errors is smaller. Scales end at 448."""
    codes, scales = _empty(lines, 1, 16, np.uint8)
    for where, (_, j) in _blocks(lines, rows, 16):
        amax = amaxes[where[0]][0]
        global_scale = nv_global_scale(amax, encode_max)
        base = np.abs(lines[where]).max() / F32(6) * global_scale
        best = None
        for expand in (F32(1), F32(1.5)):  # 6 first: 4 must be strictly better
            byte = int(encode(np.array(base * expand), "e4m3"))
            q = _nv_candidate(lines[where], byte, global_scale)
            error = _error(q, byte, amax, lines[where], mode=mode, encode_max=encode_max)
            if best is None or error < best[0]:
                best = error, q, byte
        codes[where], scales[where[0], j] = best[1], best[2]
    return codes, scales


def _error(q: np.ndarray, byte: int, amax: np.float32, x: np.ndarray, *, mode: str, encode_max: int) -> np.float32:
    sums = []
    for q_row, x_row in zip(q, x):
        total = F32(0)
        for code, value in zip(q_row, x_row):
            decoded = F32(decode(np.array(code), "e2m1")) * F32(decode(np.array(byte), "e4m3")) * amax / F32(6 * encode_max)
            difference = decoded - value
            total = total + (abs(difference) if mode == "MAE" else difference * difference)
        sums.append(total)
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:])]
    return sums[0]


def store_blocks(scales: np.ndarray, *, dims: int) -> np.ndarray:
    """fp32 block scales of lines as a plane stores them: rows of a multiple of 4; 1x128 blocks with the blocks first."""
    scales = scales.T if dims == 1 else scales
    out = np.zeros((scales.shape[0], -(-scales.shape[1] // 4) * 4), np.float32)
    out[:, : scales.shape[1]] = scales
    return out


def store_tiled(scales: np.ndarray, *, across: bool, swizzled: bool) -> np.ndarray:
    """Byte scales of lines as a plane stores them, entry by entry; ``across``: lines as columns."""
    rows, cols = -(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4
    compact, flat = np.zeros((rows, cols), np.uint8), np.zeros(rows * cols, np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            compact[i, j] = scales[i, j]
            offset = ((i // 128) * (cols // 4) + j // 4) * 512 + (i % 32) * 16 + (i % 128 // 32) * 4 + j % 4
            flat[offset] = scales[i, j]
    if swizzled:
        return flat.reshape((cols, rows) if across else (rows, cols))
    return compact.T if across else compact


def pack(codes: np.ndarray) -> np.ndarray:
    """Two E2M1 codes a byte, the even column in the low nibble."""
    return codes[:, 0::2] + 16 * codes[:, 1::2]
