"""Linear layers: the matrix product alone, and the product with a bias.

A :class:`Linear` owns the parameters, and its two parts borrow ``weight`` and ``bias`` from it. So names in ``state_dict()``
and ``named_parameters()`` are those of ``nn.Linear``, while rules and functions see two basic ops. No pattern can say
``linear``: a word names the same op in a pattern and in a pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from opfuse.core.cast import check_features
from opfuse.core.context import Context, Value
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.core.signature import Env
from opfuse.core.spec import Size, hyper_parameters
from opfuse.errors import MissingPlaneError, SpecError, describe, problem_of
from opfuse.formats import ROWWISE
from opfuse.numerics import pointwise
from opfuse.ops.main_grad import added, grad_for_autograd, is_asked_for, main_grad_of, overwrites
from opfuse.ops.pointwise import Bias
from opfuse.ops.weights import new_weight, reset_weight
from opfuse.recipes import Recipe
from opfuse.recipes.delayed import DelayedScalingState, DelayedScalingStates
from opfuse.recipes.recipe import saved_planes
from opfuse.tensors.gemm import PendingProduct, add_product, gemm
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor


class BasicLinear(BasicOperation):
    """y = x W^T for x (..., in_features) and W (out_features, in_features), without a bias.

    weight: fp32, fp16 or bf16 (fp64 without a recipe), initialised as ``nn.Linear`` does; inside ``quantized_model_init`` a
    QuantizedTensor. Computes in torch.autocast's dtype if active, else in the weight's. accumulate_into_main_grad: the weight's
    gradient is added, in fp32, to ``weight.main_grad``, a buffer of the caller, and not to ``weight.grad`` (``main_grad.py``).
    """

    module_type = "linear"
    traits = frozenset(("gemm", "producer"))
    roles = ("weight", "input", "grad_output")
    saves = ("x", "w")
    accepts_quantized = True
    asks_casts = True
    forward_kwargs = ()
    borrows = ("weight",)
    rematerialized_as = MappingProxyType({"input": "x", "weight": "w"})

    @hyper_parameters
    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        owner: nn.Module | None = None,
    ) -> None:
        super().__init__(owner=owner)
        self.owner.weight = new_weight(self, "weight", self.parameter_shape("weight"), device=device, dtype=dtype)
        self.reset_parameters()

    cut_over: Mapping[str, Any] = MappingProxyType({})
    """By role of an operand of which this rank has a part: the process group that has the whole, and finds its scale together."""

    def make_quantizer(self, role: str, recipe: Recipe) -> tuple[Quantizer, DelayedScalingState | None]:
        quantizer, state = super().make_quantizer(role, recipe)
        together = quantizer.reducing(self.cut_over[role]) if role in self.cut_over and state is None else None
        return together or quantizer, state

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        return self.spec.out_features, self.spec.in_features

    def reset_parameters(self) -> None:
        """Kaiming-uniform values (a = sqrt 5), written into the weight, plain or quantized; nothing on the meta device."""
        reset_weight(self, "weight", partial(nn.init.kaiming_uniform_, a=math.sqrt(5)))

    def compute_dtype(self, env: Env, x: Value) -> torch.dtype:
        super().compute_dtype(env, x)
        return env.autocast or self.checked_dtype("weight", self.parameter("weight").dtype)

    def reads_saved(self, ctx: Context) -> Collection[str]:
        read = [name for name, wanted in (("x", "weight"), ("w", "input")) if wanted in ctx.needs]
        return [name for name in read if name != "x" or "input" not in ctx.rematerialized]

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> torch.Tensor:
        return self.produce(ctx, input_)

    def produce(self, ctx: Context, x: Value, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The product, in the compute dtype or, for an epilogue that rounds later, in ``out_dtype``."""
        return self._product(ctx, x, out_dtype).compute()

    def pending(self, ctx: Context, x: Value, *, out_dtype: torch.dtype | None = None) -> torch.Tensor | PendingProduct:
        """The product of :meth:`produce`, yet to be made; made at once if a subclass overrides ``produce``."""
        own = getattr(self.produce, "__func__", None) is BasicLinear.produce
        return self._product(ctx, x, out_dtype) if own else self.produce(ctx, x, out_dtype=out_dtype)

    def _product(self, ctx: Context, x: Value, out_dtype: torch.dtype | None) -> PendingProduct:
        """The product of both operands' casts, yet to be made; what the backward pass reads is saved in ``ctx``."""
        weight = self.parameter("weight")
        dtype, ctx.input_dtype = ctx.dtype_of(x), x.dtype
        check_features(self, x.shape)
        x = ctx.cast("input", x if isinstance(x, QuantizedStorage) else x.to(dtype))
        check_forward(ctx, x)
        w = ctx.operands["weight"] if "weight" in ctx.operands else ctx.cast("weight", weight)
        ctx.compute_dtype = dtype
        ctx.save(
            x=saved_operand(ctx, x, "input") if "weight" in ctx.needs else None,
            w=saved_operand(ctx, w, "weight") if "input" in ctx.needs else None,
        )
        return PendingProduct(x, multiplied(w, x), dtype, out_dtype, ctx.env.product("fprop"))

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None]]:
        dy = self._gradient(ctx, grad_output)
        return self.input_gradient(ctx, dy), (self.weight_gradient(ctx, dy),)

    def input_gradient(self, ctx: Context, dy: Value, *, out_dtype: torch.dtype | None = None) -> torch.Tensor | None:
        """dx = dy W in the input's dtype or, to be rounded later, in ``out_dtype``; None if the input wants no gradient."""
        if "input" not in ctx.needs:
            return None
        dy, w = self._gradient(ctx, dy), ctx.saved.w
        options = ctx.env.product("dgrad")
        dx = gemm("dgrad", dy, multiplied(w, dy), dtype=ctx.compute_dtype, out_dtype=out_dtype, **options)
        return dx.to(out_dtype or ctx.input_dtype)

    def weight_gradient(self, ctx: Context, dy: Value, *, scale: float | None = None) -> torch.Tensor | None:
        """dW = dy^T x in the weight's dtype, times ``scale``, or None if the weight wants no gradient.

        With ``accumulate_into_main_grad`` it is added to that, unrounded, and what is returned stands for it.
        """
        if "weight" not in ctx.needs:
            return None
        weight, main = self.parameter("weight"), self.spec.accumulate_into_main_grad
        if main and not is_asked_for(weight):
            return None
        if main:
            main_grad_of(weight, where=f"{self.label} weight")
        wide = pointwise.compute_dtype(ctx.compute_dtype) if main or scale is not None else None
        dy, options = self._gradient(ctx, dy), ctx.env.product("wgrad")
        if main and scale is None and not overwrites(weight):
            buffer = main_grad_of(weight, where=f"{self.label} weight").detach()
            if add_product("wgrad", dy, ctx.saved.x, buffer, fast=options.get("fast", False)):
                return grad_for_autograd(weight)
        grad = gemm("wgrad", dy, ctx.saved.x, dtype=ctx.compute_dtype, out_dtype=wide, **options)
        if scale is not None:
            grad = grad * scale
        if main:
            return added(weight, grad, where=f"{self.label} weight")
        return grad.to(ctx.compute_dtype).to(weight.dtype)

    def _gradient(self, ctx: Context, dy: Value) -> Value:
        dy = ctx.cast("grad_output", dy)
        return dy if isinstance(dy, QuantizedStorage) else dy.to(ctx.compute_dtype)


