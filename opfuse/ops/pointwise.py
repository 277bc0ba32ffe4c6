"""Elementwise ops: each is its declared math; one base class runs any of them, alone or as a stage of a fused chain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from torch import nn

from opfuse.compiler.vocabulary import with_subclasses
from opfuse.core.cast import Cast
from opfuse.core.context import Context, Value, values_of
from opfuse.core.operation import BasicOperation
from opfuse.core.spec import Size, hyper_parameters, new_parameter
from opfuse.core.watched import METHODS, WatchedClass, all_enrolled, place
from opfuse.domains import numbers
from opfuse.errors import PipelineError, ShapeError, SpecError, describe, number_of
from opfuse.kernels.casts.encoding import Encoding, WithOriginal, apart
from opfuse.kernels.chains.cast import backward_chain_encoded, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.numerics import activations
from opfuse.numerics.chain import Rounding, Stage, operand_shape
from opfuse.numerics.pointwise import Pointwise
from opfuse.tensors.gemm import PendingProduct
from opfuse.tensors.masters import stored_in
from opfuse.tensors.storage import QuantizedStorage
from opfuse.torch_private.tensors import base_of


def _saved(cls: type, math: object) -> tuple[str, ...]:
    """What an op of this math saves. SpecError if ``math`` is no Pointwise, but a function of torch, say."""
    if not isinstance(math, Pointwise):
        cure = "write math = ops.formula(NAME, lambda x: …), or ops.Pointwise(...)"
        raise SpecError(describe(f"class {cls.__name__} math", wanted="an ops.Pointwise", got=repr(math), cure=cure))
    return ("x", *math.operands)


DECLARED = ("math", "sources")
"""Attributes from which plans and programs of an elementwise op follow."""


class PointwiseClass(WatchedClass):
    """The metaclass of elementwise ops: after a write to ``math``, what their objects save follows from the new one."""

    def __setattr__(cls, name: str, value: Any) -> None:
        if name == "math":
            _saved(cls, value)
        super().__setattr__(name, value)

    def _write(cls, name: str, write: Callable[[], None]) -> None:
        """Write an attribute, and update subclasses whose ``saves`` follows from their math, and all objects."""
        kinds: list[Any] = [*with_subclasses(cls)] if name in DECLARED else []  # type: ignore[arg-type]
        following = [kind for kind in kinds if hasattr(kind, "math") and kind.saves == _saved(kind, kind.math)]
        super()._write(name, write)
        for kind in kinds:
            kind._reads = {}
            if kind in following and hasattr(kind, "math"):
                kind.saves = _saved(kind, kind.math)
        for op in all_enrolled() if kinds else ():
            if isinstance(op, cls):
                op._follow_math()


class PointwiseOperation(BasicOperation, metaclass=PointwiseClass):
    """y = f(x, operands; constants), rounded once to the dtype of x, or of torch.autocast.

    A subclass declares ``math`` and says where each operand comes from: ``sources`` maps it to ``"extra0"`` … or to a
    parameter's name; the op takes as many extra inputs. Constants are fields of the spec. What the backward pass reads, and
    nothing else, is saved.
    """

    traits = frozenset(("elementwise",))
    forward_kwargs = ()
    math: ClassVar[Pointwise]
    sources: ClassVar[Mapping[str, str]] = {}

    speaks_for = (*METHODS, "compute_dtype")  # a chain has one dtype

    _reads: ClassVar[dict[frozenset[str], frozenset[str]]]

    def __new__(cls, *args: object, **given: object) -> Self:
        if not hasattr(cls, "math"):
            where, cure = f"class {cls.__name__}", "write math = ops.formula(NAME, lambda x: …), or ops.Pointwise(...), into it"
            raise SpecError(describe(where, wanted="its math", got="none", cure=cure))
        return super().__new__(cls, *args, **given)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._reads = {}
        if place(cls, ("sources",)) < place(cls, ("num_extra_inputs",)):
            cls.num_extra_inputs = len({source for source in cls.sources.values() if source.startswith("extra")})
        if place(cls, ("math",)) < place(cls, ("saves",)):
            cls.saves = _saved(cls, cls.math)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in DECLARED:  # an object's own, in place of its class's
            self._follow_math()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in DECLARED:
            self._follow_math()

    def _follow_math(self) -> None:
        """Derive anew what follows from this object's math; its plans and programs are made anew as well."""
        self.__dict__["_reads"] = {}
        self.__dict__["saves"] = _saved(type(self), self.math)
        self.changed()

    # -- alone -------------------------------------------------------------------------------------------------------------

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        y: torch.Tensor = run_chain(input_, [ctx], dtype=ctx.dtype_of(input_))
        ctx.input_dtype = input_.dtype
        return y

    def op_backward(self, ctx: Context, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        return run_chain_backward(grad_output, [ctx]), ctx.grad_params  # those of extra inputs stand in the context

    # -- as a stage of a chain ---------------------------------------------------------------------------------------------

    def forward_stage(self, ctx: Context, shape: torch.Size, device: torch.device) -> Stage:
        """This op's math with the operands of this call, for an input of ``shape``."""
        if not shape and (self.math.is_gated or {"row", "column"} & set(self.math.operands.values())):
            cure = "unsqueeze it"
            raise ShapeError(describe(f"{self.label} input", wanted="at least one dimension", got=tuple(shape), cure=cure))
        return Stage(
            self.math, self.operands(ctx, shape, device), self.constants, getattr(self.spec, "glu_interleave_size", None)
        )

    def operands(self, ctx: Context, shape: torch.Size, device: torch.device) -> dict[str, torch.Tensor]:
        """Operand tensors by name."""
        return {name: _source(self, ctx, source) for name, source in self.sources.items()}

    @property
    def constants(self) -> dict[str, float]:
        """The constants of the math, from the spec."""
        return {name: getattr(self.spec, name) for name in self.math.constants}

    def reads(self, ctx: Context) -> frozenset[str]:
        """The inputs and operands of the math whose values the gradients that this call wants read."""
        if ctx.needs not in self._reads:
            wanted = [name for name, source in self.sources.items() if source in ctx.needs]
            wanted += self.math.inputs if "input" in ctx.needs else ()
            self._reads[ctx.needs] = frozenset().union(*(self.math.reads.get(name, ()) for name in wanted))
        return self._reads[ctx.needs]

    def reads_saved(self, ctx: Context) -> frozenset[str]:
        reads = self.reads(ctx)
        return reads - {*self.math.inputs} | ({"x"} if not reads.isdisjoint(self.math.inputs) else frozenset())

    def remakes(self, ctx: Context) -> Literal["", "saved", "input"]:
        saved = frozenset(self.reads_saved(ctx))
        if not self.math.is_known or not saved.issuperset(self.math.operands):
            return ""
        return "saved" if "x" in saved else "input"

    def remake(self, contexts: Sequence[Context], cast: Cast | None) -> Value:
        return remake_chain(values_of(contexts[0].saved.x), contexts, cast)

    def save_stage(self, ctx: Context, stage: Stage, x: torch.Tensor | None) -> None:
        """Save what the backward pass reads: the input ``x`` and the operands that some gradient depends on."""
        read = self.reads(ctx)
        ctx.save(x=x, **{name: stage.operands.get(name) if name in read else None for name in self.math.operands})

    def backward_stage(self, ctx: Context, shape: torch.Size, device: torch.device) -> Stage:
        """This op's math with the saved operands, for a result of ``shape``.

        Of a parameter whose value no gradient reads, only the dtype counts. An extra input whose value only an unwanted gradient
        reads is replaced by zeros of its dtype.
        """
        saved = ctx.saved
        operands = {name: value for name in self.math.operands if (value := getattr(saved, name)) is not None}
        for name, source in self.sources.items():
            if not source.startswith("extra"):
                operands.setdefault(name, stored_in(self.parameter(source)))
            elif name in self.math.backward_reads - self.reads(ctx):
                dtype = ctx.extra_dtypes[int(source.removeprefix("extra"))]
                operands[name] = unread(operand_shape(self.math.operands[name], shape), dtype, device)
        return Stage(self.math, operands, self.constants, getattr(self.spec, "glu_interleave_size", None))

    def saved_input(self, ctx: Context) -> torch.Tensor | None:
        """The input as it was saved, in high precision."""
        return None if ctx.saved.x is None else values_of(ctx.saved.x)

    def set_operand_grads(self, ctx: Context, grads: Mapping[str, torch.Tensor]) -> None:
        """File operand gradients as those of the parameters and of the extra inputs."""
        by_source = {source: grads.get(name) for name, source in self.sources.items()}
        extras = [by_source.get(f"extra{i}") for i in range(self.num_extra_inputs)]
        ctx.set_grads(
            params=[by_source.get(name) for name in self.parameter_names],
            extras=[None if grad is None else grad.to(dtype) for grad, dtype in zip(extras, ctx.extra_dtypes)],
        )


def _source(op: PointwiseOperation, ctx: Context, source: str) -> torch.Tensor:
    """The operand that comes from ``source``. DtypeError for an extra input that a conversion to fp32 would change."""
    if not source.startswith("extra"):
        return op.parameter(source)
    extra: torch.Tensor = ctx.extras[int(source.removeprefix("extra"))]
    op.checked_dtype("extra input", extra.dtype)
    return extra


class Bias(PointwiseOperation):
    """y = x + b for x (..., size); db is summed over all leading dimensions in fp32. bias: (size,), initially 0."""

    math = activations.BIAS
    sources = {"bias": "bias"}
    borrows = ("bias",)

    @hyper_parameters
    def __init__(
        self, size: Size, *, device: Any = None, dtype: torch.dtype | None = None, owner: nn.Module | None = None
    ) -> None:
        super().__init__(owner=owner)
        self.owner.bias = new_parameter(type(self.owner).__name__, self.parameter_shape("bias"), device=device, dtype=dtype)
        self.reset_parameters()

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        return (self.spec.size,)

    def reset_parameters(self) -> None:
        """Zeros."""
        with torch.no_grad():
            self.owner.bias.zero_()

    def forward_stage(self, ctx: Context, shape: torch.Size, device: torch.device) -> Stage:
        if shape[-1:] != (self.size,):
            wanted, size = f"shape (..., {self.size})", shape[-1] if shape else 1
            cure = f"have the op before it make {number_of(self.size, 'feature')}, or build this one with size={size}"
            raise ShapeError(describe(f"{self.label} input", wanted=wanted, got=tuple(shape), cure=cure))
        return super().forward_stage(ctx, shape, device)


class ConstantScale(PointwiseOperation):
    """y = scale * x."""

    math = activations.CONSTANT_SCALE

    @hyper_parameters
    def __init__(self, scale: float) -> None:
        super().__init__()


class AddExtraInput(PointwiseOperation):
    """y = x + extra; the gradient goes to both.

    in_place: the sum is written into the extra tensor that the caller gives, which autograd then sees as changed. A leaf that
    wants a gradient is refused. What comes through a channel is never written, since other ops may read it.
    """

    math = activations.ADD
    sources = {"residual": "extra0"}

    @hyper_parameters
    def __init__(self, in_place: bool = False) -> None:
        super().__init__()

    @property
    def traits(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset() if self.spec.in_place else PointwiseOperation.traits

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        y = super().op_forward(ctx, input_)
        return write_in_place(ctx, y) if self.spec.in_place else y


def write_in_place(ctx: Context, y: torch.Tensor) -> torch.Tensor:
    """Put ``y`` into the op's extra tensor, and say that it changed. PipelineError if the tensor cannot take it."""
    if ctx.op.extra_input_channels[0].name is not None:
        return y
    extra, where, cure = ctx.extras[0], f"{ctx.op.label} extra input", "use in_place=False"
    if extra.dtype != y.dtype:
        raise PipelineError(
            describe(where, wanted=f"dtype {y.dtype}, that of the sum", got=extra.dtype, cure=f"cast it, or {cure}")
        )
    if any(step == 0 and size > 1 for step, size in zip(extra.stride(), extra.shape)):
        wanted, got = "a tensor with memory for each element", f"one expanded to {tuple(extra.shape)}"
        raise PipelineError(describe(where, wanted=wanted, got=got, cure=f"pass extra.contiguous(), or {cure}"))
    root = extra if (base := base_of(extra)) is None else base
    if ctx.env.grad and root.is_leaf and root.requires_grad:
        raise PipelineError(
            describe(where, wanted="a tensor to overwrite", got="a leaf that requires grad", cure=f"clone it, or {cure}")
        )
    written: torch.Tensor = extra.copy_(y)
    ctx.dirty.append(written)
    return written


PROBABILITY = numbers("a probability, 0 <= p < 1", minimum=0, exclusiveMaximum=1)


class Dropout(PointwiseOperation):
    """In training y = x * mask / (1 - p), mask ~ Bernoulli(1 - p) from torch's generator; in evaluation y = x."""

    math = activations.DROPOUT
    reads_training = True

    @hyper_parameters
    def __init__(self, p: Annotated[float, PROBABILITY]) -> None:
        super().__init__()

    def reads_saved(self, ctx: Context) -> frozenset[str]:
        return super().reads_saved(ctx) if self.training else frozenset()

    def forward_stage(self, ctx: Context, shape: torch.Size, device: torch.device) -> Stage:
        if not self.training:
            return self._stage(None)
        return self._stage(torch.rand(shape, dtype=torch.float32, device=device).ge_(self.spec.p).to(torch.uint8))

    def backward_stage(self, ctx: Context, shape: torch.Size, device: torch.device) -> Stage:
        return self._stage(ctx.saved.mask)

    def _stage(self, mask: torch.Tensor | None) -> Stage:
        """Zeros where the mask has them; without a mask, nothing happens and nothing is saved."""
        if mask is None:
            return Stage(activations.CONSTANT_SCALE, constants={"scale": 1.0})
        return Stage(self.math, {"mask": mask}, {"scale": 1 / (1 - self.spec.p)})


# -- a run of ops as one chain, which leaves in each op's context what the op alone would leave ---------------------------------

Input = torch.Tensor | PendingProduct
"""What a chain runs over: a tensor, or a product that is yet to be made."""


def run_chain(
    x: Input, contexts: Sequence[Context], cast: Cast | None = None, *, dtype: torch.dtype, rounding: Rounding = "per_op"
) -> Any:
    """The result, in ``dtype``, of the elementwise ops of ``contexts`` over ``x``, in ``dtype`` or fp32 sums; each op's state is
    saved in its context. cast: of the result, which is returned in its place; in one kernel where that can take it over.

    A product that is yet to be made is made together with them, in one kernel where that saves time.
    """
    stages: list[Stage] = []
    shape = x.shape
    for ctx in contexts:
        ctx.io_dtype = ctx.input_dtype = dtype
        ctx.extra_dtypes = [extra.dtype for extra in ctx.extras]
        stages.append(ctx.op.forward_stage(ctx, shape, x.device))
        shape = ctx.op.math.result_shape(shape)
    fused = None if cast is None else cast.fused(shape, dtype, x.device)
    encode = None if fused is None else fused.encoding
    read = [i for i, ctx in enumerate(contexts) if not ctx.op.reads(ctx).isdisjoint(ctx.op.math.inputs)]
    result, saved = _run(x, stages, encode, dtype=dtype, rounding=rounding, keep=read)
    for i, (ctx, stage) in enumerate(zip(contexts, stages)):
        ctx.op.save_stage(ctx, stage, saved.get(i))
    if fused is not None:
        return fused.storage(result)
    return result if cast is None else cast(result)


def _run(x: Input, stages: list[Stage], encode: Encoding | None, **options: Any) -> tuple[Any, dict[int, torch.Tensor]]:
    """The result of stages over ``x`` or, where there is an ``encode``, its planes; and what is kept."""
    if isinstance(x, PendingProduct):
        if (together := x.chained(stages, encode, **options)) is not None:
            encoded, y, saved = together
            return y if encode is None else encoded, saved
        x = x.compute()
    values = values_of(x)  # as a kernel reads it; the caller's tensor is saved
    run = forward_chain if encode is None else partial(forward_chain_encoded, encode=encode)
    result, saved = run(values, stages, **options)
    return result, {i: x if tensor is values else tensor for i, tensor in saved.items()}


def run_chain_backward(
    dy: torch.Tensor, contexts: Sequence[Context], cast: Cast | None = None, *, rounding: Rounding = "per_op"
) -> Any:
    """dx of a chain run by :func:`run_chain`, from the saved state; gradients of operands are left in the contexts.

    cast: of dx, which is returned in its place; in one kernel where that can take it over.
    """
    if cast is not None:
        return run_chain_backward_stored(dy, contexts, cast, stores=False, rounding=rounding)[0]
    stages, saved, _ = _backward_stages(dy, contexts)
    dx, grads = backward_chain(dy, stages, saved, rounding=rounding, dtype=contexts[0].io_dtype)
    _set_grads(contexts, grads)
    return dx.to(contexts[0].input_dtype)


def run_chain_backward_stored(
    dy: torch.Tensor, contexts: Sequence[Context], cast: Cast, *, stores: bool = True, rounding: Rounding = "per_op"
) -> tuple[QuantizedStorage, torch.Tensor | None]:
    """The cast of dx, and dx itself, which the same kernel stores. stores: whether it is wanted; else None."""
    stages, saved, shape = _backward_stages(dy, contexts)
    first = contexts[0]
    fused = cast.fused(shape, first.io_dtype, dy.device) if first.io_dtype == first.input_dtype else None
    if fused is None:
        dx = run_chain_backward(dy, contexts, rounding=rounding)
        return cast(dx), dx if stores else None
    inner, kept = apart(fused.encoding)
    encode = WithOriginal(fused.encoding.layouts, inner) if stores else fused.encoding
    encoded, grads = backward_chain_encoded(dy, stages, saved, encode, rounding=rounding, dtype=first.io_dtype)
    _set_grads(contexts, grads)
    planes = encoded if kept or not stores else encoded[:-1]
    return fused.storage(planes), encoded[-1][0] if stores else None


def _backward_stages(dy: torch.Tensor, contexts: Sequence[Context]) -> tuple[list[Stage], dict[int, torch.Tensor], torch.Size]:
    """The stages of a chain with the gradient ``dy``, the inputs that they saved, and the shape of the chain's input."""
    stages: list[Stage] = []
    saved: dict[int, torch.Tensor] = {}
    shape = dy.shape
    for i, ctx in reversed(tuple(enumerate(contexts))):
        stages.insert(0, ctx.op.backward_stage(ctx, shape, dy.device))
        shape = ctx.op.math.input_shape(shape)
        if (x := ctx.op.saved_input(ctx)) is not None:
            saved[i] = x
        elif ctx.op.math.needs_input and ctx.op.reads(ctx).isdisjoint(ctx.op.math.inputs):
            saved[i] = unread(shape, ctx.io_dtype, dy.device)
    return stages, saved, shape


def remake_chain(x: torch.Tensor, contexts: Sequence[Context], cast: Cast | None) -> Value:
    """The result of a chain whose ops have run, from the first op's input ``x`` and saved operands; cast if ``cast`` is given."""
    stages, shape = [], x.shape
    for ctx in contexts:
        shape = ctx.op.math.result_shape(shape)
        stages.append(ctx.op.backward_stage(ctx, shape, x.device))
    dtype, rounding = contexts[0].io_dtype, contexts[0].env.rounding
    fused = None if cast is None else cast.fused(shape, dtype, x.device)
    if fused is None:
        y, _ = forward_chain(x, stages, rounding=rounding, dtype=dtype, keep=[])
        return y if cast is None else cast(y)
    encoded, _ = forward_chain_encoded(x, stages, fused.encoding, rounding=rounding, dtype=dtype, keep=[])
    return fused.storage(encoded)


def _set_grads(contexts: Sequence[Context], grads: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for ctx, operand_grads in zip(contexts, grads):
        ctx.op.set_operand_grads(ctx, operand_grads)


def unread(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In place of a value that only unwanted gradients read: one zero, expanded to ``shape``."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)
