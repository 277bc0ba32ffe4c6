"""A trial of a fusion rule: pipelines of the ops that its pattern matches, with the rule and without it, compared bit by bit.

Pipelines (``rule_pipelines.py``) run forward and backward under every recipe. Where the rule fires, the same call without it
tells what is right. What the ops refuse by themselves, as a shape that no recipe casts, is no fault of the rule.
"""

from __future__ import annotations

import copy
import importlib
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch

from opfuse.compiler.cover import ABSENT_STATUS, FUSED
from opfuse.compiler.plan import Plan
from opfuse.compiler.registry import Registration, RuleSet, default_rules, use_rules
from opfuse.compiler.rules import JOINT, Fusion, printed
from opfuse.config.rule_pipelines import MadePipeline, RulePipelines, random_values
from opfuse.core.operation import BasicOperation
from opfuse.errors import FusionError, OpfuseWarning, describe, differing, listed, nearest, number_of
from opfuse.events import PlanUsed, TensorSaved, collected, subscribed
from opfuse.formats import dtype_name
from opfuse.interchange.parity import same_bytes
from opfuse.recipes import RECIPES, Recipe
from opfuse.recipes.autocast import under
from opfuse.recipes.recipe import OVERRIDES
from opfuse.tensors.storage import QuantizedStorage
from opfuse.tensors.tensor import QuantizedTensor

EQUAL, DIFFERENT, RAISED, IDLE = "equal", "different", "raised", "not fired"
"""What became of a rule under a recipe."""

NO_RECIPE = "none"

_FIELDS: Mapping[str, Mapping[str, Any]] = {"custom": {"qfactory": "fp8_row_scaled"}}
"""What a kind of recipe needs to be told."""

_FIELDS_IN_FP32: Mapping[str, Mapping[str, Any]] = {"nvfp4": {"disable_rht": True}}
"""What a kind of recipe needs for tensors in fp32: the rotation of NVFP4 is for bf16 only."""


class FirstDifference(NamedTuple):
    """The first tensor that is not as without the rule. at: its first wrong element. others: more wrong tensors."""

    tensor: str
    at: tuple[int, ...]
    wanted: str
    got: str
    differing: int
    elements: int
    others: tuple[str, ...]

    def __str__(self) -> str:
        where = f" at {self.at}" if self.elements else ""
        count = f"; {differing(self.differing, self.elements, 'element')}" if self.elements else ""
        others = f"; {listed(self.others)} {'differs' if len(self.others) == 1 else 'differ'} too" if self.others else ""
        return f"{self.tensor}{where} wants {self.wanted}, got {self.got}{count}{others}"


