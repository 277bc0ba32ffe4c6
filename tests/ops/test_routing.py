"""Tokens to experts and back: the order is a stable sort's, in few launches, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import opfuse
from opfuse import ops, recipes
from opfuse.core.context import Context
from opfuse.errors import DtypeError, ShapeError
from opfuse.ops.routing import by_group
from tests.compiler.harness import generator_of, randn

TOKENS, FEATURES, GROUPS, TOP_K = 37, 16, 12, 3
ROWS = TOKENS * TOP_K


class Made(TorchDispatchMode):
    """Ops that read or write values, with the shapes that they give; not views, and not memory without values.

    memory: numbers of elements with the addresses where they lie.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...] | None] = []
        self.names: list[str] = []
        self.memory: set[tuple[int, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in ("empty", "empty_like", "new_empty"):
            self.names.append(name)
            self.shapes += [tuple(result.shape) if isinstance(result, torch.Tensor) else None]
            if isinstance(result, torch.Tensor):
                self.memory.add((result.numel(), result.data_ptr()))
        return result


def made_by(call: Callable[[], Any]) -> Made:
    with Made() as made:
        call()
    return made


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "groups", "top_k"), [(37, 12, 3), (1, 1, 1), (0, 4, 2), (200, 100, 1), (9, 128, 8)])
def test_tokens_are_sorted_by_group_and_counted(tokens, groups, top_k, dtype):
    draw = generator_of(tokens)
    chosen = torch.stack([torch.randperm(groups, generator=draw)[:top_k] for _ in range(tokens)] or [torch.empty(0, top_k)])
    found = by_group(chosen.to(dtype), groups)
    flat = chosen.flatten().long()
    order = torch.tensor(sorted(range(len(flat)), key=lambda i: int(flat[i])), dtype=torch.int64)
    assert torch.equal(found.order, order)
    assert torch.equal(found.splits, torch.bincount(flat, minlength=groups))
    assert found.places.shape == chosen.shape
    assert torch.equal(order[found.places.flatten()], torch.arange(len(flat)))
    assert {each.dtype for each in found} == {torch.int64}


@pytest.mark.parametrize("strange", [-1, GROUPS, 1 << 40])
def test_what_is_no_group_counts_for_none(strange):
    """So that the sizes of groups do not add up, which whoever reads them says."""
    chosen = torch.tensor([[0, 3], [strange, 3]])
    assert by_group(chosen, GROUPS).splits.sum() == 3


