"""The generated text of chains: compiled without a GPU, the same for other shapes and constants, of declared expressions."""

from functools import partial

import pytest
import torch

from opfuse.errors import KernelError, QuantizerError
from opfuse.formats import COLUMNWISE, E4M3, IDENTITY, NVFP4, ROWWISE, USAGES, fp8_block, fp8_tensor, mxfp8
from opfuse.kernels.casts.encoding import Blocks, Measured, Microscaled, RecordingScale, WithOriginal
from opfuse.kernels.chains.cast import backward_chain_cast, backward_chain_encoded, forward_chain_cast, forward_chain_encoded
from opfuse.kernels.chains.chain import backward_chain, forward_chain
from opfuse.kernels.engine import compiling
from opfuse.kernels.engine.compiling import ARCHITECTURES
from opfuse.numerics.activations import POINTWISE
from opfuse.numerics.chain import Stage
from opfuse.numerics.layouts import Layout
from opfuse.numerics.pointwise import Pointwise
from tests.kernels.cases.chains import SOFTSIGN, ChainCase

BF16 = torch.bfloat16


def launched(kernel, *args, **kwargs):
    """The variants, entries and results of a call, on tensors of the CPU."""
    calls = []
    result = kernel.run(lambda variant, entry, *fields, device: calls.append((variant, entry)), *args, **kwargs)
    return calls, result


def bias_softcap(rows, columns, beta, dtype=BF16):
    op = Pointwise(
        "softcap",
        forward="cap * tanhf(x / cap)",
        backward=("dy * (1.0f - tanhf(x / cap) * tanhf(x / cap))",),
        value=lambda x, cap: cap * torch.tanh(x / cap),
        grad=lambda dy, x, cap: (dy * (1 - torch.tanh(x / cap).square()),),
        constants=("cap",),
    )
    stages = [Stage(POINTWISE["bias"], {"bias": torch.zeros(columns, dtype=dtype)}), Stage(op, constants={"cap": beta})]
    return torch.zeros(rows, columns, dtype=dtype), stages


def test_an_activation_of_the_users_own_is_a_function_of_the_text():
    x, stages = bias_softcap(64, 128, 30.0)
    assert (
        "stage1_softcap(float cap, float x) { return cap * tanhf(x / cap); }"
        in launched(forward_chain, x, stages)[0][0][0].generated
    )


ERF = ("bias", "gelu_erf", "geglu_erf")


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=() if arch == "sm_90a" else pytest.mark.slow) for arch in ARCHITECTURES]
)
def test_the_exact_gelu_compiles_without_spills_in_both_directions(arch):
    for kernel, way in ((forward_chain, "forward"), (backward_chain, "backward")):
        args, kwargs = getattr(ChainCase(ERF, (33, 64)), way)(torch.device("cpu"))
        for variant in {variant for variant, _ in launched(kernel, *args, **kwargs)[0]}:
            assert compiling.compile_text(compiling.assemble(variant), arch).spills == 0


def test_r14_rows_and_constants_compile_nothing_and_structure_does():
    _, stages = bias_softcap(64, 128, 30.0)

    def variant(rows, columns, beta, dtype=BF16, **kwargs):
        x, own = bias_softcap(rows, columns, beta, dtype)
        return launched(forward_chain, x, [own[0], Stage(stages[1].math, constants={"cap": beta})], **kwargs)[0][0][0]

    first = variant(64, 128, 30.0)
    assert variant(7, 128, 2.5) == variant(1, 4096, 1.0) == first
    assert "30" not in first.generated
    others = [variant(64, 128, 30.0, torch.float16), variant(64, 128, 30.0, keep=(1,)), variant(64, 128, 30.0, rounding="single")]
    assert len({first, *others, variant(64, 127, 30.0)}) == 5


def test_a_sum_of_gradients_takes_a_second_pass_and_an_added_tensor_none():
    chain = ChainCase(("add", "bias", "scaled_srelu", "add"), (33, 64))
    args, kwargs = chain.backward(torch.device("cpu"))
    calls, (_, grads) = launched(backward_chain, *args, **kwargs)
    assert [entry for _, entry in calls] == ["chain_tile", "row_sums", "column_sums"]
    assert grads[3]["residual"] is args[0]
    assert grads[0]["residual"] is not args[0]
    args, kwargs = ChainCase(("add", "add"), (33, 64)).backward(torch.device("cpu"))
    calls, (dx, grads) = launched(backward_chain, *args, **kwargs)
    assert calls == []
    assert dx is grads[0]["residual"] is grads[1]["residual"] is args[0]


def test_an_expression_that_is_not_cuda_is_refused_with_the_compilers_words():
    broken = Pointwise("broken", "nothing_such(x)", ("dy",), lambda x: x, lambda dy, x: (dy,))
    ((variant, _),), _ = launched(forward_chain, torch.zeros(4, 8), [Stage(broken)])
    with pytest.raises(KernelError, match=r"generated.cuh\(\d+\): error: identifier \"nothing_such\" is undefined"):
        compiling.compile_text(compiling.assemble(variant), "sm_90a")


RECORDING = {"scale": torch.ones(1), "amax": torch.zeros(1)}


