"""Weight gradients that are added to ``main_grad``, fp32, without a rounding in between."""

from __future__ import annotations

import pytest
import torch

import opfuse
from opfuse import errors, ops, recipes
from opfuse.core.spec import beyond_gradients
from opfuse.kernels.products.runs import products_into
from opfuse.tensors.gemm import gemm, wgrad_into
from opfuse.tensors.quantizers import Float8CurrentScalingQuantizer
from opfuse.tensors.ragged import cast_in_groups, groups_in
from tests.compiler.harness import generator_of
from tests.ops.test_op_errors import raised
from tests.programs import forwards

SPLITS = torch.tensor([32, 0, 64])
RECIPES = (None, recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling(), recipes.DelayedScaling(amax_history_len=2))
FORMS = {
    "linear": lambda **options: ops.Linear(32, 64, **options),
    "grouped": lambda **options: ops.GroupedLinear(3, 32, 64, **options),
    "single": lambda **options: ops.GroupedLinear(3, 32, 64, single_grouped_weight=True, **options),
}


def pipelines(form, dtype=torch.float32):
    """Of the same values: one that adds to ``main_grad``, one that does not."""
    made = [ops.Sequential(FORMS[form](accumulate_into_main_grad=main, dtype=dtype), ops.GELU()) for main in (True, False)]
    made[0].load_state_dict(made[1].state_dict())
    return made


def weights(model):
    return {name: p for name, p in model.named_parameters() if "weight" in name}


def given(model, x):
    return (x, SPLITS) if model[0].num_extra_inputs else (x,)


def buffered(model):
    for weight in weights(model).values():
        weight.main_grad = torch.randn(weight.shape, generator=generator_of(1))
        weight.grad_added_to_main_grad = False
    return model


@pytest.mark.few
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_sum_in_fp32_is_that_of_the_gradients(form, recipe):
    """Over more steps than a recording takes to be made and repeated; other gradients are as ever."""
    main, plain = pipelines(form)
    wanted = {name: w.main_grad.clone() for name, w in weights(buffered(main)).items()}
    for i in range(4):
        x = [torch.randn(96, 32, generator=generator_of(i)).requires_grad_() for _ in range(2)]
        for model, each in zip((main, plain), x):
            with opfuse.autocast(enabled=recipe is not None, recipe=recipe):
                y = model(*given(model, each))
            y.square().sum().backward()
        assert torch.equal(x[0].grad, x[1].grad)
        for name, weight in weights(plain).items():
            wanted[name] += weight.grad
            own = main.get_parameter(name)
            assert own.grad_added_to_main_grad
            assert torch.equal(own.main_grad, wanted[name])
            assert not own.grad.any()  # zeros, for hooks of the weight to run
        for name, bias in plain.named_parameters():
            assert "bias" not in name or torch.equal(bias.grad, main.get_parameter(name).grad)
        plain.zero_grad()
        main.zero_grad()


@pytest.mark.row("X10")
@pytest.mark.parametrize("form", ["added", "overwritten", "scaled"])
def test_a_product_that_adds_to_the_buffer_itself_does_what_an_addition_does(form, monkeypatch):
    """As on a GPU: not where the buffer is overwritten, nor where a factor is taken into the sums."""
    asked = []

    def adding(name, dy, x, out, *, fast):
        asked.append(fast)
        out.add_(gemm(name, dy, x, dtype=torch.float32))
        return True

    found = []
    for add in (lambda *_, **__: False, adding):
        monkeypatch.setattr("opfuse.ops.linear.add_product", add)
        torch.manual_seed(0)
        scale = 0.5 if form == "scaled" else 1.0
        model = ops.Sequential(ops.BasicLinear(32, 64, accumulate_into_main_grad=True), ops.ConstantScale(scale))
        (weight,) = weights(buffered(model)).values()
        weight.overwrite_main_grad = form == "overwritten"
        with opfuse.autocast(recipe=recipes.Float8CurrentScaling(rounding="single" if form == "scaled" else "per_op")):
            model(torch.randn(96, 32)).square().sum().backward()
        assert weight.grad_added_to_main_grad
        assert not weight.grad.any()
        found.append(weight.main_grad)
    assert torch.equal(*found)
    assert bool(asked) == (form == "added")


