"""The names of the package with their types, as type checkers see them. A test compares them with those that it has."""

from opfuse import errors as errors
from opfuse import formats as formats
from opfuse import fusions as fusions
from opfuse import kernels as kernels
from opfuse import keys as keys
from opfuse import ops as ops
from opfuse import recipes as recipes
from opfuse import tensors as tensors
from opfuse.compiler.registry import RuleSet as RuleSet
from opfuse.compiler.registry import active_rules as active_rules
from opfuse.compiler.registry import register_fusion as register_fusion
from opfuse.compiler.registry import use_rules as use_rules
from opfuse.compiler.rules import Fusion as Fusion
from opfuse.compiler.rules import fusion as fusion
from opfuse.config.load import load as load
from opfuse.config.load import load_policy as load_policy
from opfuse.convert import fuse_ as fuse_
from opfuse.convert import invariant as invariant
from opfuse.convert import register_experts as register_experts
from opfuse.convert import report as report
from opfuse.convert import unfuse_ as unfuse_
from opfuse.convert.expert_parallel import ExpertParallel as ExpertParallel
from opfuse.core.state import plain_state_dict as plain_state_dict
from opfuse.core.state import prepare_delayed as prepare_delayed
from opfuse.inspect.advise import advise as advise
from opfuse.inspect.caches import cache_info as cache_info
from opfuse.inspect.explain import explain as explain
from opfuse.inspect.host import host_times as host_times
from opfuse.inspect.ranks import compare_ranks as compare_ranks
from opfuse.inspect.saved import saved as saved
from opfuse.inspect.watch import watch as watch
from opfuse.interchange.state_dicts import export_weights as export_weights
from opfuse.interchange.state_dicts import import_weights as import_weights
from opfuse.interchange.updates import weight_updates as weight_updates
from opfuse.numerics.log_probs import log_probs as log_probs
from opfuse.ops.parallel import TensorParallel as TensorParallel
from opfuse.recipes import quantized_model_init as quantized_model_init
from opfuse.recipes import support as support
from opfuse.recipes import support_matrix as support_matrix
from opfuse.recipes.autocast import autocast as autocast
from opfuse.runtime.graphed_step import graphed_step as graphed_step
from opfuse.runtime.graphs import graphed as graphed
from opfuse.runtime.interpret.checkpoint import checkpoint as checkpoint
from opfuse.runtime.offload import offloaded as offloaded
from opfuse.runtime.plans.misses import on_miss as on_miss
from opfuse.runtime.plans.trace import dump as dump
from opfuse.runtime.replay.dispatch import interpreted as interpreted
from opfuse.runtime.weights.cast_cache import kept_weights as kept_weights
from opfuse.tensors.files import from_planes as from_planes
from opfuse.tensors.files import to_planes as to_planes
from opfuse.tensors.masters import master_weights as master_weights
from opfuse.tensors.optimizers import with_masters as with_masters
from opfuse.train.layer_costs import layer_costs as layer_costs
from opfuse.train.memory import memory as memory

__version__: str
RULE_TABLE: str
GROUPS: dict[str, dict[str, str]]
__all__: list[str]