@dataclass(frozen=True)
class RuleUnderRecipe:
    """What became of a rule under one recipe.

    status: "equal", "different", "raised" or "not fired". fired: in how many calls it did. reasons: why it did not in others.
    call: the one that went wrong. error: what it raised, and where.
    """

    recipe: str
    backward_override: str | None
    status: str
    fired: int
    reasons: tuple[str, ...] = ()
    call: str = ""
    difference: FirstDifference | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; a rule need not fire under every recipe."""
        return self.status in (EQUAL, IDLE)

    @property
    def name(self) -> str:
        """The recipe, and its override."""
        return f"{self.recipe}, {self.backward_override}" if self.backward_override else self.recipe

    @property
    def fault(self) -> str:
        """What went wrong; empty if nothing did."""
        return f"raised {self.error}" if self.error else str(self.difference or "")

    @property
    def summary(self) -> str:
        """In one line: what became of the rule, and why it did not fire."""
        if self.status == EQUAL:
            return f"equal in {number_of(self.fired, 'call')}"
        if self.status == IDLE:
            return f"not fired: {self.reasons[0] if self.reasons else 'its pattern matches nothing'}"
        return f"{self.status}: {self.difference.tensor}" if self.difference else f"{self.status} {self.error.partition(':')[0]}"


@dataclass(frozen=True)
class RuleReport:
    """What became of a rule under every recipe. pipelines: how many were tried. left_out: ops that could not be, and why."""

    rule: str
    pattern: str
    direction: str
    source: str
    device: str
    pipelines: int
    results: tuple[RuleUnderRecipe, ...]
    left_out: tuple[str, ...] = ()

    @property
    def fired(self) -> bool:
        """Whether it fired under some recipe."""
        return any(result.fired for result in self.results)

    @property
    def ok(self) -> bool:
        """Whether it fired, and was right wherever it did."""
        return self.fired and all(result.ok for result in self.results)

    @property
    def verdict(self) -> str:
        """In one sentence: whether the rule is right; if it never fired, why."""
        name, recipes = f"fusion {self.rule!r}", number_of(len(self.results), "recipe")
        if wrong := sum(not result.ok for result in self.results):
            return f"{name} is wrong under {wrong} of {recipes}"
        if self.fired:
            fired = sum(result.fired > 0 for result in self.results)
            return f"{name} equals its ops, bit for bit; it fired under {fired} of {recipes}"
        reasons = Counter(reason for result in self.results for reason in result.reasons[:1])
        got = "; ".join(f"{reason} (under {number_of(count, 'recipe')})" for reason, count in reasons.most_common())
        cure = "mend the pattern or the guards; opfuse.explain says why it does not fire in a pipeline of yours"
        return describe(name, wanted="a call in which it fires", got=f"none: {got or 'its pattern matches nothing'}", cure=cure)

    def faults(self) -> list[list[RuleUnderRecipe]]:
        """The recipes under which something went wrong, those together that show the same in the same call."""
        alike: dict[tuple[str, str], list[RuleUnderRecipe]] = {}
        for result in self.results:
            if not result.ok:
                alike.setdefault((result.call, result.summary), []).append(result)
        return [*alike.values()]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        results = [_plain_result(result) for result in self.results]
        return {**asdict(self), "ok": self.ok, "verdict": self.verdict, "results": results}


def _plain_result(result: RuleUnderRecipe) -> dict[str, Any]:
    found = result.difference
    return {**vars(result), "reasons": [*result.reasons], "difference": None if found is None else found._asdict()}


# -- which rule ------------------------------------------------------------------------------------------------------------------


def rule_at(path: str) -> Fusion:
    """The rule that ``module:NAME`` names: what ``fusion`` returned, or ``register_fusion``. FusionError if there is none."""
    module_name, _, name = path.partition(":")
    where = f"rule {path!r}"
    if not module_name or not all(name.split(".")):
        cure = "write the name of a module and, after a colon, that of a rule in it"
        raise FusionError(describe(where, wanted="MODULE:RULE", got=repr(path), cure=cure))
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does
        cure = "mend the module, or run from the folder that has it"
        got = f"{type(error).__name__}: {error}"
        raise FusionError(describe(where, wanted="a module that can be imported", got=got, cure=cure)) from error
    for step in name.split("."):
        if not hasattr(found, step):
            known = [name for name, value in vars(found).items() if isinstance(value, (Fusion, Registration))]
            got, cure = f"none{nearest(step, known)}", f"name one of {', '.join(known)}" if known else "define a rule in it"
            raise FusionError(describe(where, wanted=f"{step!r} in {module_name}", got=got, cure=cure))
        found = getattr(found, step)
    if isinstance(found, Registration):
        known_rules = {rule.name: rule for rule in default_rules().rules}
        found = known_rules.get(found.name, found)
    if not isinstance(found, Fusion):
        cure = "name what fusion() or register_fusion() returned; a fusion function has no pattern to make pipelines of"
        raise FusionError(describe(where, wanted="a fusion rule", got=repr(found), cure=cure))
    return found


# -- calls -----------------------------------------------------------------------------------------------------------------------


class CallResult(NamedTuple):
    """Named tensors of a call, and the plans that ran. error: what it raised, in place of tensors."""

    tensors: Mapping[str, torch.Tensor | None]
    plans: Sequence[Plan]
    error: Exception | None = None


def _run(made: MadePipeline, recipe: Recipe | None, rules: RuleSet) -> CallResult:
    """Training calls of a copy of the pipeline: two under delayed scaling, whose second one has a scale."""
    copied = made._replace(model=copy.deepcopy(made.model))
    tensors: dict[str, torch.Tensor | None] = {}
    with collected(PlanUsed) as used:
        try:
            for step in range(2 if recipe is not None and recipe.kind == "delayed" else 1):
                copied.model.zero_grad(set_to_none=True)
                torch.manual_seed(7 + step)
                tensors = _step(copied._replace(x=made.x * (1 + step)), recipe, rules)
        except Exception as error:  # of a rule, whatever it does
            return CallResult({}, [event.plan for event in used], error)
    return CallResult(tensors, [event.plan for event in used])


def _step(made: MadePipeline, recipe: Recipe | None, rules: RuleSet) -> dict[str, torch.Tensor | None]:
    """One call: outputs, gradients, what ops saved, the states of delayed scaling, the input as the call left it."""
    model, asked = made.model, made.asked
    x = made.x.clone().requires_grad_(asked.inputs and asked.grad)
    leaves = [extra.clone().requires_grad_(asked.grad and extra.is_floating_point()) for extra in made.extras]
    saved: dict[str, torch.Tensor | None] = {}

    def keep(event: TensorSaved) -> None:
        node = event.plan.graph.nodes[event.node]
        if not _keeps_its_own(event.plan, event.node):
            saved.update(_flat(f"what {node.name} saved as {event.name!r}", event.value))

    with subscribed(keep, TensorSaved), use_rules(rules), under(recipe), torch.set_grad_enabled(asked.grad):
        result = model(x, *(leaf.clone() for leaf in leaves))
    outputs = result if isinstance(result, tuple) else (result,)
    named = ["the output", *(f"extra output {i}" for i in range(len(outputs) - 1))]
    tensors: dict[str, torch.Tensor | None] = {name: _values(output) for name, output in zip(named, outputs)}
    read = [output for i, output in enumerate(outputs) if output.requires_grad and (asked.extras or not i)]
    if read:
        grads = [random_values(tuple(y.shape), y.dtype, y.device, seed=100 + i) for i, y in enumerate(read)]
        torch.autograd.backward(read, grads)
    tensors["the gradient of the input"] = x.grad
    tensors |= {f"the gradient of extra input {i}": leaf.grad for i, leaf in enumerate(leaves)}
    tensors |= {f"the gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    for name, module in model.named_modules():
        if isinstance(module, BasicOperation):
            states = module.quantizer_states.to_dict().items()
            tensors |= {f"the scaling state {key} of {name}": state.clone() for key, state in states}
    return tensors | saved | {"the input after the call": x.detach()}


def _keeps_its_own(plan: Plan, node: int) -> bool:
    """Whether a rule for both passes ran the node: what it saves is its own affair."""
    groups = (group for segment in plan.segments for group in segment.forward if node in group.nodes)
    return any(group.rule is not None and group.rule.direction == JOINT for group in groups)


def _values(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor).detach().clone()


def _flat(name: str, value: Any) -> dict[str, torch.Tensor | None]:
    """A saved value as tensors: itself, or the parts of its planes."""
    record = value.record if isinstance(value, QuantizedTensor) else value
    if not isinstance(record, QuantizedStorage):
        return {name: record.detach().clone()}
    planes = [record.plane(usage) for usage in record.usages]
    kinds = [f"{usage} {plane.format}" for usage, plane in zip(record.usages, planes)]
    parts = [(f"{name}, {kind}", plane.tensors()) for kind, plane in zip(kinds, planes)]
    return {f"{text}, part {i}": part.detach().clone() for text, tensors in parts for i, part in enumerate(tensors)}


# -- comparing -------------------------------------------------------------------------------------------------------------------


def difference(wanted: Mapping[str, torch.Tensor | None], got: Mapping[str, torch.Tensor | None]) -> FirstDifference | None:
    """The first of the tensors that is not, bit for bit, what it should be. A rule may save less than its ops would."""
    saved = {name for name in (*wanted, *got) if name.startswith("what ")}
    names = [name for name in wanted if name not in saved or name in got]
    wrong = [name for name in names if not _same(wanted[name], got.get(name))]
    return _first(wrong, wanted[wrong[0]], got.get(wrong[0])) if wrong else None


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else same_bytes(left, right)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element, a row for each."""
    return tensor.detach().contiguous().reshape(-1, 1).view(torch.uint8)