@pytest.mark.row("X10")
@pytest.mark.parametrize("form", ["grouped", "single", "single, without empty groups"])
def test_products_of_groups_that_add_to_their_buffers_do_what_additions_do(form, monkeypatch):
    """In one launch where all groups have rows and one buffer; else in one for each that is not overwritten."""
    asked, splits = [], SPLITS if "without" not in form else torch.tensor([32, 32, 32])

    def adding(name, dys, xs, out, *, fast):
        asked.append(len(dys))
        out.add_(torch.cat([gemm(name, dy, x, dtype=torch.float32) for dy, x in zip(dys, xs)]))
        return True

    found, weight_form = [], form.split(",")[0]
    for add in (lambda *_, **__: False, adding):
        monkeypatch.setattr("opfuse.tensors.gemm_grouped.add_products", add)
        monkeypatch.setattr(
            "opfuse.tensors.gemm_grouped.add_product", lambda n, a, b, out, *, fast, add=add: add(n, [a], [b], out, fast=fast)
        )
        torch.manual_seed(0)
        model = buffered(ops.Sequential(FORMS[weight_form](accumulate_into_main_grad=True, dtype=torch.float32)))
        *_, last = weights(model).values()
        last.overwrite_main_grad = form == "grouped"
        with opfuse.autocast(recipe=recipes.Float8CurrentScaling()):
            model(torch.randn(96, 32), splits).square().sum().backward()
        found.append([weight.main_grad for weight in weights(model).values()])
        assert all(weight.grad_added_to_main_grad for weight in weights(model).values())
    assert all(map(torch.equal, *found))
    assert asked == {"grouped": [1], "single": [1, 1], "single, without empty groups": [3]}[form]


@pytest.mark.parametrize("form", FORMS)
def test_a_gradient_of_bf16_is_not_rounded_on_its_way(form):
    main, plain = pipelines(form, torch.bfloat16)
    for weight in weights(main).values():
        weight.main_grad = torch.full(weight.shape, float("nan"))
        weight.overwrite_main_grad = True
    for model in (main, plain):
        model(*given(model, torch.randn(96, 32, generator=generator_of(0)).bfloat16())).sum().backward()
    for name, weight in weights(plain).items():
        own = main.get_parameter(name)
        assert own.grad is None
        assert torch.equal(own.main_grad.bfloat16(), weight.grad)
        assert not weight.grad.any() or not torch.equal(own.main_grad, weight.grad.float())


def test_a_scale_between_linears_and_a_weight_that_lives_quantized():
    recipe = recipes.MXFP8BlockScaling()
    with opfuse.quantized_model_init(recipe=recipe):
        linears = [ops.Linear(32, 32, False, accumulate_into_main_grad=main) for main in (True, False)]
    main, plain = (ops.Sequential(linear, ops.ConstantScale(0.5)) for linear in linears)
    plain.load_state_dict(main.state_dict())
    main[0].weight.main_grad = torch.zeros(32, 32)
    x = torch.randn(32, 32)
    with opfuse.autocast(recipe=recipe):
        for model in (main, plain):
            model(x).sum().backward()
    assert torch.equal(main[0].weight.main_grad, plain[0].weight.grad)


def test_plans_tell_them_apart_and_no_program_is_made_of_what_adds():
    (main, plain), x = pipelines("linear"), torch.randn(32, 32)
    buffered(main)
    for model in (main, plain):
        for _ in range(4):
            model(x).sum().backward()
    (one,), (other,) = main.runs(), plain.runs()
    assert one.structure != other.structure
    assert beyond_gradients(main[0].basic_ops[0].spec) == ["adds gradients to tensors of the caller"]
    assert beyond_gradients(plain[0].basic_ops[0].spec) == []
    ((_, plan),) = one.cache.items()
    (op,) = (i for i, node in enumerate(plan.graph.nodes) if node.op == 0)
    (forward,) = forwards([plan])
    assert not forward.rest.replayable  # what follows is the pass in stretches, of which none has the op that adds
    (own,) = (segment.user_code for segment in plan.segments)
    assert [stretch.repeats for stretch in own.backward if op in stretch.nodes] == [False]
    assert sum(isinstance(key, tuple) for key in plan.programs) == sum(stretch.repeats for stretch in own.backward)


