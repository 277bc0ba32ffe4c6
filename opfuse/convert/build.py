"""From the chain of a module to the parts that run it: ops over its parameters, and submodules that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from opfuse.convert.chain import Add, Apply, CallModule, ChainStep, GatedUnit, NoChain, TracedChain, arguments_of, chain_of
from opfuse.convert.converted import Converted
from opfuse.convert.fits import unfit
from opfuse.convert.leaves import GATED, obstacle, op_of, weight_of
from opfuse.convert.parts import Opaque, PipelineRun
from opfuse.convert.policy import Choice, Policies
from opfuse.convert.probe import UNGATED, activation_of_module
from opfuse.convert.weights import Weight
from opfuse.core.operation import BasicOperation
from opfuse.ops.pointwise import AddExtraInput, Dropout
from opfuse.ops.structure import Identity
from opfuse.recipes import Recipe


@dataclass(eq=False)
class Build:
    """The parts of one module, as they are made.

    weights: the modules whose matrices its runs multiply with. members: the submodules that its runs replace, by path. inlined:
    members whose own chain became a part of this one. told: words for each part, for the report.
    """

    module: nn.Module
    path: str
    policies: Policies
    parts: list[PipelineRun | Opaque] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    members: dict[str, nn.Module] = field(default_factory=dict)
    inlined: list[nn.Module] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    recipe: Recipe | None = None

    # -- steps -------------------------------------------------------------------------------------------------------------

    def add(self, steps: Sequence[ChainStep]) -> None:
        """Make the parts of all ``steps``. NoChain for what is no op and no submodule."""
        for step in steps:
            match step:
                case CallModule():
                    self._call(step.path)
                case Apply():
                    self._op(UNGATED[step.name](), step.name)
                case Add():
                    self._op(AddExtraInput(), f"add{step.index}")
                    self._run().extras.append(step.index)
                case GatedUnit():
                    self._gate(step)

    def _call(self, path: str) -> None:
        child = self.module.get_submodule(path)
        weight = weight_of(child)
        if weight is not None:
            if self._takes(weight, path):
                self._product([path], [weight])
                return
        elif obstacle(child) is None:
            op = op_of(child)
            if op is not None:
                self.members[path] = child
                self._op(op, path, child if isinstance(op, Dropout) else None)
                return
            inner = _inlined(child)
            if inner is not None and self.policies.allows(child, self._named(path)):
                self.members[path] = child
                self.inlined.append(child)
                self.add(inner.within(path))
                return
        self.parts.append(Opaque(child))
        self.told.append(f"({type(child).__name__})")

    def _gate(self, step: GatedUnit) -> None:
        act = step.act
        name = act.name if isinstance(act, Apply) else self._activation(act.path)
        if name not in GATED:
            raise NoChain(f"a gate of {act}", f"a gate that is one of {', '.join(GATED)}")
        paths = [path for path in (step.gate, step.up) if path]
        if paths:
            found = [weight_of(self.module.get_submodule(path)) for path in paths]
            weights = [w for w, path in zip(found, paths) if w is not None and self._takes(w, path)]
            if len(weights) < len(paths) or not weights[0].agrees(weights[1]):
                got = f"{' and '.join(paths)}, of which one is none, or differs"
                raise NoChain(got, "two products of one input, dtype and recipe")
            if weights[0].out_features != weights[1].out_features:
                got = f"{weights[0].out_features} and {weights[1].out_features} columns"
                raise NoChain(got, "a gate as wide as what it gates")
            self._product(paths, weights)
        self._op(GATED[name](), f"{'+'.join(paths) or 'halves'}.{name}")

    def _activation(self, path: str) -> str:
        child = self.module.get_submodule(path)
        if obstacle(child) is not None:
            return ""
        self.members[path] = child
        return activation_of_module(child) or ""

    # -- parts -------------------------------------------------------------------------------------------------------------

    def _run(self) -> PipelineRun:
        """The run at the end of the parts, begun if there is none."""
        if self.parts and isinstance(last := self.parts[-1], PipelineRun):
            return last
        run = PipelineRun(path=self.path)
        self.parts.append(run)
        return run

    def _op(self, op: BasicOperation, name: str, follows: nn.Module | None = None) -> None:
        if isinstance(op, Identity):
            return
        run = self._run()
        run.ops.append(op)
        run.names.append(name)
        if follows is not None:
            run.modes.append((op, follows))
        self.told.append(type(op).__name__)

    def _product(self, paths: Sequence[str], weights: Sequence[Weight]) -> None:
        name = "+".join(paths)
        self._run().multiply(weights, "+".join(map(self._named, paths)), (name, f"{name}.bias"))
        self.weights += weights
        self.members.update(zip(paths, [weight.module for weight in weights]))
        self.told.append("Linear" + (f"×{len(weights)}" if len(weights) > 1 else ""))

    def _takes(self, weight: Weight, path: str) -> bool:
        """Whether a product joins this module. NoChain where its recipe is another one than that of those before."""
        choice = self.policies.of(weight.module, self._named(path))
        if not choice.convert or obstacle(weight.module) is not None or refusal(weight, choice) is not None:
            return False
        if self.weights and choice.recipe != self.recipe:
            raise NoChain(f"{path} under {choice.recipe!r}, others under {self.recipe!r}", "one recipe for the whole chain")
        self.recipe = choice.recipe
        return True

    def _named(self, path: str) -> str:
        return f"{self.path}.{path}".lstrip(".")

    def result(self, chain: TracedChain) -> Converted:
        """The forward of the module. NoChain where it multiplies nothing."""
        if not self.weights:
            raise NoChain("no product that may be converted", "a product")
        recipe, members = self.recipe, {path: member for path, member in self.members.items() if path}
        return Converted(self.module, self.path, arguments=chain.arguments, parts=self.parts, members=members, recipe=recipe)


def build(module: nn.Module, path: str, policies: Policies) -> tuple[Converted, Build]:
    """The new forward of a module whose forward is a chain, and how it was made. NoChain for any other, or without a product."""
    if "forward" in vars(module):
        raise NoChain("a forward of this very object", "the forward of its class")
    chain = chain_of(module)
    made = Build(module, path, policies)
    made.add(chain.steps)
    return made.result(chain), made


def build_alone(weight: Weight, path: str, choice: Choice) -> Converted:
    """A product that is converted by itself."""
    run = PipelineRun(path=path)
    run.multiply([weight], path, ("weight", "bias"))
    names = arguments_of(weight.module)[:1]
    return Converted(weight.module, path, arguments=names, parts=(run,), members={}, recipe=choice.recipe)


def _inlined(module: nn.Module) -> TracedChain | None:
    """The chain of a submodule that may run as a part of the chain around it."""
    try:
        chain = chain_of(module)
    except NoChain:
        return None
    return chain if len(chain.arguments) == 1 else None


def refusal(weight: Weight, choice: Choice) -> tuple[str, str] | None:
    """What the recipe wants of a matrix, and what this one has; None: it can take it, or the recipe is not known yet."""
    return None if choice.recipe is None else unfit(choice.recipe, weight.in_features, weight.out_features)
