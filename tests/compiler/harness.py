"""One training step of a pipeline as a flat dictionary of named tensors, so that two runs are compared bit by bit."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

import opfuse
from opfuse import ops, recipes
from opfuse.compiler.plan import Plan
from opfuse.compiler.registry import RuleSet, use_rules
from opfuse.core.context import Context
from opfuse.errors import OpfuseError
from opfuse.runtime.interpret.interpreter import Interpreter
from opfuse.runtime.replay.dispatch import interpreted
from opfuse.tensors.storage import QuantizedStorage
from tests.plans import plans_used

UNFUSED = RuleSet(())

RECIPES = {
    "none": lambda **_: None,
    "delayed": lambda **fields: recipes.DelayedScaling(amax_history_len=4, **fields),
    "fp8_current": recipes.Float8CurrentScaling,
    "fp8_row": lambda **fields: recipes.CustomRecipe(qfactory="fp8_row_scaled", **fields),
    "fp8_block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
}
OVERRIDES = (None, "dequantized", "high_precision")
HAS_OVERRIDE = ("fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4")
CASES = [("none", None), ("delayed", None), *((name, override) for name in HAS_OVERRIDE for override in OVERRIDES)]
"""Every recipe under every override that it takes."""


def recipe_for(
    name: str, override: str | None = None, *, dtype: torch.dtype = torch.bfloat16, **fields: object
) -> recipes.Recipe | None:
    """A recipe of the table that takes tensors of ``dtype`` (the rotation of NVFP4 is for bf16 only)."""
    if name == "nvfp4" and dtype != torch.bfloat16:
        fields["disable_rht"] = True
    if override is not None:
        fields["backward_override"] = override
    return RECIPES[name](**fields)


def generator_of(seed: int) -> torch.Generator:
    """A generator of the default device, whose values are others on another device."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal values that depend on shape and seed only, on the default device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device(), dtype)


@dataclass(frozen=True)
class Step:
    """How to run training steps. input_grad: whether the input wants a gradient. silent: indices of outputs that get none."""

    recipe: recipes.Recipe | None = None
    rules: RuleSet | None = None
    seed: int = 7
    steps: int = 1
    input_grad: bool = True
    silent: frozenset[int] = frozenset()

    def with_rules(self, rules: RuleSet) -> Step:
        """The same step under other rules."""
        return replace(self, rules=rules)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Its rules and its recipe."""
        rules = contextlib.nullcontext() if self.rules is None else use_rules(self.rules)
        with rules, opfuse.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            yield


@dataclass
class Result:
    """Named tensors of a run, and the plans that ran in its last step."""

    tensors: dict[str, torch.Tensor | None]
    plans: list[Plan]

    def outcomes(self, rule: str) -> list:
        """What became of ``rule``, place by place."""
        return [outcome for plan in self.plans for outcome in plan.outcomes if outcome.rule == rule]


def run(model: torch.nn.Module, x: torch.Tensor, *extras: torch.Tensor, step: Step = Step()) -> Result:
    """Forward and backward of a copy of ``model``: outputs, all gradients, saved state of every op, delayed-scaling state."""
    model = copy.deepcopy(model)
    for index in range(step.steps):
        model.zero_grad(set_to_none=True)
        result = train(model, x * (1 + index), *extras, step=replace(step, seed=step.seed + index))
    return result


def train(model: torch.nn.Module, x: torch.Tensor, *extras: torch.Tensor, step: Step) -> Result:
    """One step of ``model`` itself. Extra inputs are copies of leaves, which ops may overwrite."""
    torch.manual_seed(step.seed)
    x = x.detach().clone().requires_grad_(step.input_grad)
    leaves = [extra.detach().clone().requires_grad_(extra.is_floating_point()) for extra in extras]
    with saved_states() as saved, plans_used() as plans, step.scope():
        outputs = model(x, *(leaf.clone() for leaf in leaves))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors: dict[str, torch.Tensor | None] = {f"output {i}": plain(output) for i, output in enumerate(outputs)}
    backward = [(y, gradient(y, i)) for i, y in enumerate(outputs) if y.requires_grad and i not in step.silent]
    if backward:
        torch.autograd.backward(*map(list, zip(*backward)))
    tensors["grad of input"] = x.grad
    tensors |= {f"grad of extra {i}": leaf.grad for i, leaf in enumerate(leaves)}
    tensors |= {f"grad of {name}": parameter.grad for name, parameter in model.named_parameters()}
    tensors |= saved | delayed_state(model)
    return Result(tensors, plans)


def gradient(output: torch.Tensor, index: int) -> torch.Tensor:
    return randn(*output.shape, seed=100 + index, dtype=output.dtype).to(output.device)


def outcome(call: Callable[[], Result]) -> Result | str:
    """What a run gave, or the error it raised."""
    try:
        return call()
    except (OpfuseError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, quantized or not."""
    return (tensor.dequantize() if isinstance(tensor, opfuse.tensors.QuantizedTensor) else tensor).detach().clone()


