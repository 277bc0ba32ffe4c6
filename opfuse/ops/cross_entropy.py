"""The output head of a language model and its loss as one op, which never holds the logits of all rows.

Rows go in chunks: the logits of a chunk are made, and their gradients in the memory of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from opfuse.core.cast import Cast, check_features
from opfuse.core.context import Context, Value, values_of
from opfuse.core.operation import BasicOperation, OwnProducts
from opfuse.core.signature import Env
from opfuse.core.spec import NonNegative, Positive, Size, hyper_parameters, new_parameter
from opfuse.domains import numbers
from opfuse.errors import DtypeError, GemmError, QuantizerError, ShapeError, describe
from opfuse.formats import COLUMNWISE, USAGES, NumberFormat
from opfuse.kernels.cross_entropy import row_losses
from opfuse.kernels.engine.launch import as_on_gpu
from opfuse.numerics import pointwise
from opfuse.numerics.cross_entropy import CrossEntropy, counted
from opfuse.recipes import Recipe
from opfuse.recipes.recipe import cast_quantizer
from opfuse.tensors.gemm import GEMMS, Operand, add_product, clash, gemm
from opfuse.tensors.masters import stored_in
from opfuse.tensors.quantizers import Quantizer
from opfuse.tensors.quantizers.base import is_repeatable
from opfuse.tensors.storage import QuantizedStorage

Smoothing = Annotated[float, numbers("a number from 0 to 1", minimum=0, maximum=1)]

CHUNK_BYTES, CHUNKS, LEAST_ROWS, MOST_ROWS, WHOLE_ROWS = 1 << 30, 8, 1024, 4096, 128
"""Of fp32 logits that exist at a time; or of all logits, the part that the second says, if that is more.

Each chunk adds its product to dW: for 6 FLOPs a row, 8 bytes of each element are read and written. With ``MOST_ROWS`` that is a
tenth of the time of the products in FP8 on an H200, and a twentieth in bf16. With fewer than ``LEAST_ROWS``, products would not
keep a GPU busy. Tiles have ``WHOLE_ROWS``.
"""

MOST_SLICES = 8
"""Into how many parts of the vocabulary the product of dW is cut at most."""


class Head(NamedTuple):
    """The weight (vocabulary, in_features) and the bias of a head, in the dtype in which it multiplies."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class Casts(NamedTuple):
    """The quantizers of a head's operands, with the planes that its products read; None: an operand in high precision."""

    input: Quantizer | None = None
    weight: Quantizer | None = None
    grad_output: Quantizer | None = None

    def of(self, role: str, x: torch.Tensor) -> Operand:
        """An operand as products read it."""
        quantizer: Quantizer | None = getattr(self, role)
        return x if quantizer is None else quantizer.quantize(x.contiguous())

    @property
    def block(self) -> int:
        """What the number of rows has to be a multiple of: planes that the product of dW reads run along rows."""
        along = [each for each in (self.input, self.grad_output) if each is not None and each.columnwise]
        return math.lcm(*(each.formats[USAGES.index(COLUMNWISE)].multiple for each in along))

    def formats(self, product: str) -> tuple[NumberFormat | None, NumberFormat | None]:
        """Of the planes that a product reads of its operands; None in high precision."""
        what = GEMMS[product]
        return self._format(what.left, what.left_plane), self._format(what.right, what.right_plane)

    def _format(self, role: str, plane: str) -> NumberFormat | None:
        quantizer: Quantizer | None = getattr(self, role)
        return None if quantizer is None else quantizer.formats[USAGES.index(plane)]

    def gradient_in(self, dtype: torch.dtype, wide: torch.dtype) -> torch.dtype:
        """The dtype of the logits' gradient: that of the logits if it is cast, since it then fills their memory without gaps."""
        if self.grad_output is None:
            return dtype
        taken = self.grad_output.input_dtypes
        return wide if taken is None or wide in taken else dtype


