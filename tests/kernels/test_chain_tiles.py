"""The tiles of chains with casts: none spills in the form in which it is called, nor does a user's own, on whatever rung."""

import itertools

import pytest
import torch

from opfuse.formats import E4M3, USAGES, fp8_block
from opfuse.kernels.casts.encoding import Blocks
from opfuse.kernels.chains.cast import backward_chain_cast, forward_chain_cast
from opfuse.kernels.chains.chain import backward_chain
from opfuse.kernels.engine import compiling
from opfuse.numerics.chain import Stage
from opfuse.numerics.layouts import Layout
from opfuse.numerics.pointwise import Pointwise
from tests.kernels.cases.chain_casts import AS_CALLED, BACKWARD, FORWARD, OF_GROUPS, Combination, chain_case
from tests.kernels.cases.chains import ChainCase

KERNELS = {"forward": forward_chain_cast, "backward": backward_chain_cast}
CPU = torch.device("cpu")


def variants_of(kernel, args, kwargs):
    """What the call launches, by entry, but for the kernels that add up its sums: nothing if two kernels do it."""
    made = {}
    kernel.run(lambda variant, entry, *_, **__: made.setdefault(entry, variant), *args, **kwargs)
    return {entry: variant for entry, variant in made.items() if entry not in ("row_sums", "column_sums")}


def variant_of(kernel, args, kwargs):
    """The one kernel that the call launches."""
    (variant,) = variants_of(kernel, args, kwargs).values()
    return variant


def takes_two(direction, name):
    """Whether rows' scales and two strands of dx would crowd the threads of a large tile, or groups have sums over rows."""
    large = any(f"called, {cast}," in name for cast in ("1x128", "128x128", "MX swizzled"))
    crowded = name.startswith("scaled_") and "srelu" not in name and large
    summed = f"called, {OF_GROUPS}," in name and "bias" in name
    return direction == "backward" and (crowded or summed)


def cases():
    """Those of the pipelines that all recipes run are cases of the kernels, which are compiled at every run."""
    for direction, of_direction in AS_CALLED.items():
        at_every_run = FORWARD if direction == "forward" else BACKWARD
        for name in of_direction:
            if name not in at_every_run:
                yield pytest.param(direction, name, id=f"{direction} {name}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("direction", "name"), [*cases()])
def test_no_built_in_op_and_no_ordinary_chain_spills_as_it_is_called(direction, name):
    variants = variants_of(KERNELS[direction], *AS_CALLED[direction][name](CPU))
    if "called, current," in name:  # the pass that finds the amax, and where it pays the one that casts
        assert {"chain_forward"} <= variants.keys() <= {"chain_forward", "chain_tile"}
    else:
        assert variants.keys() == (set() if takes_two(direction, name) else {"chain_tile"})
    for variant in variants.values():
        made = compiling.compile_variant(variant, "sm_90a")
        assert {name: used.spills for name, used in made.entries.items()} == dict.fromkeys(made.entries, 0)


@pytest.mark.parametrize(("ops", "form"), [("swiglu", "both"), ("bias swiglu", "both"), ("bias swiglu", "both, kept")])
def test_gated_units_with_blocks_have_all_the_threads_of_their_tile(ops, form):
    """64 registers for each of the 1024 threads that share a multiprocessor, on the rung of the table or beside it."""
    variant = variant_of(forward_chain_cast, *AS_CALLED["forward"][f"{ops} as called, 1x128, {form}"](CPU))
    made = compiling.compile_variant(variant, "sm_90a")
    assert {"TILE_THREADS=512", "RESIDENT=2"} <= {*variant.defines}
    assert "#define RESIDENT 2\n" in made.text
    assert made.entries["chain_tile"].registers <= 64


def test_as_it_is_called_a_chain_makes_what_its_form_says():
    assert len(AS_CALLED["forward"]) > len(AS_CALLED["backward"]) > 200
    for name, case in itertools.islice(AS_CALLED["forward"].items(), 0, None, 7):  # of every cast and form
        args, kwargs = case(CPU)
        planes, y, kept = forward_chain_cast.run(lambda *_, **__: None, *args, **kwargs)
        assert len(planes) == (1 if ", rows" in name else 2)
        assert (y is None) == (not name.endswith("stored"))
        assert bool(kept) or not name.endswith("kept")


QUOTIENT = Pointwise(
    "quotient",
    forward="expf(x) / expf(x * 2.0f)",
    backward=("dy",),
    value=lambda x: (-x).exp(),
    grad=lambda dy, x: (dy,),
)


def test_an_activation_of_the_users_own_finds_its_rung():
    chain = ChainCase(("bias", "gelu", "add", "add"), (256, 512))
    (x, stages), kwargs = chain.forward(CPU)
    encode = Blocks([Layout(fp8_block(E4M3, 1), usage, (256, 512)) for usage in USAGES])
    variant = variant_of(forward_chain_cast, (x, [*stages, Stage(QUOTIENT)], encode), kwargs)
    made = compiling.compile_variant(variant, "sm_90a")
    assert made.spills == 0
    assert made.text != compiling.assemble(variant)  # the first rung, which is left because it spills


@pytest.mark.parametrize("chain", [("reglu", "bias", "reglu"), ("bias", "reglu", "relu", "reglu", "bias")], ids=" ".join)
def test_chains_of_two_gated_units_compile_without_spills(chain):
    """A gradient in four parts."""
    args, kwargs = ChainCase(chain, (70, 48)).backward(CPU)
    variants = []
    backward_chain.run(lambda variant, *_, **__: variants.append(variant), *args, **kwargs)
    (variant,) = {each for each in variants if each.source == "chain_tile.cu"}
    assert "STRANDS = 4;" in variant.generated
    used = compiling.compile_text(compiling.assemble(variant), "sm_90a", variant.source).entries
    assert not any(each.spills for each in used.values())


MOST = {None: 12, "delayed": 12, "1x128": 3, "MX": 4}
"""The most biases, of those tried, whose sums a kernel makes."""


def sums():
    """At every run the most that a kernel sums and those too many, for the newest architecture; sizes are those of the text.

    Delayed scaling sums as a chain without a cast does.
    """
    for cast, biases, arch in itertools.product(MOST, (1, 3, 4, 12, 30), ("sm_80", "sm_90a")):
        quick = biases >= MOST[cast] and arch == "sm_90a" and (cast, biases) != ("delayed", 12)
        yield pytest.param(cast, biases, arch, marks=() if quick else pytest.mark.slow)


@pytest.mark.few(apart=True)
@pytest.mark.parametrize(("cast", "biases", "arch"), [*sums()])
def test_sums_have_shared_memory_that_every_device_has(cast, biases, arch):
    """However many biases come before a gated unit: in one kernel, in two, or none is launched."""
    chain, variants = ChainCase(("bias",) * biases + ("swiglu",), (128, 256)), []

    def record(variant, *_, **__):
        variants.append(variant)

    if cast is None:
        args, kwargs = chain.backward(CPU)
        backward_chain.run(record, *args, **kwargs)
    else:
        args, kwargs = chain_case(chain, "backward", Combination(cast, USAGES, E4M3, False), CPU)
        backward_chain_cast.run(record, *args, **kwargs)
    assert variants or biases > (12 if cast is None else 3)
    for variant in {*variants}:
        used = compiling.compile_text(compiling.assemble(variant), arch, variant.source).entries
        assert all(each.shared <= 48 << 10 for each in used.values()), used
