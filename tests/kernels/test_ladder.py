"""The ladder of registers: its order, that compilation stops where nothing spills, and that what spills on all rungs is told."""

import warnings

import pytest
import torch

from opfuse.errors import OpfuseWarning
from opfuse.formats import COLUMNWISE, E4M3, ROWWISE, mxfp8
from opfuse.kernels.casts.tensor import _mx_work
from opfuse.kernels.engine import compiling, launch
from opfuse.kernels.engine.compiling import Variant, compile_variant, rungs
from opfuse.kernels.engine.cubins import CubinCache
from opfuse.kernels.engine.joining import joined_variant
from opfuse.numerics.layouts import Layout

# Half as many values as `VALUES` are live at once, in blocks of 512 threads.
HOLDS = """
extern "C" __global__ void __launch_bounds__(512, RESIDENT) holds(volatile float* x) {
    float v[VALUES];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) v[i] = x[i];
#pragma unroll
    for (int i = 0; i < VALUES; ++i) x[i] = v[VALUES - 1 - i] * v[i];
}
"""


@pytest.fixture
def cache(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    return CubinCache(directory)


@pytest.fixture
def holds(monkeypatch, tmp_path):
    """The variant that holds so many values, two blocks of which are to share a multiprocessor."""
    (tmp_path / "holds.cu").write_text(HOLDS)
    monkeypatch.setattr(compiling, "SOURCES", tmp_path)
    compiling.assemble.cache_clear()
    yield lambda values: Variant("holds.cu", (f"VALUES={values}", "RESIDENT=2"), "// The chain held.\n")
    compiling.assemble.cache_clear()


def test_other_rows_ahead_come_before_fewer_blocks():
    assert [*rungs(("A=1", "RESIDENT=4", "AHEAD=2", "B"))] == [
        ("A=1", f"RESIDENT={resident}", f"AHEAD={ahead}", "B") for resident in (4, 3, 2, 1) for ahead in (2, 1, 4)
    ]
    assert [*rungs(("RESIDENT=9",))] == [(f"RESIDENT={n}",) for n in (9, 7, 5, 4, 3, 2, 1)]
    assert [*rungs(("RESIDENT=0",))] == [(f"RESIDENT={n}",) for n in (0, 4, 3, 2, 1)]
    assert [*rungs(("AHEAD=4",))] == [(f"AHEAD={n}",) for n in (4, 2, 1)]
    assert [*rungs(("AHEAD=1",))] == [(f"AHEAD={n}",) for n in (1, 2, 4)]
    assert [*rungs(("A=1",))] == [("A=1",)]
    assert [*rungs(())] == [()]


@pytest.mark.parametrize(("values", "resident"), [(32, 2), (180, 1)])
def test_compilation_stops_on_the_first_rung_without_spills(values, resident, holds):
    made = compiling.compile_variant(holds(values), "sm_90a")
    assert made.spills == 0
    assert f"#define RESIDENT {resident}\n" in made.text


def test_r14_the_rung_is_kept_with_the_cubin_and_found_without_compiling(cache, holds, monkeypatch):
    cubin = compiling.cubin(holds(180), "sm_90a", cache)
    (source,) = cache.directory.glob("*.cu")
    assert "#define RESIDENT 1\n" in source.read_text()
    monkeypatch.setattr(compiling, "compile_text", None)
    assert compiling.cubin(holds(180), "sm_90a", cache) == cubin
    assert compiling.resources(holds(180), "sm_90a", cache)["holds"].spills == 0


def test_r14_another_ladder_is_another_cubin(cache, holds, monkeypatch):
    compiling.cubin(holds(32), "sm_90a", cache)
    (first,) = cache.directory.glob("*.cubin")
    monkeypatch.setattr(compiling, "rungs", lambda defines: iter((defines,)))
    compiling.cubin(holds(32), "sm_90a", cache)
    assert len({path.name[:64] for path in cache.directory.glob("*.cubin")} - {first.name[:64]}) == 1


def test_what_spills_on_every_rung_spills_least_and_is_told(cache, holds):
    exotic = holds(400)
    spilled = [
        compiling.compile_text(compiling.assemble(exotic._replace(defines=d)), "sm_90a").spills for d in rungs(exotic.defines)
    ]
    used = compiling.resources(exotic, "sm_90a", cache)
    assert used["holds"].spills == min(spilled) > 0
    told = rf"^The chain held on sm_90a: .*got {min(spilled)} bytes spilled by holds\. Cure: .*results are right"
    with pytest.warns(OpfuseWarning, match=told):
        launch.tell_of_spills(exotic, "sm_90a", used)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.tell_of_spills(holds(32), "sm_90a", compiling.resources(holds(32), "sm_90a", cache))


def test_a_joined_cast_of_squares_goes_down_to_one_block_where_two_would_spill():
    """On sm_80, whose kernels take more registers; on sm_90a, for which it is tuned, two share a multiprocessor."""
    layouts = tuple(Layout(mxfp8(E4M3), usage, (256, 256), swizzled=True) for usage in (ROWWISE, COLUMNWISE))
    variant, *_ = _mx_work(layouts, (256, 256), torch.bfloat16, on_vectors=True, block_rows=32)
    assert "RESIDENT=2" in variant.defines
    made = compile_variant(joined_variant(variant), "sm_80")
    assert made.spills == 0
    assert "#define RESIDENT 1\n" in made.text
