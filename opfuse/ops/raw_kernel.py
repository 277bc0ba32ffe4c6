"""Ops of a user's CUDA text: two kernels that CuPy compiles, and a torch function that defines them."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar

import torch

from opfuse.core.context import Context, Value
from opfuse.core.operation import BasicOperation
from opfuse.core.signature import DTYPES, Env
from opfuse.errors import DtypeError, PipelineError, ShapeError, SpecError, describe
from opfuse.kernels.engine.registry import runs_kernels
from opfuse.kernels.user_kernels import KernelText


class RawKernelOperation(BasicOperation):
    """y = reference(x), computed on a GPU by CUDA text that the decorator :func:`raw_kernel` gives to a subclass.

    y has the shape and dtype of x. A subclass defines ``reference``; hyper-parameters are numbers, which ``reference`` gets by
    keyword and kernels behind all other arguments: bool as ``bool``, int as ``long long``, float as ``double``.
    """

    saves = ("x",)
    forward_kwargs = ()
    kernels: ClassVar[KernelText | None] = None

    @staticmethod
    def reference(x: torch.Tensor, **constants: Any) -> torch.Tensor:
        """The definition in differentiable functions of torch, on any device: a tensor like ``x``."""
        cure = "write @staticmethod def reference(x): in the class of the op"
        raise PipelineError(describe("an op of raw kernels", wanted="a reference in torch", got="none", cure=cure))

    def compute_dtype(self, env: Env, x: Value) -> torch.dtype:
        """That of every op. DtypeError, on all devices, if the kernels are not declared for it; SpecError if their text declares
        other parameters than they are launched with.
        """
        numbers = (*map(type, self._constants.values()),)
        for entry, tensors in ((self._text.forward, 2), (self._text.backward, 3)):
            _check_parameters(self._text.code, entry, tensors, numbers)
        dtype, declared = super().compute_dtype(env, x), self._text.dtypes
        if dtype not in declared:
            cure = "cast the input, or declare a C type for it in @raw_kernel(dtypes=...)"
            raise DtypeError(describe(f"{self.label} input", wanted=f"one of {(*declared,)}", got=dtype, cure=cure))
        return dtype

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        x = input_.to(ctx.dtype_of(input_)).contiguous()
        ctx.save(x=x if "input" in ctx.needs else None)
        if not _on_gpu(x):
            return self._defined(x)
        y = torch.empty_like(x)
        self._text.launch(self._text.forward, x, y, constants=tuple(self._constants.values()))
        return y

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, tuple[()]]:
        x = ctx.saved.x
        if x is None:
            return None, ()
        dy = grad_output.to(x.dtype).contiguous()
        if _on_gpu(x):
            dx = torch.empty_like(x)
            self._text.launch(self._text.backward, dy, x, dx, constants=tuple(self._constants.values()))
        else:
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                (dx,) = torch.autograd.grad(self._defined(leaf), leaf, dy)
        return dx.to(ctx.input_dtype), ()

    @property
    def _text(self) -> KernelText:
        if self.kernels is None:
            where, cure = f"class {type(self).__name__}", "decorate it with @ops.raw_kernel(CODE, forward=..., backward=...)"
            raise PipelineError(describe(where, wanted="CUDA text", got="none", cure=cure))
        return self.kernels

    @property
    def _constants(self) -> dict[str, int | float]:
        """The hyper-parameters by name, in their order."""
        values = {field.name: getattr(self.spec, field.name) for field in fields(self.spec)}
        for name, value in values.items():
            if not isinstance(value, (int, float)):
                cure = "declare hyper-parameters of raw kernels as numbers"
                raise SpecError(describe(f"{self.label}.{name}", wanted="a bool, int or float", got=repr(value), cure=cure))
        return values

    def _defined(self, x: torch.Tensor) -> torch.Tensor:
        """The reference's result; ShapeError or DtypeError if it is not like ``x``, as the kernels' is."""
        y, where = self.reference(x, **self._constants), f"{type(self).__name__}.reference"
        if y.shape != x.shape:
            raise ShapeError(describe(where, wanted=f"the shape {tuple(x.shape)} of x", got=tuple(y.shape), cure="keep it"))
        if y.dtype != x.dtype:
            raise DtypeError(describe(where, wanted=f"{x.dtype}, that of x", got=y.dtype, cure="cast the result"))
        return y


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda and bool(x.numel()) and runs_kernels(x)


# -- parameters of kernels ------------------------------------------------------------------------------------------------------

_SPELLINGS = {
    bool: ("bool",),
    int: ("long long", "long long int", "int64_t", "std::int64_t"),
    float: ("double",),
}
"""How text may declare a number; CuPy passes it as the first."""

_OTHERS = {"scalar_t", "float", "half", "char", "short", "int", "unsigned", "unsigned int", "int32_t", "long", "size_t"}
"""Other types of numbers. What is in neither, a macro or a name of the text's own, is believed."""

