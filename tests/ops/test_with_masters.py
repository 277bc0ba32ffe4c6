"""``with_masters``: any optimizer of torch steps on masters, and whoever looks between steps sees the model's parameters."""

from __future__ import annotations

import copy
import functools
import operator
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import opfuse
from opfuse import ops, recipes
from opfuse.errors import DtypeError, OpfuseWarning, OptimizerError, ShapeError
from opfuse.tensors import QuantizedTensor
from opfuse.tensors.optimizers import mark_replaced, settle_masters
from tests.compiler.harness import generator_of
from tests.ops.by_hand import step_by_hand

with warnings.catch_warnings():  # of extensions for GPUs that are not here
    warnings.simplefilter("ignore")
    from torchao.optim import _AdamW

KINDS = ["fp8_current", "fp8_block", "mxfp8", "nvfp4", "delayed"]
ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
OPTIMIZERS = {
    "adamw": lambda p: ADAMW(p, lr=1e-3),
    "adamw_foreach": lambda p: ADAMW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: ADAMW(p, lr=1e-3, fused=True),
    "sgd": lambda p: SGD(p, lr=1e-2),
    "momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True),
}


def model(kind: str = "mxfp8", dtype: torch.dtype = torch.float32, seed: int = 0) -> ops.Sequential:
    """Two layers whose weights live quantized, and one that is plain."""
    torch.manual_seed(seed)
    with opfuse.quantized_model_init(recipe=recipes.recipe_of(kind, {}), preserve_high_precision_init_val=True):
        stored = [ops.Linear(64, 64, dtype=dtype) for _ in range(2)]
    return ops.Sequential(*stored, ops.Linear(64, 64, dtype=dtype))


def give_gradients(made: nn.Module, seed: int) -> None:
    generator = generator_of(seed)
    for p in made.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def by_hand(made: nn.Module, build, steps: int) -> list[torch.Tensor]:
    """The loop that ``with_masters`` is to be equal to, written out; the masters."""
    masters = opfuse.master_weights(made.parameters())
    optimizer = build([masters.get(p, p) for p in made.parameters()])
    for seed in range(steps):
        give_gradients(made, seed)
        step_by_hand(optimizer, masters)
    return list(masters.values())


def masters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [entries["master"] for _, entries in sorted(optimizer.state_dict()["state"].items()) if "master" in entries]


def run(made: nn.Module, optimizer: torch.optim.Optimizer, seeds) -> None:
    for seed in seeds:
        give_gradients(made, seed)
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    """All parameters, and all bytes of those that live quantized."""
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert type(a) is type(b)
        planes = [p.record.tensors() if isinstance(p, QuantizedTensor) else [p] for p in (a, b)]
        assert all(torch.equal(x, y) for x, y in zip(*planes, strict=True))


def assert_same(ones, others) -> None:
    assert len(ones) == len(others) > 0
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ones, others))


@pytest.mark.few
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_equal_the_loop_by_hand_bit_for_bit(kind, name):
    dtype = torch.bfloat16 if kind == "mxfp8" else torch.float32
    ours, reference = model(kind, dtype), model(kind, dtype)
    optimizer = opfuse.with_masters(OPTIMIZERS[name](ours.parameters()))
    run(ours, optimizer, range(10))
    assert_same(masters_of(optimizer), by_hand(reference, OPTIMIZERS[name], 10))
    assert_equal(ours, reference)
    assert all(m.dtype == torch.float32 for m in masters_of(optimizer))


@pytest.mark.cpu
def test_a_compiled_step_is_torchs_compiled_step_on_masters():
    made, weight = model(), nn.Parameter(model()[0].weight.get_high_precision_init_val().clone())
    optimizer, plain = opfuse.with_masters(ADAMW([made[0].weight], lr=1e-3)), ADAMW([weight], lr=1e-3)
    steps = [torch.compile(each.step, backend="eager") for each in (optimizer, plain)]
    for _ in range(2):
        for p, step in zip((made[0].weight, weight), steps):
            p.grad = torch.ones(64, 64)
            step()
    assert_same(masters_of(optimizer), [weight])


