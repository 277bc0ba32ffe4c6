"""opfuse: a fusible-operation-graph compiler for low-precision training in PyTorch.

Names are imported when they are first used, so that ``import opfuse`` costs nothing. Type checkers read ``__init__.pyi``.
"""

from importlib import import_module
from sys import modules
from typing import Any

__version__ = "0.1.0"

RULE_TABLE = "opfuse.fusions:RULES"
"""Where the compiler finds the built-in fusion rules when it makes its first plan."""

_MODULES = ("errors", "formats", "fusions", "keys", "kernels", "ops", "recipes", "tensors")

_NAMES = {
    "autocast": "opfuse.recipes",
    "quantized_model_init": "opfuse.recipes",
    "is_fp8_available": "opfuse.recipes",
    "is_fp8_block_scaling_available": "opfuse.recipes",
    "is_mxfp8_available": "opfuse.recipes",
    "is_nvfp4_available": "opfuse.recipes",
    "support": "opfuse.recipes",
    "support_matrix": "opfuse.recipes",
    "QuantizedTensor": "opfuse.tensors",
    "master_weights": "opfuse.tensors.masters",
    "with_masters": "opfuse.tensors.optimizers",
    "TensorParallel": "opfuse.ops.parallel",
    "quantize_master_weights": "opfuse.tensors.raw",
    "post_all_gather_processing": "opfuse.tensors.raw",
    "replace_raw_data": "opfuse.tensors.raw",
    "Fusion": "opfuse.compiler.rules",
    "fusion": "opfuse.compiler.rules",
    "RuleSet": "opfuse.compiler.registry",
    "use_rules": "opfuse.compiler.registry",
    "active_rules": "opfuse.compiler.registry",
    "register_fusion": "opfuse.compiler.registry",
    "register_forward_fusion": "opfuse.compiler.registry",
    "register_backward_fusion": "opfuse.compiler.registry",
    "register_forward_backward_fusion": "opfuse.compiler.registry",
    "on_miss": "opfuse.runtime.plans.misses",
    "prepare_delayed": "opfuse.core.state",
    "plain_state_dict": "opfuse.core.state",
    "to_planes": "opfuse.tensors.files",
    "from_planes": "opfuse.tensors.files",
    "interpreted": "opfuse.runtime.replay.dispatch",
    "graphed": "opfuse.runtime.graphs",
    "kept_weights": "opfuse.runtime.weights.cast_cache",
    "offloaded": "opfuse.runtime.offload",
    "dump": "opfuse.runtime.plans.trace",
    "explain": "opfuse.inspect.explain",
    "saved": "opfuse.inspect.saved",
    "cache_info": "opfuse.inspect.caches",
    "watch": "opfuse.inspect.watch",
    "host_times": "opfuse.inspect.host",
    "compare_ranks": "opfuse.inspect.ranks",
    "checkpoint": "opfuse.runtime.interpret.checkpoint",
    "advise": "opfuse.inspect.advise",
    "load": "opfuse.config",
    "fuse_": "opfuse.convert",
    "unfuse_": "opfuse.convert",
    "report": "opfuse.convert",
    "register_experts": "opfuse.convert",
    "export_weights": "opfuse.interchange.state_dicts",
    "import_weights": "opfuse.interchange.state_dicts",
    "load_policy": "opfuse.config",
}

__all__ = list(_MODULES + tuple(_NAMES))


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = import_module(f"opfuse.{name}")
    else:
        raise AttributeError(f"module 'opfuse' has no attribute {name!r}", name=name, obj=modules[__name__])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
