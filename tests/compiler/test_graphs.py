"""A fuzz of random graphs: fused against op by op, bit for bit, both against plain torch in fp64, and compiled calls against all.

25 graphs run with every change, 5 000 by ``make fuzz``. A graph is its seed: ``graphs.graph(seed)`` makes the one of a failure.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from opfuse import ops
from opfuse.fusions import RULES
from opfuse.runtime.replay.dispatch import interpreted
from tests.compiler.graphs import OWN, VIEWS, Graph, Turned, graph
from tests.compiler.harness import (
    CASES,
    UNFUSED,
    Result,
    Step,
    delayed_state,
    differences,
    gradient,
    randn,
    recipe_for,
    run,
    to,
    train,
)
from tests.turns import in_turn

pytestmark = pytest.mark.filterwarnings("ignore:autocast region of:opfuse.errors.OpfuseWarning")
"""Some graphs have nothing that a recipe quantizes."""
RELATIVE = 1e-10
"""Of the largest value of a tensor; what some tens of fp64 operations lose is a millionth of that."""
LARGE = {"unit": 64, "rows": (32,)}
"""Sizes that every format takes, in both directions."""
DTYPES = (torch.bfloat16, torch.float32)


def step_of(made: Graph, **fields: object) -> Step:
    return Step(input_grad=made.input_grad, silent=made.silent, **fields)


def ours(made: Graph, step: Step) -> Result:
    return train(made.model, made.x, *made.extras, step=step)


def in_graphs(made: Graph, step: Step) -> dict[str, torch.Tensor | None]:
    """The same as ops of graphs of torch.compile, but for what ops save."""
    torch._dynamo.reset()
    compiled = torch.compile(made.model, backend="aot_eager")
    found = train(compiled, made.x, *made.extras, step=step).tensors
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items() if not name.startswith("saved")}


def theirs(made: Graph, step: Step) -> dict[str, torch.Tensor | None]:
    """What plain torch makes of the formula, under the names of ``harness.train``."""
    torch.manual_seed(step.seed)
    params = {id(p): p.detach().clone().requires_grad_(p.requires_grad) for p in made.model.parameters()}
    x = made.x.detach().clone().requires_grad_(made.input_grad)
    extras = [extra.detach().clone().requires_grad_() for extra in made.extras]
    outputs = made.formula(x, params, *extras)
    backward = [(y, gradient(y, i)) for i, y in enumerate(outputs) if y.requires_grad and i not in step.silent]
    if backward:
        torch.autograd.backward(*map(list, zip(*backward)))
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)} | {"grad of input": x.grad}
    found |= {f"grad of extra {i}": extra.grad for i, extra in enumerate(extras)}
    return found | {f"grad of {name}": params[id(p)].grad for name, p in made.model.named_parameters()}


def far(got: torch.Tensor | None, want: torch.Tensor | None) -> bool:
    """Whether two tensors differ by more than rounding; no gradient is one of zeros."""
    return unlike(got, want, by=RELATIVE)


def unlike(got: torch.Tensor | None, want: torch.Tensor | None, *, by: float = 0.0) -> bool:
    """Whether a value differs by more than ``by`` times the largest; no gradient is one of zeros, and -0.0 is 0.0."""
    if got is None or want is None:
        other = got if want is None else want
        return other is not None and bool(other.count_nonzero())
    atol = by and by * want.abs().max().clamp_min(1e-3).item()
    return got.shape != want.shape or not torch.allclose(got, want, rtol=0, atol=atol, equal_nan=not by)


def exact(seed: int) -> list[str]:
    """What differs in fp64: fused, op by op, plain torch."""
    fused, unfused = (ours(made := graph(seed), step_of(made, rules=rules)) for rules in (RULES, UNFUSED))
    want = theirs(made := graph(seed), step_of(made))
    found = [f"fused, op by op: {name}" for name in differences(fused.tensors, unfused.tensors)]
    return found + [f"fused, torch: {name}" for name, tensor in want.items() if far(fused.tensors[name], tensor)]


def quantized(seed: int) -> list[str]:
    """What differs in fewer bits, under a recipe that the seed chooses: fused, op by op."""
    case, dtype = CASES[seed % len(CASES)], DTYPES[seed // len(CASES) % 2]
    fused, unfused = (
        ours(made := graph(seed, dtype, **LARGE), step_of(made, rules=rules, recipe=recipe_for(*case, dtype=dtype)))
        for rules in (RULES, UNFUSED)
    )
    return [f"{case}, {dtype}: {name}" for name in differences(fused.tensors, unfused.tensors)]


def repeated(made: Graph, case: tuple, dtype: torch.dtype) -> list[dict[str, torch.Tensor | None]]:
    """Results of training steps: interpreted, recorded and repeated, unless the scope around says otherwise."""
    found = []
    for call in range(4):
        torch.manual_seed(call)
        x = (made.x * (1 + call)).requires_grad_(made.input_grad)
        extras = [extra.detach().clone().requires_grad_() for extra in made.extras]
        made.model.zero_grad()
        with step_of(made, recipe=recipe_for(*case, dtype=dtype)).scope():
            outputs = made.model(x, *(extra.clone() for extra in extras))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        backward = [(y, gradient(y, i)) for i, y in enumerate(outputs) if y.requires_grad and i not in made.silent]
        if backward:
            torch.autograd.backward(*map(list, zip(*backward)))
        leaves = {"input": x, **{f"extra {i}": each for i, each in enumerate(extras)}, **dict(made.model.named_parameters())}
        results = {f"output {i}": y.detach().clone() for i, y in enumerate(outputs)}
        found.append(results | {f"grad of {name}": leaf.grad for name, leaf in leaves.items()} | delayed_state(made.model))
    return found


def compiled(seed: int) -> list[str]:
    """What differs in compiled calls: from plain torch in fp64, and under a recipe from eager calls, in any value.

    For an output without a gradient compiled code passes zeros on: so -0.0 may be 0.0, and no gradient one of zeros. What several
    pipelines give one parameter is summed for each of them first, so such sums may round otherwise. So may those of tensors that
    are not contiguous, which enter compiled pipelines as contiguous ones.
    """
    case, dtype = CASES[seed % len(CASES)], DTYPES[seed // len(CASES) % 2]
    made, again = (graph(seed, more=VIEWS) for _ in range(2))
    got, want = in_graphs(made, step_of(made)), theirs(again, step_of(again))
    found = [f"compiled, torch: {name}" for name, tensor in want.items() if far(got[name], tensor)]
    made, again = (graph(seed, dtype, more=VIEWS, **LARGE) for _ in range(2))
    step = step_of(made, recipe=recipe_for(*case, dtype=dtype))
    got, want = in_graphs(made, step), ours(again, step).tensors
    uses = Counter(map(id, every(made.model)))
    summed = {id(p) for module in every(made.model) if uses[id(module)] > 1 for p in module.parameters()}
    rounded = {f"grad of {name}" for name, p in made.model.named_parameters() if id(p) in summed}
    by = 2**-8 if any(isinstance(module, Turned) for module in every(made.model)) else 0.0
    names = [name for name in got if name not in rounded and unlike(got[name], want[name], by=by)]
    return found + [f"compiled, eager, {case}, {dtype}: {name}" for name in names]


def failures(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        found += [f"seed {seed}: {each}" for check in (exact, quantized) for each in check(seed)]
    return found


@pytest.mark.row("R04")
def test_r4_25_random_graphs() -> None:
    assert failures(range(25)) == []


@pytest.mark.parametrize("seed", in_turn(range(100), of=21))
def test_graphs_with_ops_of_a_users_own_repeat_as_they_are_interpreted(seed: int) -> None:
    """Their methods run at every call, between programs; in fp64 without a recipe the first step is that of plain torch."""
    case, dtype = CASES[seed % len(CASES)], DTYPES[seed // len(CASES) % 2]
    got = repeated(graph(seed, dtype, more=OWN, **LARGE), case, dtype)
    with interpreted():
        wanted = repeated(graph(seed, dtype, more=OWN, **LARGE), case, dtype)
    assert [differences(one, other) for one, other in zip(got, wanted, strict=True)] == [[]] * len(wanted)
    exact = ours(made := graph(seed, more=OWN), step_of(made)).tensors
    assert [name for name, tensor in theirs(made, step_of(made)).items() if far(exact[name], tensor)] == []


@pytest.mark.row("R04")
@pytest.mark.parametrize("seed", in_turn(range(200), of=200))
def test_compiled_graphs_have_the_numbers_of_eager_calls_and_of_torch(seed: int) -> None:
    """Views alone, too, of which autograd and the compiled call keep track in different ways."""
    assert compiled(seed) == []


@pytest.mark.slow
@pytest.mark.row("R04")
@pytest.mark.parametrize("start", range(0, 5000, 100))
def test_r4_5000_random_graphs(start: int) -> None:
    assert failures(range(start, start + 100)) == []


def test_graphs_have_what_they_promise() -> None:
    """Among 300: ops used two and three times, pipelines inside, channels, frozen parameters; and rules fire on them."""
    kinds: Counter[str] = Counter()
    uses: Counter[int] = Counter()
    fired: set[str] = set()
    for seed in range(300):
        made = graph(seed)
        modules = list(every(made.model))
        kinds.update(type(module).__name__ for module in modules)
        uses.update(Counter(map(id, modules)).values())
        kinds["frozen"] += any(not p.requires_grad for p in made.model.parameters())
        kinds["channel"] += any(c.name for m in modules for c in getattr(m, "extra_input_channels", ()))
        if seed < 60:
            fired |= {name for plan in ours(made, step_of(made, rules=RULES)).plans for name in plan.fusions}
    assert (
        not {"Sequential", "Tanh", "ScaledSwiGLU", "AddExtraInput", "Dropout", "Reshape", "Turned", "frozen", "channel"}
        - kinds.keys()
    )
    assert min(kinds[name] for name in ("Sequential", "frozen", "channel")) >= 30
    assert min(uses[2], uses[3]) > 50
    assert fired >= {"epilogue", "linear_add", "backward_add_rms_norm", "backward_linear_add"}


def every(model: ops.Sequential) -> list[torch.nn.Module]:
    """Modules as often as they stand in a model, those of pipelines inside as well."""
    return [each for module in model for each in ([module, *every(module)] if isinstance(module, ops.Sequential) else [module])]


@pytest.mark.row("R04")
def test_r4_an_op_used_three_times_sums_its_gradients_in_one_order() -> None:
    """Two uses in one fused chain and a third behind it: autograd adds the last use's first, whatever shares a node."""
    bias = ops.Bias(64)
    model = to(ops.Sequential(bias, ops.GELU(), bias, ops.SiLU(), ops.Linear(64, 64), bias), torch.float32)
    fused, unfused = (run(model, randn(64, 64, dtype=torch.float32), step=Step(rules=rules)) for rules in (RULES, UNFUSED))
    assert any(len(segment.ops) > 3 for segment in fused.plans[0].segments)
    assert differences(fused.tensors, unfused.tensors) == []