CLASSES = [c for c in vars(torch.optim).values() if isinstance(c, type) and c.__module__ != "torch.optim.optimizer"]
DENSE = [c for c in CLASSES if c.__name__ != "SparseAdam"]


@pytest.mark.parametrize("build", DENSE, ids=lambda c: c.__name__)
def test_every_optimizer_of_torch(build):
    one, two = model(), model()
    ours, reference = ([p for p in m.parameters() if p.ndim == 2 or build is not torch.optim.Muon] for m in (one, two))
    masters = opfuse.master_weights(reference)
    stepped = [masters.get(p, p) for p in reference]
    optimizer, other = opfuse.with_masters(build(ours)), build(stepped)

    def loss_of(parameters, stepped):  # in closed form
        terms = [p.detach().float() for p in parameters]
        for p, value in zip(stepped, terms):
            p.grad = 2.0 * value
        return sum(value.square().sum() for value in terms)

    def closure():
        assert all(map(operator.is_, optimizer.param_groups[0]["params"], ours))
        optimizer.zero_grad()
        return loss_of(ours, ours)

    def closure_by_hand():
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
        return loss_of(reference, stepped)

    for _ in range(3):
        assert torch.equal(optimizer.step(closure=closure), other.step(closure_by_hand))
        assert all(master.grad is None for master in masters_of(optimizer))
    with torch.no_grad():
        for p, master in masters.items():
            p.copy_(master)
    assert_same(masters_of(optimizer), list(masters.values()))
    assert_equal(one, two)