class Linear(FusibleOperation):
    """y = x W^T + b: a :class:`BasicLinear` followed by a :class:`Bias`, with the parameters of ``nn.Linear``.

    x: (..., in_features); y: (..., out_features). State-dict keys are ``weight`` and ``bias``; those of ``nn.Linear`` and of
    te.ops load as well. accumulate_into_main_grad: as of :class:`BasicLinear`, for the weight; the bias has its gradient as ever.
    """

    kind = "linear"
    weight: nn.Parameter
    bias: nn.Parameter | None
    accumulate_into_main_grad: bool

    @hyper_parameters
    def __init__(
        self,
        in_features: Size,
        out_features: Size,
        bias: bool = True,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
    ) -> None:
        super().__init__()
        made = {"device": device, "dtype": dtype, "owner": self}
        product = BasicLinear(in_features, out_features, accumulate_into_main_grad=accumulate_into_main_grad, **made)
        parts: list[BasicOperation] = [product]
        if bias:
            parts.append(Bias(out_features, **made))
        else:
            self.register_parameter("bias", None)
        self.__dict__["parts"] = tuple(parts)
        self._reset_bias()

    @property
    def basic_ops(self) -> tuple[BasicOperation, ...]:
        parts: tuple[BasicOperation, ...] = self.__dict__["parts"]
        return parts

    @property
    def name(self) -> str:
        """The name in quantizer roles, which a factory of a CustomRecipe may ask for; to be given before the first call."""
        return self._product.name

    @name.setter
    def name(self, name: str) -> None:
        self._product.name = name

    @property
    def _product(self) -> BasicLinear:
        return next(part for part in self.basic_ops if isinstance(part, BasicLinear))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """SpecError for a bias where none was asked for: no op would add it. A ``forward`` of one's own may."""
        spec = self.__dict__.get("spec")
        if name == "bias" and param is not None and spec is not None and not spec.use_bias and self.joins:
            where, cure = f"{self.label}.bias", "build it with bias=True, or put a Bias behind it"
            raise SpecError(describe(where, wanted="None, for bias=False", got=f"a parameter {tuple(param.shape)}", cure=cure))
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Values as ``nn.Linear`` draws them."""
        self._product.reset_parameters()
        self._reset_bias()

    def _reset_bias(self) -> None:
        if self.bias is not None and not self.bias.is_meta:
            bound = 1 / math.sqrt(self.in_features)
            with torch.no_grad():
                self.bias.uniform_(-bound, bound)

    def extra_repr(self) -> str:
        main = ", accumulate_into_main_grad=True" * self.accumulate_into_main_grad
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}{main}"

    @property
    def quantizer_states(self) -> DelayedScalingStates:
        """Delayed-scaling states of the product."""
        return self._product.quantizer_states

    def adapt_state_dict(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Load also the keys of its parts, under which te.ops saves: ``basic_ops.0.weight`` is ``weight``."""
        state_dict.pop(f"{prefix}basic_ops.1._extra_state", None)
        for part in (f"{prefix}basic_ops.{i}." for i in range(len(self.basic_ops))):
            for name in [name for name in state_dict if name.startswith(part)]:
                state_dict[prefix + name.removeprefix(part)] = state_dict.pop(name)