@contextlib.contextmanager
def watched(see: Callable[[int, Context], None]) -> Iterator[None]:
    """Show ``see`` the position and the context of every op after each forward pass, before its saved state is handed over."""
    forward = Interpreter.forward

    def watching(runner: Interpreter, tensors: Sequence[torch.Tensor]) -> list:
        outputs = forward(runner, tensors)
        position = {id(op): i for i, op in enumerate(runner.ops)}
        for context in runner.contexts.values():
            if id(context.op) in position:
                see(position[id(context.op)], context)
        return outputs

    Interpreter.forward = watching
    try:
        with interpreted():  # a program has no contexts
            yield
    finally:
        Interpreter.forward = forward


@contextlib.contextmanager
def saved_states() -> Iterator[dict[str, torch.Tensor | None]]:
    """Copies of what every op saves for its backward pass, under ``saved POSITION:KIND.NAME`` and the field of the plane."""
    found: dict[str, torch.Tensor | None] = {}

    def see(position: int, context: Context) -> None:
        for name, value in context.saved_state().items():
            found.update(_flat(f"saved {position}:{context.op.kind}.{name}", value))

    with watched(see):
        yield found


@contextlib.contextmanager
def saved_values() -> Iterator[dict[str, object]]:
    """The very objects that ops save, under ``POSITION.NAME``."""
    found: dict[str, object] = {}

    def see(position: int, context: Context) -> None:
        found.update({f"{position}.{name}": value for name, value in context.saved_state().items()})

    with watched(see):
        yield found


def _flat(name: str, value: object) -> dict[str, torch.Tensor | None]:
    if isinstance(value, opfuse.tensors.QuantizedTensor):
        value = value.record
    if not isinstance(value, QuantizedStorage):
        return {name: None if value is None else value.detach().clone()}
    tensors = {}
    for usage in value.usages:
        plane = value.plane(usage)
        for i, each in enumerate(getattr(plane, "members", (plane,))):
            group = f" of group {i}" if each is not plane else ""
            for field in ("data", "scale", "amax"):
                part = getattr(each, field)
                tensors[f"{name} {usage} {plane.format} {field}{group}"] = None if part is None else part.detach().clone()
    return tensors


def delayed_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Scales and amax histories of every op."""
    modules = [(name, module) for name, module in model.named_modules() if hasattr(module, "quantizer_states")]
    return {
        f"state {name} {key}": tensor for name, module in modules for key, tensor in module.quantizer_states.to_dict().items()
    }


def rowwise(recipe: recipes.Recipe, tensor_type: str, tensor: torch.Tensor) -> torch.Tensor:
    """The values that the rowwise cast of ``tensor`` stands for, in its dtype."""
    quantizer = recipe.quantizer(recipes.QuantizerRole(tensor_type=tensor_type)).wanting(rowwise=True, columnwise=False)
    return quantizer.quantize(tensor.detach()).dequantize(tensor.dtype)


def differences(left: Mapping[str, torch.Tensor | None], right: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Names whose bits, dtypes or shapes differ, or that only one side has."""
    return sorted(name for name in {*left, *right} if name not in left or name not in right or not same(left[name], right[name]))


def same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Equal bits, dtype and shape; None only equals None."""
    if left is None or right is None:
        return left is right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(bits(left), bits(right))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def to(model: torch.nn.Module, dtype: torch.dtype, *, seed: int = 3) -> torch.nn.Module:
    """``model`` in ``dtype`` with parameters that are neither all zero nor all one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.add_(0.25 * noise.to(parameter.device))
    return model.to(dtype)


def mlp(width: int = 64) -> ops.Sequential:
    """norm, linear, GELU, linear."""
    return ops.Sequential(ops.RMSNorm(width), ops.Linear(width, 2 * width), ops.GELU(), ops.Linear(2 * width, width))