@pytest.mark.parametrize("groups", [255, 256, 32767, 32768])
def test_gates_may_choose_any_group(groups):
    """The numbers that are sorted hold them all."""
    gate, x = ops.TokenDispatch(groups, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    with torch.no_grad():
        gate.weight.zero_()[groups - 1, 0] = 5
        gate.weight[groups // 2, 1] = 5
    _, splits, *_ = gate(x)
    assert splits.nonzero().flatten().tolist() == [groups // 2, groups - 1]


def test_the_gate_reads_no_value_and_makes_no_matrix_of_rows_and_groups():
    gate, x = ops.TokenDispatch(GROUPS, FEATURES, top_k=TOP_K, dtype=torch.bfloat16), randn(TOKENS, FEATURES)
    made = made_by(lambda: gate(x))
    assert "_local_scalar_dense" not in made.names
    assert (ROWS, GROUPS) not in made.shapes
    assert len(made.names) <= 16
    assert made.names.count("sort") == 1


@pytest.mark.cpu
def test_gradients_of_rows_are_written_once():
    """Not repeated for each place of a token, and then put there."""
    combine, draw = ops.TokenCombine(), generator_of(1)
    places = torch.randperm(ROWS, generator=draw).view(TOKENS, TOP_K)
    rows, dy = randn(ROWS, FEATURES).requires_grad_(), randn(TOKENS, FEATURES, seed=2)
    y = combine(rows, places)
    made = made_by(lambda: torch.autograd.grad(y, rows, dy))
    assert [elements for elements, _ in made.memory].count(ROWS * FEATURES) == 1
    (found,) = torch.autograd.grad(combine(rows, places), rows, dy)
    assert torch.equal(found, dy[places.flatten().argsort() // TOP_K])


def test_rows_of_a_router_of_ones_own_come_by_group_and_go_back():
    """A choice that is no group adds nothing to the result, nor to a gradient."""
    permute, combine, draw = ops.TokenPermute(GROUPS), ops.TokenCombine(), generator_of(1)
    x, chosen = randn(TOKENS, FEATURES).requires_grad_(), torch.randint(GROUPS, (TOKENS, TOP_K), generator=draw)
    chosen[3], chosen[5, 1] = -1, GROUPS
    known = (chosen >= 0) & (chosen < GROUPS)
    rows, splits, places = permute(x, chosen)
    near = chosen.clamp(0, GROUPS - 1)
    assert torch.equal(splits, torch.bincount(near.flatten(), minlength=GROUPS))
    by_group = [(t, g) for g in range(GROUPS) for t in range(TOKENS) for c in near[t].tolist() if c == g]
    assert torch.equal(rows, x[[token for token, _ in by_group]])
    factors = torch.tensor([float(group + 1) for _, group in by_group]).unsqueeze(1).to(x.dtype)
    y = combine(rows * factors, places)
    counts = ((chosen + 1) * known).sum(1, keepdim=True).to(x.dtype)
    torch.testing.assert_close(y, x * counts)
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones_like(y))[0], counts.expand_as(x))


def test_choices_may_be_narrower_than_the_number_of_groups():
    chosen = torch.tensor([[200], [3]], dtype=torch.uint8)
    rows, splits, _ = ops.TokenPermute(300)(randn(2, FEATURES), chosen)
    assert torch.equal(rows, randn(2, FEATURES).flip(0))
    assert splits.nonzero().flatten().tolist() == [3, 200]


def test_choices_that_are_no_matrix_of_integers_are_refused():
    permute, x = ops.TokenPermute(GROUPS), randn(TOKENS, FEATURES)
    for chosen in (torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS - 1, 2, dtype=torch.int64)):
        with pytest.raises(ShapeError, match=r"wants shape \(37, top_k\), got"):
            permute(x, chosen)
    with pytest.raises(DtypeError, match=r"wants integers, got torch\.float32"):
        permute(x, torch.zeros(TOKENS, 2))


def test_places_that_are_no_matrix_of_integers_are_refused():
    """One place for each token, as a vector, would be the sum over the features of its row."""
    combine, rows = ops.TokenCombine(), randn(4, FEATURES)
    places = torch.tensor([2, 0, 3, 1])
    assert torch.equal(combine(rows, places.view(4, 1)), rows[places])
    with pytest.raises(ShapeError, match=r"wants shape \(tokens, top_k\), got \(4,\)"):
        combine(rows, places)
    with pytest.raises(DtypeError, match="wants int64 or int32, got"):
        combine(rows, places.view(4, 1).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_go_with_the_rows_and_their_gradients_come_back(dtype):
    """A row of a choice that is no group's has weight 0, whatever stands there, which gets no gradient: no sum has the row."""
    draw = generator_of(1)
    chosen = torch.randint(-1, GROUPS, (TOKENS, TOP_K), generator=draw)
    weights = torch.rand(TOKENS, TOP_K, generator=draw).to(dtype)
    weights = weights.where(chosen >= 0, float("nan")).requires_grad_()
    x = randn(TOKENS, FEATURES)
    rows, _, places, of_rows = ops.TokenPermute(GROUPS, weighted=True)(x, chosen, weights)
    counts, at = chosen >= 0, places.where(places >= 0, ~places)
    assert torch.equal(rows[at], x.unsqueeze(1).expand(-1, TOP_K, -1))
    assert of_rows.dtype == dtype
    assert torch.equal(of_rows[at], weights.where(counts, 0))
    d_rows = torch.full((ROWS,), float("nan"))  # of rows that no sum has, anything
    d_rows[at[counts]] = randn(int(counts.sum()), seed=2).float()
    (d_weights,) = torch.autograd.grad(of_rows, weights, d_rows.to(dtype))
    assert torch.equal(d_weights, torch.where(counts, d_rows[at], 0).to(dtype))


def test_weights_of_rows_that_are_no_float_for_each_choice_are_refused():
    permute, x, chosen = ops.TokenPermute(GROUPS, weighted=True), randn(4, FEATURES), torch.zeros(4, 2, dtype=torch.int64)
    with pytest.raises(ShapeError, match=r"weights: wants shape \(4, 2\), got \(4,\)"):
        permute(x, chosen, torch.ones(4))
    with pytest.raises(DtypeError, match="weights: wants a dtype of"):
        permute(x, chosen, chosen)


def mixture(weighs: str) -> ops.Sequential:
    """Two grouped layers, whose rows are weighted by the activation between them or in the sum behind them."""
    torch.manual_seed(3)
    before = weighs == "before"
    options = {"bias": False, "single_grouped_weight": True, "dtype": torch.float64}
    permute, combine = ops.TokenPermute(GROUPS, weighted=before), ops.TokenCombine(weighted=not before, typed=True)
    layers = [ops.GroupedLinear(GROUPS, *sizes, **options) for sizes in ((FEATURES, 32), (16, FEATURES))]
    act = ops.ScaledSwiGLU() if before else ops.SwiGLU()
    for number, channel in enumerate(("splits", "places", *(["weights"] if before else []))):
        permute.set_extra_output_channel(number, channel, output_to_caller=False)
    for op, channel in (
        (layers[0], "splits"),
        (layers[1], "splits"),
        (combine, "places"),
        *([(act, "weights")] if before else []),
    ):
        op.set_extra_input_channel(0, channel)
    return ops.Sequential(permute, layers[0], act, layers[1], combine)


def test_weights_of_the_activation_are_those_of_the_sum():
    """Results and gradients in fp64, with weights of zero, a group without rows and choices of none; in fewer saved bytes."""
    draw = generator_of(1)
    chosen = torch.randint(-1, GROUPS - 1, (TOKENS, TOP_K), generator=draw)
    x = randn(TOKENS, FEATURES).double().requires_grad_()
    weights = torch.rand(TOKENS, TOP_K, generator=draw, dtype=torch.float64)
    weights[::5] = 0
    weights.requires_grad_()
    found = []
    for weighs in ("before", "behind"):
        model = mixture(weighs)
        y = model(x, chosen, weights, x)
        found.append((y, *torch.autograd.grad(y.square().sum(), (x, weights, *model.parameters()))))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)
    saved = [
        {value.name for value in opfuse.saved(mixture(weighs), x, chosen, weights, x).values} for weighs in ("before", "behind")
    ]
    assert saved[1] - saved[0] == {"rows", "weights"}


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e6])
def test_a_weight_of_a_choice_that_is_no_group_changes_nothing(scale):
    """Neither gradients of experts, in whose group its row is, nor what its group is scaled by."""
    draw = generator_of(1)
    chosen, weights = torch.randint(-1, GROUPS, (TOKENS, TOP_K), generator=draw), torch.rand(TOKENS, TOP_K, generator=draw)
    x, found = randn(TOKENS, 16), []
    for other in (0.0, scale):
        model = mixture("before").bfloat16()
        given = weights.where(chosen >= 0, other).requires_grad_()
        with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
            y = model(x, chosen, given, x)
        found.append((y, *torch.autograd.grad(y.sum(), (given, *model.parameters()))))
    assert all(map(torch.equal, *found))