def test_between_steps_all_is_as_without_masters():
    """Groups, gradients, schedulers, clipping, and a gradient scaler that finds an infinite gradient."""
    made = model()
    weight, bias = made[0].weight, made[0].bias
    optimizer = SGD([{"params": [weight], "lr": 1.0}, {"params": [bias], "lr": 0.5}])
    assert opfuse.with_masters(optimizer) is optimizer
    assert not optimizer.state
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    start, first = masters_of(optimizer)[0].clone(), bias.detach().clone()

    def step(value: float) -> None:
        weight.grad, bias.grad = torch.full((64, 64), 4.0 * value), torch.full((64,), 4.0 * value)
        scaler.scale(torch.zeros(()))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
        scaler.step(optimizer)
        scaler.update()

    step(1.0)
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)  # kept until zero_grad, as ever
    assert torch.equal(masters_of(optimizer)[0], start - weight.grad)
    assert torch.equal(bias, first - 0.5)
    assert optimizer.param_groups[0]["params"][0] is weight
    optimizer.zero_grad(set_to_none=False)
    assert not weight.grad.any()
    scheduler.step()
    before = masters_of(optimizer)[0].clone()
    step(float("inf"))
    assert torch.equal(masters_of(optimizer)[0], before)
    optimizer.zero_grad()
    assert weight.grad is None
    assert optimizer.param_groups[0]["lr"] == 0.5
    for _ in range(2):  # a parameter without a gradient is left alone, byte for byte
        planes = [plane.clone() for plane in weight.record.tensors()]
        optimizer.step()
        assert all(map(torch.equal, planes, weight.record.tensors()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_first", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path, dtype, model_first):
    straight, resumed = model("mxfp8", dtype), model("mxfp8", dtype, seed=1)
    optimizer = opfuse.with_masters(ADAMW(straight.parameters(), lr=1e-3))
    run(straight, optimizer, range(3))
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=False)
    other = opfuse.with_masters(ADAMW(resumed.parameters(), lr=1.0))
    parts = [lambda: resumed.load_state_dict(saved["model"]), lambda: other.load_state_dict(saved["optimizer"])]
    for load in parts if model_first else parts[::-1]:
        load()
    assert_same(masters_of(other), masters_of(optimizer))
    assert {e["exp_avg"].dtype for i, e in other.state_dict()["state"].items() if "master" in e} == {torch.float32}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made, steps in ((straight, optimizer), (resumed, other)):
            run(made, steps, range(3, 6))
    assert_same(masters_of(other), masters_of(optimizer))
    assert_equal(resumed, straight)


def assert_casts(of: nn.Module, masters) -> None:
    """Parameters are casts of masters in bf16."""
    for layer, master in zip(of[:2], masters, strict=True):
        assert master.dtype == torch.bfloat16
        assert torch.equal(layer.weight.dequantize(torch.float32), layer.weight.clone().copy_(master).dequantize(torch.float32))


@pytest.mark.filterwarnings("ignore:a step on weights")
@pytest.mark.parametrize("kind", KINDS)
def test_masters_in_bf16_round_what_is_written_into_weights_of_fp32(kind):
    """And what a state without masters makes them start from: bf16 holds neither."""
    made, other = model(kind), model(kind, seed=1)
    build = functools.partial(_AdamW, lr=1e-3, bf16_stochastic_round=True)
    optimizer, plain = opfuse.with_masters(build(made.parameters()), dtype=torch.bfloat16), ADAMW(other.parameters(), lr=1e-3)
    run(other, plain, range(1))

    def write() -> None:
        with torch.no_grad():
            for layer in made[:2]:
                layer.weight.mul_(1.1).mul_(1.3)

    write()
    with pytest.warns(OpfuseWarning, match="2 of 2 with other values"):
        written = masters_of(optimizer)
    assert_casts(made, written)
    write()
    with pytest.warns(OpfuseWarning) as told:
        optimizer.load_state_dict(plain.state_dict())
    assert any("none for 2 of 2" in str(each.message) for each in told)
    assert_casts(made, masters_of(optimizer))


@pytest.mark.row("U12", "H17")
@pytest.mark.parametrize("kind", KINDS)
def test_masters_in_bf16_round_at_random_and_parameters_are_their_casts_at_all_times(kind):
    """From the call on, also after a write and a load; 30 steps far below the spacing of bf16 come through on average."""
    made, other = model(kind, torch.bfloat16), model(kind, torch.bfloat16, seed=1)
    with torch.no_grad():
        made[0].weight.mul_(1.1)  # which bf16 cannot hold
    build = functools.partial(_AdamW, lr=2.0**-17, weight_decay=0.0, bf16_stochastic_round=True)
    optimizer, loaded = (opfuse.with_masters(build(m.parameters()), dtype=torch.bfloat16) for m in (made, other))

    start = masters_of(optimizer)
    assert_casts(made, start)
    start = [each.float() for each in start]
    for _ in range(30):
        for p in made.parameters():
            p.grad = torch.ones_like(p, dtype=torch.bfloat16)
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, which takes long
            optimizer.step()
    assert_casts(made, masters_of(optimizer))
    for before, after in zip(start, masters_of(optimizer)):
        far = before.abs() > 2.0**-5
        moved = (before - after.float())[far].mean().item()
        assert moved == pytest.approx(30 * 2.0**-17, rel=0.5)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(masters_of(loaded), masters_of(optimizer))
    assert_casts(other, masters_of(loaded))
    with torch.no_grad():
        made[1].weight.mul_(1.1)
    with pytest.warns(OpfuseWarning, match="1 of 2 with other values"):
        written = masters_of(optimizer)
    assert_casts(made, written)


@pytest.mark.parametrize("kind", KINDS)
def test_masters_that_are_loaded_are_cast_into_the_parameters(kind):
    """At once, also where nobody loads the model: what it computes is what the masters say."""
    one, two = model(kind), model(kind, seed=1)
    optimizer, other = (opfuse.with_masters(ADAMW(m.parameters(), lr=1e-1)) for m in (one, two))
    run(one, optimizer, range(2))
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x = torch.randn(32, 64)
    for layer, loaded in zip(one[:2], two[:2]):
        assert_same(loaded.weight.record.tensors(), layer.weight.record.tensors())
        loaded.bias = layer.bias
        assert torch.equal(loaded(x), layer(x))
    assert not torch.equal(two[2].weight, one[2].weight)  # which has no master


def test_state_by_names_of_torch_distributed_checkpoint():
    """It asks for the state of an optimizer that has not stepped, too, and reads into what it finds there."""
    one, two = model(), model(seed=1)
    optimizer, other = (opfuse.with_masters(ADAMW(m.parameters(), lr=1e-3)) for m in (one, two))
    run(one, optimizer, range(2))
    shown, target = get_optimizer_state_dict(one, optimizer), get_optimizer_state_dict(two, other)
    assert {name: set(e) for name, e in target["state"].items()} == {name: set(e) for name, e in shown["state"].items()}
    assert "master" in shown["state"]["0.weight"]
    set_optimizer_state_dict(two, other, shown)
    assert_same(masters_of(other), masters_of(optimizer))


def test_masters_in_bf16_of_an_optimizer_that_rounds_to_the_nearest_value_are_told():
    with pytest.warns(OpfuseWarning, match="rounds at random for masters in bfloat16, got AdamW, .* leave dtype out"):
        opfuse.with_masters(ADAMW(model().parameters(), lr=1e-3), dtype=torch.bfloat16)
    with pytest.warns(OpfuseWarning, match="rounds at random for masters in bfloat16, got _AdamW"):
        opfuse.with_masters(_AdamW(model().parameters(), lr=1e-3, bf16_stochastic_round=False), dtype=torch.bfloat16)


class Own(torch.optim.SGD):
    """Of a user, who rounds at random somewhere else."""


def test_an_optimizer_that_nobody_knows_is_believed_to_round_at_random():
    opfuse.with_masters(Own(model().parameters(), lr=1e-3), dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:a step on weights")
def test_a_state_dict_without_masters_starts_them_from_the_parameters_and_says_so():
    made = model(dtype=torch.bfloat16)
    plain = ADAMW(made.parameters(), lr=1e-3)
    run(made, plain, range(1))
    optimizer = opfuse.with_masters(ADAMW(made.parameters(), lr=1e-3))
    with pytest.warns(OpfuseWarning, match="none for 2 of 2"):
        optimizer.load_state_dict(plain.state_dict())
    assert_same(masters_of(optimizer), [made[i].weight.detach().dequantize(torch.float32) for i in range(2)])
    assert len(optimizer.state) == 6


def test_a_parameter_that_was_written_is_believed_and_its_own_bytes_change_nothing():
    made = model()
    optimizer = opfuse.with_masters(SGD(made.parameters(), lr=1e-3))
    run(made, optimizer, range(2))
    before = [m.clone() for m in masters_of(optimizer)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.load_state_dict(copy.deepcopy(made.state_dict()))  # written with what it has: masters know more
        assert_same(masters_of(optimizer), before)
    with torch.no_grad():
        made[1].weight.mul_(2.0)
    with pytest.warns(OpfuseWarning, match="1 of 2 with other values"):
        first, second = masters_of(optimizer)
    assert torch.equal(first, before[0])
    assert torch.equal(second, made[1].weight.detach().dequantize())


def test_values_preserved_before_a_checkpoint_was_read_are_not_taken_for_masters():
    made = model()
    made.load_state_dict(model(seed=1).state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = opfuse.with_masters(SGD(made.parameters(), lr=1e-3))
    decoded = [made[i].weight.detach().dequantize() for i in range(2)]
    assert_same(masters_of(optimizer), decoded)
    assert_same(list(opfuse.master_weights(made.parameters()).values()), decoded)


@pytest.mark.cpu
def test_groups_added_later_have_masters_and_frozen_parameters_have_none():
    made = model()
    made[1].weight.requires_grad_(False)
    optimizer = opfuse.with_masters(SGD([made[2].bias, made[1].weight, made[0].weight], lr=1.0))
    assert len(masters_of(optimizer)) == 1
    made[1].weight.requires_grad_()
    late = model()[0].weight
    optimizer.add_param_group({"params": [late], "lr": 0.5})
    late.grad = torch.ones(64, 64)
    optimizer.step()
    assert torch.equal(masters_of(optimizer)[2], late.get_high_precision_init_val() - 0.5)
    assert len(masters_of(optimizer)) == 3


def test_a_step_a_closure_or_a_load_that_raises_leaves_no_master_in_the_groups():
    made = model()
    optimizer = opfuse.with_masters(SGD(made.parameters(), lr=1.0))
    parameters = list(made.parameters())

    def closure():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], parameters))
    saved = optimizer.state_dict()
    with pytest.raises(ValueError, match="size of optimizer's group"):
        optimizer.load_state_dict(opfuse.with_masters(SGD(list(made.parameters())[:2], lr=1.0)).state_dict())
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], parameters))
    saved["state"][0]["master"] = torch.zeros(1, 64)
    with pytest.raises(ShapeError, match=r"a master of shape \(64, 64\), got \(1, 64\)"):
        optimizer.load_state_dict(saved)
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], parameters))
    optimizer.param_groups[0]["lr"] = "no number"
    give_gradients(made, 0)
    with pytest.raises(Exception, match=r"str|type"):
        optimizer.step()
    with pytest.warns(OpfuseWarning, match=r"one that raised.*model.zero_grad\(\)"):
        optimizer.state_dict()
    assert all(map(operator.is_, optimizer.param_groups[0]["params"], parameters))