def _first(wrong: Sequence[str], wanted: torch.Tensor | None, got: torch.Tensor | None) -> FirstDifference:
    name, *others = wrong
    if wanted is None or got is None or wanted.dtype != got.dtype or wanted.shape != got.shape:
        return FirstDifference(name, (), _kind(wanted), _kind(got), 0, 0, tuple(others))
    differs = (_bits(wanted) != _bits(got)).any(1)
    place = int(differs.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), wanted.shape))
    left, right = (repr(each.detach().reshape(-1)[place].item()) for each in (wanted, got))
    return FirstDifference(name, index, left, right, int(differs.sum()), wanted.numel(), tuple(others))


def _kind(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}"


# -- the trial -------------------------------------------------------------------------------------------------------------------


class RecipeCase(NamedTuple):
    """A kind of recipe, or none, and a backward override."""

    kind: str
    override: str | None = None

    def recipe(self, dtype: torch.dtype) -> Recipe | None:
        """The recipe for tensors of ``dtype``; None for none."""
        if self.kind == NO_RECIPE:
            return None
        cls = RECIPES[self.kind]
        fields: dict[str, Any] = {**_FIELDS.get(self.kind, {})}
        if dtype == torch.float32:
            fields |= _FIELDS_IN_FP32.get(self.kind, {})
        if cls.takes_backward_override:
            fields["backward_override"] = self.override
        return cls(**fields)


