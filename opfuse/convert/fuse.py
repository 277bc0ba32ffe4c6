"""``fuse_`` converts a model in place to train through opfuse; ``unfuse_`` undoes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Never, TypeVar

from torch import nn
from torch.nn.parameter import is_lazy

from opfuse.convert.build import Build, build, build_alone, refusal
from opfuse.convert.code import NotRecorded
from opfuse.convert.converted import OWN, Converted, converted
from opfuse.convert.experts import Experts, build_experts, experts_of
from opfuse.convert.leaves import obstacle, weight_of, why_refused
from opfuse.convert.norms import lone_norm, why_kept
from opfuse.convert.pipeline import unfit
from opfuse.convert.policy import Filter, Policies, Policy
from opfuse.convert.report import NONE, Conversion, Report
from opfuse.convert.siblings import siblings
from opfuse.convert.states import States
from opfuse.convert.weights import Weight
from opfuse.core.operation import FusibleOperation
from opfuse.domains import BOOLEAN, checked_arguments
from opfuse.errors import ConversionError, describe, nearest

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def fuse_(
    model: nn.Module,
    recipe: object = None,
    *,
    filter_fn: Filter | None = None,
    policy: Policy | None = None,
    pack: bool = False,
    **unknown: Never,
) -> Report:
    """Convert ``model``, in place, to compute under ``recipe``; :func:`unfuse_` undoes it. Returns a report on each module.

    Modules whose forward is a chain of products, activations, norms, dropouts and sums run as pipelines; other products run
    alone. Submodules, parameters (the same objects), their names and the state dict do not change, so existing optimizers keep
    working, and ``save_pretrained`` writes an ordinary checkpoint. Without a recipe a converted module computes what it did
    before, bit for bit.

    recipe: that of every converted module outside of ``autocast``; inside, the region's recipe counts. None: high precision
    outside of regions. policy: recipes of single modules, as a mapping from patterns of paths (a pattern covers everything below
    the path it matches, ``layers.-1`` is the last layer, the first match counts), or as a function of module and path that
    returns a recipe, None for modules that stay as they are, or "default". :func:`opfuse.load_policy` reads recipe and policy
    from YAML. filter_fn: False for a module and its path leaves that module alone, and asks for its submodules. Output heads and
    routers stay in high precision unless the policy names them.

    pack: place the weights of one product (gate and up; query, key and value) side by side in memory, so that calls do not copy
    them. Parameters stay the same objects; if they are moved or copied later, each has its own memory again, and calls copy.

    A model that is fused already is converted again. ConversionError if nothing could be converted, if a pattern matches nothing,
    and for another keyword.
    """
    if unknown:
        name, known = next(iter(unknown)), ("recipe", "filter_fn", "policy", "pack")
        cure = f"write one of {', '.join(known)}"
        raise ConversionError(describe("fuse_", wanted="keywords that it has", got=f"{name!r}{nearest(name, known)}", cure=cure))
    if not isinstance(model, nn.Module):
        cure = "pass the model itself"
        raise ConversionError(describe("fuse_", wanted="an nn.Module", got=type(model).__name__, cure=cure))
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        cure = "call the model once, on what it is made for, and then fuse_"
        raise ConversionError(describe(f"fuse_ {lazy}", wanted="a shape", got="a parameter without one", cure=cure))
    BOOLEAN.checked("fuse_ pack", pack, ConversionError)
    before = _converted(model)
    _restore(before)
    try:
        walk = _Walk(Policies(model, recipe, policy, filter_fn))
        walk.visit(model, "")
        if walk.made:
            walk.convert_norms()
        walk.policies.check_used(name for name, _ in model.named_modules())
        if not walk.made:
            raise _nothing(model, [*walk.entries.values()])
    except BaseException:
        _install(before)
        raise
    _carry_over(before, walk.made)
    _install(walk.made)
    if pack:
        for made in dict.fromkeys(each for forward in walk.made.values() for each in forward.made):
            made.pack()
    return Report(tuple(walk.entries.values()))


@checked_arguments(ConversionError)
def unfuse_(model: AnyModule) -> AnyModule:
    """Undo :func:`fuse_`, in place: every module gets its own forward back.

    ConversionError if no module is converted, or if one was given another forward since.
    """
    found = _converted(model)
    if not found:
        got, cure = f"none in a {type(model).__name__}", "call opfuse.fuse_ first"
        raise ConversionError(describe("unfuse_", wanted="modules that fuse_ has converted", got=got, cure=cure))
    _restore(found)
    return model


def _converted(model: nn.Module) -> dict[nn.Module, Converted]:
    """The modules that are converted. ConversionError if one has another forward by now, which may call that of fuse_."""
    found = {module: own for module in model.modules() if (own := converted(module)) is not None}
    for path, module in model.named_modules():
        if module not in found and OWN in vars(module) and "forward" in vars(module):
            where, got = f"{path or type(module).__name__}.forward", f"{vars(module)['forward']!r:.80}, put over it"
            cure = "undo what replaced it first (of accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
            raise ConversionError(describe(where, wanted="the one that fuse_ gave", got=got, cure=cure))
    return found


def _install(made: dict[nn.Module, Converted]) -> None:
    for module, forward in made.items():
        vars(module).update({"forward": forward.forward, OWN: forward})
        States(module, forward.products).install()
    for forward in made.values():
        forward.guard.forwards = {path: converted(member) for path, member in forward.guard.members.items()}


def _carry_over(before: dict[nn.Module, Converted], made: dict[nn.Module, Converted]) -> None:
    """Have ops that stand for what ops stood for before go on with their delayed scales."""
    for module, forward in made.items():
        earlier = before[module].products if module in before else {}
        for name, op in forward.products.items():
            if name in earlier and earlier[name].spec == op.spec:
                op.__dict__["quantizer_states"] = earlier[name].quantizer_states


def _restore(made: dict[nn.Module, Converted]) -> None:
    for module in made:
        for name in ("forward", OWN):
            vars(module).pop(name, None)
        States.remove(module)


def _nothing(model: nn.Module, entries: list[Conversion]) -> ConversionError:
    first = next((entry for entry in entries if entry.status in ("refused", "kept") and entry.weights), None)
    why = first and f"; {first.path or 'the model itself'} wants {first.wanted}, got {first.got}"
    got = f"none in a {type(model).__name__}{why or ''}"
    cure = first.cure if first and first.cure != NONE else "pass a model with linear layers"
    return ConversionError(describe("fuse_", wanted="modules that can be converted", got=got, cure=cure))


class _Walk:
    """Visits each module once, from the outside in.

    A module whose forward is a chain runs as one pipeline; the products in it are converted alone as well, for calls that the
    pipeline is not for. inlined: modules whose own chain is a part of another one. taken: all modules that chains replace. lone:
    modules whose own parameters are vectors, such as norms, by path; they are converted last.
    """

    def __init__(self, policies: Policies) -> None:
        self.policies = policies
        self.entries: dict[str, Conversion] = {}
        self.made: dict[nn.Module, Converted] = {}
        self.seen: set[nn.Module] = set()
        self.inlined: set[nn.Module] = set()
        self.taken: set[nn.Module] = set()
        self.lone: list[tuple[str, nn.Module]] = []

    def visit(self, module: nn.Module, path: str) -> None:
        """Convert ``module``, or what is in it."""
        if module in self.seen:
            return
        self.seen.add(module)
        if isinstance(module, FusibleOperation):
            self._ours(module, path)
            return
        weight, experts = weight_of(module), experts_of(module)
        if weight is not None:
            self._alone(weight, path)
            return
        if experts is not None:
            self._experts(experts, path)
            return
        if module._modules and module not in self.inlined and self.policies.allows(module, path):
            self._block(module, path)
        self._own(module, path)
        for name, child in module.named_children():
            self.visit(child, f"{path}.{name}".lstrip("."))
        if self.policies.allows(module, path):
            self._join(module)

    def _block(self, module: nn.Module, path: str) -> None:
        try:
            made, how = build(module, path, self.policies)
        except NotRecorded as no:
            if not _matrices(module) and any(weight_of(child) is not None for child in module.children()):
                self._add(module, path, "parts", wanted=no.wanted, got=no.got, cure="its submodules are converted one by one")
            return
        self.made[module] = made
        self.inlined.update(how.inlined)
        self.taken.update(how.members.values())
        self.seen.update(self.taken - self.inlined)
        self._convert_alone(how)
        weights = sum(_elements(weight) for weight in how.weights)
        self._add(module, path, "fused", became=" → ".join(how.names), recipe=_recipe_name(made), weights=weights)

    def _convert_alone(self, how: Build) -> None:
        """Convert the products of a chain for calls that it is not for. One that is alone there has the same scales here."""
        names = {member: path for path, member in how.members.items()}
        for weight in how.weights:
            if weight.module in self.made or weight.module is how.module:
                continue
            name = names[weight.module]
            ops = [op for at, op in zip(how.run.names, how.run.ops) if at in (name, f"{name}.bias") and op.owner is weight.module]
            self.made[weight.module] = build_alone(weight, f"{how.path}.{name}".lstrip("."), how.recipe, ops)

    def _join(self, module: nn.Module) -> None:
        """Join products of one tensor."""
        for group in siblings(module, {m: made for m, made in self.made.items() if m not in self.taken}):
            first, *others = group
            names = [each.path.rpartition(".")[2] for each in group]
            weights = sum(self.entries[each.path].weights for each in group)
            self._update(first.path, became=f"Linear×{len(group)}", weights=weights)
            for other in others:
                self._update(other.path, status="joined", became=f"in {names[0]}", weights=0)
            self.made.update({each.module: each for each in group})

    def _update(self, path: str, **fields: Any) -> None:
        self.entries[path] = replace(self.entries[path], **fields)

    def convert_norms(self) -> None:
        """Convert the norms that no pipeline begins with, each alone."""
        for path, module in self.lone:
            choice = self.policies.of(module, path)
            made = lone_norm(module, path, choice.recipe) if choice.convert else None
            if made is not None:
                self.made[module], became = made
                self._update(path, status="fused", became=became, recipe=_recipe_name(made[0]))
            elif choice.convert:
                wanted, got, cure = why_kept(module)
                self._update(path, wanted=wanted, got=got, cure=cure or NONE)
            else:
                self._update(path, wanted="to be converted", got=choice.got, cure=choice.cure)

    def _alone(self, weight: Weight, path: str) -> None:
        module, elements = weight.module, _elements(weight)
        choice, hindered = self.policies.of(module, path), obstacle(module, called=True)
        if not choice.convert:
            wanted = "to be converted"
            self._add(module, path, "kept", weights=elements, wanted=wanted, got=choice.got, cure=choice.cure)
        elif hindered is not None:
            got, cure = hindered
            self._add(module, path, "refused", weights=elements, wanted="a plain product", got=got, cure=cure)
        elif (why := refusal(weight, choice)) is not None:
            wanted, got = why
            self._add(module, path, "refused", weights=elements, wanted=wanted, got=got, cure=OTHER)
        else:
            self.made[module] = made = build_alone(weight, path, choice.recipe)
            self._add(module, path, "fused", became="Linear", recipe=_recipe_name(made), weights=elements)

    def _experts(self, experts: Experts, path: str) -> None:
        module, (_, width, inner) = experts.module, experts.sizes
        choice, hindered = self.policies.of(module, path), obstacle(module, called=True)
        told: dict[str, Any] = {"weights": experts.elements, "wanted": "to be converted"}
        if not choice.convert:
            self._add(module, path, "kept", **told, got=choice.got, cure=choice.cure)
        elif hindered is not None:
            self._add(module, path, "refused", **told, got=hindered[0], cure=hindered[1])
        elif choice.recipe is not None and (why := unfit(choice.recipe, width, inner)) is not None:
            self._add(module, path, "refused", **{**told, "wanted": why[0]}, got=why[1], cure=OTHER)
        else:
            self.made[module] = made = build_experts(experts, path, choice.recipe)
            names = " → ".join(type(op).__name__ for op in made.run.ops)
            self._add(module, path, "fused", became=names, recipe=_recipe_name(made), weights=experts.elements)

    def _ours(self, module: FusibleOperation, path: str) -> None:
        """Tell of an op of opfuse, which a model may have as well."""
        if elements := sum(p.numel() for p in module.parameters() if p.dim() > 1):
            got, cure = "an op of opfuse already", "run it inside of opfuse.autocast(recipe=…)"
            self._add(module, path, "kept", weights=elements, wanted="a module of torch", got=got, cure=cure)

    def _own(self, module: nn.Module, path: str) -> None:
        """Tell of a module with parameters of its own that no row knows."""
        own = [p for p in module._parameters.values() if p is not None]
        if not own or module in self.made or module in self.inlined:
            return
        elements = _matrices(module)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            self._add(module, path, "kept", wanted="a product", got="an embedding, which multiplies nothing", cure=NONE)
        elif not elements and not module._modules:
            self.lone.append((path, module))
            self._add(module, path, "kept")
        elif elements and not (choice := self.policies.of(module, path)).convert:
            self._add(module, path, "kept", weights=elements, wanted="a product to convert", got=choice.got, cure=choice.cure)
        elif (why := why_refused(module)) is not None:
            wanted, got, cure = why
            self._add(module, path, "refused", weights=elements, wanted=wanted, got=got, cure=cure)
        else:
            names = ", ".join(name for name, p in module._parameters.items() if p is not None)
            self._add(
                module, path, "kept", wanted="a linear layer", got=f"{names} of its own, which its forward reads", cure=NONE
            )

    def _add(self, module: nn.Module, path: str, status: Any, **fields: Any) -> None:
        self.entries.setdefault(path, Conversion(path, type(module).__name__, status, **fields))


OTHER = "give it another recipe in the policy, or other sizes"


def _matrices(module: nn.Module) -> int:
    """Elements of the parameters of its own that are no vectors."""
    return sum(p.numel() for p in module._parameters.values() if p is not None and p.dim() > 1)


def _elements(weight: Weight) -> int:
    return weight.in_features * weight.out_features


def _recipe_name(made: Converted) -> str:
    return "autocast's" if made.recipe is None else type(made.recipe).__name__
