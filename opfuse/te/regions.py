"""TransformerEngine's context managers with their signatures: the current ones, and the former ones named after FP8."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from opfuse.errors import UnsupportedError, describe
from opfuse.recipes import ModelInit, quantized_model_init
from opfuse.recipes.autocast import autocast as region

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: object = None,
    amax_reduction_group: ProcessGroup | None = None,
) -> region:
    """:class:`opfuse.autocast`. UnsupportedError for ``calibrating=True``.

    Without a recipe TransformerEngine chooses by device; here it is ``Float8CurrentScaling()`` on all of them.
    """
    if calibrating:
        cure = "leave it out: run some training steps under the recipe, whose states then hold what they counted"
        raise UnsupportedError(describe("autocast", wanted="calibrating=False", got="True", cure=cure))
    return region(enabled, recipe=recipe, amax_reduction_group=amax_reduction_group)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: object = None,
    fp8_group: ProcessGroup | None = None,
) -> region:
    """:func:`autocast` by its former name."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group)


def fp8_model_init(
    enabled: bool = True, recipe: object = None, preserve_high_precision_init_val: bool = False
) -> AbstractContextManager[ModelInit | None]:
    """:func:`opfuse.quantized_model_init` by its former name."""
    return quantized_model_init(enabled=enabled, recipe=recipe, preserve_high_precision_init_val=preserve_high_precision_init_val)
