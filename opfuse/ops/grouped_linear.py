"""Grouped linear layers: the experts of a mixture, each with a weight of its own for its rows."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn

from opfuse.core.cast import check_features
from opfuse.core.context import Context, Value
from opfuse.core.operation import BasicOperation
from opfuse.core.protocol import Grouping
from opfuse.core.quantizers import Mode, separate_slot
from opfuse.core.signature import Env
from opfuse.core.spec import Size, hyper_parameters, new_parameter
from opfuse.errors import ShapeError, SpecError, describe
from opfuse.formats import IDENTITY, NumberFormat
from opfuse.ops.grouped_bias import add_biases, bias_gradients, biases_of, scale_gradient
from opfuse.ops.grouped_delay import PutOff, owed
from opfuse.ops.linear import check_forward, in_dtype, multiplied, saved_operand
from opfuse.ops.main_grad import add_gradients_of_groups, is_asked_for
from opfuse.ops.weights import new_weight, regroup, reset_weight
from opfuse.recipes import QuantizerRole, Recipe
from opfuse.recipes.recipe import OVERRIDES, cast_quantizer
from opfuse.tensors.gemm_grouped import Groups, Weights, grouped_rows, grouped_wgrad, takes_device_splits
from opfuse.tensors.groups import Sizes, check_sizes, check_splits, groups_of, known_sizes, listed_splits, read_sizes, sizes_of
from opfuse.tensors.quantizers import GroupedQuantizer, Quantizer
from opfuse.tensors.ragged import RaggedProducts, casts_in_groups, groups_in
from opfuse.tensors.storage import QuantizedStorage, matrix_shape
from opfuse.tensors.tensor import QuantizedTensor

_SINGLE = ("weight", "bias")
"""Parameters that hold those of all groups."""


class GroupedLinear(BasicOperation):
    """y_i = x_i W_i^T + b_i for each of ``num_groups`` groups i of consecutive rows of x (..., in_features).

    Extra inputs: ``splits``, int64 or int32 (num_groups,), the rows of each group, which may be 0; with ``scale_bias`` also
    ``scales``, floating point x.shape[:-1], and the bias added to a row is multiplied by its scale. Called on its own, the op
    takes ``splits`` as a list of ints too. Anything else is a DtypeError or a ShapeError.

    Parameters: ``weight0`` … and ``bias0`` …, or ``weight`` (num_groups, out_features, in_features) and ``bias`` (num_groups,
    out_features) where ``single_grouped_weight`` and ``single_grouped_bias`` ask for one; ``weight[i]``, to be read and written,
    is that of a group, quantized where the whole lives so.

    Each group is a :class:`~opfuse.ops.Linear` of its own: under a recipe its rows, its weight and its gradients are cast as
    tensors of their own, with states of their own. What was quantized as one tensor is cast again group by group. pad_splits:
    rows of zeros fill the last blocks of each group, for formats whose columnwise data needs a multiple of rows; without it, and
    without a backward override, such splits are a ShapeError.
    Where torch multiplies bf16 for all groups at once, sums may have another order than in a Linear: gradients, also under a
    backward override, and results of small groups without a recipe; never what is batch-invariant.

    ``splits`` may stay on a GPU, where nothing waits for them, while no bias wants a gradient: in bf16, and on compute capability
    9.0 in FP8, scaled per tensor (current or delayed), per row or in 1x128 blocks. All groups are then one launch, a program
    repeats it for all sizes and a CUDA graph captures it. Splits of the GPU that do not add up to the rows stop it with an
    assertion; nothing outside of the tensors is touched. Elsewhere the host waits, once for the layers of a pipeline that share
    splits: for gradients of biases, more than 128 groups, emulated formats, amaxes over ranks, bf16 gradients in ``main_grad``. A
    CPU tensor or a list costs no wait; a CUDA graph keeps the numbers of a list. Weights of bf16 products may be copied into one.

    In a pipeline, layers share the ``splits`` that an op such as :class:`~opfuse.ops.TokenDispatch` puts into a channel. Those of
    the caller have no channel: they are passed once for each layer, in op order.

    delay_wgrad_compute: a backward pass leaves the weights without a gradient; a training loop of your own calls
    :meth:`backward_dw`, which computes it later. accumulate_into_main_grad: gradients of weights are added, in fp32, to
    ``main_grad`` of each weight parameter, a buffer of the caller, and not to its ``grad`` (``main_grad.py``). A configuration
    file can ask for neither.
    """

    kind = "grouped_linear"
    traits = frozenset(("gemm", "grouped", "producer"))
    saves = ()  # an object knows its own
    accepts_quantized = True
    asks_casts = True
    pipelined = True
    forward_kwargs = ()
    num_extra_inputs = 1
    most_extra_inputs = 2

    @hyper_parameters
    def __init__(
        self,
        num_groups: Size,
        in_features: Size,
        out_features: Size,
        *,
        bias: bool = True,
        scale_bias: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        pad_splits: bool = False,
        delay_wgrad_compute: bool = False,
        accumulate_into_main_grad: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        where = type(self).__name__
        if not bias:
            self.__dict__["spec"] = replace(self.spec, scale_bias=False, single_grouped_bias=False)
        if delay_wgrad_compute and accumulate_into_main_grad:
            wanted, got = "gradients that come at once", "delay_wgrad_compute beside it"
            raise SpecError(describe(f"{where}.accumulate_into_main_grad", wanted=wanted, got=got, cure="choose one of the two"))
        if self.spec.scale_bias:
            self.__dict__["num_extra_inputs"] = 2
        super().__init__()
        self.__dict__["_delayed"] = deque()
        weights = _names("weight", num_groups, single=single_grouped_weight)
        biases = _names("bias", num_groups, single=single_grouped_bias) if bias else ()
        self.__dict__.update(weight_names=weights, bias_names=biases, borrows=(*weights, *biases))
        saves, made = ("x", *weights, *biases, "splits", "scales"), {"device": device, "dtype": dtype}
        self.__dict__.update(saves=saves, rematerialized_as={"input": "x", **dict(zip(weights, weights))})
        for name in weights:
            setattr(self, name, new_weight(self, name, self.parameter_shape(name), **made))
        for name in biases:
            setattr(self, name, new_parameter(where, self.parameter_shape(name), **made))
        self.reset_parameters()

    # -- parameters ------------------------------------------------------------------------------------------------------

    def parameter_shape(self, name: str) -> tuple[int, ...]:
        spec, columns = self.spec, () if name in self.bias_names else (self.spec.in_features,)
        return (*((spec.num_groups,) if name in _SINGLE else ()), spec.out_features, *columns)

    def reset_parameters(self) -> None:
        """Values as ``nn.Linear`` draws them, group by group, weights first, in place; nothing on the meta device."""
        for name in self.weight_names:
            reset_weight(self, name, _draw)
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            for name in self.bias_names:
                self.parameter(name).uniform_(-bound, bound)

    def adapt_state_dict(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Load also what was saved with weights or biases held the other way."""
        for kind, names in (("weight", self.weight_names), ("bias", self.bias_names)):
            regroup(state_dict, f"{prefix}{kind}", len(names), self.num_groups)

    # -- quantization ----------------------------------------------------------------------------------------------------

    def quantized_roles(self) -> tuple[str, ...]:
        return ("input", *self.weight_names, "grad_output")

    def grouping(self, needs: Collection[str]) -> Grouping:
        return Grouping(self.num_groups, padded=self.pad_splits, summed=self.sums_biases(needs))

    def cast_groups(self, role: str) -> int:
        return self.num_groups if role in ("input", "weight", "grad_output") else 0

    def ragged_products(self, quantizers: Mapping[str, Quantizer], env: Env, needs: Collection[str]) -> RaggedProducts | None:
        """Those of FP8, where no bias wants a gradient. Under an override gradients are those of bf16."""
        rows = [quantizers[role] for role in ("input", "grad_output") if role in quantizers]
        known = all(casts_in_groups(quantizer, self.num_groups) for quantizer in rows)
        backward = OVERRIDES[env.backward_override].backward == "quantized"
        weights = {fmt.as_stored for name in self.weight_names for fmt in self._weight_formats(name, quantizers)[: 1 + backward]}
        if self.sums_biases(needs) or not rows or not known or len(weights) != 1:
            return None
        one, *_, other = [quantizer.formats[0] for quantizer in (rows[0], *rows)]
        widths, added = (self.in_features, self.out_features), self.accumulate_into_main_grad
        return RaggedProducts(one, other if backward else None, weights.pop(), widths, added)

    def _weight_formats(self, name: str, quantizers: Mapping[str, Quantizer]) -> Sequence[NumberFormat]:
        """Those of its directions, rowwise first, of a cast or as the parameter is stored."""
        if name in quantizers:
            return quantizers[name].formats
        weight = self.parameter(name)
        held = weight.held if isinstance(weight, QuantizedTensor) else None
        return [IDENTITY] if held is None else [held.plane(usage).format for usage in held.usages]

    def make_quantizer(self, role: str, recipe: Recipe) -> tuple[Quantizer, Any]:
        """The quantizer of a group's operand, and its delayed-scaling state; for an operand in groups, a tuple of states."""
        made = [self.quantizer_of(self.quantizer_role(role), recipe, slot=slot) for slot in self.state_slots(role)]
        states = tuple(state for _, state in made if state is not None)
        return made[0][0], states if self.cast_groups(role) else next(iter(states), None)

    def stored_quantizer(self, role: str, recipe: Recipe) -> Quantizer:
        """A quantizer for each group where one parameter holds the weights of all."""
        made = super().stored_quantizer(role, recipe)
        return GroupedQuantizer((made,) * self.num_groups) if self.cast_groups(role) else made

    def narrow_quantizer(
        self, quantizer: Quantizer, role: str, override: str | None, backward_gemms: tuple[str, ...]
    ) -> Quantizer | None:
        return cast_quantizer(quantizer, "weight" if role in self.weight_names else role, override, backward_gemms)

    def num_quantizers(self, mode: Mode) -> int:
        """An input and a weight for each group, in turn; backward a gradient for each."""
        groups: int = self.num_groups
        return groups * (2 if len(self._declared(mode)) > 1 else 1)

    def get_quantizer_roles(self, mode: Mode) -> Sequence[QuantizerRole | None] | None:
        names = ("input", "weight") if mode == "forward" else ("grad_output",)
        roles = [self.quantizer_role(name) for name in names]
        return [role for _ in range(self.num_groups) for role in roles]

    def state_slots(self, role: str) -> tuple[QuantizerRole, ...]:
        """Where the states of an operand are kept, one for each group that is cast apart, as :meth:`get_quantizer` finds them."""
        place, step = {"input": (0, 2), "grad_output": (0, 1)}.get(role, (1, 2))
        groups = range(self.num_groups) if self.cast_groups(role) else (int(role.removeprefix("weight")),)
        base, first = self.quantizer_role(role), self.slot_part * self.num_groups
        return tuple(separate_slot(base, place + step * i) if i else base for i in (first + group for group in groups))

    def compute_dtype(self, env: Env, x: Value) -> torch.dtype:
        super().compute_dtype(env, x)
        return env.autocast or self.checked_dtype("weight", self.parameter(self.weight_names[0]).dtype)

    derives = MappingProxyType(
        {"sizes": lambda ctx: read_sizes(ctx.saved.splits, matrix_shape(ctx.input_shape)[0], where=ctx.op.label)}
    )

    def reads_saved(self, ctx: Context) -> Collection[str]:
        wgrad, dgrad = not ctx.needs.isdisjoint(self.weight_names), "input" in ctx.needs
        dbias, dscales = self.sums_biases(ctx.needs), "extra1" in ctx.needs
        unknown = vars(ctx).get("sizes") is None and bool(ctx.needs)
        kept = "input" not in ctx.rematerialized
        wanted = {"x": wgrad and kept, "splits": unknown, "scales": dbias and self.scale_bias}
        wanted |= dict.fromkeys(self.weight_names, dgrad) | dict.fromkeys(self.bias_names, dscales)
        return [name for name, read in wanted.items() if read]

    def remember(self, ctx: Context) -> None:
        """The sizes of the groups, where the host has them."""
        splits = ctx.extras[0]
        if "sizes" not in vars(ctx) and splits is not None and not splits.is_meta and (sizes := known_sizes(splits, 0)):
            ctx.sizes = sizes

    # -- forward ---------------------------------------------------------------------------------------------------------

    def forward(self, x: torch.Tensor, *extra_inputs: Any, **kwargs: Any) -> Any:
        """Run this op alone; split sizes may then be a list of ints as well, of which a DtypeError names any other entry."""
        splits = [listed_splits(e, where=self.label) if isinstance(e, (list, tuple)) else e for e in extra_inputs[:1]]
        return super().forward(x, *splits, *extra_inputs[1:], **kwargs)

    def op_forward(self, ctx: Context, input_: Value, **_: Any) -> torch.Tensor:
        return self.produce(ctx, input_)

    def produce(self, ctx: Context, x: Value, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The output, in the compute dtype or, for an epilogue that rounds later, in ``out_dtype``."""
        splits, scales = (*ctx.extras, None)[:2]
        ctx.input_dtype, ctx.compute_dtype = x.dtype, ctx.dtype_of(x)
        self._check_call(x, splits, scales)
        x = ctx.cast("input", x if isinstance(x, QuantizedStorage) else x.to(ctx.compute_dtype), splits)
        check_forward(ctx, x)
        held = {name: self._operand(ctx, name) for name in self.weight_names}
        weights = self._operands(ctx, held.values(), x)
        options = {"dtype": ctx.compute_dtype, "out_dtype": out_dtype, **ctx.env.product("fprop")}
        one_launch = out_dtype in (None, ctx.compute_dtype) and not options.get("invariant")
        ctx.sizes = self._sizes(x, weights, splits, one_launch=one_launch and not self.sums_biases(ctx.needs))
        groups = Groups(ctx.sizes, splits)
        y = grouped_rows("fprop", x, weights, groups, **options)
        ctx.extra_dtypes = [extra.dtype for extra in ctx.extras]
        self._save(ctx, x, held, splits, scales)
        if self.use_bias:
            add_biases(y.view(-1, self.out_features), biases_of(self.bias_names, self.parameter), scales, groups)
        return y

    def _check_call(self, x: Value, splits: torch.Tensor, scales: torch.Tensor | None) -> None:
        check_features(self, x.shape)
        check_splits(splits, self.num_groups, where=self.label)
        if scales is None:
            return
        self.checked_dtype("scales", scales.dtype)
        if scales.shape != x.shape[:-1]:
            wanted, cure = f"shape {tuple(x.shape[:-1])}", "pass one scale for each row of the input"
            raise ShapeError(describe(f"{self.label} scales", wanted=wanted, got=tuple(scales.shape), cure=cure))

    def _operand(self, ctx: Context, name: str) -> Value:
        """A weight as it is multiplied: its quantized copy, or the parameter."""
        weight = self.parameter(name)
        return ctx.operands[name] if name in ctx.operands else ctx.cast(name, weight)

    def _operands(self, ctx: Context, held: Iterable[Any], other: Value) -> Weights:
        """The weight of each group as a product reads it beside ``other``; plain weights in one tensor stay in it."""
        read = [in_dtype(multiplied(weight, other), ctx.compute_dtype) for weight in held]
        if not self.single_grouped_weight:
            return read
        (whole,) = read
        if isinstance(whole, QuantizedStorage):
            return list(groups_of(whole, (self.out_features,) * self.num_groups))
        return whole

    def _sizes(self, x: Value, weights: Weights, splits: torch.Tensor, *, one_launch: bool) -> Sizes | None:
        """Rows of each group; None where only the device knows them and need be. one_launch: whether torch's product may do."""
        rows = matrix_shape(x.shape)[0]
        if isinstance(x, QuantizedStorage) and groups_in(x) is not None:
            return None
        known = sizes_of(x) if isinstance(x, QuantizedStorage) else None
        known = known or known_sizes(splits, rows)
        if known is None and not (one_launch and takes_device_splits(x, weights)):
            known = read_sizes(splits, rows, where=self.label)
        return None if known is None else check_sizes(known, rows, where=self.label)

    def _save(self, ctx: Context, x: Value, held: dict[str, Value], splits: torch.Tensor, scales: torch.Tensor | None) -> None:
        operands = {
            "x": x,
            "splits": splits,
            "scales": scales,
            **held,
            **{name: self.parameter(name) for name in self.bias_names},
        }
        read = {name: saved_operand(ctx, operands[name], "input" if name == "x" else name) for name in self.reads_saved(ctx)}
        ctx.save(**(dict.fromkeys(self.saves) | read))

    def sums_biases(self, needs: Collection[str]) -> bool:
        """Whether a backward pass sums rows for biases, of which the host has to know how many there are."""
        return not set(needs).isdisjoint(self.bias_names)

    def reads_gradient(self, needs: Collection[str]) -> bool:
        """Whether a backward pass reads the output's gradient in high precision, too."""
        return self.sums_biases(needs) or "extra1" in needs

    # -- backward --------------------------------------------------------------------------------------------------------

    def op_backward(self, ctx: Context, grad_output: Value) -> tuple[torch.Tensor | None, Any, Any]:
        plain = ctx.grad_output if isinstance(grad_output, QuantizedStorage) else grad_output
        if plain is None and self.reads_gradient(ctx.needs):
            plain = cast(QuantizedStorage, grad_output).dequantize(ctx.compute_dtype)
        ctx.grad_output = None
        dy = ctx.cast("grad_output", grad_output, ctx.sizes or ctx.saved.splits)
        ctx.sizes = ctx.sizes or (sizes_of(dy) if isinstance(dy, QuantizedStorage) else None)
        dy, groups = in_dtype(dy, ctx.compute_dtype), Groups(ctx.sizes, ctx.saved.splits)
        dx = self._input_gradient(ctx, dy, groups)
        weights = self._weight_gradients(ctx, dy, groups)
        biases, scales = self._bias_gradients(ctx, cast(torch.Tensor, plain), groups)
        return dx, (*map(weights.get, self.weight_names), *biases), (None, scales)[: self.num_extra_inputs]

    def _input_gradient(self, ctx: Context, dy: Value, groups: Groups) -> torch.Tensor | None:
        if "input" not in ctx.needs:
            return None
        weights = self._operands(ctx, [getattr(ctx.saved, name) for name in self.weight_names], dy)
        dx = grouped_rows("dgrad", dy, weights, groups, dtype=ctx.compute_dtype, **ctx.env.product("dgrad"))
        return dx.to(ctx.input_dtype)

    def _weight_gradients(self, ctx: Context, dy: Value, groups: Groups) -> Mapping[str, torch.Tensor]:
        """Gradients of the weights that want one, by name; none where they are put off."""
        weights = {name: self.parameter(name) for name in self.weight_names if name in ctx.needs}
        if weights and self.delay_wgrad_compute:
            weights = owed(weights, where=self.label)
        if self.accumulate_into_main_grad:
            weights = {name: weight for name, weight in weights.items() if is_asked_for(weight)}
        if not weights:
            return {}
        x, options = ctx.saved.x, {"dtype": ctx.compute_dtype, **ctx.env.product("wgrad")}
        if self.accumulate_into_main_grad:
            if groups.sizes is None and not (isinstance(dy, QuantizedStorage) and groups_in(dy)):
                sizes = read_sizes(ctx.saved.splits, matrix_shape(x.shape)[0], where=self.label)
                groups = Groups(sizes, groups.splits)
            return add_gradients_of_groups(weights, self.weight_names, dy, x, groups, where=self.label, **options)
        product = partial(self._products, weights, dy, x, groups, **options)
        if not self.delay_wgrad_compute:
            return product()
        kept = {"input": x, "gradient of the output": dy, "split sizes": groups.splits}
        self._delayed.append(PutOff(self.label, weights, kept, product))
        return {}

    def _products(
        self, weights: Mapping[str, nn.Parameter], dy: Value, x: Value, groups: Groups, **options: Any
    ) -> dict[str, torch.Tensor]:
        wanted = [i for i in range(self.num_groups) if self.weight_names[i % len(self.weight_names)] in weights]
        grads = grouped_wgrad(dy, x, groups, wanted=wanted, **options)
        if self.single_grouped_weight:
            grads = [grads if isinstance(grads, torch.Tensor) else torch.stack(cast(list[torch.Tensor], grads))]
        made = zip(self.weight_names, cast(Iterable[torch.Tensor], grads))
        return {name: grad.to(weights[name].dtype) for name, grad in made if name in weights}

    def backward_dw(self) -> None:
        """Add to the weights' ``grad`` what the earliest ``backward()`` put off, and forget it; nothing if none did.

        To be called once for each ``backward()`` that reached a weight which trains; others, such as one with ``inputs=[x]``, put
        nothing off. No hook of a weight sees these gradients, and ``zero_grad`` does not cancel them.

        SavedTensorError if the input, the gradient of the output or the split sizes were changed in place since; that gradient
        is lost. ``torch.autograd.grad`` for a weight, and weights other than the op's own parameters
        (``torch.func.functional_call``), are an UnsupportedError in the backward pass. A copy of the op (``copy.deepcopy``,
        pickle) owes nothing: its gradients are those that had been computed.
        """
        if self._delayed:
            self._delayed.popleft().accumulate()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_delayed": deque()}

    def _bias_gradients(
        self, ctx: Context, dy: torch.Tensor, groups: Groups
    ) -> tuple[list[torch.Tensor | None], torch.Tensor | None]:
        """The gradients of the biases and the scales, summed in fp32.

        A bias gets the sum of its rows times their scales; a scale gets the product of its row of dy and the bias.
        """
        biases: list[torch.Tensor | None] = [None] * len(self.bias_names)
        if self.sums_biases(ctx.needs):
            held = [self.parameter(name) for name in self.bias_names]
            biases = [*bias_gradients(dy, held, ctx.saved.scales, cast(Sizes, groups.sizes))]
        if "extra1" not in ctx.needs:
            return biases, None
        rows = scale_gradient(dy, biases_of(self.bias_names, partial(getattr, ctx.saved)), groups)
        return biases, rows.reshape(dy.shape[:-1]).to(ctx.extra_dtypes[-1])


def _names(kind: str, groups: int, *, single: bool) -> tuple[str, ...]:
    return (kind,) if single else tuple(f"{kind}{i}" for i in range(groups))


def _draw(values: torch.Tensor) -> None:
    for matrix in values.view(-1, *values.shape[-2:]):
        nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
