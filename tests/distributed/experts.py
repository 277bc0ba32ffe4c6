"""A mixture whose experts are spread over ranks beside the same mixture on one rank, which has the tokens of all.

On a CPU all sums have one order, so bits are compared. On GPUs, products of other sizes may sum in another order.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import opfuse
from opfuse import ops, recipes
from opfuse.convert.converted import converted as forward_of
from opfuse.core.grouped_cast import GroupedCast
from opfuse.errors import ConversionError, ShapeError, SpecError
from opfuse.tensors import row_collectives
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from tests.distributed.running import Task

WIDTH, INNER, CHOSEN = 128, 64, 2


def experts_in_all() -> int:
    """Experts of a mixture, two of each of up to four ranks: their casts and conversion are most of what a case takes."""
    return 4 if dist.get_world_size() <= 2 else 8


def over_ranks(role: Any) -> Any:
    """Casts under amaxes of all ranks, which have the same experts where these are not spread."""
    return Float8CurrentScalingQuantizer(torch.float8_e4m3fn, with_amax_reduction=True)


MADE: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipes.Float8CurrentScaling,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=2),
    "amaxes over ranks": lambda: recipes.CustomRecipe(qfactory=over_ranks),
    "block": recipes.Float8BlockScaling,
    "block dequantized": lambda: recipes.Float8BlockScaling(backward_override="dequantized"),
    "block high precision": lambda: recipes.Float8BlockScaling(backward_override="high_precision"),
    "rows": lambda: recipes.CustomRecipe(qfactory="fp8_row_scaled"),
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
CODES = {"current": 2, "block": 2, "rows": 2, "mxfp8": 2, "block dequantized": 1}
"""In how many of the passes codes travel to experts, by recipe; values do under all others."""

TWICE = ("block", "rows", "mxfp8")
"""Recipes under which codes by columns are made of codes by rows: on one rank alone, they are made of values."""

WIRE = 0.55
"""Most bytes of codes beside those of values in 16 bits."""

BOUND = 2.0**-4
"""On a GPU, relative to the largest value: a sum in another order flips roundings of casts behind it."""


class Mixture(NamedTuple):
    """recipe: by name. tokens: of each rank. most: how many experts get tokens; biased, transposed: of the layout. learned:
    whether tokens want gradients.
    """

    recipe: str
    tokens: tuple[int, ...] = (48, 16, 32, 8)
    most: int = 8
    biased: bool = False
    transposed: bool = False
    learned: bool = True


class Experts(nn.Module):
    """A loop over the experts that have tokens, as transformers' models write it."""

    def __init__(self, case: Mixture) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = (experts_in_all(), 2 * INNER, WIDTH), (experts_in_all(), WIDTH, INNER)
        made = [(torch.randn(*size, generator=generator) / 8).bfloat16() for size in sizes]
        first, last = [each.mT.contiguous() if case.transposed else each for each in made]
        self.gate_up_proj, self.down_proj = nn.Parameter(first), nn.Parameter(last)
        if case.biased:
            biases = [torch.randn(experts_in_all(), size[1], generator=generator).bfloat16() for size in sizes]
            self.gate_up_proj_bias, self.down_proj_bias = map(nn.Parameter, biases)
        self.biased, self.transposed = case.biased, case.transposed
        self.act_fn = nn.SiLU()

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.down_proj.shape[0]):
            token, place = torch.where(index == expert)
            x = self.product(hidden[token], self.gate_up_proj[expert])
            if self.biased:
                x = x + self.gate_up_proj_bias[expert]
            gate, up = x.chunk(2, -1)
            y = self.product(self.act_fn(gate) * up, self.down_proj[expert])
            if self.biased:
                y = y + self.down_proj_bias[expert]
            out.index_add_(0, token, (y * weights[token, place, None]).to(out.dtype))
        return out

    def product(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight if self.transposed else nn.functional.linear(x, weight)


@functools.cache
def _converted(biased: bool, transposed: bool, device: str) -> Experts:
    """Converting takes longer than a step: it is done once for cases alike, which take copies."""
    model = Experts(Mixture("none", biased=biased, transposed=transposed)).to(device)
    opfuse.fuse_(model)
    return model


def converted(case: Mixture, device: str, mesh: Any = None, **options: Any) -> Experts:
    model = copy.deepcopy(_converted(case.biased, case.transposed, device))
    return model if mesh is None else parallelize_module(model, mesh, opfuse.ExpertParallel(**options))  # type: ignore[return-value]


class Batch(NamedTuple):
    x: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor
    dy: torch.Tensor


def batches(case: Mixture, step: int, ranks: int, device: str) -> list[Batch]:
    """Of each rank."""
    generator, made = torch.Generator().manual_seed(step), []
    for rank in range(ranks):
        tokens = case.tokens[rank % len(case.tokens)]
        x, dy = (torch.randn(tokens, WIDTH, generator=generator).bfloat16() for _ in range(2))
        index = torch.rand(tokens, min(case.most, experts_in_all()), generator=generator).argsort(1)[:, :CHOSEN]
        weights = torch.rand(tokens, CHOSEN, generator=generator).bfloat16()
        made.append(Batch(*(each.to(device) for each in (x, index, weights, dy))))
    return made


def passes(model: nn.Module, recipe: Any, batch: Batch, *, learned: bool = True) -> dict[str, torch.Tensor]:
    """Results and gradients, by name. learned: whether tokens want gradients."""
    x, weights = batch.x.clone().requires_grad_(learned), batch.weights.clone().requires_grad_()
    with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x, batch.index, weights)
    y.backward(batch.dy)
    found = {"result": y.detach(), "weights": weights.grad, **({"x": x.grad} if learned else {})}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        found[name] = grad.to_local() if isinstance(grad, DTensor) else grad
        parameter.grad = None
    return found


