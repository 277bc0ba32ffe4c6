"""From the chain of a module to the pipeline that runs it, of ops over the module's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from opfuse.convert.chain import ChainStep, TracedChain, chain_of
from opfuse.convert.code import NotRecorded
from opfuse.convert.converted import Converted
from opfuse.convert.guards import Proven
from opfuse.convert.leaves import GATED, NORM_DTYPES, UNGATED, LeafModule, leaf_of, norm_of, obstacle, runs, weight_of
from opfuse.convert.pipeline import PipelineRun, unfit
from opfuse.convert.policy import Policies
from opfuse.convert.record import LEADING, required_arguments
from opfuse.convert.weights import MOST_APART, Weight
from opfuse.core.operation import BasicOperation
from opfuse.errors import number_of
from opfuse.ops.pointwise import AddExtraInput
from opfuse.ops.structure import Identity
from opfuse.recipes import Recipe


@dataclass(eq=False)
class Build:
    """The pipeline of one module, as it is made.

    weights: the modules whose matrices it multiplies with. members: the submodules that it replaces, by path. inlined: members
    whose own chain became a part of this one. names: the ops, for the report. keeps_dtype: behind the first product, which
    begins the chain, all has the dtype that torch.autocast gives that product. dtypes: those in which each leaf was read.
    """

    module: nn.Module
    path: str
    policies: Policies
    run: PipelineRun
    weights: list[Weight] = field(default_factory=list)
    members: dict[str, nn.Module] = field(default_factory=dict)
    inlined: list[nn.Module] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    recipe: Recipe | None = None
    keeps_dtype: bool = True
    dtypes: list[tuple[torch.dtype, ...]] = field(default_factory=list)

    # -- steps -------------------------------------------------------------------------------------------------------------

    def add(self, steps: Sequence[ChainStep], within: str = "") -> None:
        """Add the ops of all ``steps`` of the submodule at the path ``within``. NotRecorded for a submodule that is none."""
        for step in steps:
            match step:
                case "call", path:
                    self._call(_joined_path(within, path))
                case "apply", name:
                    self._op(UNGATED[name](), name)
                case "add", index:
                    self._op(AddExtraInput(), f"add{index}")
                    self.run.extras.append(index)
                case "gate", act, *paths:
                    self._gate(act, [_joined_path(within, path) for path in paths], within)

    def _call(self, path: str) -> None:
        child = self.module.get_submodule(path)
        weight = weight_of(child)
        if weight is not None:
            self._product([path], [self._checked(weight, path)])
            return
        leaf = self._leaf(child, path)
        if leaf is not None:
            self._op(leaf.op, path, leaf)
            return
        if not self.policies.allows(child, self._named(path)):
            raise NotRecorded(f"{path}, for which filter_fn returned False", "submodules that may be converted")
        inner = chain_of(child)
        if len(inner.arguments) != 1:
            raise NotRecorded(f"{path}, which takes {len(inner.arguments)} arguments", "submodules of one argument")
        self.members[path] = child
        self.inlined.append(child)
        self.dtypes.append(() if inner.dtype is None else (inner.dtype,))
        self.add(inner.steps, path)

    def _leaf(self, child: nn.Module, path: str) -> LeafModule | None:
        if (hindered := obstacle(child)) is not None:
            raise NotRecorded(f"{path} with {hindered[0]}", "plain submodules")
        leaf = leaf_of(child)
        if leaf is not None:
            self.members[path] = child
            self.dtypes.append(leaf.dtypes)
            if leaf.made is not None:
                self.run.made.append(leaf.made)
        return leaf

    def _gate(self, act: ChainStep, paths: Sequence[str], within: str) -> None:
        kind, name = act
        if kind == "call":
            at = _joined_path(within, name)
            leaf = self._leaf(self.module.get_submodule(at), at)
            name = leaf.name if leaf is not None else ""
            self.keeps_dtype &= leaf is not None and leaf.keeps_dtype
        if name not in GATED:
            raise NotRecorded(f"a gate of {act}", f"a gate that is one of {', '.join(GATED)}")
        if paths:
            members = [weight_of(self.module.get_submodule(path)) for path in paths]
            if None in members:
                raise NotRecorded(f"{' and '.join(paths)}, of which one is no product", "two products of one input")
            weights = [self._checked(weight, path) for weight, path in zip(members, paths) if weight is not None]
            if not weights[0].agrees(weights[1]) or weights[0].out_features != weights[1].out_features:
                near = f"largest values at most {MOST_APART:g} times apart"
                wanted = f"two products of one size, dtype, bias or none, stored alike, and {near}"
                raise NotRecorded(f"{' and '.join(paths)}, which differ", wanted)
            self._product(paths, weights)
        self._op(GATED[name](), f"{'+'.join(paths) or 'halves'}.{name}")

    # -- ops ---------------------------------------------------------------------------------------------------------------

    def _op(self, op: BasicOperation, name: str, leaf: LeafModule | None = None) -> None:
        self.keeps_dtype &= bool(self.weights) and (leaf is None or leaf.keeps_dtype)
        if isinstance(op, Identity):
            return
        self.run.ops.append(op)
        self.run.names.append(name)
        self.names.append(type(op).__name__)

    def _product(self, paths: Sequence[str], weights: Sequence[Weight]) -> None:
        name = "+".join(paths)
        self.run.multiply(weights, "+".join(map(self._named, paths)), (name, f"{name}.bias"))
        self.weights += weights
        self.members.update(zip(paths, [weight.module for weight in weights]))
        self.names.append("Linear" + (f"×{len(weights)}" if len(weights) > 1 else ""))

    def _checked(self, weight: Weight, path: str) -> Weight:
        """The weight, in the pipeline. NotRecorded if it may not be converted, or under another recipe than those before."""
        choice = self.policies.of(weight.module, self._named(path), in_chain=True)
        if not choice.convert:
            raise NotRecorded(f"{path}: {choice.got}", "products that are converted")
        if (hindered := obstacle(weight.module)) is not None:
            raise NotRecorded(f"{path} with {hindered[0]}", "plain submodules")
        sizes = weight.in_features, weight.out_features
        if choice.recipe is not None and (why := unfit(choice.recipe, weight.module, *sizes)) is not None:
            raise NotRecorded(f"{path} of {why.got}", why.wanted)
        if self.weights and choice.recipe != self.recipe:
            raise NotRecorded(f"{path} under {choice.recipe!r}, others under {self.recipe!r}", "one recipe for the whole chain")
        self.recipe = choice.recipe
        return weight

    def _named(self, path: str) -> str:
        return _joined_path(self.path, path)

    def result(self, chain: TracedChain) -> Converted:
        """The forward of the module. NotRecorded where it multiplies nothing."""
        if not self.weights:
            raise NotRecorded("no product that may be converted", "a product")
        proven = Proven(
            ranks=tuple(len(leading) + 1 for leading in LEADING),
            dtypes=self._dtypes(chain),
            in_autocast=chain.in_autocast and self.keeps_dtype,
            columns=chain.widths[1:],
            views=any(map(views_rows, self.weights)),
        )
        members = {path: member for path, member in self.members.items() if path}
        return Converted(
            self.module,
            self.path,
            arguments=chain.arguments,
            run=self.run,
            members=members,
            recipe=self.recipe,
            proven=proven,
        )

    def _dtypes(self, chain: TracedChain) -> tuple[torch.dtype, ...]:
        """The dtypes in which the forward and all its leaves were read; empty: any. NotRecorded where they share none."""
        known = [dtypes for dtypes in (*self.dtypes, () if chain.dtype is None else (chain.dtype,)) if dtypes]
        common = tuple(dtype for dtype in known[0] if all(dtype in dtypes for dtypes in known)) if known else ()
        if known and not common:  # none at all, where nothing would mean any
            raise NotRecorded(
                f"parts that are known in {' and in '.join(map(str, known))}", "a dtype in which all of it is known"
            )
        return common


def _joined_path(parent: str, name: str) -> str:
    return f"{parent}.{name}".lstrip(".")


def build(module: nn.Module, path: str, policies: Policies) -> tuple[Converted, Build]:
    """The new forward of a module whose forward is a chain with a product, and how it was made. NotRecorded for any other."""
    if "forward" in vars(module):
        raise NotRecorded("one that was put in its place", "the forward of its class")
    chain = chain_of(module)
    made = Build(module, path, policies, PipelineRun(path=path))
    made.add(chain.steps)
    return made.result(chain), made


def build_alone(weight: Weight, path: str, recipe: Recipe | None, shared: Sequence[BasicOperation] = ()) -> Converted:
    """A product that is converted by itself. shared: its ops, if those of a chain stand for it alone, whose scales it shares."""
    run = PipelineRun(path=path)
    if shared:
        run.ops, run.names = [*shared], ["weight", "bias"][: len(shared)]
    else:
        run.multiply([weight], path, ("weight", "bias"))
    argument = required_arguments(weight.module)[:1]
    proven = Proven(linear=True, views=views_rows(weight))
    return Converted(weight.module, path, arguments=argument, run=run, members={}, recipe=recipe, proven=proven)


def views_rows(weight: Weight) -> bool:
    """Whether the forward of a product may view its input as a matrix, as that of a Conv1D, and refuse one of other strides."""
    return not runs(weight.module, nn.Linear)


# -- norms by themselves ---------------------------------------------------------------------------------------------------------

NARROW = 1024
"""Columns below which a norm is left alone: norms of attention heads were not measured."""


def build_norm(module: nn.Module, path: str, recipe: Recipe | None) -> Converted:
    """The new forward of a norm that no pipeline begins with, such as the one before attention. NotRecorded for any other module,
    whose ``got`` is a clause.

    Models write an RMS norm as several sums, casts and products, seven in transformers, each a kernel over the whole tensor. In a
    graph of torch.compile the norm stays as it is: the compiler makes one kernel of it and of the sum before it. But where the
    recipe has the norm's input saved in FP8 it is an op there, too, since a compiler saves it as it is.
    """
    columns = next(p.numel() for p in module._parameters.values() if p is not None)
    if columns < NARROW:
        norm = "norm" in type(module).__name__.lower()  # for the reader alone: to read a forward takes long
        small = f"a norm of {number_of(columns, 'column')}; norms run as ops from {NARROW} on"
        raise NotRecorded(small if norm else "it has no matrix to multiply with", "a wide norm")
    if (hindered := obstacle(module, called=True)) is not None:
        raise NotRecorded(f"it has {hindered[0]}", "a plain norm", hindered[1])
    leaf = norm_of(module)
    if leaf is None:
        raise NotRecorded("its forward computes neither a LayerNorm nor an RMSNorm", "a norm that opfuse has")
    run = PipelineRun([leaf.op], ["norm"], made=[] if leaf.made is None else [leaf.made], path=path)
    saves_less = recipe is not None and recipe.keep == "quantized"
    proven = Proven(ranks=range(1, 65), dtypes=NORM_DTYPES, in_graph=saves_less)
    return Converted(module, path, arguments=required_arguments(module), run=run, members={}, recipe=recipe, proven=proven)
