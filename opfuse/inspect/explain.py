"""What a model does under the active recipe: the lowered graph, what fused and what did not, why, and at what cost."""

from __future__ import annotations

from typing import Any

from torch import nn

from opfuse.core.state import stateful
from opfuse.domains import checked_arguments
from opfuse.errors import PipelineError
from opfuse.inspect.observe import CallInputs, observe
from opfuse.inspect.render import Explanation
from opfuse.inspect.saved import RefusedSetting, recipes_of, totals_under
from opfuse.recipes.availability import kernels_in_torch, support
from opfuse.recipes.delayed import DelayedScalingStates

ENVIRONMENT = "environment "
"""How the source of a recipe's field begins if its value came from an environment variable."""


@checked_arguments(PipelineError, but="model")
def explain(model: nn.Module, *inputs: Any, overrides: bool = False, **named: Any) -> Explanation:
    """Explain ``model(*inputs, **named)`` under the active recipe, or those of converted modules, by running its forward once.

    The run leaves no trace: it works on copies of the inputs and of the model's buffers, and makes plans that no cache keeps.
    Delayed-scaling states record nothing, those that it makes are dropped, and random state is restored. Only hooks of the caller
    see it. overrides: also measure the bytes saved for backward under every backward override, as :func:`opfuse.saved` does in
    more detail; an override under which the call cannot run is reported as refused, and why.

    OpfuseWarning for amaxes of delayed scaling that were not finite. PipelineError for what is no module or runs no op of opfuse;
    DtypeError for a first input that is no tensor.
    """
    given = CallInputs(inputs, named)
    found = observe(model, given)
    for name, op in stateful(model):
        if isinstance(states := getattr(op, "quantizer_states", None), DelayedScalingStates):
            states.warn_of_left_out(name)
    recipes = recipes_of(found)
    if not recipes:
        reason = "; ".join(filter(None, ("no recipe is active", kernels_in_torch())))
        made = "none", "high precision", reason, found.plans, found.values, found.totals
        return Explanation(*made, kept=found.kept)
    statuses = [support(each) for each in recipes]
    status = next((each for each in statuses if each.status != "native"), statuses[0])
    asked = overrides and len(recipes) == 1
    totals = totals_under(recipes[0], "backward_override", found.totals, model, given) if asked else {}
    by_override = {name: kept if isinstance(kept, RefusedSetting) else kept.bytes for name, kept in totals.items()}
    sources = {name: source for each in recipes for name, source in each.sources.items()}
    taken = {name: source.removeprefix(ENVIRONMENT) for name, source in sources.items() if source.startswith(ENVIRONMENT)}
    told_as = " and ".join(map(repr, recipes))
    made = told_as, status.status, status.reason, found.plans, found.values, found.totals
    return Explanation(*made, by_override, taken, kept=found.kept, chains=found.products if given.on_cuda else ())
