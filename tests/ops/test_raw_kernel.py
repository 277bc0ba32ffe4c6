"""Ops of a user's CUDA text: the definition on a CPU, and what is refused."""

import pytest
import torch

from examples.raw_kernel import CODE, SoftThreshold
from opfuse import ops
from opfuse.config.operations import _model
from opfuse.core.spec import hyper_parameters
from opfuse.errors import DtypeError, PipelineError, ShapeError, SpecError
from opfuse.kernels.engine.compiling import compile_text


def model(op, dtype=torch.float32):
    torch.manual_seed(0)
    return ops.Sequential(ops.Linear(8, 8), op, ops.Linear(8, 4)).to(dtype)


def test_alone_it_is_its_reference_and_gradients_are_autograds():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    y, wanted = SoftThreshold(bound=0.3)(x), torch.nn.functional.softshrink(x, 0.3)
    assert torch.equal(y, wanted)
    dy = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(out, x, dy)[0] for out in (y, wanted)))


def test_every_call_of_a_pipeline_has_the_same_gradients():
    net, x = model(SoftThreshold(), torch.float64), torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    first, *others = [torch.autograd.grad(net(x).sum(), [x, *net.parameters()]) for _ in range(4)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert torch.autograd.gradcheck(net, x)


@pytest.mark.parametrize("c_type", SoftThreshold.kernels.dtypes.values())
def test_the_text_of_the_example_compiles(c_type):
    compiled = compile_text(f"#define scalar_t {c_type}\n{CODE}", "sm_90a")
    assert compiled.entries.keys() == {SoftThreshold.kernels.forward, SoftThreshold.kernels.backward}


def test_files_may_name_it_with_its_hyper_parameters():
    made = _model("soft_threshold", SoftThreshold)(op="soft_threshold", bound=0.25)
    assert (SoftThreshold.kind, made.bound) == ("soft_threshold", 0.25)


def test_a_dtype_without_a_c_type_is_refused_on_every_device():
    with pytest.raises(DtypeError, match=r"input: wants one of .*float32.* got torch.bfloat16"):
        SoftThreshold()(torch.randn(4, dtype=torch.bfloat16))


class Bounded(ops.RawKernelOperation):
    @hyper_parameters
    def __init__(self, *, bound: float = 0.5) -> None:
        super().__init__()


def like(reference):
    return ops.raw_kernel(CODE, forward="soft_threshold", backward="soft_threshold_backward")(
        type("Wrong", (Bounded,), {"reference": staticmethod(reference)})
    )


@pytest.mark.parametrize(
    ("reference", "error"),
    [(lambda x, bound: x.sum(), ShapeError), (lambda x, bound: x.double(), DtypeError)],
    ids=["shape", "dtype"],
)
@pytest.mark.cpu
def test_a_reference_that_is_not_like_its_input_is_refused(reference, error):
    with pytest.raises(error, match=r"Wrong\.reference"):
        like(reference)()(torch.randn(4, 4))


@pytest.mark.cpu
def test_a_class_without_text_or_reference_is_refused():
    with pytest.raises(PipelineError, match="CUDA text"):
        type("Bare", (ops.RawKernelOperation,), {})()(torch.randn(4))
    with pytest.raises(PipelineError, match="a reference in torch"):
        like(ops.RawKernelOperation.reference)()(torch.randn(4))


@pytest.mark.parametrize(
    "given",
    [{"forward": "nowhere"}, {"dtypes": {}}, {"dtypes": {torch.int8: "char"}}, {"grid": "tiles"}, {"block": 0}, {"block": 2048}],
    ids=str,
)
def test_what_no_kernel_can_be_is_refused(given):
    with pytest.raises(SpecError, match="@raw_kernel"):
        ops.raw_kernel(CODE, **{"forward": "soft_threshold", "backward": "soft_threshold_backward", **given})


def test_only_its_base_class_takes_the_decorator():
    with pytest.raises(SpecError, match=r"RawKernelOperation, got .*Identity"):
        ops.raw_kernel(CODE, forward="soft_threshold", backward="soft_threshold_backward")(ops.Identity)


class Numbers(ops.RawKernelOperation):
    @hyper_parameters
    def __init__(self, *, bound: float = 0.5, count: int = 3, flag: bool = True) -> None:
        super().__init__()

    @staticmethod
    def reference(x, **_):
        return x


def numbers(more, backward=None, mark='extern "C" __global__ void'):
    """An op with kernels that have these parameters behind those that every kernel has."""
    sizes = "long long rows, const long long /* of x */ columns"
    code = f"""
    // __global__ void forward(int): not this one
    {mark} forward(const scalar_t* x, scalar_t *y, {sizes}{more}) {{}}
    {mark} __launch_bounds__(256) backward(
        const scalar_t* dy, const scalar_t* x, scalar_t* __restrict__ dx, {sizes}{more if backward is None else backward}
    ) {{}}
    """
    return ops.raw_kernel(code, forward="forward", backward="backward")(type("Op", (Numbers,), {}))()


GIVEN = ", double bound, long long count, bool flag"


@pytest.mark.parametrize(
    ("more", "backward"),
    [
        ("", None),
        (", double bound, long long count", None),
        (GIVEN + ", double more", None),
        (", float bound, long long count, bool flag", None),
        (", scalar_t bound, long long count, bool flag", None),
        (", double bound, int count, bool flag", None),
        (", double bound, const int count, bool flag", None),
        (", double bound, long long count, int flag", None),
        (", double bound, double count, bool flag", None),
        (", double, int, bool", None),
        (", double* bound, long long count, bool flag", None),
        (GIVEN, ", double bound"),
    ],
)
def test_kernels_with_other_parameters_than_they_are_given_are_refused_on_every_device(more, backward):
    """They would read behind their arguments, or half of one."""
    name = "forward" if backward is None else "backward"
    wanted = r"wants \(const scalar_t\*, .*scalar_t\*, long long, long long, double, long long, bool\), got \(const scalar_t"
    with pytest.raises(SpecError, match=f"parameters of kernel {name}: {wanted}"):
        numbers(more, backward)(torch.ones(4, 4))


@pytest.mark.parametrize(
    "more",
    [
        GIVEN,
        ", const double bound, int64_t count, bool flag",
        ", double, long long int, bool",
        ", Real bound, long long count, bool flag",
    ],
)
@pytest.mark.cpu
def test_kernels_with_the_parameters_that_they_are_given_run(more):
    x = torch.ones(4, 4)
    assert torch.equal(numbers(more)(x), x)
    assert torch.equal(numbers("", mark="KERNEL")(x), x)  # nobody knows what a macro declares
