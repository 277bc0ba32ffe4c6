"""``fuse_`` converts a model in place to train through opfuse; ``unfuse_`` undoes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Never, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from opfuse.convert.build import build, build_alone, build_norm
from opfuse.convert.code import NotRecorded
from opfuse.convert.converted import Converted, converted
from opfuse.convert.evaluation import evaluation_regions
from opfuse.convert.experts import Routed, build_experts, experts_of
from opfuse.convert.given import FORWARD, OWN, GivenForward, given_forward
from opfuse.convert.head_loss import LossKind, ModelLoss, head_of_loss, model_loss, unfit_in_chunks
from opfuse.convert.leaves import NORM_DTYPES, asked_once, obstacle, weight_of, why_refused
from opfuse.convert.pipeline import unfit
from opfuse.convert.policy import ADAPTERS, Choice, Filter, Policies, Policy
from opfuse.convert.report import ANY, NONE, Conversion, Report, Status
from opfuse.convert.row_tiles import remove_row_tiles
from opfuse.convert.siblings import siblings
from opfuse.convert.weights import Weight
from opfuse.core.operation import FusibleOperation
from opfuse.domains import BOOLEAN, Domain, checked_arguments, domain_of
from opfuse.errors import ConversionError, describe, listed, nearest, with_article
from opfuse.interchange.stored_modules import (
    COMPRESSED,
    Ids,
    decompress_the_rest,
    hold_arrays,
    hold_stored,
    is_whole,
    stored_arrays,
    stored_kind,
    why_not_held,
)

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_LOSS: Domain = domain_of(LossKind)  # type: ignore[assignment]


def fuse_(
    model: nn.Module,
    recipe: object = None,
    *,
    filter_fn: Filter | None = None,
    policy: Policy | None = None,
    pack: bool = False,
    loss: LossKind = "own",
    **unknown: Never,
) -> Report:
    """Convert ``model``, in place, to compute under ``recipe``; :func:`unfuse_` undoes it. Returns a report on each module.

    Modules whose forward is a chain of products, activations, norms, dropouts and sums run as pipelines; other products run
    alone. Submodules, parameters (the same objects), their names and the state dict do not change, so existing optimizers keep
    working, and ``save_pretrained`` writes an ordinary checkpoint. Without a recipe a converted module computes what it did
    before, bit for bit. One exception: the FP8 matrices of transformers' ``FP8Linear`` and ``FP8Experts`` become parameters that
    are stored quantized, over the same bytes, which products read as they are; make optimizers afterwards. State dicts have the
    arrays under the names of before.

    recipe: that of every converted module outside of ``autocast``; inside, the region's recipe counts. None: high precision
    outside of regions. policy: recipes of single modules, as a mapping from patterns of paths (a pattern covers everything below
    the path it matches, ``layers.-1`` is the last layer, the first match counts), or as a function of module and path that
    returns a recipe, None for modules that stay as they are, or "default"; or "auto", which leaves those in high precision that
    :func:`opfuse.advise` says to, and the first and last layer of four or more. :func:`opfuse.load_policy` reads recipe and
    policy from YAML. filter_fn: False for a module and its path leaves that module alone, and asks for its submodules. Output
    heads and routers stay in high precision unless the policy names them.

    pack: place the weights of one product (gate and up; query, key and value) side by side in memory, so that calls do not copy
    them. Parameters stay the same objects; if they are moved or copied later, each has its own memory again, and calls copy.

    loss: "fused" has a causal language model of transformers compute its loss by :class:`~opfuse.ops.LinearCrossEntropy`, without
    the logits of all tokens in memory: a call with labels returns the loss, and None for logits. Other calls stay as they are.
    A policy that converts the output head has the products of the loss quantized. ConversionError for a model whose loss may be
    another one.

    A model that is fused already is converted again. ConversionError if nothing could be converted, if a pattern matches nothing,
    if experts are over ranks, and for another keyword.
    """
    if unknown:
        name, known = next(iter(unknown)), ("recipe", "filter_fn", "policy", "pack", "loss")
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
    _LOSS.checked("fuse_ loss", loss, ConversionError)
    before, losses = _converted(model), _losses(model)
    _check_whole("fuse_", before)
    _restore({**before, **losses})
    remove_row_tiles(model)
    try:
        walk = _Walk(Policies(model, recipe, policy, filter_fn), head_of_loss(model) if loss == "fused" else None)
        walk.hold_stored(model)
        with asked_once():
            walk.visit(model, "")
            if walk.forwards:
                walk.convert_norms()
        walk.policies.check_used(name for name, _ in model.named_modules())
        if not walk.forwards:
            raise _nothing(model, [*walk.entries.values()])
        fused_loss = model_loss(model, walk.forwards, walk.head_choice) if loss == "fused" else None
    except BaseException:
        _release(model, before)
        _install(before)
        for each in losses.values():
            each.install()
        raise
    _release(model, walk.forwards)
    _carry_over(before, walk.forwards)
    if fused_loss is not None:
        walk.tell_loss(fused_loss)
        fused_loss.install()
    told = Report(tuple(walk.entries.values()))
    for forward in walk.forwards.values():
        forward.report = told
    _install(walk.forwards)
    if pack:
        _pack(walk.forwards)
    return told


def _pack(forwards: Mapping[nn.Module, Converted]) -> None:
    for run in {run: None for forward in forwards.values() for run in forward.runs}:
        for parameters in run.made:
            parameters.pack()


@checked_arguments(ConversionError)
def report(model: nn.Module) -> Report:
    """What :func:`fuse_` made of ``model``, of parts of it, or of the model that it is a part of, as it is now.

    "kept" is also a module that runs its own forward since, because something that it reads was changed, with what was changed;
    one that :func:`unfuse_` was called on; and one with matrices of its own outside of the parts that were converted.
    ConversionError if no module is converted.
    """
    given = _given(model)
    forwards = {path: forward for path, part in model.named_modules() if isinstance(forward := given.get(part), Converted)}
    if not forwards:
        raise _none_converted("report", model)
    parts = dict(sorted({each[0]: each for each in map(_part, forwards, forwards.values()) if each is not None}.items()))
    told: dict[str, Conversion] = {}
    for part, within, given_then in parts.values():  # what was converted later lies inside
        told = {path: line for path, line in told.items() if not _is_below(path, part)}
        told |= {_relative(part, within, line.path): line for line in given_then if _is_below(line.path, within)}
    lines: list[Conversion] = []
    changed: list[str] = []
    for path, module in model.named_modules():
        line, forward = told.get(path), forwards.get(path)
        if forward is not None and forward.report is not None and (not path or forward.path in forward.report):
            line = forward.entry  # a part of another module's pipeline has no line but where it is the model
        if forward is not None and forward.entry is not None and (change := forward.change()) is not None:
            line = _unfused(forward.entry, f"it has changed since fuse_ ({change.got})", change.cure, weights=0)
            changed.append(path)
        elif line is None and forward is not None and any(_is_below(path, each) for each in changed):
            line = _alone(module, forward)
        elif line is not None and line.status in ("fused", "joined") and module not in given:
            line = _unfused(line, UNFUSED, "call opfuse.fuse_ again")
        elif line is None and module not in given and not any(_is_below(path, part) for part in parts):
            line = _outside(module)
        if line is not None:
            lines.append(replace(line, path=path))
    return Report(tuple(lines))


def _alone(module: nn.Module, forward: Converted) -> Conversion:
    """The line of a part of a pipeline that is called by itself, since the module of the pipeline has changed."""
    names = [type(op).__name__.removeprefix("Basic") for op in forward.run.ops]
    became = " → ".join(name for name in names if name != "Bias")
    weights = _matrix_elements(_parameters(module))
    return Conversion("", type(module).__name__, "fused", became=became, recipe=_recipe_name(forward), weights=weights)


def _part(path: str, forward: Converted) -> tuple[str, str, Report] | None:
    """The part of a model that a module was converted in, by its path; where the model is one of that part, its path there; and
    what was reported. path: of the module in the model. None if nobody can tell, as of a module that was moved.
    """
    here, there = (f".{each}" if each else "" for each in (path, forward.path))
    if forward.report is None or not (here.endswith(there) or there.endswith(here)):
        return None
    same = min(len(here), len(there))
    return here[1 : len(here) - same], there[1 : len(there) - same], forward.report


def _is_below(path: str, part: str) -> bool:
    """Whether a path is that of ``part``, or of a module in it."""
    return not part or f"{path}.".startswith(f"{part}.")


def _beside(path: str, other: str) -> str:
    """A path as one reads it beside ``other``, without the module that both lie in."""
    names, others = path.split("."), other.split(".")
    same = next((i for i, (one, another) in enumerate(zip(names, others)) if one != another), 0)
    return ".".join(names[same:])


def _relative(part: str, within: str, path: str) -> str:
    return f"{part}.{path.removeprefix(within).lstrip('.')}".strip(".")


def _unfused(line: Conversion, got: str, cure: str, **fields: Any) -> Conversion:
    return replace(line, status="kept", became="", recipe="", wanted="", got=got, cure=cure, **fields)


OUTSIDE, UNFUSED = "it is outside of what fuse_ was called on", "it was put there after fuse_, or unfuse_ was called on it"
"""What a report says of modules that nobody has asked to convert, or of which somebody has undone it."""


def _outside(module: nn.Module) -> Conversion | None:
    """The line of a module outside of what was converted; None if it multiplies with nothing of its own."""
    elements = _matrix_elements(_parameters(module))
    if not elements or isinstance(module, (nn.Embedding, nn.EmbeddingBag, FusibleOperation)):
        return None
    cure = "call opfuse.fuse_ on the whole model"
    return Conversion("", type(module).__name__, "kept", weights=elements, got=OUTSIDE, cure=cure)


@checked_arguments(ConversionError)
def unfuse_(model: AnyModule) -> AnyModule:
    """Undo :func:`fuse_`, in place: every module gets its own forward back.

    ConversionError if no module is converted, or if one was given another forward since, or is over ranks.
    """
    forwards = _converted(model)
    if not forwards:
        raise _none_converted("unfuse_", model)
    _check_whole("unfuse_", forwards)
    _restore({**forwards, **_losses(model)})
    remove_row_tiles(model)
    for region in evaluation_regions(model):
        region.remove()
    _release(model, {})
    return model


def _check_whole(where: str, forwards: Mapping[nn.Module, Converted]) -> None:
    """ConversionError if one of the modules is over ranks."""
    label = next((forward.label for forward in forwards.values() if forward.over_ranks), None)
    if label is not None:
        wanted, got = "modules with all of their parameters", "experts over ranks"
        cure = "call it on a model as it was built, and parallelize_module after that"
        raise ConversionError(describe(f"{where} {label}", wanted=wanted, got=got, cure=cure))


def _none_converted(where: str, model: nn.Module) -> ConversionError:
    got, cure = f"none in {with_article(type(model).__name__)}", "call opfuse.fuse_ first"
    return ConversionError(describe(where, wanted="modules that fuse_ has converted", got=got, cure=cure))


def _given(model: nn.Module) -> dict[nn.Module, GivenForward]:
    """The modules with a forward of opfuse's. ConversionError if one has another forward by now, which may call that of fuse_."""
    forwards = {module: forward for module in model.modules() if (forward := given_forward(module)) is not None}
    for path, module in model.named_modules():
        if module not in forwards and OWN in vars(module) and FORWARD in vars(module):
            where, got = f"{path or type(module).__name__}.forward", f"{vars(module)[FORWARD]!r:.80}, put over it"
            cure = "undo what replaced it first (of accelerate: unwrap_model(model, keep_fp32_wrapper=False))"
            raise ConversionError(describe(where, wanted="the one that fuse_ gave", got=got, cure=cure))
    return forwards