def own(found: dict[str, torch.Tensor], rank: int, tokens: list[int], experts: slice) -> dict[str, torch.Tensor]:
    """This rank's part of the results for the tokens of all."""
    return {
        name: each.split(tokens)[rank] if name in ("result", "x", "weights") else each[experts] for name, each in found.items()
    }


def check_experts(case: Mixture, rank: int, ranks: int, device: str) -> list[str]:
    """Over ranks, and over one rank that has all tokens; and beside experts of a model that knows of no ranks."""
    wrong: list[str] = []
    meshes = init_device_mesh(device, (1, ranks), mesh_dim_names=("one", "all"))
    many, one, plain = (converted(case, device, each) for each in (meshes["all"], meshes["one"], None))
    experts = slice(rank * experts_in_all() // ranks, (rank + 1) * experts_in_all() // ranks)
    recipe = MADE[case.recipe]()
    for step in range(3):
        parts = batches(case, step, ranks, device)
        whole, tokens = Batch(*map(torch.cat, zip(*parts))), [len(part.x) for part in parts]
        found = passes(many, recipe, parts[rank], learned=case.learned)
        for name, model in {"one rank": one, "no ranks": plain}.items():
            # Without a recipe the model's own forward runs, which rounds elsewhere, and without tokens too.
            if model is plain and (recipe is None or not sum(tokens) or (case.recipe in TWICE and not case.biased)):
                continue
            want = own(passes(model, recipe, whole, learned=case.learned), rank, tokens, experts)
            far = {what: apart(found[what], want[what], device) for what in want}
            wrong += [f"{what} of step {step} beside {name}: {each}" for what, each in far.items() if each]
    return wrong


def check_turns(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Each rank sends all of its rows to one, another at each step: as many rows as at the step before come from elsewhere."""
    meshes, wrong = init_device_mesh(device, (1, ranks), mesh_dim_names=("one", "all")), list[str]()
    case, each = Mixture(recipe, tokens=(16,)), experts_in_all() // ranks
    many, one = (converted(case, device, meshes[name]) for name in ("all", "one"))
    for step in range(5):
        parts = [
            part._replace(index=part.index % each + (sender + step) % ranks * each)
            for sender, part in enumerate(batches(case, step, ranks, device))
        ]
        found, whole = passes(many, MADE[recipe](), parts[rank]), Batch(*map(torch.cat, zip(*parts)))
        want = own(passes(one, MADE[recipe](), whole), rank, [16] * ranks, slice(rank * each, (rank + 1) * each))
        wrong += [f"{what} of step {step}" for what in want if apart(found[what], want[what], device)]
    return wrong


def by_hand(between: bool, device: str, **options: Any) -> ops.Sequential:
    """A layer of experts that each of the ranks has a part of. between: with an op on both sides of the products."""
    dispatch, back = ops.AllToAllDispatch(experts_in_all(), **options), ops.AllToAllReturn(experts_in_all(), **options)
    permute, combine = ops.TokenPermute(experts_in_all()), ops.TokenCombine()
    for op, reads, gives in (
        (permute, (), ("splits", "places")),
        (dispatch, ("splits",), ("own", "counts", "order")),
        (back, ("splits", "own", "counts", "order"), ()),
        (combine, ("places",), ()),
    ):
        for number, channel in enumerate(reads):
            op.set_extra_input_channel(number, channel)
        for number, channel in enumerate(gives):
            op.set_extra_output_channel(number, channel, output_to_caller=False)
    product = ops.GroupedLinear(
        experts_in_all() // dispatch.process_group_size, WIDTH, WIDTH, bias=False, pad_splits=True
    ).bfloat16()
    product.set_extra_input_channel(0, "own")
    first, last = ([ops.SiLU()] if between else [] for _ in range(2))
    return ops.Sequential(permute, dispatch, *first, product, *last, back, combine).to(device)


def check_between(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Rows travel as codes to a product that multiplies these, and as values to any other op."""
    batch, made, sent = batches(Mixture(recipe), 0, ranks, device)[rank], [], list[int]()
    for between in (True, False):
        for quantized in (True, False):
            torch.manual_seed(rank)
            model, x = by_hand(between, device, quantized=quantized), batch.x.clone().requires_grad_()
            with mock.patch("opfuse.tensors.expert_rows.exchanged", wraps=_exchanged) as calls:
                with opfuse.autocast(recipe=MADE[recipe]()):
                    y = model(x, batch.index)
                y.backward(batch.dy)
            sent.append(sum(call.args[0].dtype == torch.uint8 for call in calls.call_args_list))
            made.append([y.detach(), x.grad, *[parameter.grad for parameter in model.parameters()]])
    wrong = [f"number {i}" for i, (one, other) in enumerate(zip(made[0], made[1])) if apart(one, other, device)]
    return wrong + ([] if sent == [0, 0, 2, 0] else [f"tensors of codes were {sent}"])


def apart(got: torch.Tensor, want: torch.Tensor, device: str) -> float:
    """How far two results are, relative to the largest value; 0 within what may be."""
    if got.shape != want.shape:
        return torch.inf
    if torch.equal(got, want):
        return 0.0
    far = ((got.float() - want.float()).abs().max() / want.float().abs().max()).item()
    return 0.0 if device != "cpu" and far <= BOUND else far


def check_rounded(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Rows of zeros, which on a GPU round up how many there are, change no result and no gradient."""
    case, mesh = Mixture(recipe), init_device_mesh(device, (ranks,))
    batch, found = batches(case, 0, ranks, device)[rank], []
    for kinds in ((), ("cpu", "cuda")):
        with mock.patch("opfuse.tensors.expert_rows.ROUNDED", kinds):
            found.append(passes(converted(case, device, mesh), MADE[recipe](), batch))
    far = {what: apart(found[0][what], found[1][what], device) for what in found[0]}
    return [f"{what}: {each}" for what, each in far.items() if each]


def check_bytes(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """Codes and scales that travel to experts are about half of the values, and a style that asks for values sends values."""
    case, sent = Mixture(recipe, tokens=(32,)), dict[str, list[int]]()
    for name, options in {"codes": {}, "values": {"quantized": False}}.items():
        calls = sent[name] = list[int]()

        def count(x: torch.Tensor, received: Any, given: Any, group: Any, calls: list[int] = calls) -> torch.Tensor:
            calls.append(x.nbytes if x.dim() > 1 else 0)
            return _exchanged(x, received, given, group)

        model = converted(case, device, init_device_mesh(device, (ranks,)), **options)
        taken = mock.patch.object(GroupedCast, "_completed", autospec=True, side_effect=GroupedCast._completed)
        with mock.patch("opfuse.tensors.expert_rows.exchanged", count), taken as cast:
            passes(model, MADE[recipe](), batches(case, 0, ranks, device)[rank])
        if cast.call_count != (CODES.get(recipe, 0) if name == "codes" else 0):
            return [f"{cast.call_count} operands of products are the codes that came"]
    ways, values = CODES.get(recipe, 0), sum(sent["values"])
    back = values - ways * 32 * CHOSEN * WIDTH * 2  # of the ways on which values travel in any case
    codes = sum(sent["codes"]) - back
    most = WIRE * (values - back) if ways else 0
    return [] if codes <= most and values > 0 else [f"{codes} bytes of codes, {values - back} of values"]


_exchanged = row_collectives.exchanged


def check_refused(_: None, rank: int, ranks: int, device: str) -> list[str]:
    """What cannot be spread, and calls for which the pipeline is not."""
    mesh, case = init_device_mesh(device, (ranks,)), Mixture("none")
    model, batch = converted(case, device, mesh), batches(case, 0, ranks, device)[rank]
    with pytest.raises(ConversionError, match=r"experts over ranks: wants .*, got torch.float32 .*Cure"):
        model(batch.x.float(), batch.index, batch.weights)
    with pytest.raises(ConversionError, match="got one that is spread already"):
        parallelize_module(model, mesh, opfuse.ExpertParallel())
    with pytest.raises(ConversionError, match=r"opfuse.fuse_\(model\) first"):
        parallelize_module(Experts(case), mesh, opfuse.ExpertParallel())
    for change in (opfuse.fuse_, opfuse.unfuse_):
        with pytest.raises(
            ConversionError, match=rf"{change.__name__} Experts: wants .*, got experts over ranks\. Cure: .*parallelize"
        ):
            change(nn.ModuleDict({"experts": model, "other": nn.Linear(32, 32)}))
    assigned = converted(case, device, mesh)
    assigned.load_state_dict(Experts(case).state_dict(), assign=True)
    with pytest.raises(ConversionError, match=r"Experts.gate_up_proj, experts over ranks: wants a DTensor.* got Parameter"):
        assigned(batch.x, batch.index, batch.weights)
    strict = converted(case, device)
    forward_of(strict).strict = True  # type: ignore[union-attr]
    parallelize_module(strict, mesh, opfuse.ExpertParallel())
    with pytest.raises(ConversionError, match="invariant"), opfuse.autocast(recipe=recipes.Float8BlockScaling()):
        strict(batch.x, batch.index, batch.weights)
    with pytest.raises(SpecError, match=f"a multiple of the {ranks} ranks, got {ranks + 1}"):
        ops.AllToAllDispatch(ranks + 1)
    wrong = torch.full((ranks,), 2, device=device)
    with pytest.raises(ShapeError, match=f"1 row, those of the input, got {2 * ranks}"):
        ops.AllToAllDispatch(ranks)(torch.ones(1, 4, device=device), wrong)
    return []


def check_compiled(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """A graph that has experts breaks there, and computes what the eager call does."""
    case = Mixture(recipe)
    model, batch = converted(case, device, init_device_mesh(device, (ranks,))), batches(case, 0, ranks, device)[rank]
    want, got = passes(model, MADE[recipe](), batch), passes(_Around(model), MADE[recipe](), batch)
    backend = "eager" if device == "cpu" else "inductor"  # the break is what is looked at; C++ takes seconds to compile
    compiled = passes(torch.compile(_Around(model), backend=backend), MADE[recipe](), batch)
    return [
        name
        for name in want
        if not (torch.equal(want[name], got[_of(name, got)]) and torch.equal(want[name], compiled[_of(name, compiled)]))
    ]


def _of(name: str, found: dict[str, torch.Tensor]) -> str:
    return next(each for each in found if each.endswith(name))


class _Around(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x * 1.0, index, weights)
        return out


def check_states(_: None, rank: int, ranks: int, device: str) -> list[str]:
    """Delayed scaling goes on: over ranks after training on one, there after training over ranks, and from distributed files."""
    case, recipe, mesh = Mixture("delayed"), MADE["delayed"](), init_device_mesh(device, (ranks,))
    parts = [batches(case, step, ranks, device) for step in range(4)]
    wholes, tokens = [Batch(*map(torch.cat, zip(*each))) for each in parts], [len(part.x) for part in parts[0]]
    experts = slice(rank * experts_in_all() // ranks, (rank + 1) * experts_in_all() // ranks)

    def made(spread: bool, steps: int = 0) -> Any:
        model = opfuse.prepare_delayed(converted(case, device, mesh if spread else None), recipe)
        for step in range(steps):
            passes(model, recipe, parts[step][rank] if spread else wholes[step])
        return model

    plain, before = made(False, 3), made(False, 3)
    wanted = own(passes(plain, recipe, wholes[3]), rank, tokens, experts)
    spread_later = parallelize_module(before, mesh, opfuse.ExpertParallel())
    many = made(True, 3)
    folders = [tempfile.mkdtemp() if not rank else ""]
    dist.broadcast_object_list(folders)
    save(get_model_state_dict(many), checkpoint_id=folders[0])
    again, gathered = made(True), made(False)
    for model in (again, gathered):
        state = get_model_state_dict(model)
        load(state, checkpoint_id=folders[0])
        set_model_state_dict(model, state)
    wrong = []
    for name, model in {
        "spread after training": spread_later,
        "spread and loaded": again,
        "loaded on one rank": gathered,
    }.items():
        found = passes(model, recipe, wholes[3] if model is gathered else parts[3][rank])
        found = own(found, rank, tokens, experts) if model is gathered else found
        wrong += [f"{what}, {name}" for what in wanted if apart(found[what], wanted[what], device)]
    return wrong


def check_sharded(recipe: str, rank: int, ranks: int, device: str) -> list[str]:
    """FSDP2 around, along the other dimension of the mesh: what each batch gives, and the mean of gradients over the batches."""
    spread, wrong = ranks // 2, []
    mesh = init_device_mesh(device, (2, spread), mesh_dim_names=("batch", "experts"))
    case, each = Mixture(recipe, tokens=(16,)), mesh["batch"].get_local_rank()
    many, one = converted(case, device, mesh["experts"]), converted(case, device, mesh["experts"])
    fully_shard(many, mesh=mesh["batch"])
    parts, place = batches(case, 0, ranks, device), mesh["experts"].get_local_rank()
    found = passes(many, MADE[recipe](), parts[spread * each + place])
    want = [passes(one, MADE[recipe](), parts[spread * batch + place]) for batch in range(2)]
    for name in found:
        mean = want[each][name]
        if name.endswith("proj"):
            mean = ((want[0][name].float() + want[1][name].float()) / 2).to(mean.dtype).chunk(2)[each]
        far = apart(found[name], mean, device)
        wrong += [f"{name}: {far}"] if far > (2.0**-7 if name.endswith("proj") else 0) else []
    optimizer = torch.optim.AdamW(many.parameters(), lr=1e-3)
    optimizer.step()
    return wrong


UNEVEN = (48, 0, 32, 8), (0, 0, 5, 0), (1, 64, 0, 3)

FEW: list[Task] = [
    (check_experts, Mixture("none", biased=True, transposed=True)),
    (check_experts, Mixture("current", UNEVEN[2])),
    (check_experts, Mixture("delayed", UNEVEN[0])),
    (check_experts, Mixture("amaxes over ranks")),
    (check_experts, Mixture("block", UNEVEN[1])),
    (check_experts, Mixture("block high precision", learned=False)),
    (check_experts, Mixture("rows")),
    (check_experts, Mixture("mxfp8", most=2)),
    (check_experts, Mixture("nvfp4")),
    *((check_rounded, name) for name in ("delayed", "mxfp8")),
    (check_between, "rows"),
    (check_turns, "block"),
    *((check_bytes, name) for name in ("block", "block dequantized", "delayed")),
    (check_refused, None),
    (check_states, None),
    (check_compiled, "block"),
    (check_sharded, "block"),
]
"""Every recipe and everything that mixtures differ in once, and each check under recipes whose codes travel in another way."""

TASKS: list[Task] = [
    *((check_experts, Mixture(name)) for name in MADE),
    *((check_experts, Mixture(name, tokens)) for name in ("none", "current", "delayed", "block") for tokens in UNEVEN),
    *((check_experts, Mixture(name, most=2)) for name in ("current", "block", "mxfp8")),
    *((check_experts, Mixture(name, learned=False)) for name in ("current", "block", "block high precision")),
    *((check_experts, Mixture(name, biased=True, transposed=True)) for name in ("none", "current", "block")),
    *((check_rounded, name) for name in ("none", "current", "delayed", "block", "mxfp8")),
    *((check_between, name) for name in ("current", "rows")),
    *((check_turns, name) for name in ("none", "current", "block")),
    *((check_bytes, name) for name in MADE if name != "none"),
    (check_refused, None),
    (check_states, None),
    *((check_compiled, name) for name in ("none", "block")),
    *((check_sharded, name) for name in ("none", "current", "block")),
]