_PRODUCTS = {"dgrad": "input", "wgrad": "weight"}
"""The products of a backward pass, and whose gradients they are."""


class HeadGradients(NamedTuple):
    """The gradients of the sum of all losses: of x (M, K) in the dtype of products, of weight and bias in that of sums."""

    x: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class LinearCrossEntropy(BasicOperation):
    """The cross-entropy of the logits x W^T + b with the extra input ``targets``, without the logits of all rows in memory.

    x: (..., in_features). targets: int64 (...), the number of a word or ``ignore_index``; another shape is a ShapeError, another
    dtype a DtypeError. A target that is neither makes the loss and the gradients NaN, on every device; torch raises an IndexError
    on a CPU and ends the process's work on a GPU. The loss is fp32 (fp64 of fp64): a scalar, or (...) of ``reduction="none"``.
    "mean" divides by the number of rows that are not ignored, and is NaN if all are, with gradients of 0, as torch's is.

    ``chunk`` rows at a time are multiplied in the dtype of the weight or of torch.autocast, to fp32 logits. ``weight``
    (vocabulary, in_features) may be that of an embedding. It is a plain parameter also inside ``quantized_model_init``. The
    gradient of a chunk's logits is written into their memory.
    ``chunk=None`` takes as many rows as have 1 GiB of fp32 logits, or an eighth of all rows if those are more, from 1024 to 4096
    and a multiple of 128: of 128 256 words 2048 of 8192 rows, 4096 of 32 768. A larger chunk is a little faster on a GPU and
    takes more memory.

    Where something wants a gradient, the forward pass computes dX and dW, summed over chunks in fp32, and keeps these; the
    backward pass multiplies them by the incoming gradient. So each product is made once, as in Liger Kernel (Hsu et al., 2024,
    https://arxiv.org/abs/2410.10989). With ``reduction="none"`` each row has an incoming gradient of its own, which cannot be
    taken out of the sum dW, so the backward pass makes the logits again.

    label_smoothing, z_loss and softcap are those of :class:`~opfuse.numerics.cross_entropy.CrossEntropy`.

    quantized: the products multiply what the active recipe casts weight, rows and the logits' gradient to, as those of a
    :class:`~opfuse.ops.Linear` do. Not by default, since errors of a head are errors of the loss. Each chunk of rows is cast by
    itself, when its tensor is there, so delayed scaling takes the scale of the tensor itself, and no cast may draw random
    numbers. QuantizerError for one that does, and for quantizers of other libraries or of one's own. Where a format wants whole
    blocks of rows, rows of zeros that are ignored fill the last one.

    ``torch.nn.functional.linear_cross_entropy`` of torch 2.13 is not used: releases before have none, in chunks it takes neither
    label smoothing nor a z-loss nor a softcap, and in a graph of torch.compile it runs outside of it.
    """

    module_type = "linear"
    saves = ("x", "weight", "bias", "targets", "count", "dx", "dw", "db")
    forward_kwargs = ()
    num_extra_inputs = 1
    borrows = ("weight",)

    @hyper_parameters
    def __init__(
        self,
        in_features: Size,
        vocabulary: Size,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        label_smoothing: Smoothing = 0.0,
        z_loss: NonNegative = 0.0,
        softcap: Positive | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        chunk: Size | None = None,
        quantized: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = partial(new_parameter, type(self).__name__, device=device, dtype=dtype)
        self.weight = made((vocabulary, in_features))
        self.register_parameter("bias", made((vocabulary,)) if bias else None)
        self.reset_parameters()

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        shape = self.spec.vocabulary, self.spec.in_features
        return shape if name == "weight" else shape[:1]

    def reset_parameters(self) -> None:
        """Values as ``nn.Linear`` draws them."""
        if self.weight.is_meta:
            return
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.spec.use_bias:
            bound = 1 / math.sqrt(self.spec.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def compute_dtype(self, env: Env, x: Value) -> torch.dtype:
        super().compute_dtype(env, x)
        return env.autocast or self.checked_dtype("weight", self.parameter("weight").dtype)

    @property
    def loss(self) -> CrossEntropy:
        """The loss of a row."""
        return CrossEntropy(*(getattr(self.spec, name) for name in CrossEntropy._fields))

    def rows_at_a_time(self, rows: int) -> int:
        """How many of ``rows`` have logits at a time."""
        chunk: int | None = self.spec.chunk
        fitting = max(CHUNK_BYTES // (4 * self.spec.vocabulary), rows // CHUNKS)
        return chunk or min(max(fitting // WHOLE_ROWS * WHOLE_ROWS, LEAST_ROWS), MOST_ROWS)

    def reads_saved(self, ctx: Context) -> Collection[str]:
        if not ctx.needs:
            return ()
        if self.spec.reduction == "none":
            return [name for name in ("x", "weight", "bias", "targets") if name != "bias" or self.spec.use_bias]
        kept = [name for name, of in (("dx", "input"), ("dw", "weight"), ("db", "bias")) if of in ctx.needs]
        return [*kept, "count"] if self.spec.reduction == "mean" else kept

    def op_forward(self, ctx: Context, input_: torch.Tensor, **_: Any) -> torch.Tensor:
        (targets,) = ctx.extras
        self._check(input_, targets)
        ctx.input_dtype, ctx.input_shape = input_.dtype, input_.shape
        ctx.compute_dtype = dtype = ctx.dtype_of(input_)
        bias = self.parameter("bias") if self.spec.use_bias else None
        x, head, aims = self._operands(input_, self.parameter("weight"), bias, targets, dtype)
        again = self.spec.reduction == "none"
        if again:
            self._casts(ctx, head, ctx.needs)  # what the backward pass cannot cast is refused before it
        losses, made = self._chunks(ctx, x, head, aims, wanted=frozenset() if again else ctx.needs)
        count = counted(aims, self.loss).to(losses.dtype) if self.spec.reduction == "mean" else None
        kept, values = self.reads_saved(ctx), {"x": input_, "weight": self.parameter("weight"), "bias": bias, "targets": targets}
        values |= {"count": count, "dx": made.x, "dw": made.weight, "db": made.bias}
        ctx.save(**{name: value if name in kept else None for name, value in values.items()})
        if again:
            return losses.reshape(targets.shape)
        return losses.sum() if count is None else losses.sum() / count

    def op_backward(
        self, ctx: Context, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, tuple[torch.Tensor | None, ...], tuple[None]]:
        saved, dtype = ctx.saved, ctx.compute_dtype
        if self.spec.reduction == "none":
            x, head, aims = self._operands(saved.x, saved.weight, saved.bias, saved.targets, dtype)
            _, made = self._chunks(ctx, x, head, aims, wanted=ctx.needs, scales=grad_output.reshape(-1).to(_sums(dtype)))
            scale = None
        else:
            made = HeadGradients(saved.dx, saved.dw, saved.db)
            # Where all rows are ignored the gradients are 0, and stay so.
            scale = grad_output if saved.count is None else grad_output / saved.count.clamp(min=1)
        dx = _scaled(made.x, scale, ctx.input_dtype)
        by_name = {"weight": made.weight, "bias": made.bias}
        held = [name for name in by_name if name == "weight" or self.spec.use_bias]
        params = tuple(_scaled(by_name[name], scale, self.parameter(name).dtype) for name in held)
        return None if dx is None else dx.reshape(ctx.input_shape), params, (None,)

    def _operands(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Head, torch.Tensor]:
        """Rows, head and targets as products and losses take them."""
        head = Head(values_of(stored_in(weight)).to(dtype), None if bias is None else stored_in(bias).to(dtype))
        return values_of(x).reshape(-1, self.spec.in_features).to(dtype), head, targets.reshape(-1)

    def _chunks(
        self,
        ctx: Context,
        x: torch.Tensor,
        head: Head,
        targets: torch.Tensor,
        *,
        wanted: frozenset[str],
        scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, HeadGradients]:
        """The losses of all rows, and the gradients that are ``wanted`` of their sum, each times its scale."""
        rows, dtype, wide, casts = self.rows_at_a_time(len(x)), x.dtype, _sums(x.dtype), self._casts(ctx, head, wanted)
        losses, dx = [x.new_empty(0, dtype=wide)], [x.new_empty(0, self.spec.in_features)]
        dw = torch.zeros_like(head.weight, dtype=wide) if "weight" in wanted else None
        db = torch.zeros_like(head.bias, dtype=wide) if "bias" in wanted and head.bias is not None else None
        weight, made_in = casts.of("weight", head.weight), casts.gradient_in(dtype, wide)
        for start in range(0, len(x), rows):
            each, aims = x[start : start + rows], targets[start : start + rows]
            factors = None if scales is None else scales[start : start + rows]
            count = len(each)
            if spare := -count % casts.block:
                each, aims = F.pad(each, (0, 0, 0, spare)), F.pad(aims, (0, spare), value=self.spec.ignore_index)
                factors = None if factors is None else F.pad(factors, (0, spare))
            piece = casts.of("input", each)
            logits = gemm("fprop", piece, weight, dtype=dtype, out_dtype=wide, **ctx.env.product("fprop"))
            if head.bias is not None:
                logits.add_(head.bias)
            found = row_losses(logits, aims, self.loss, gradient=made_in if wanted else None, scales=factors)
            losses.append(found.losses)  # 0 of the rows behind
            plain = found.gradient
            del logits, found
            if plain is None:
                continue
            if db is not None:
                db.add_(plain.sum(0, dtype=wide))
            dy = casts.of("grad_output", plain)
            del plain  # of a gradient that is cast, the memory of the logits
            if "input" in wanted:
                dx.append(gemm("dgrad", dy, weight, dtype=dtype, **ctx.env.product("dgrad"))[:count])
            if dw is not None:
                _add_product(dw, dy, piece, dtype=dtype, **ctx.env.product("wgrad"))
            del dy  # and with it that of a plain one, before the next logits are made
        return torch.cat(losses), HeadGradients(torch.cat(dx) if "input" in wanted else None, dw, db)

    def _casts(self, ctx: Context, head: Head, needs: Collection[str]) -> Casts:
        """How the active recipe casts the operands of the logits, and of the gradients in ``needs``; an error if it cannot."""
        recipe = ctx.env.recipe if self.spec.quantized else None
        if recipe is None:
            return Casts()
        casts, dtype, (words, features) = self.casts(recipe, needs), head.weight.dtype, head.weight.shape
        shapes = {"input": (casts.block, features), "weight": (words, features), "grad_output": (casts.block, words)}
        for role, quantizer in casts._asdict().items():
            if quantizer is not None:
                Cast(role, quantizer, self, ctx.env, f"{self.label} {role}").check(shapes[role], dtype)
        return casts

    def casts(self, recipe: Recipe, needs: Collection[str]) -> Casts:
        """How ``recipe`` casts the operands of the logits, and of the gradients in ``needs``, ``"input"`` and ``"weight"``.

        QuantizerError, RecipeError or GemmError if chunks cannot be cast so, or their casts not be multiplied.
        """
        backward = tuple(name for name, of in _PRODUCTS.items() if of in needs)
        found: dict[str, Quantizer | None] = {}
        for role in Casts._fields:
            whole = self.stored_quantizer(role, recipe)  # whose scale is the tensor's own, also under delayed scaling
            if role == "input":
                recipe.check_row_local(f"{self.label} {role} under {type(recipe).__name__}", whole)
            found[role] = quantizer = cast_quantizer(whole, role, recipe.backward_override, backward)
            if quantizer is not None and not is_repeatable(quantizer):
                wanted = "a quantizer of opfuse's own that draws no random numbers and reduces no amax over ranks"
                cure = "set disable_stochastic_rounding=True, choose another recipe, or leave the head in high precision "
                cure += "(quantized=False, a policy of fuse_ without it)"
                raise QuantizerError(describe(f"{self.label} {role}", wanted=wanted, got=repr(quantizer), cure=cure))
        made = Casts(**found)
        for name in ("fprop", *backward):
            reason = clash(name, *made.formats(name))
            if reason is not None and not recipe.allow_mixed_emulation:
                raise GemmError(f"{self.label} {reason}")
        return made

    def own_products(self, env: Env, needs: Collection[str]) -> OwnProducts:
        if not self.spec.quantized or env.recipe is None:
            return super().own_products(env, needs)
        casts, backward = self.casts(env.recipe, needs), [name for name, of in _PRODUCTS.items() if of in needs]
        formats = {name: casts.formats(name) for name in ("fprop", *backward)}
        # All are powers of two but a chunk that is given, which is filled up if it is no multiple of a block.
        rows = max(math.gcd(env.rows_class, self.spec.chunk or WHOLE_ROWS), casts.block)
        return OwnProducts(formats, (rows, self.spec.in_features, self.spec.vocabulary))

    def _check(self, x: torch.Tensor, targets: torch.Tensor) -> None:
        check_features(self, x.shape)
        where, cure = f"{self.label} targets", "pass the number of a word for each row of x"
        if targets.dtype != torch.int64:
            raise DtypeError(describe(where, wanted="int64", got=targets.dtype, cure=f"{cure}, as labels.long()"))
        if targets.shape != x.shape[:-1]:
            wanted = f"shape {tuple(x.shape[:-1])}, that of x without its features"
            raise ShapeError(describe(where, wanted=wanted, got=tuple(targets.shape), cure=cure))


def _sums(dtype: torch.dtype) -> torch.dtype:
    """The dtype of logits, losses and sums."""
    return pointwise.compute_dtype(dtype)


def _add_product(dw: torch.Tensor, dy: Operand, x: Operand, *, dtype: torch.dtype, **how: Any) -> None:
    """Add dy^T x to ``dw``.

    Of operands in high precision cuBLAS adds to fp32 on a GPU. On a CPU torch has no such product of 16-bit operands, so the
    vocabulary goes in parts, of which one takes about as much memory as the logits of a chunk.
    """
    if isinstance(dy, QuantizedStorage) or isinstance(x, QuantizedStorage):
        if not add_product("wgrad", dy, x, dw, fast=how.get("fast", False)):
            dw.add_(gemm("wgrad", dy, x, dtype=dtype, out_dtype=dw.dtype, **how))
        return
    if as_on_gpu(dw) and dy.dtype != dw.dtype:
        if not dw.is_meta:  # nothing is to be added, and torch 2.11 has no such product there in modes of dispatch
            with torch.autocast("cuda", enabled=False):
                torch.addmm(dw, dy.t(), x, out_dtype=dw.dtype, out=dw)
        return
    count = min(-(-dw.shape[1] // len(dy)), MOST_SLICES)
    size = max(-(-len(dw) // count), 1)
    for start in range(0, len(dw), size):
        words = slice(start, start + size)
        dw[words].add_(gemm("wgrad", dy[:, words], x, dtype=dtype, out_dtype=dw.dtype, **how))


def _scaled(gradient: torch.Tensor | None, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A gradient times the incoming one, in fp32 and rounded once to ``dtype``, without a copy of dW in fp32."""
    if gradient is None or scale is None:
        return None if gradient is None else gradient.to(dtype)
    wide = _sums(gradient.dtype)
    if gradient.dtype != wide:
        return (gradient.to(wide) * scale).to(dtype)
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))
