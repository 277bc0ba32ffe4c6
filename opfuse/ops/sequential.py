"""Sequential: a list of modules whose runs of fusible ops become pipelines."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex, cast

import torch
from torch import nn

from opfuse.compiler.lower import check_channels
from opfuse.compiler.plan import PlanKey
from opfuse.compiler.registry import RuleSet, checked_rules
from opfuse.core.operation import BasicOperation, FusibleOperation, cure_of_extras
from opfuse.core.tracers import check_exported, check_proxy
from opfuse.core.watched import Enrolled, WatchedModule, prepared
from opfuse.domains import INTEGER
from opfuse.errors import OpfuseWarning, PipelineError, PipelineIndexError, PipelineTypeError, describe, number_of
from opfuse.recipes import current_recipe
from opfuse.runtime.fuser import OperationFuser
from opfuse.runtime.plans.cache_info import CacheInfo, info_of
from opfuse.tensors.groups import listed_splits

NamedOps = list[tuple[str, FusibleOperation]]
"""Consecutive fusible ops with their names."""


class _RunsOfModules:
    """The runs that were made of a list of modules, and the epoch of changes at which they were last found to hold."""

    def __init__(self, modules: Sequence[nn.Module | None], runs: tuple[nn.Module | OperationFuser, ...]) -> None:
        self.modules = modules
        self.runs = runs
        self.called = self._called()
        self.unquantized = _unquantized(modules)
        self.epoch = WatchedModule.epoch

    def _called(self) -> list[bool]:
        return [not isinstance(module, FusibleOperation) or not module.joins for module in self.modules]

    def stands(self) -> bool:
        """Whether each module is still called, or run in a pipeline, as when the runs were made."""
        self.epoch = WatchedModule.epoch
        return self.called == self._called()


def _unquantized(modules: Iterable[nn.Module | None]) -> str:
    """The first ``nn.Linear`` of a list in which no recipe quantizes anything; empty where there is none."""
    plain = ""
    for module in modules:
        for part in () if module is None else module.modules():
            for op in part.basic_ops if isinstance(part, FusibleOperation) else ():
                if op.quantized_roles():
                    return ""
            if isinstance(part, nn.Linear) and not plain:
                plain = repr(part)
    return plain


def _callable(name: str, module: nn.Module) -> nn.Module:
    """A module that is called. PipelineError for an op with a ``forward`` of its own that takes or makes extra tensors."""
    if isinstance(module, FusibleOperation) and (module.num_extra_inputs or module.num_extra_outputs):
        wanted, cure = "no forward of its own on an op with extra tensors", "override op_forward and op_backward instead"
        raise PipelineError(describe(f"Sequential module {name}", wanted=wanted, got=module.label, cure=cure))
    return module


def _check_owned_parameters(module: nn.Module) -> None:
    """PipelineError for an op whose parameters belong to a module that is not in ``module``: nobody would find them there."""
    if "_modules" not in vars(module):
        wanted, cure = "the state of an nn.Module", "call super().__init__() first in its constructor"
        raise PipelineError(describe(f"class {type(module).__name__}", wanted=wanted, got="none", cure=cure))
    held = set(module.modules())
    for lent in held:
        if isinstance(lent, BasicOperation) and lent.owner not in held:
            owner, names = lent.owner, " and ".join(lent.borrows) or "parameters"
            got = f"{lent.label}, whose {names} a {type(owner).__name__} outside of the list holds"
            cure = f"put that {type(owner).__name__} into the list, or a {type(lent).__name__}(...) made for it"
            raise PipelineError(describe("Sequential", wanted="ops with their parameters", got=got, cure=cure))


class Sequential(Enrolled):
    """Runs modules one after another, maximal runs of fusible ops each as one pipeline.

    Behaves as a list: indices, slices, ``append``, ``extend``, ``insert``, ``pop``, ``del``, ``+`` and ``+=``; a dictionary
    names the modules. Extra inputs are consumed run by run in op order; extra outputs follow the main one in op order; those of
    a Sequential inside take their place among them. Splits may be lists of ints. A channel may start in one run and end in a
    later one. Every change of the list makes its pipelines anew, with empty plan caches. rules: a rule set of its own; None takes
    the active one at each call.
    """

    _runs: _RunsOfModules | None

    def __init__(self, *modules: nn.Module | Mapping[str, nn.Module], rules: RuleSet | None = None) -> None:
        super().__init__()
        self.__dict__["_runs"] = None
        self.__dict__["_path"] = ""
        self.__dict__["_rules"] = None if rules is None else checked_rules(rules)
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self._add_named(name, self._check(module))
        else:
            self.extend(modules)  # type: ignore[arg-type]

    @property
    def rules(self) -> RuleSet | None:
        """The rule set of its own, or None."""
        rules: RuleSet | None = self.__dict__["_rules"]
        return rules

    # -- a list of modules -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def _name(self, index: SupportsIndex) -> str:
        position = INTEGER.checked("Sequential index", index, PipelineTypeError)
        if not -len(self) <= position < len(self):
            wanted = f"an index within {number_of(len(self), 'module')}"
            raise PipelineIndexError(describe("Sequential", wanted=wanted, got=position, cure="check len(model)"))
        return str(list(self._modules)[position])

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(*list(self)[index], rules=self.rules)
        return self._modules[self._name(index)]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self._modules[self._name(index)] = self._check(module)

    def __delitem__(self, index: int | slice) -> None:
        kept = list(self)
        if not isinstance(index, slice):
            self._name(index)
        del kept[index]
        self._replace(kept)

    def _replace(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._modules.clear()
        self.extend(modules)

    def _check(self, module: object) -> nn.Module:
        if not isinstance(module, nn.Module):
            got, cure = type(module).__name__, "pass ops or modules"
            if isinstance(module, type):
                got, cure = f"the class {module.__name__}", f"write {module.__name__}(...)"
            raise PipelineError(describe("Sequential", wanted="an nn.Module", got=got, cure=cure))
        _check_owned_parameters(module)
        return module

    def _add_named(self, name: str, module: nn.Module) -> None:
        try:
            self.add_module(name, module)
        except (KeyError, TypeError) as error:
            wanted, cure = "a name that a submodule can have", f"give it another name: {error.args[0]}"
            raise PipelineError(describe("Sequential", wanted=wanted, got=repr(name), cure=cure)) from error

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end."""
        taken = (int(name) for name in self._modules if name.isdigit())
        self.add_module(str(max(taken, default=-1) + 1), self._check(module))
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in self._listed(modules):
            self.append(module)
        return self

    def _listed(self, modules: object) -> list[Any]:
        if not isinstance(modules, Iterable):
            got, cure = type(modules).__name__, "pass several modules in a list, or one to append()"
            raise PipelineTypeError(describe("Sequential", wanted="a list of modules", got=got, cure=cure))
        return list(modules)

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Insert a module before ``index``; names are renumbered."""
        modules = list(self)
        modules.insert(INTEGER.checked("Sequential index", index, PipelineTypeError), self._check(module))
        self._replace(modules)
        return self

    def pop(self, index: int | slice = -1) -> Any:
        """Remove and return a module, or for a slice a Sequential of those removed; names are renumbered."""
        removed = self[index]
        del self[index]
        return removed

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return type(self)(*self, *self._listed(other), rules=self.rules)

    def __iadd__(self, other: Iterable[nn.Module]) -> Sequential:
        return self.extend(other)

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold live ops; a copy makes its own.
        return {name: value for name, value in self.__dict__.items() if name != "ticket"} | {"_runs": None}

    # -- running -----------------------------------------------------------------------------------------------------------

    def runs(self) -> tuple[nn.Module | OperationFuser, ...]:
        """The modules, with maximal runs of fusible ops as pipelines. Any change of the list makes them anew."""
        made: _RunsOfModules | None = self._runs
        modules = [*self._modules.values()]
        if made is None or made.modules != modules or (made.epoch != WatchedModule.epoch and not made.stands()):
            made = self.__dict__["_runs"] = _RunsOfModules(modules, self._make_runs())
        return made.runs

    def get_ready(self) -> None:
        """Make the pipelines of this Sequential and of every one inside, which dynamo reads."""
        for module in self.modules():
            if isinstance(module, Sequential):
                module.runs()

    def resembles(self, other: Sequential) -> bool:
        """Whether it has the same classes of modules."""
        return [*map(type, self.modules())] == [*map(type, other.modules())]

    def _make_runs(self) -> tuple[nn.Module | OperationFuser, ...]:
        parts: list[nn.Module | NamedOps] = []
        for name, module in self._modules.items():
            self._check(module)  # torch lets attributes in
            if not isinstance(module, FusibleOperation) or not module.joins:
                parts.append(_callable(name, cast(nn.Module, module)))
            elif parts and isinstance(parts[-1], list):
                parts[-1].append((name, module))
            else:
                parts.append([(name, module)])
        runs = [part for part in parts if isinstance(part, list)]
        check_channels([basic for run in runs for _, op in run for basic in op.basic_ops])
        return tuple([self._pipeline(part, runs) if isinstance(part, list) else part for part in parts])

    def _pipeline(self, run: NamedOps, runs: Sequence[NamedOps]) -> OperationFuser:
        names, members = zip(*run)
        imports: set[str] = set()
        exports: set[str] = set()
        for other in runs:
            if other is not run:
                imports.update(_channels(other, "extra_output_channels"))
                exports.update(_channels(other, "extra_input_channels"))
        before = self._last_key(names[0])
        name = f"ops {names[0]}..{names[-1]}"
        fuser = OperationFuser(members, rules=self.rules, name=name, names=names, before=before, imports=imports, exports=exports)
        fuser.path = self.__dict__["_path"]
        return fuser

    def _last_key(self, name: str) -> PlanKey | None:
        """The last key of the pipeline that began at the module ``name`` before the list changed."""
        made: _RunsOfModules | None = self.__dict__["_runs"]
        for run in () if made is None else made.runs:
            if isinstance(run, OperationFuser) and name in run.names:
                return None if run.cache.last_miss is None else cast(PlanKey, run.cache.last_miss.key)
        return None

    def named_modules(self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
        # Whoever walks the whole model says where this module stands in it.
        if len(prefix) > len(self.__dict__["_path"]):
            self.__dict__["_path"] = prefix
            made: _RunsOfModules | None = self.__dict__["_runs"]
            for run in made.runs if made is not None else ():
                if isinstance(run, OperationFuser):
                    run.path = prefix
        return super().named_modules(memo, prefix, remove_duplicate)

    def forward(
        self, x: torch.Tensor, *extra_inputs: torch.Tensor, op_kwargs: Mapping[Any, Mapping[str, Any]] | None = None
    ) -> Any:
        """The last module's output, or a tuple of it and all extra outputs.

        op_kwargs: keyword arguments for the forward of single ops, by op or by index.
        """
        compiling = torch.compiler.is_compiling()
        if compiling:
            check_exported("Sequential")
            prepared(self.ticket)  # no tracer must follow the making of pipelines
        elif type(x) is not torch.Tensor:
            check_proxy("Sequential", x)
        runs = self.runs()
        if not compiling and self.__dict__["_runs"].unquantized and current_recipe() is not None:
            self._warn_unquantized()
        kwargs = {} if op_kwargs is None else self._kwargs(op_kwargs)
        if len(extra_inputs) != (wanted := _num_extra_inputs(runs)):
            raise self._another_number(wanted, len(extra_inputs))
        extras = iter([listed_splits(e, where="Sequential") if isinstance(e, (list, tuple)) else e for e in extra_inputs])
        outputs: list[torch.Tensor] = []
        channels: dict[str, torch.Tensor] = {}
        for run in runs:
            if isinstance(run, OperationFuser):
                inputs = [next(extras) if name is None else channels[name] for name in run.extra_inputs]
                result = run(x, *inputs, kwargs=kwargs.get(id(run)) if kwargs else None)
                x, *more = result if isinstance(result, tuple) else (result,)
                for channel, tensor in zip(run.extra_outputs, more):
                    if channel.name is not None:
                        channels[channel.name] = tensor
                    if channel.to_caller:
                        outputs.append(tensor)
            elif isinstance(run, Sequential):
                result = run(x, *itertools.islice(extras, _num_extra_inputs(run.runs())))
                x, *more = result if isinstance(result, tuple) else (result,)
                outputs += more
            else:
                x = run(x)
        if unread := [*extras]:  # a module has changed the list since they were counted
            raise self._another_number(len(extra_inputs) - len(unread), len(extra_inputs))
        return (x, *outputs) if outputs else x

    def _warn_unquantized(self) -> None:
        """One OpfuseWarning for modules of torch that stay in high precision under a recipe."""
        where, got = f"{self.__dict__['_path'] or 'Sequential'} under {current_recipe()!r}", self.__dict__["_runs"].unquantized
        self.__dict__["_runs"].unquantized = ""
        cure = "use opfuse.ops.Linear, which has the same parameters and state dict"
        message = describe(where, wanted="an op that a recipe quantizes", got=f"{got}, which stays as it is", cure=cure)
        warnings.warn(message, OpfuseWarning, stacklevel=5)

    def _basic_ops(self) -> Iterator[BasicOperation]:
        for run in self.runs():
            if isinstance(run, (OperationFuser, Sequential)):
                yield from run.ops if isinstance(run, OperationFuser) else run._basic_ops()

    def _another_number(self, wanted: int, got: int) -> PipelineError:
        cure = cure_of_extras(self._basic_ops())
        return PipelineError(describe("Sequential", wanted=number_of(wanted, "extra input"), got=got, cure=cure))

    def _kwargs(self, op_kwargs: Mapping[Any, Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
        """The keyword arguments of each op of a run, by the run's identity; an op stands for all its places, an index for one."""
        if not isinstance(op_kwargs, Mapping):
            got, cure = type(op_kwargs).__name__, "pass {op: {...}}, by op or by index"
            raise PipelineTypeError(describe("Sequential op_kwargs", wanted="a mapping", got=got, cure=cure))
        if not op_kwargs:
            return {}
        runs = [run for run in self.runs() if isinstance(run, OperationFuser)]
        by_run: dict[int, list[Mapping[str, Any]]] = {id(run): [{}] * len(run.ops) for run in runs}
        for key, value in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            places = [
                (run, i) for run in runs for i, basic in enumerate(run.ops) if basic is op and isinstance(op, BasicOperation)
            ]
            if not places:
                wanted, cure = "a BasicOperation of this Sequential, or its index", "pass keyword arguments to basic ops only"
                got = getattr(op, "label", repr(key))
                raise PipelineError(describe("Sequential op_kwargs", wanted=wanted, got=got, cure=cure))
            if isinstance(key, int):
                name = self._name(key)
                places = [(run, i) for run, i in places if run.starts.get(name) == i]
            for run, i in places:
                by_run[id(run)][i] = value
        return by_run

    def cache_info(self) -> CacheInfo:
        """Plans alive, hits and misses of its pipelines and of every Sequential inside, and why the latest miss was one.

        Also how many programs there are, and what they take. They count from the last change of the list.
        """
        lists = [module for module in self.modules() if isinstance(module, Sequential)]
        pipelines = [run for inner in lists for run in inner.runs() if isinstance(run, OperationFuser)]
        return info_of(pipelines)


def _num_extra_inputs(runs: Iterable[nn.Module | OperationFuser]) -> int:
    """Extra inputs of a call, with those of each Sequential inside."""
    count = 0
    for run in runs:
        if isinstance(run, OperationFuser):
            count += run.extra_inputs.count(None)
        elif isinstance(run, Sequential):
            count += _num_extra_inputs(run.runs())
    return count


def _channels(run: NamedOps, side: str) -> Iterator[str]:
    for _, op in run:
        for basic in op.basic_ops:
            yield from (channel.name for channel in getattr(basic, side) if channel.name is not None)