def test_rows_that_no_place_names_have_an_index_that_may_be_read():
    """On a GPU, one that was left as it lay would read what is nobody's."""
    combine = ops.TokenCombine()
    ctx = Context(combine, None, frozenset(("input",)))
    ctx.input_dtype = torch.float32
    ctx.save(rows=None, places=torch.tensor([[0, 1], [1, ~0]]), weights=None)
    torch.use_deterministic_algorithms(True)  # memory that is left as it lies has the largest numbers
    try:
        rows, index = combine.gradient_rows(ctx, torch.ones(2, 3))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(rows[index[2:]], torch.zeros(2, 3))


def test_weights_multiply_rows_in_fp32_and_the_sum_has_the_dtype_of_the_tokens():
    """Under torch.autocast, too, which would round it to its own. Only gradients that are wanted are made."""
    combine, draw = ops.TokenCombine(weighted=True, typed=True), generator_of(1)
    places = torch.randperm(ROWS, generator=draw).view(TOKENS, TOP_K)
    rows, weights = randn(ROWS, FEATURES).bfloat16().requires_grad_(), torch.rand(TOKENS, TOP_K, generator=draw)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            y = combine(rows, places, weights, torch.empty(0, dtype=dtype))
        wanted = sum(rows.detach()[places[:, k]].float() * weights[:, k, None] for k in range(TOP_K))
        assert torch.equal(y, wanted.to(dtype))
    dy = randn(TOKENS, FEATURES, seed=2).bfloat16()
    (d_rows,) = torch.autograd.grad(y, rows, dy)
    assert torch.equal(d_rows[places], (weights.unsqueeze(-1) * dy.unsqueeze(1)).bfloat16())
    weights.requires_grad_()
    (d_weights,) = torch.autograd.grad(combine(rows.detach(), places, weights, rows), weights, dy)
    torch.testing.assert_close(d_weights, (rows.detach()[places].float() * dy.float().unsqueeze(1)).sum(-1))


