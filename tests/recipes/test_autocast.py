"""Where a recipe is in force."""

import asyncio
import re
import threading

import pytest
from torch.distributed import ProcessGroup

from opfuse.errors import RecipeError
from opfuse.recipes import (
    Float8CurrentScaling,
    ModelInit,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    autocast,
    current_recipe,
    quantized_model_init,
)
from opfuse.recipes.autocast import at_outermost_exit, current_amax_group, current_model_init

MX, NV = MXFP8BlockScaling(), NVFP4BlockScaling()


def test_innermost_region_counts_and_ends():
    assert current_recipe() is None
    with autocast(recipe=MX):
        with autocast(recipe=NV):
            assert current_recipe() is NV
        assert current_recipe() is MX
    assert current_recipe() is None


def test_default_recipe_is_current_scaling():
    with autocast():
        assert current_recipe() == Float8CurrentScaling()


@pytest.mark.row("B29")
def test_b29_disabled_region_has_no_recipe():
    with autocast(enabled=False, recipe=MX.replace(backward_override="dequantized")):
        assert current_recipe() is None
    with autocast(recipe=MX), autocast(enabled=False):
        assert current_recipe() is None


def test_one_object_is_entered_again_and_nested():
    region = autocast(recipe=MX)
    for _ in range(2):
        with region:
            with autocast(enabled=False), region:
                assert current_recipe() is MX
            assert current_recipe() is MX
        assert current_recipe() is None


def test_exception_restores_the_region_around():
    with autocast(recipe=MX):
        with pytest.raises(ZeroDivisionError), autocast(recipe=NV):
            raise ZeroDivisionError
        assert current_recipe() is MX


def test_decorator_is_reentrant_and_keeps_name_and_arguments():
    @autocast(recipe=MX)
    def nested(depth, *, log):
        """Recursive."""
        log.append(current_recipe())
        return depth if depth == 0 else nested(depth - 1, log=log)

    log = []
    assert nested(3, log=log) == 0
    assert log == [MX] * 4
    assert (nested.__name__, nested.__doc__) == ("nested", "Recursive.")
    assert current_recipe() is None


def test_threads_share_one_object_but_not_the_region():
    region, seen, barrier = autocast(recipe=MX), {}, threading.Barrier(2)

    def enter(name):
        seen[name, "before"] = current_recipe()
        with region:
            barrier.wait()  # both inside
            seen[name, "inside"] = current_recipe()
            if name == "slow":
                barrier.wait()
        if name == "fast":
            barrier.wait()
        seen[name, "after"] = current_recipe()

    with autocast(recipe=NV):
        threads = [threading.Thread(target=enter, args=(name,)) for name in ("fast", "slow")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert set(seen.values()) == {None, MX}
    assert [seen[name, "inside"] for name in ("fast", "slow")] == [MX, MX]


def test_tasks_do_not_see_each_others_region():
    async def enter(recipe):
        with autocast(recipe=recipe):
            await asyncio.sleep(0)
            return current_recipe()

    async def both():
        return await asyncio.gather(enter(MX), enter(NV))

    assert asyncio.run(both()) == [MX, NV]


def test_amax_group_follows_the_region():
    group = ProcessGroup(0, 1)
    assert current_amax_group() is None
    with autocast(recipe=MX, amax_reduction_group=group):
        assert current_amax_group() is group
        with autocast(recipe=MX):
            assert current_amax_group() is None
        assert current_amax_group() is group


@pytest.mark.parametrize(
    ("keyword", "told"),
    [
        ("fp8_recipe", "got 'fp8_recipe'. Cure: name it recipe="),
        ("fp8_group", "name it amax_reduction_group="),
        ("calibrating", "Cure: leave it out: run some training steps"),
        ("recipee", "did you mean 'recipe'"),
    ],
)
def test_keywords_of_others_are_refused_with_what_to_write(keyword, told):
    for where in (autocast, quantized_model_init):
        with pytest.raises(RecipeError, match=re.escape(told)), where(**{keyword: None}):
            pass


def test_bad_recipe_is_refused_when_the_region_is_made():
    for wrong in ("mxfp8", MXFP8BlockScaling, 3):
        with pytest.raises(RecipeError, match="MXFP8BlockScaling"):
            autocast(recipe=wrong)


def test_hooks_run_once_at_the_outermost_exit():
    runs = []

    def make():
        return lambda completed: runs.append((completed, current_recipe()))

    with autocast(recipe=MX):
        with autocast(recipe=NV):
            first = at_outermost_exit("hook", make)
        assert runs == []
        assert at_outermost_exit("hook", make) is first
    assert runs == [(True, None)]
    fail = autocast(recipe=MX)(lambda: at_outermost_exit("hook", make) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert runs == [(True, None), (False, None)]
    with pytest.raises(RecipeError, match="active autocast region"):
        at_outermost_exit("hook", make)


def test_model_init():
    assert current_model_init() is None
    with quantized_model_init(recipe=MX, preserve_high_precision_init_val=True) as init:
        assert current_model_init() == init == ModelInit(MX, preserve_high_precision_init_val=True)
        with quantized_model_init(enabled=False):
            assert current_model_init() is None
        with quantized_model_init():
            assert current_model_init() == ModelInit(Float8CurrentScaling(), preserve_high_precision_init_val=False)
        assert current_model_init() is init
    with pytest.raises(ZeroDivisionError), quantized_model_init(recipe=MX):
        raise ZeroDivisionError
    assert current_model_init() is None


def test_leaving_a_region_that_nobody_entered():
    with pytest.raises(RecipeError, match="wants an entered region"):
        autocast().__exit__(None, None, None)
