"""Products of cuBLASLt by addresses, through nvmath's bindings: descriptors are made and the algorithm is chosen once.

The library gets the same descriptors as from torch's ``scaled_mm``, so the bits are the same. The workspace has torch's size,
too: algorithms that need more split long sums, and add in another order.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np
import torch

from opfuse.kernels.engine.bindings import on_demand

WORKSPACE = 1 << 20
"""Bytes that an algorithm may use."""

TYPES = {torch.float32: 0, torch.bfloat16: 14, torch.float16: 2, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""cudaDataType_t of dtypes."""

MODES = {0: 0, 1: 3, 4: 4, 5: 5}
"""cublasLtMatmulMatrixScale_t of torch's ScalingType: a tensor, rows, 1x128, 128x128."""

_FP32_SUMS, _FP32 = 68, 0
_SOME_ADDRESS = 256


@functools.cache
def library() -> Any:
    """nvmath's bindings of cuBLASLt; None where they are not installed, or do not load.

    The packages around them import all that nvmath has: 300 modules in half a second.
    """
    try:
        with on_demand("nvmath", "nvmath.bindings"):
            return importlib.import_module("nvmath.bindings.cublasLt")
    except (ImportError, OSError, RuntimeError):
        return None


@functools.cache
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return library().create()


class ProductForm(NamedTuple):
    """The product of left (rows, length) and right (columns, length), both contiguous, with torch's ScalingType of each."""

    rows: int
    columns: int
    length: int
    left: torch.dtype
    right: torch.dtype
    out: torch.dtype
    left_scaling: int
    right_scaling: int
    fast: bool
    device: int


OPERANDS = ("left", "right", "left_scale", "right_scale", "out", "workspace")
"""The operands whose addresses a product takes, in this order."""


class Product:
    """The descriptors of a form and an algorithm. For one call at a time: the addresses of scales are in the descriptor.

    found: whether the library has an algorithm. workspace: bytes that it uses. addresses: of the operands.
    """

    def __init__(self, form: ProductForm) -> None:
        lt = library()
        self._lt, self._handle = lt, _handle(form.device)
        names = lt.MatmulDescAttribute
        self._operation = lt.matmul_desc_create(_FP32_SUMS, _FP32)
        put = functools.partial(_put, lt.matmul_desc_set_attribute, lt.get_matmul_desc_attribute_dtype, self._operation)
        # The library's matrices lie by columns: its A is our right operand, transposed, and its result is ours.
        put(names.TRANSA, 1)
        put(names.FAST_ACCUM, int(form.fast))
        for name, scaling in ((names.A_SCALE_MODE, form.right_scaling), (names.B_SCALE_MODE, form.left_scaling)):
            if MODES[scaling]:
                put(name, MODES[scaling])
        self._scales = np.zeros(2, np.uint64)
        self._scale_fields = tuple(zip((names.A_SCALE_POINTER, names.B_SCALE_POINTER), self._words(self._scales)))
        self._scaled_by(_SOME_ADDRESS, _SOME_ADDRESS)
        self._right = lt.matrix_layout_create(TYPES[form.right], form.length, form.columns, form.length)
        self._left = lt.matrix_layout_create(TYPES[form.left], form.length, form.rows, form.length)
        self._out = lt.matrix_layout_create(TYPES[form.out], form.columns, form.rows, form.columns)
        self._one_and_zero = np.array([1, 0], np.float32)
        self._one, self._zero = (self._one_and_zero.ctypes.data + 4 * i for i in range(2))
        self._choose()
        self.addresses = [0] * len(OPERANDS)

    @staticmethod
    def _words(array: Any) -> tuple[int, int]:
        return array.ctypes.data, array.ctypes.data + array.itemsize

    def _choose(self) -> None:
        lt, preference = self._lt, self._lt.matmul_preference_create()
        most = lt.MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES
        _put(lt.matmul_preference_set_attribute, lt.get_matmul_preference_attribute_dtype, preference, most, WORKSPACE)
        self._result, count = np.zeros(1, dtype=lt.matmul_heuristic_result_dtype), np.zeros(1, dtype=np.int32)
        operands = self._operation, self._right, self._left, self._out, self._out
        try:
            lt.matmul_algo_get_heuristic(self._handle, *operands, preference, 1, self._result.ctypes.data, count.ctypes.data)
        except lt.cuBLASLtError:
            count[0] = 0
        finally:
            lt.matmul_preference_destroy(preference)
        self.found = bool(count[0])
        self.workspace = int(self._result[0][1])
        self._algorithm = self._result.ctypes.data  # the first field

    def _scaled_by(self, right: int, left: int) -> None:
        self._scales[:] = self._last = right, left
        for name, address in self._scale_fields:
            self._lt.matmul_desc_set_attribute(self._operation, name, address, self._scales.itemsize)

    def __call__(self, stream: int) -> None:
        """Queue the product of what lies at ``addresses`` on ``stream``."""
        left, right, left_scale, right_scale, out, workspace = self.addresses
        if self._last != (right_scale, left_scale):
            self._scaled_by(right_scale, left_scale)
        self._lt.matmul(
            self._handle,
            self._operation,
            self._one,
            right,
            self._right,
            left,
            self._left,
            self._zero,
            out,
            self._out,
            out,
            self._out,
            self._algorithm,
            workspace,
            self.workspace,
            stream,
        )

    def __del__(self) -> None:
        for name in ("_right", "_left", "_out"):
            if name in self.__dict__:
                self._lt.matrix_layout_destroy(self.__dict__[name])
        if "_operation" in self.__dict__:
            self._lt.matmul_desc_destroy(self._operation)


def _put(setter: Any, dtype_of: Any, described: Any, name: Any, value: int) -> None:
    array = np.array([value], dtype=dtype_of(name))
    setter(described, name, array.ctypes.data, array.itemsize)
