"""What the pipelines of a model keep for later calls, by the module that runs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from opfuse.core.operation import FusibleOperation
from opfuse.core.protocol import runs_ops
from opfuse.core.watched import Enrolled
from opfuse.errors import PipelineError, describe, number_of
from opfuse.runtime.fuser import OperationFuser
from opfuse.runtime.plans.cache_info import CacheInfo, info_of


class ModelCaches(NamedTuple):
    """Counts of all pipelines of a model, and those of each module that runs some, by its path: "" for the model itself."""

    total: CacheInfo
    by_path: Mapping[str, CacheInfo]

    def __str__(self) -> str:
        nouns = {"plans": "plan", "hits": "hit", "misses": "miss", "programs": "program"}
        rows = [(path or "(itself)", info) for path, info in self.by_path.items()]
        return "\n".join(
            f"{path}: {', '.join(number_of(getattr(info, field), noun) for field, noun in nouns.items())}"
            for path, info in [*rows, ("total", self.total)]
        )


def cache_info(model: nn.Module) -> ModelCaches:
    """Plans, programs, hits and misses of every pipeline in ``model``, in all and by path, and why the latest miss was one.

    model: a ``Sequential``, an op, a model that :func:`opfuse.fuse_` has converted, or any module around these. A module counts
    its own pipelines, not those of modules inside of it. PipelineError for a model without any.
    """
    found = dict(_pipelines(model)) if isinstance(model, nn.Module) else {}
    if not found:
        cure = "pass a model that is made of opfuse.ops, or that fuse_ has converted"
        raise PipelineError(describe("cache_info", wanted="a module with ops of opfuse", got=type(model).__name__, cure=cure))
    every = dict.fromkeys(run for runs in found.values() for run in runs)
    return ModelCaches(info_of(every), {path: info_of(runs) for path, runs in found.items()})


def _pipelines(model: nn.Module) -> Iterator[tuple[str, list[OperationFuser]]]:
    """The path of each module that runs pipelines, and these; none yet for an op and a converted module that nobody called."""
    inside = {id(op) for module in model.modules() if _is_list(module) for op in module.children()}
    for path, module in model.named_modules():
        if (converted := runs_ops(module)) is not None:
            yield path, [run.fuser for run in converted.runs if run.fuser is not None]
        elif isinstance(module, FusibleOperation):
            if "_fuser" in vars(module) or id(module) not in inside:
                yield path, [vars(module)["_fuser"]] if "_fuser" in vars(module) else []
        elif _is_list(module):
            yield path, [run for run in module.runs() if isinstance(run, OperationFuser)]


def _is_list(module: nn.Module) -> bool:
    """Whether it is a list of ops: ``ops.Sequential``."""
    return isinstance(module, Enrolled) and not isinstance(module, FusibleOperation)
