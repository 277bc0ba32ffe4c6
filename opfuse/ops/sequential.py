"""Sequential: a list of modules whose runs of fusible ops become pipelines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, SupportsIndex, cast

import torch
from torch import nn

from opfuse.compiler.fuser import CacheInfo, OperationFuser
from opfuse.compiler.lower import check_channels
from opfuse.compiler.registry import RuleSet, checked_rules
from opfuse.core.operation import BasicOperation, FusibleOperation
from opfuse.errors import PipelineError, PipelineIndexError, describe

Run = list[tuple[str, FusibleOperation]]
"""Consecutive fusible ops with their names."""


class Sequential(nn.Module):
    """Runs modules one after another, maximal runs of fusible ops each as one pipeline.

    Behaves as a list: indices, slices, ``append``, ``extend``, ``insert``, ``pop``, ``del``, ``+`` and ``+=``; a dictionary
    names the modules. Extra inputs are consumed run by run in op order; extra outputs follow the main one in op order; those of
    a Sequential inside take their place among them. A channel may start in one run and end in a later one. Every change of the
    list makes its pipelines anew, with empty plan caches. rules: a rule set of its own; None takes the active one at each call.
    """

    def __init__(self, *modules: nn.Module | Mapping[str, nn.Module], rules: RuleSet | None = None) -> None:
        super().__init__()
        self.__dict__["_runs"] = None
        self.__dict__["_rules"] = None if rules is None else checked_rules(rules)
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(modules)  # type: ignore[arg-type]

    @property
    def rules(self) -> RuleSet | None:
        """The rule set of its own, or None."""
        return self.__dict__["_rules"]

    # -- a list of modules -------------------------------------------------------------------------------------------------

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)
        self.__dict__["_runs"] = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # Other attributes change no run: ``train()`` and ``eval()`` set ``training`` and must find the plans again.
        if isinstance(value, nn.Module) or name in self._modules:
            self.__dict__["_runs"] = None

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__["_runs"] = None

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def _name(self, index: SupportsIndex) -> str:
        position = index.__index__()
        if not -len(self) <= position < len(self):
            raise PipelineIndexError(
                describe("Sequential", wanted=f"an index within {len(self)} modules", got=position, cure="check len(model)")
            )
        return list(self._modules)[position]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return type(self)(*list(self)[index], rules=self.rules)
        return self._modules[self._name(index)]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        self._check(module)
        self._modules[self._name(index)] = module
        self.__dict__["_runs"] = None

    def __delitem__(self, index: int | slice) -> None:
        kept = list(self)
        del kept[index]
        self._replace(kept)

    def _replace(self, modules: Iterable[nn.Module]) -> None:
        modules = list(modules)
        self._modules.clear()
        self.extend(modules)

    def _check(self, module: object) -> nn.Module:
        if not isinstance(module, nn.Module):
            raise PipelineError(
                describe("Sequential", wanted="an nn.Module", got=type(module).__name__, cure="pass ops or modules")
            )
        return module

    def append(self, module: nn.Module) -> Sequential:
        """Add a module at the end."""
        taken = (int(name) for name in self._modules if name.isdigit())
        self.add_module(str(max(taken, default=-1) + 1), self._check(module))
        return self

    def extend(self, modules: Iterable[nn.Module]) -> Sequential:
        """Add modules at the end."""
        for module in modules:
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Sequential:
        """Insert a module before ``index``; names are renumbered."""
        modules = list(self)
        modules.insert(index, self._check(module))
        self._replace(modules)
        return self

    def pop(self, index: int = -1) -> nn.Module:
        """Remove and return a module; names are renumbered."""
        modules = list(self)
        self._name(index)
        module = modules.pop(index)
        self._replace(modules)
        return module

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        return type(self)(*self, *other, rules=self.rules)

    def __iadd__(self, other: Iterable[nn.Module]) -> Sequential:
        return self.extend(list(other))

    def __getstate__(self) -> dict[str, Any]:
        # Plans hold live ops; a copy makes its own.
        return {**self.__dict__, "_runs": None}

    # -- running -----------------------------------------------------------------------------------------------------------

    def runs(self) -> tuple[nn.Module | OperationFuser, ...]:
        """The modules, with maximal runs of fusible ops as pipelines. Any change of the list makes them anew."""
        if self.__dict__["_runs"] is None:
            # Torch's tracer, if it is there at all, must not follow the making of pipelines.
            make = torch.compiler.disable(Sequential._make_runs) if "torch._dynamo" in sys.modules else Sequential._make_runs
            self.__dict__["_runs"] = make(self)
        return cast(tuple[nn.Module | OperationFuser, ...], self.__dict__["_runs"])

    def _make_runs(self) -> tuple[nn.Module | OperationFuser, ...]:
        parts: list[nn.Module | Run] = []
        for name, module in self._modules.items():
            if not isinstance(module, FusibleOperation):
                parts.append(cast(nn.Module, module))
            elif parts and isinstance(parts[-1], list):
                parts[-1].append((name, module))
            else:
                parts.append([(name, module)])
        runs = [part for part in parts if isinstance(part, list)]
        check_channels([basic for run in runs for _, op in run for basic in op.basic_ops])
        return tuple(self._pipeline(part, runs) if isinstance(part, list) else part for part in parts)

    def _pipeline(self, run: Run, runs: Sequence[Run]) -> OperationFuser:
        others = [other for other in runs if other is not run]
        return OperationFuser(
            [op for _, op in run],
            rules=self.rules,
            name=f"ops {run[0][0]}..{run[-1][0]}",
            imports={name for other in others for name in _channels(other, "extra_output_channels")},
            exports={name for other in others for name in _channels(other, "extra_input_channels")},
        )

    def forward(
        self, x: torch.Tensor, *extra_inputs: torch.Tensor, op_kwargs: Mapping[Any, Mapping[str, Any]] | None = None
    ) -> Any:
        """The last module's output, or a tuple of it and all extra outputs.

        op_kwargs: keyword arguments for the forward of single ops, by op or by index.
        """
        runs = self.runs()
        kwargs = self._kwargs(op_kwargs or {})
        given = self._given(extra_inputs)
        outputs: list[torch.Tensor] = []
        channels: dict[str, torch.Tensor] = {}
        for run in runs:
            if isinstance(run, Sequential):
                result = run(x, *islice(given, run._wanted()))
                x, *more = result if isinstance(result, tuple) else (result,)
                outputs += more
                continue
            if not isinstance(run, OperationFuser):
                x = run(x)
                continue
            extras = [next(given) if name is None else channels[name] for name in run.extra_inputs]
            result = run(x, *extras, kwargs=[kwargs.get(id(op), {}) for op in run.ops] if kwargs else None)
            x, *more = result if isinstance(result, tuple) else (result,)
            for channel, tensor in zip(run.extra_outputs, more):
                if channel.name is not None:
                    channels[channel.name] = tensor
                if channel.to_caller:
                    outputs.append(tensor)
        return (x, *outputs) if outputs else x

    def _wanted(self) -> int:
        """Extra inputs of a call, with those of each Sequential inside."""
        runs = self.runs()
        own = sum(run.extra_inputs.count(None) for run in runs if isinstance(run, OperationFuser))
        return own + sum(run._wanted() for run in runs if isinstance(run, Sequential))

    def _given(self, extra_inputs: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        wanted = self._wanted()
        if len(extra_inputs) != wanted:
            cure = "pass one tensor for each extra input that has no channel, in op order"
            raise PipelineError(describe("Sequential", wanted=f"{wanted} extra inputs", got=len(extra_inputs), cure=cure))
        return iter(extra_inputs)

    def _kwargs(self, op_kwargs: Mapping[Any, Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
        known = {id(op) for run in self.runs() if isinstance(run, OperationFuser) for op in run.ops} if op_kwargs else set()
        found: dict[int, Mapping[str, Any]] = {}
        for key, value in op_kwargs.items():
            op = self[key] if isinstance(key, int) else key
            if not isinstance(op, BasicOperation) or id(op) not in known:
                wanted, cure = "a BasicOperation of this Sequential, or its index", "pass keyword arguments to basic ops only"
                raise PipelineError(
                    describe("Sequential op_kwargs", wanted=wanted, got=getattr(op, "label", repr(key)), cure=cure)
                )
            found[id(op)] = value
        return found

    def cache_info(self) -> CacheInfo:
        """Plans alive, hits and misses of its pipelines and of every Sequential inside, and why the latest miss was one.

        They count from the last change of the list.
        """
        lists = [module for module in self.modules() if isinstance(module, Sequential)]
        pipelines = [run for inner in lists for run in inner.runs() if isinstance(run, OperationFuser)]
        infos = [run.cache_info() for run in pipelines]
        last = max(pipelines, key=lambda run: run.last_missed, default=None)
        reason = None if last is None else last.cache_info().last_miss
        return CacheInfo(sum(i.plans for i in infos), sum(i.hits for i in infos), sum(i.misses for i in infos), reason)


def _channels(run: Run, side: str) -> Iterator[str]:
    for _, op in run:
        for basic in op.basic_ops:
            yield from (channel.name for channel in getattr(basic, side) if channel.name is not None)