def test_misuse_is_told():
    made = model()
    with pytest.raises(OptimizerError, match=r"a torch.optim.Optimizer, got a Sequential"):
        opfuse.with_masters(made)
    optimizer = opfuse.with_masters(SGD(made.parameters(), lr=1.0))
    with pytest.raises(OptimizerError, match="call with_masters once"):
        opfuse.with_masters(optimizer)
    for call in (
        lambda: opfuse.with_masters(SGD(made.parameters(), lr=1.0), dtype=torch.float16),
        lambda: opfuse.master_weights(made.parameters(), dtype=torch.float16),
    ):
        with pytest.raises(DtypeError, match=r"torch.float32 or torch.bfloat16, got torch.float16. Cure: leave dtype out"):
            call()
    masters = opfuse.master_weights(made.parameters())
    for parameters in (made[2].parameters(), masters.values()):
        with pytest.warns(OpfuseWarning, match="none in the groups"):
            opfuse.with_masters(SGD(parameters, lr=1.0))


class Around(torch.optim.Optimizer):
    """Steps with another optimizer, which keeps the parameters in groups of its own."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.inner = SGD(parameters, lr=1.0)

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.filterwarnings("ignore:a step on weights")
def test_an_optimizer_that_writes_the_parameters_themselves_is_refused():
    made = model()
    optimizer = opfuse.with_masters(Around(made.parameters()))
    give_gradients(made, 0)
    with pytest.raises(OptimizerError, match="on the optimizer inside it"):
        optimizer.step()


def test_masters_settle_without_a_step():
    """As before the replay of a step, in which no hook of an optimizer runs."""
    made = model()
    optimizer = opfuse.with_masters(SGD(made.parameters(), lr=1.0))
    master = optimizer.state_dict()["state"][0]["master"]
    with torch.no_grad():
        made[0].weight.mul_(2.0)
    with pytest.warns(OpfuseWarning, match="1 of 2 with other values"):
        settle_masters(optimizer)
    assert torch.equal(master, made[0].weight.detach().dequantize())
    settle_masters(SGD(made.parameters(), lr=1.0))


def test_an_optimizer_of_what_was_replaced_is_told_where_either_is_trained():
    old, between, new = (nn.Parameter(torch.zeros(2), requires_grad=False) for _ in range(3))
    other = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([other, old], lr=1.0)
    mark_replaced(None, new, "a.weight")
    mark_replaced(old, between, "a.weight")
    mark_replaced(between, new, "b.weight")
    other.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(other, -torch.ones(2))
    old.grad = torch.ones(2)
    with pytest.raises(OptimizerError, match=r"SGD\.step.*b\.weight as it was before"):
        optimizer.step()
    old.grad = None
    new.requires_grad_()
    with pytest.raises(OptimizerError, match=r"SGD\.step.*b\.weight as it was before"):
        optimizer.step()
    assert torch.equal(old, torch.zeros(2))
    torch.optim.SGD([other, new], lr=1.0).step()
