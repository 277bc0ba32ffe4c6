"""Which modules are converted, and under which recipe each computes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Literal, NamedTuple, NoReturn

from torch import nn

from opfuse.domains import uncallable
from opfuse.errors import ConversionError, describe, nearest
from opfuse.inspect.advise import advise
from opfuse.inspect.heads import HEADS, heads_of
from opfuse.recipes import Recipe, as_recipe
from opfuse.recipes.availability import BF16, RATES

Said = Recipe | None | Literal["default"]
"""What a policy says of a module: its recipe; None: it stays in high precision; "default": the recipe of the other modules."""

Policy = Mapping[str, Said] | Callable[[nn.Module, str], Said] | Literal["auto"]
Filter = Callable[[nn.Module, str], bool]


class Choice(NamedTuple):
    """What was decided for a module with weights. got, cure: why it is not converted, and how to have it converted."""

    convert: bool
    recipe: Recipe | None = None
    got: str = ""
    cure: str = ""


FUNCTION = "function"
"""What stands for a pattern where a policy is a function."""

ADAPTER = "a low-rank adapter"
ADAPTERS = ("lora_A", "lora_B")
"""Steps of paths of adapters' matrices, which are small and whose updates are smaller."""


class Policies:
    """The choice for each module of a model; remembers which patterns decided of one."""

    def __init__(self, model: nn.Module, recipe: object, policy: Policy | None, filter_fn: Filter | None) -> None:
        if filter_fn is not None and (got := uncallable(filter_fn, model, "")):
            _refuse("filter_fn", "a function of module and path", got, "filter_fn=lambda module, path: 'mlp' in path")
        other = policy is not None and policy != AUTO and not isinstance(policy, Mapping)
        if other and (got := uncallable(policy, model, "")):
            file = isinstance(policy, (str, PurePath)) and PurePath(policy).suffix in (".yaml", ".yml")
            cure = f"opfuse.fuse_(model, **opfuse.load_policy({str(policy)!r}))" if file else "policy={'lm_head': 'default'}"
            _refuse("policy", "'auto', a mapping, or a function of module and path", got, cure)
        self.model = model
        self.recipe = None if recipe is None else as_recipe(recipe)
        self.policy = None if isinstance(policy, str) else policy
        self.reasons = reasons_of(model, self.recipe) if policy == AUTO else {}
        self.filter_fn = filter_fn
        self.used: set[str] = set()
        self.asked: list[str] = []
        self.heads = dict(heads_of(model))
        patterns = policy if isinstance(policy, Mapping) else ()
        for pattern in patterns:
            if not isinstance(pattern, str):
                _refuse("policy", "patterns of paths, which are texts", repr(pattern), "policy={'model.layers.3': None}")
        self.patterns = {pattern: tuple(_counted(model, pattern)) for pattern in patterns}

    def of(self, module: nn.Module, path: str, *, in_chain: bool = False) -> Choice:
        """The choice for the module at ``path``. in_chain: it is a part of a chain, such as the gate of a gated unit."""
        if self.filter_fn is not None and not self.filter_fn(module, path):
            return Choice(False, got="filter_fn returned False for it", cure="return True to convert it")
        where, said = self._said(module, path)
        if said is None:
            by, cure = (
                ("it returned None", "return a recipe") if where == FUNCTION else (f"{where}: None", "give it a recipe there")
            )
            return Choice(False, got=f"your policy leaves it alone ({by})", cure=f"{cure} to convert it")
        if where and said != "default":
            return Choice(True, _recipe(said, where))
        parents = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)] if self.reasons else []
        if (why := next((self.reasons[each] for each in parents if each in self.reasons), "")) and not where:
            cure = f"to convert it, pass policy={{{path!r}: 'default'}} in the place of {AUTO!r}"
            return Choice(False, got=f"policy={AUTO!r} leaves it in high precision: {why}", cure=cure)
        kind = self.heads.get(id(module)) or (None if in_chain else self._named(path))
        if kind is not None and not where:
            got, cure = f"{kind} stays in high precision by default", f"to convert it, pass policy={{{path!r}: 'default'}}"
            return Choice(False, got=got, cure=cure)
        return Choice(True, self.recipe)

    def _named(self, path: str) -> str | None:
        """What a module is by its name. A gate is a router if it stands beside experts."""
        holder, _, name = path.rpartition(".")
        kind = HEADS.get(name) or next((ADAPTER for step in path.split(".") if step in ADAPTERS), None)
        if name == "gate" and not any("expert" in beside for beside, _ in self.model.get_submodule(holder).named_children()):
            return None
        return kind

    def allows(self, module: nn.Module, path: str) -> bool:
        """Whether the filter lets a module that holds others run as one with them."""
        return self.filter_fn is None or bool(self.filter_fn(module, path))

    def _said(self, module: nn.Module, path: str) -> tuple[str, Said]:
        """What the policy says, and the pattern that says it; no pattern where none does."""
        if self.policy is None:
            return "", "default"
        if not isinstance(self.policy, Mapping):
            said = self.policy(module, path)
            return (FUNCTION if said != "default" else ""), said
        self.asked.append(path)
        for pattern, said in self.policy.items():
            if self._fits(path, pattern):
                self.used.add(pattern)
                return repr(pattern), said
        return "", "default"

    def _fits(self, path: str, pattern: str) -> bool:
        """Whether a pattern names the module at ``path``, or one that it is in."""
        parents = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]
        return any(fnmatchcase(each, counted) for each in parents for counted in self.patterns[pattern])

    def check_used(self, paths: Iterator[str]) -> None:
        """ConversionError for a pattern that no module with weights has, or that an earlier one always covers."""
        unused = [pattern for pattern in self.patterns if pattern not in self.used]
        if unused:
            got, cure = self._unused(unused[0], [*paths])
            wanted = "patterns that match a module with weights"
            raise ConversionError(describe("fuse_ policy", wanted=wanted, got=got, cure=cure))

    def _unused(self, pattern: str, paths: Sequence[str]) -> tuple[str, str]:
        """Why a pattern decided of nothing, and what to do about it."""
        fitting = [path for path in paths if self._fits(path, pattern)]
        decided = [path for path in self.asked if path in fitting]
        if decided:
            first = next(each for each in self.patterns if self._fits(decided[0], each))
            got = f"{pattern!r}, which matches only modules that {first!r}, listed before it, already covers"
            return got, self._sorted(paths)
        example = next(iter(get_close_matches(pattern, self.asked, 1, 0)), "")
        write = f"write the path of a module with weights, as {example!r}, or a pattern of such paths"
        if fitting:
            return f"{pattern!r}, which matches {fitting[0]!r} and no module with weights", write
        return f"{pattern!r}{nearest(pattern, paths)}", write

    def _sorted(self, paths: Sequence[str]) -> str:
        """An order in which patterns decide, those that fit less first, and without those that decide of nothing in any."""
        fits = {each: [path for path in paths if self._fits(path, each)] for each in self.patterns}
        order = sorted(fits, key=lambda each: len(fits[each]))
        deciding = {
            next(each for each in order if path in fits[each]) for path in self.asked if any(path in f for f in fits.values())
        }
        kept, left = [each for each in order if each in deciding], [each for each in order if each not in deciding]
        without = f", without {', '.join(map(repr, left))}" if left else ""
        return f"write the patterns in the order {', '.join(map(repr, kept))}{without}; the first that matches counts"