def _converted(model: nn.Module) -> dict[nn.Module, Converted]:
    """The modules that are converted."""
    return {module: forward for module, forward in _given(model).items() if isinstance(forward, Converted)}


def _losses(model: nn.Module) -> dict[nn.Module, ModelLoss]:
    """The models whose loss is fused with its head."""
    return {module: forward for module, forward in _given(model).items() if isinstance(forward, ModelLoss)}


def _install(forwards: dict[nn.Module, Converted]) -> None:
    for forward in forwards.values():
        forward.install()
    for forward in forwards.values():
        forward.guard.forwards = {path: converted(member) for path, member in forward.guard.members.items()}


def _carry_over(before: dict[nn.Module, Converted], forwards: dict[nn.Module, Converted]) -> None:
    """Have ops that stand for what ops stood for before go on with their delayed scales."""
    for module, forward in forwards.items():
        earlier = before[module].products if module in before else {}
        for name, op in forward.products.items():
            if name in earlier and earlier[name].spec == op.spec:
                op.__dict__["quantizer_states"] = earlier[name].quantizer_states


def _release(model: nn.Module, forwards: Mapping[nn.Module, Converted]) -> None:
    """Have modules of other libraries that are not converted hold their quantized matrices as they did."""
    tied: dict[int, list[nn.Parameter]] = {}
    for module in model.modules():
        if module not in forwards:
            hold_arrays(module, tied)
    decompress_the_rest(model)