def test_tokens_that_give_a_sum_its_dtype_get_no_gradient():
    """Also where nothing else wants one."""
    rows, places, tokens = randn(4, FEATURES), torch.tensor([[2, 0], [3, 1]]), torch.zeros(2, requires_grad=True)
    y = ops.TokenCombine(typed=True)(rows, places, tokens)
    assert y.dtype == torch.float32
    assert torch.autograd.grad(y.sum(), tokens, allow_unused=True) == (None,)


def test_weights_that_are_no_float_for_each_place_are_refused():
    combine, rows, places = ops.TokenCombine(weighted=True, typed=True), randn(4, FEATURES), torch.tensor([[2, 0], [3, 1]])
    with pytest.raises(ShapeError, match=r"weights: wants shape \(2, 2\), got \(2,\)"):
        combine(rows, places, torch.ones(2), rows)
    with pytest.raises(DtypeError, match="weights: wants a dtype of"):
        combine(rows, places, torch.ones(2, 2, dtype=torch.int64), rows)
    with pytest.raises(DtypeError, match="tokens: wants a dtype of"):
        combine(rows, places, torch.ones(2, 2), places)


def test_a_gate_reads_its_input_as_it_is_under_autocast():
    torch.manual_seed(0)
    gate, x = ops.TokenDispatch(8, 32, top_k=2), torch.randn(64, 32)
    own = gate(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        cast = gate(x)
    assert all(torch.equal(one, other) for one, other in zip(own[1:], cast[1:]) if not one.is_floating_point())
    floats = [(one, other) for one, other in zip(own[1:], cast[1:]) if one.is_floating_point()]
    assert floats
    assert all(torch.equal(one.to(other.dtype), other) for one, other in floats)


def test_more_rows_than_places_and_choices_that_are_no_numbers_are_refused():
    with pytest.raises(ShapeError, match="4 rows, one for each place"):
        ops.TokenCombine()(torch.randn(6, 8), torch.arange(4).view(2, 2))
    with pytest.raises(DtypeError, match=r"integers, got torch\.bool"):
        ops.TokenPermute(4)(torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.bool))
