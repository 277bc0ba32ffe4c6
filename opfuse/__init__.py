"""opfuse: a fusible-operation-graph compiler for low-precision training in PyTorch.

Names are imported when they are first used, so that ``import opfuse`` costs nothing. Type checkers read ``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

RULE_TABLE = "opfuse.fusions:RULES"
"""Where the compiler finds the built-in fusion rules when it makes its first plan."""

GROUPS = {
    "Convert a model": {
        "fuse_": "opfuse.convert",
        "unfuse_": "opfuse.convert",
        "report": "opfuse.convert",
        "invariant": "opfuse.convert",
        "log_probs": "opfuse.numerics.log_probs",
        "load_policy": "opfuse.config",
        "register_experts": "opfuse.convert",
    },
    "Recipes": {
        "autocast": "opfuse.recipes",
        "advise": "opfuse.inspect.advise",
        "layer_costs": "opfuse.train.layer_costs",
        "memory": "opfuse.train.memory",
        "support": "opfuse.recipes",
        "support_matrix": "opfuse.recipes",
    },
    "See what runs": {
        "explain": "opfuse.inspect.explain",
        "saved": "opfuse.inspect.saved",
        "watch": "opfuse.inspect.watch",
        "host_times": "opfuse.inspect.host",
        "cache_info": "opfuse.inspect.caches",
        "on_miss": "opfuse.runtime.plans.misses",
        "dump": "opfuse.runtime.plans.trace",
        "compare_ranks": "opfuse.inspect.ranks",
    },
    "Train": {
        "load": "opfuse.config",
        "checkpoint": "opfuse.runtime.interpret.checkpoint",
        "graphed": "opfuse.runtime.graphs",
        "graphed_step": "opfuse.runtime.graphed_step",
        "kept_weights": "opfuse.runtime.weights.cast_cache",
        "offloaded": "opfuse.runtime.offload",
        "interpreted": "opfuse.runtime.replay.dispatch",
        "ExpertParallel": "opfuse.convert.expert_parallel",
        "TensorParallel": "opfuse.ops.parallel",
    },
    "Weights and state dicts": {
        "export_weights": "opfuse.interchange.state_dicts",
        "import_weights": "opfuse.interchange.state_dicts",
        "weight_updates": "opfuse.interchange.updates",
        "quantized_model_init": "opfuse.recipes",
        "with_masters": "opfuse.tensors.optimizers",
        "master_weights": "opfuse.tensors.masters",
        "to_planes": "opfuse.tensors.files",
        "from_planes": "opfuse.tensors.files",
        "prepare_delayed": "opfuse.core.state",
        "plain_state_dict": "opfuse.core.state",
    },
    "Fusion rules": {
        "register_fusion": "opfuse.compiler.registry",
        "fusion": "opfuse.compiler.rules",
        "Fusion": "opfuse.compiler.rules",
        "active_rules": "opfuse.compiler.registry",
        "use_rules": "opfuse.compiler.registry",
        "RuleSet": "opfuse.compiler.registry",
    },
}
"""Where names are, in groups: what is used daily comes first. The reference shows them in this order."""

_NAMES = {name: module for names in GROUPS.values() for name, module in names.items()}

_MODULES = ("recipes", "ops", "tensors", "fusions", "errors", "formats", "keys", "kernels")

__all__ = list(_NAMES) + list(_MODULES)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"opfuse.{name}")
    else:
        raise import_module("opfuse.errors").no_name(__name__, name, __all__)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