def _restore(forwards: Mapping[nn.Module, GivenForward]) -> None:
    for module, forward in forwards.items():
        forward.remove(module)


def _nothing(model: nn.Module, entries: list[Conversion]) -> ConversionError:
    first = next((entry for entry in entries if entry.status in ("refused", "kept") and entry.weights), None)
    where = "" if first is None else f"{first.path}: " if first.path else "it " if first.wanted else ""
    why = f"; {where}{first.problem}" if first else ""
    got = f"{with_article(type(model).__name__)} without any{why}"
    cure = first.cure if first and first.cure != NONE else "pass a model with linear layers"
    return ConversionError(describe("fuse_", wanted="a model with layers to convert", got=got, cure=cure))


class _Walk:
    """Visits each module once, from the outside in.

    A module whose forward is a chain runs as one pipeline; the products in it are converted alone as well, for calls that the
    pipeline is not for. inlined: modules whose own chain is a part of another one. taken: all modules that chains replace. lone:
    modules whose own parameters are vectors, such as norms, by path; they are converted last. left: modules with quantized
    weights that stay as they are, and what the report says of them. head: the output head whose products a fused loss makes.
    head_choice: what the policy has for it, if that is to be converted.
    """

    def __init__(self, policies: Policies, head: nn.Module | None = None) -> None:
        self.policies, self.head = policies, head
        self.head_choice: Choice | None = None
        self.entries: dict[str, Conversion] = {}
        self.forwards: dict[nn.Module, Converted] = {}
        self.visited: set[nn.Module] = set()
        self.inlined: set[nn.Module] = set()
        self.taken: set[nn.Module] = set()
        self.lone: list[tuple[str, nn.Module]] = []
        self.left: dict[nn.Module, dict[str, Any]] = {}

    def hold_stored(self, model: nn.Module) -> None:
        """Have the modules of other libraries that hold their matrices quantized hold them as parameters, if they are to multiply
        under a recipe; without one they compute what they did.
        """
        plain, tied = _plain_parameters(model), dict[Ids, nn.Parameter]()
        dtype, trains = _dtype_of(plain), not plain or any(parameter.requires_grad for parameter in plain)
        for path, module in model.named_modules():
            if (kind := stored_kind(module)) is None:
                continue
            arrays = stored_arrays(module)
            choice, left = self.policies.of(module, path), {"weights": max(array.numel() for array in arrays)}
            if choice.convert and choice.recipe is None:
                got = "its weights are quantized, and it has no recipe"
                cure = "to convert it, pass a recipe that multiplies its format"
                choice = Choice(False, got=got, cure=cure)
            if not choice.convert:
                self.left[module] = {"status": "kept", "got": choice.got, "cure": choice.cure, **left}
            elif kind is COMPRESSED and not is_whole(model):
                wanted = "the whole model that was compressed"
                got = "a part of it, which the first call of the whole decompresses"
                self.left[module] = {"status": "refused", "wanted": wanted, "got": got, "cure": "fuse_ the whole model", **left}
            elif got := why_not_held(module):
                self.left[module] = {"status": "refused", "wanted": kind.wanted, "got": got, "cure": kind.cure, **left}
            else:
                hold_stored(module, path, dtype, trains, tied)

    def visit(self, module: nn.Module, path: str) -> None:
        """Convert ``module``, or what is in it."""
        if module in self.visited:
            return
        self.visited.add(module)
        if module in self.left:
            self._add(module, path, **self.left[module])
        elif isinstance(module, FusibleOperation):
            if elements := _matrix_elements(module.parameters()):
                got, cure = "it is an op of opfuse already", "call it inside of opfuse.autocast(recipe=…) to quantize it"
                self._add(module, path, "kept", weights=elements, got=got, cure=cure)
        elif (weight := weight_of(module)) is not None:
            self._single(module, path, _elements(weight), (weight.in_features, weight.out_features), partial(build_alone, weight))
        elif (experts := experts_of(module)) is not None:
            self._single(module, path, experts.elements, experts.sizes[1:], partial(build_experts, experts))
        else:
            allowed = self.policies.allows(module, path)
            if module._modules and module not in self.inlined and allowed:
                self._block(module, path)
            self._unknown_parameters(module, path)
            for name, child in module.named_children():
                self.visit(child, f"{path}.{name}".lstrip("."))
            if allowed:
                self._join(module)

    def _single(
        self, module: nn.Module, path: str, elements: int, sizes: tuple[int, int], make: Callable[..., Converted]
    ) -> None:
        """Convert a module that multiplies with parameters of its own. sizes: columns and rows of its matrices."""
        choice, hindered = self.policies.of(module, path), obstacle(module, called=True)
        entry = partial(self._add, module, path, weights=elements)
        if not choice.convert:
            entry("kept", got=choice.got, cure=choice.cure)
        elif hindered is not None:
            entry("refused", wanted="a linear layer without extras", got=hindered[0], cure=hindered[1])
        elif choice.recipe is not None and (why := unfit(choice.recipe, module, *sizes)) is not None:
            other = f"give it other sizes, or another recipe, as in policy={{{path!r}: recipes.Float8CurrentScaling()}}"
            entry("refused", wanted=why.wanted, got=why.got, cure=why.cure or other)
        elif module is self.head and choice.recipe is not None and (no := unfit_in_chunks(choice.recipe, *sizes)) is not None:
            entry("refused", wanted=no.wanted, got=no.got, cure=no.cure)
        elif module is self.head:
            self.head_choice = choice
            entry("kept", got="its products are those of the fused loss; calls without labels run its own forward", cure=NONE)
        else:
            self.forwards[module] = forward = make(path, choice.recipe)
            names = " → ".join(type(op).__name__ for op in forward.run.ops)
            entry("fused", became=names if isinstance(forward, Routed) else "Linear", recipe=_recipe_name(forward))

    def _block(self, module: nn.Module, path: str) -> None:
        try:
            forward, how = build(module, path, self.policies)
        except NotRecorded as no:
            if not _matrix_elements(_parameters(module)) and any(weight_of(child) is not None for child in module.children()):
                self._add(module, path, "parts", wanted=no.wanted, got=no.got, cure="its submodules are converted one by one")
            return
        self.forwards[module] = forward
        self.inlined.update(how.inlined)
        self.taken.update(how.members.values())
        self.visited.update(self.taken - self.inlined)
        names = {member: name for name, member in how.members.items()}
        for weight in how.weights:  # alone as well: one that is alone in the chain has the same scales here
            if weight.module in self.forwards or weight.module is module:
                continue
            name = names[weight.module]
            shared = [
                op for at, op in zip(how.run.names, how.run.ops) if at in (name, f"{name}.bias") and op.owner is weight.module
            ]
            self.forwards[weight.module] = build_alone(weight, f"{path}.{name}".lstrip("."), how.recipe, shared)
        weights = sum(map(_elements, how.weights))
        self._add(module, path, "fused", became=" → ".join(how.names), recipe=_recipe_name(forward), weights=weights)

    def _join(self, module: nn.Module) -> None:
        """Join products of one tensor."""
        for group in siblings(module, {part: forward for part, forward in self.forwards.items() if part not in self.taken}):
            first, *others = group
            weights = sum(self.entries[sibling.path].weights for sibling in group)
            self._update(first.path, became=f"Linear×{len(group)}", weights=weights)
            for other in others:
                self._update(other.path, status="joined", became=f"in {_beside(first.path, other.path)}", weights=0)
            self.forwards.update({sibling.module: sibling for sibling in group})

    def convert_norms(self) -> None:
        """Convert the norms that no pipeline begins with, each alone."""
        for path, module in self.lone:
            choice = self.policies.of(module, path)
            try:
                if not choice.convert:
                    raise NotRecorded(choice.got, "", choice.cure)
                self.forwards[module] = norm = build_norm(module, path, choice.recipe)
                became = type(norm.run.ops[0]).__name__
                self._update(path, status="fused", became=became, recipe=_recipe_name(norm))
            except NotRecorded as no:
                self._update(path, got=no.got, cure=no.cure or NONE)

    def tell_loss(self, loss: ModelLoss) -> None:
        """Report a model whose loss is fused with its head."""
        self.entries.pop(loss.path, None)
        recipe = _recipe_name(loss) if loss.quantized else ""
        self._add(loss.module, loss.path, "fused", became="LinearCrossEntropy, of labels", recipe=recipe)

    def _unknown_parameters(self, module: nn.Module, path: str) -> None:
        """Report a module with parameters of its own that is no op."""
        parameters = _parameters(module)
        if not parameters or module in self.forwards or module in self.inlined:
            return
        elements = _matrix_elements(parameters)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            self._add(module, path, "kept", got="an embedding is a table lookup, with nothing to multiply", cure=NONE)
        elif not elements and not module._modules:
            self.lone.append((path, module))
            self._add(module, path, "kept")
        elif elements and not (choice := self.policies.of(module, path)).convert:
            self._add(module, path, "kept", weights=elements, got=choice.got, cure=choice.cure)
        elif (why := why_refused(module)) is not None:
            wanted, got, cure = why
            self._add(module, path, "refused", weights=elements, wanted=wanted, got=got, cure=cure)
        else:
            names = listed([name for name, p in module._parameters.items() if p is not None])
            kind = with_article(type(module).__name__)
            got = f"opfuse has no op for {kind}, whose forward uses its own {names}"
            self._add(module, path, "kept", got=got, cure=NONE)

    def _add(self, module: nn.Module, path: str, status: Status, **fields: Any) -> None:
        self.entries.setdefault(path, Conversion(path, type(module).__name__, status, **fields))

    def _update(self, path: str, **fields: Any) -> None:
        self.entries[path] = replace(self.entries[path], **fields)


def _plain_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model whose matrices are quantized that are values, without those of adapters, which may have another
    dtype, and are trained over a model that is not.
    """
    skipped = {id(array) for module in model.modules() for array in stored_arrays(module)}
    named = [(name, p) for name, p in model.named_parameters() if id(p) not in skipped and p.dtype in NORM_DTYPES]
    return [parameter for name, parameter in named if not {*ADAPTERS}.intersection(name.split("."))]


def _dtype_of(parameters: Iterable[nn.Parameter]) -> torch.dtype:
    """That of most elements."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else torch.bfloat16


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module itself."""
    return [p for p in module._parameters.values() if p is not None]


def _matrix_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of the parameters that are no vectors."""
    return sum(p.numel() for p in parameters if p.dim() > 1)


def _elements(weight: Weight) -> int:
    return weight.in_features * weight.out_features


def _recipe_name(forward: Converted | ModelLoss) -> str:
    return ANY if forward.recipe is None else type(forward.recipe).__name__