@pytest.mark.parametrize("form", FORMS)
def test_a_pass_that_asks_for_other_gradients_adds_nothing(form):
    """As it leaves ``weight.grad`` alone: a gradient penalty, or a schedule that takes gradients of inputs first."""
    main, x = buffered(pipelines(form)[0]), torch.randn(96, 32, requires_grad=True)
    before, y = {name: w.main_grad.clone() for name, w in weights(main).items()}, main(*given(main, x)).sum()
    torch.autograd.grad(y, x, retain_graph=True)
    y.backward(inputs=[x], retain_graph=True)
    assert all(torch.equal(w.main_grad, before[name]) for name, w in weights(main).items())
    first, *others = weights(main).values()
    y.backward(inputs=[first])
    assert not torch.equal(first.main_grad, next(iter(before.values())))
    assert not any(w.grad_added_to_main_grad for w in others)


WRONG = {
    "none": (lambda w: None, errors.PipelineError, "a tensor to add"),
    "dtype": (lambda w: torch.zeros(w.shape, dtype=torch.bfloat16), errors.DtypeError, "torch.float32"),
    "shape": (lambda w: torch.zeros(w.numel()), errors.ShapeError, "shape"),
    "device": (lambda w: torch.zeros(w.shape, device="meta"), errors.PipelineError, "device"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("form", FORMS)
def test_a_buffer_that_cannot_take_the_sum(form, wrong):
    (main, _), (make, error, wanted) = pipelines(form), WRONG[wrong]
    for weight in weights(main).values():
        weight.main_grad = make(weight)
    y = main(*given(main, torch.randn(96, 32)))
    with raised(error, Exception, "main_grad", wanted):
        y.sum().backward()


def test_put_off_and_added_at_once():
    with raised(errors.SpecError, ValueError, "come at once", "delay_wgrad_compute"):
        ops.GroupedLinear(2, 32, 32, delay_wgrad_compute=True, accumulate_into_main_grad=True)


@pytest.mark.cpu
def test_sizes_that_no_product_needed_are_read_for_the_buffers(monkeypatch):
    """In high precision torch's grouped product leaves them on the device; each buffer gets the rows of its group."""
    found = []
    for there in (False, True):
        if there:
            monkeypatch.setattr("opfuse.kernels.products.grouped.takes", lambda *_: True)
            monkeypatch.setattr("opfuse.kernels.products.grouped._arch", lambda device: (9, 0))
            monkeypatch.setattr("opfuse.ops.grouped_linear.known_sizes", lambda *_: None)
        torch.manual_seed(0)
        model = buffered(ops.Sequential(ops.GroupedLinear(3, 32, 64, bias=False, accumulate_into_main_grad=True)).bfloat16())
        x = torch.randn(96, 32).bfloat16().requires_grad_()
        model(x, SPLITS).backward(torch.linspace(-1, 1, 96 * 64).view(96, 64).bfloat16())
        found.append([x.grad, *[weight.main_grad for weight in weights(model).values()]])
    torch.testing.assert_close(*[grads.pop(0) for grads in found], rtol=2**-7, atol=1e-2)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("lies", ["as it is made", "strided", "off 16 bytes"])
@pytest.mark.cpu
def test_a_kernel_is_given_buffers_that_it_can_write(lies, monkeypatch):
    """Sums over groups of rows whose sizes the device knows: contiguous and on 16 bytes, or a copy whose values come back."""
    room = torch.empty(64 * 32 + 4)
    buffer = {
        "as it is made": room[:2048].view(64, 32),
        "strided": room[:2048].view(32, 64).t(),
        "off 16 bytes": room[1:2049].view(64, 32),
    }
    sizes, rows = torch.tensor([5, 0, 60]), torch.randn(65, 96, generator=generator_of(0))
    x, dy = (cast_in_groups(Float8CurrentScalingQuantizer(torch.float8_e4m3fn), r, sizes) for r in rows.split((32, 64), 1))
    given, own = [], buffer[lies].fill_(1)

    def written(left, right, groups, results, **options):
        given.extend(results.values())
        products_into(left, right, groups, results, **options)

    monkeypatch.setattr("opfuse.tensors.gemm.products_into", written)
    wgrad_into(dy, x, groups_in(x), {0: own}, accumulate=True, fast=False)
    (result,) = given
    assert result.is_contiguous()
    assert result.data_ptr() % 16 == 0
    assert (result is own) == (lies == "as it is made")
    product = dy.dequantize(torch.float32, "columnwise")[:5].t() @ x.dequantize(torch.float32, "columnwise")[:5]
    torch.testing.assert_close(own, 1 + product)