def recipe_cases() -> tuple[RecipeCase, ...]:
    """None, and every kind of recipe under every backward override that it takes."""
    taken = {kind: tuple(OVERRIDES) if cls.takes_backward_override else (None,) for kind, cls in RECIPES.items()}
    return RecipeCase(NO_RECIPE), *(RecipeCase(kind, override) for kind, overrides in taken.items() for override in overrides)


def try_rule(rule: Fusion, device: torch.device | str = "cpu", *, cases: Sequence[RecipeCase] | None = None) -> RuleReport:
    """Run ``rule`` against its ops under ``cases``, by default all of :func:`recipe_cases`.

    FusionError for a rule that no rule set takes, and for one of whose pattern no pipeline can be built.
    """
    place = torch.device(device)
    rules, pipelines = RuleSet(()).with_rule(rule), RulePipelines(rule, place)
    with warnings.catch_warnings(), torch.random.fork_rng([place] if place.type == "cuda" else []):
        torch.manual_seed(0)  # parameters are initialised with it
        warnings.simplefilter("ignore", OpfuseWarning)  # of emulated products, and of regions without any
        tried = enumerate(recipe_cases() if cases is None else cases)
        results = tuple([_under(case, turn, rules, pipelines) for turn, case in tried])
    if not pipelines.count:
        got = next(iter(pipelines.left_out), "a pattern that no op matches")
        cure = "give the arguments of its constructor defaults, or annotate them as int, float or bool"
        raise FusionError(describe(f"fusion {rule.name!r}", wanted="ops that a trial can build", got=got, cure=cure))
    about = rule.name, printed(rule.pattern), rule.direction, rule.source, str(place)
    return RuleReport(*about, pipelines.count, results, tuple(pipelines.left_out))


def _under(case: RecipeCase, turn: int, rules: RuleSet, pipelines: RulePipelines) -> RuleUnderRecipe:
    """What becomes of the rule under one recipe; the first call that goes wrong ends it."""
    rule = pipelines.rule
    found = RuleUnderRecipe(case.kind, case.override, IDLE, 0)
    reasons: Counter[str] = Counter()
    for made in pipelines.calls(turn):
        recipe = case.recipe(made.x.dtype)
        ran = _run(made, recipe, rules)
        outcomes = [outcome for plan in ran.plans for outcome in plan.outcomes if outcome.rule == rule.name]
        if all(outcome.status != FUSED for outcome in outcomes):
            for outcome in outcomes:
                if outcome.reason:  # of a guard it says more than of a place that nothing matched
                    reasons[outcome.reason] += 1 if outcome.status == ABSENT_STATUS else 1000
            continue
        right = _run(made, recipe, rules.without(rule.name))
        if right.error is not None:
            reasons[f"the ops refuse the call: {right.error}"] += 1
            continue
        found = replace(found, status=EQUAL, fired=found.fired + 1)
        if ran.error is not None:
            return replace(found, status=RAISED, call=made.text, error=_told(ran.error, rule))
        if (wrong := difference(right.tensors, ran.tensors)) is not None:
            return replace(found, status=DIFFERENT, call=made.text, difference=wrong)
    return replace(found, reasons=tuple(reason for reason, _ in reasons.most_common()))


def _told(error: Exception, rule: Fusion) -> str:
    """An error, and the line of the rule's own file that raised it."""
    files = {code.co_filename for run in (rule.forward, rule.backward) if (code := getattr(run, "__code__", None))}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{type(error).__name__}: {error}" + (f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else "")