# -- operands of products --------------------------------------------------------------------------------------------------------


def multiplied(weight: Any, other: Value) -> Value:
    """A weight as a product reads it: a quantized parameter gives its planes if ``other`` is quantized, else its values."""
    if not isinstance(weight, QuantizedTensor):
        return weight  # type: ignore[no-any-return]
    return weight.held if isinstance(other, QuantizedStorage) else weight.dequantize()


def in_dtype(operand: Value, dtype: torch.dtype) -> Value:
    """A plain operand in ``dtype``; a quantized one as it is."""
    return operand if isinstance(operand, QuantizedStorage) else operand.to(dtype)


def saved_operand(ctx: Context, operand: Any, role: str) -> Any:
    """What the backward products read of an operand: a quantized parameter itself, a plane of its cast, or the tensor.

    A parameter is saved itself so that autograd notices a change before the backward pass. An operand that the backward pass
    makes anew is saved as the parameter that it is made of, or as None. MissingPlaneError for an operand that was quantized
    elsewhere without the plane that is read.
    """
    if role in ctx.rematerialized:
        return ctx.op.parameter(role) if role in ctx.op.parameter_names else None
    if isinstance(operand, QuantizedTensor) and getattr(ctx.op.owner, "temporary", False):
        operand = operand.held  # of this call alone, so nobody writes it: the plane that is read is enough
        if operand.columnwise is None and operand.rowwise is not None and operand.rowwise.is_mirror:
            return operand  # the backward pass reads the same bytes
    if not isinstance(operand, QuantizedStorage):
        return operand
    try:
        return saved_planes(operand, ctx.env.backward_override)
    except MissingPlaneError as error:
        cure = f"pass {role}.dequantize(), or keep both ops in one Sequential, whose Quantize makes what the product reads"
        raise _missing(ctx, role, "data for both the forward and the backward products", error, cure) from error


def check_forward(ctx: Context, x: Value) -> None:
    """MissingPlaneError unless the forward product can read the input."""
    if not isinstance(x, QuantizedStorage):
        return
    try:
        x.plane(ROWWISE)
    except MissingPlaneError as error:
        cure = "quantize it with rowwise=True, or pass input.dequantize()"
        raise _missing(ctx, "input", "rowwise data, which the forward product reads", error, cure) from error


def _missing(ctx: Context, role: str, wanted: str, error: MissingPlaneError, cure: str) -> MissingPlaneError:
    got = f"one that was quantized elsewhere: {problem_of(error)}"
    return MissingPlaneError(describe(f"{ctx.op.label} {role}", wanted=wanted, got=got, cure=cure))