_POINTER = "*"

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@functools.cache
def _check_parameters(code: str, entry: str, tensors: int, numbers: tuple[type, ...]) -> None:
    """SpecError if the text declares other parameters of a kernel than ``tensors`` pointers, two numbers of rows and columns, and
    ``numbers``: it would read behind those that it is given, or half of one.
    """
    found = re.search(rf"\b__global__\b[^;{{}}]*?\b{re.escape(entry)}\s*\(([^()]*)\)", _COMMENTS.sub("", code))
    if found is None:
        return  # a macro makes it
    declared = [" ".join(each.split()) for each in found[1].split(",")]
    types = [_type_of(each) for each in declared]
    wanted = [*["const scalar_t*"] * (tensors - 1), "scalar_t*", *(_SPELLINGS[kind][0] for kind in (int, int, *numbers))]
    known = {spelling for spellings in _SPELLINGS.values() for spelling in spellings} | _OTHERS | {_POINTER}
    kinds = (None,) * tensors + (int, int, *numbers)
    fits = len(types) == len(kinds) and all(
        given == _POINTER if kind is None else given in _SPELLINGS[kind] or given not in known
        for given, kind in zip(types, kinds)
    )
    if not fits:
        cure = "declare these; the last ones are the hyper-parameters of the op, in their order"
        where = f"parameters of kernel {entry}"
        raise SpecError(describe(where, wanted=f"({', '.join(wanted)})", got=f"({', '.join(declared)})", cure=cure))


def _type_of(declared: str) -> str:
    """The type of a parameter, without ``const`` and its name."""
    if "*" in declared:
        return _POINTER
    words = [word for word in declared.split() if word != "const"]
    return " ".join(words[:-1] if len(words) > 1 and words[-1] not in ("long", "int") else words)


Op = TypeVar("Op", bound=type[RawKernelOperation])

MOST_THREADS = 1024
"""Threads of a block, on every GPU."""


def raw_kernel(
    code: str,
    *,
    forward: str,
    backward: str,
    dtypes: Mapping[torch.dtype, str] | None = None,
    grid: Literal["elements", "rows"] = "elements",
    block: int = 256,
    options: tuple[str, ...] = (),
) -> Callable[[Op], Op]:
    """Decorator that gives a subclass of :class:`RawKernelOperation` its CUDA text, for ``cupy.RawKernel``.

    The kernels are ``extern "C" __global__``: ``forward(const scalar_t* x, scalar_t* y, long long rows, long long columns, ...)``
    and ``backward(const scalar_t* dy, const scalar_t* x, scalar_t* dx, long long rows, long long columns, ...)``, all tensors
    contiguous (rows, columns). The dots are the op's hyper-parameters.

    dtypes: the C type of ``scalar_t`` by the dtype that the op computes in; by default ``{torch.float32: "float"}``. grid:
    ``"elements"``, a thread for each element, or ``"rows"``, a block for each row. block: threads of a block. options: further
    options of the compiler. SpecError for what none of these may be. CuPy's compiler flushes subnormals to zero.
    """
    types = {torch.float32: "float"} if dtypes is None else dict(dtypes)
    for entry in (forward, backward):
        _check("kernel", f'a function extern "C" {entry} of the text', entry in code, entry)
    _check("dtypes", f"C types by dtypes of {DTYPES}", bool(types) and types.keys() <= {*DTYPES}, dtypes)
    _check("grid", '"elements" or "rows"', grid in ("elements", "rows"), grid)
    _check("block", f"1 to {MOST_THREADS} threads", type(block) is int and 0 < block <= MOST_THREADS, block)

    def decorate(cls: Op) -> Op:
        _check(
            "class", "a subclass of ops.RawKernelOperation", isinstance(cls, type) and issubclass(cls, RawKernelOperation), cls
        )
        cls.kernels = KernelText(code, forward, backward, types, grid, block, tuple(options))
        return cls

    return decorate


def _check(what: str, wanted: str, fits: bool, got: object) -> None:
    if not fits:
        raise SpecError(describe(f"@raw_kernel {what}", wanted=wanted, got=repr(got), cure="see docs/ops.md, CUDA text"))