@pytest.mark.parametrize("ops", ["gelu", "swiglu"])
@pytest.mark.parametrize(
    ("shape", "given", "words"),
    [
        ((32, 64), {}, r"wants planes of \(.*\), got a layout of \(32, 64\)"),
        (None, {"scale": torch.ones(1, dtype=torch.float64)}, r"wants fp32 \(1,\) on cpu, got torch.float64"),
        (None, {"amax": torch.zeros(2)}, r"wants fp32 \(1,\) on cpu, got torch.float32 \(2,\)"),
    ],
)
def test_a_cast_of_another_matrix_and_a_number_that_is_none_are_refused_before_anything_is_written(ops, shape, given, words):
    chain = ChainCase((ops,), (64, 128))
    (x, stages), _ = chain.forward(torch.device("cpu"))
    (dy, _, saved), _ = chain.backward(torch.device("cpu"))

    def encode(like):
        return RecordingScale(**RECORDING | given, layouts=[Layout(fp8_tensor(E4M3), ROWWISE, shape or tuple(like.shape))])

    for kernel, args in ((forward_chain_cast, (x, stages, encode(dy))), (backward_chain_cast, (dy, stages, saved, encode(x)))):
        with pytest.raises(QuantizerError, match=words):
            kernel.run(lambda *_, **__: pytest.fail("launched"), *args)


def test_planes_of_a_format_that_the_cast_does_not_make_are_refused():
    (x, stages), _ = ChainCase(("gelu",), (64, 128)).forward(torch.device("cpu"))
    for encode, fmt in (
        (Microscaled, NVFP4),
        (Blocks, fp8_tensor(E4M3)),
        (partial(RecordingScale, *RECORDING.values()), mxfp8(E4M3)),
    ):
        with pytest.raises(QuantizerError, match="wants planes of the family"):
            forward_chain_cast.run(lambda *_, **__: pytest.fail("launched"), x, stages, encode([Layout(fmt, ROWWISE, (64, 128))]))


@pytest.mark.parametrize("usage", USAGES)
def test_a_cast_to_a_format_of_a_users_own_is_left_to_the_definition(usage):
    """Tiles are blocks of 128 x 128: the scales of others are not theirs."""
    (x, stages), _ = ChainCase(("gelu",), (64, 192)).forward(torch.device("cpu"))
    encode = Blocks([Layout(fp8_block(E4M3, 1).replace(block=(1, 64)), usage, (64, 192))])
    calls, (((data, scale),), _, _) = launched(forward_chain_cast, x, stages, encode)
    assert calls == []
    assert all(map(torch.equal, (data, scale), *encode(forward_chain(x, stages)[0])))


KEPT = {
    "contiguous": lambda x: x,
    "columns": lambda x: x[:, 8:],
    "transposed": lambda x: x.t(),
    "repeated": lambda x: x[:1].expand(64, 64),
}


@pytest.mark.row("B31")
@pytest.mark.parametrize("view", KEPT.values(), ids=KEPT)
def test_b31_an_input_is_kept_as_it_came(view):
    """A copy that the kernel reads is gone after the call: what is saved takes no memory of its own."""
    x, stage = view(torch.zeros(64, 64, dtype=BF16)), Stage(POINTWISE["gelu"])
    for call in (partial(forward_chain.run, lambda *_, **__: None), forward_chain.reference):
        assert call(x, [stage], keep=(0,))[1][0] is x
        assert call(x, [stage], keep=(0,), dtype=torch.float32)[1][0].dtype is torch.float32


@pytest.mark.row("B10")
@pytest.mark.parametrize("name", ["MX", "amax"])
def test_b10_the_original_is_stored_by_the_kernel_that_casts_it_in_both_directions(name):
    chain = ChainCase(("bias", "gelu"), (64, 128))
    (x, stages), _ = chain.forward(torch.device("cpu"))
    (dy, _, saved), _ = chain.backward(torch.device("cpu"))
    layouts = [Layout(mxfp8(E4M3), ROWWISE, (64, 128))]
    mx = Microscaled(layouts)
    inner = mx if name == "MX" else Measured(layouts, lambda x, amax: mx(x))
    encode = WithOriginal([*layouts, Layout(IDENTITY, COLUMNWISE, (64, 128))], inner)
    ((data, scale), (y,)), kept = forward_chain_encoded(x, stages, encode, keep=(1,))
    wanted, wanted_kept = forward_chain(x, stages, keep=(1,))
    assert torch.equal(y, wanted)
    assert torch.equal(kept[1], wanted_kept[1])
    assert all(map(torch.equal, (data, scale), *mx(wanted)))
    ((data, scale), (dx,)), grads = backward_chain_encoded(dy, stages, saved, encode)
    wanted, wanted_grads = backward_chain(dy, stages, saved)
    assert torch.equal(dx, wanted)
    assert torch.equal(grads[0]["bias"], wanted_grads[0]["bias"])
    assert all(map(torch.equal, (data, scale), *mx(wanted)))


def test_what_a_kernel_cannot_take_is_left_to_the_definition():
    x = torch.randn(4, 8, dtype=torch.float64)
    for given in (x, torch.randn(()), torch.ones(4, 8, dtype=torch.int32)):
        calls, (y, _) = launched(forward_chain, given, [Stage(SOFTSIGN)])
        assert calls == []
        assert torch.equal(y, forward_chain.reference(given, [Stage(SOFTSIGN)])[0])
    calls, _ = launched(backward_chain, x, [Stage(SOFTSIGN)], {0: x})
    assert calls == []