def _refuse(name: str, wanted: str, got: str, example: str) -> NoReturn:
    raise ConversionError(describe(f"fuse_ {name}", wanted=wanted, got=got, cure=f"write {example}"))


def _recipe(said: object, where: str) -> Recipe:
    """What a policy says, as a recipe. ConversionError for a word that is none."""
    if isinstance(said, str):
        cure = "None leaves a module in high precision; a recipe is an object such as opfuse.recipes.Float8CurrentScaling()"
        raise ConversionError(describe(f"fuse_ policy {where}", wanted="a recipe, None or 'default'", got=repr(said), cure=cure))
    return as_recipe(said)


_FROM_THE_END = re.compile(r"(?:(.*?)\.)??-(\d+)(\..*)?")


def _counted(model: nn.Module, pattern: str) -> Iterator[str]:
    """What ``pattern`` means in this model: a step ``-k`` is the k-th submodule from the end of the module before it."""
    found = _FROM_THE_END.fullmatch(pattern)
    if found is None:
        yield pattern
        return
    before, step, after = found.groups("")
    for name, module in model.named_modules():
        names = [*module._modules]
        if fnmatchcase(name, before) and 0 < int(step) <= len(names):
            yield from _counted(model, f"{name}.{names[-int(step)]}{after}".lstrip("."))


# -- policy="auto": which modules stay in high precision by what is known of the model, each with the reason -------------------

AUTO = "auto"
"""The word for it, in the place of a policy."""

LAYERS = 4
"""A model of fewer layers has no first and last one that stay plain: too little would be left."""


def reasons_of(model: nn.Module, recipe: Recipe | None) -> Mapping[str, str]:
    """By path, why a module stays in high precision: those that :func:`opfuse.advise` is against, and the first and the last
    layer of a model of at least LAYERS.

    That a recipe is emulated on the GPU that advice was measured on is no reason: who chose it wants it.
    """
    reasons = dict[str, str]()
    for path, place in _ends(model):
        reasons[path] = f"the {place} layer, whose errors reach the loss most"
    kind = recipe.kind if recipe is not None and recipe.kind in RATES else "fp8_current"
    try:
        advice = advise(model, kind=kind).layers
    except ConversionError:  # of a model without linear layers
        return reasons
    paths = {path for path, _ in model.named_modules()}  # advice has another name for a model that is a layer itself
    for layer in advice:
        if layer.advice == "bf16" and (layer.gain is None or RATES[kind] >= BF16):
            reasons[layer.path if layer.path in paths else ""] = layer.why
    return reasons


def _ends(model: nn.Module) -> list[tuple[str, str]]:
    """The first and the last of the longest list of modules of one class, with their paths. Lists inside of one, such as the
    experts of a layer, hold no layers.
    """
    lists = list[tuple[str, nn.ModuleList]]()
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.".lstrip(".")) for outer, _ in lists)
        if isinstance(module, nn.ModuleList) and not inside and len({type(each) for each in module}) == 1:
            lists.append((path, module))
    path, longest = max(lists, key=lambda each: len(each[1]), default=("", ()))
    if len(longest) < LAYERS:
        return []
    return [(f"{path}.0".lstrip("."), "first"), (f"{path}.{len(longest) - 1}".lstrip("."), "last")]
