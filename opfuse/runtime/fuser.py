"""A pipeline of ops: makes a key of every call, keeps a plan for every key, runs it."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import gcd
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from opfuse.compiler.lower import Inputs, check_channels
from opfuse.compiler.plan import Plan, PlanKey, compile_plan
from opfuse.compiler.registry import RuleSet, active_rules
from opfuse.core.fused import FusedOperation
from opfuse.core.operation import BasicOperation, Channel, FusibleOperation
from opfuse.core.signature import Env, TensorSig, input_signature, parameter_signatures
from opfuse.core.tracers import break_graph, check_exported, check_followed, check_partial, check_proxy, outside
from opfuse.core.watched import ParameterPlaces, Tree, WatchedModule, enroll, prepared
from opfuse.errors import OpfuseWarning, PipelineError, describe
from opfuse.events import PlanMissed, PlanUsed, emit, listeners
from opfuse.kernels.engine.variants import VECTOR
from opfuse.keys import Cache, Digest, digest, record, token
from opfuse.recipes import Recipe, current_recipe
from opfuse.recipes.autocast import amax_group_here, mark_region_used, region_source
from opfuse.recipes.passes import Pass, current_pass, is_recomputing, is_trained
from opfuse.recipes.standing import standing_here
from opfuse.runtime.compile.backward_tape import BackwardTape
from opfuse.runtime.compile.custom_op import follow, hindrance
from opfuse.runtime.compile.saved_call import CallInside, RepeatedCalls
from opfuse.runtime.interpret.checkpoint_replay import repeated
from opfuse.runtime.plans.cache_info import CacheInfo, info_of
from opfuse.runtime.plans.misses import (
    ThrashingDetector,
    check_call,
    check_count,
    check_miss,
    check_tensors,
    plan_policy,
    resolved,
    warn_of_machine,
)
from opfuse.runtime.plans.trace import PlanRecord, since_start
from opfuse.runtime.replay.dispatch import repeats_here
from opfuse.runtime.segment import outlined, run_grouped, run_plan
from opfuse.sources import caller
from opfuse.torch_private.autograd import is_followed, is_saved_by_its_node

ROWS = 128
"""The largest divisor of the number of rows that a plan may depend on."""

PLANS, MADE = 64, 256
"""Plans alive of a pipeline; plans of which it remembers why they were made."""

_NEGATIVE = torch.Tensor.is_neg
"""Whether a tensor has torch's negative bit: its values are those in memory, negated."""

_TRAINING = attrgetter("training")

_NONE_YET = object()
"""In place of the recipe of a call before the first."""

_log = logging.getLogger("opfuse.misses")
_misses = itertools.count(1)
"""Misses of all pipelines, in order."""


class Facts(NamedTuple):
    """What a key shows of an op. revision: how often it was changed in place."""

    op: str
    parameters: tuple[str, ...]
    channels: tuple[Any, ...]
    revision: int


class _Around(Env):
    """An environment that knows where a value came from."""

    sources: Mapping[str, str | None] = MappingProxyType({})


class _LocatedKey(PlanKey):
    """A key that knows where it was asked for."""

    sources: Mapping[str, str | None] = MappingProxyType({})


@cache
def _device(device: torch.device) -> tuple[str, tuple[int, int], bool]:
    """Type and compute capability, and whether torch.autocast knows the type; it does not know ``meta``."""
    arch = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    return device.type, arch, torch.amp.autocast_mode.is_autocast_available(device.type)


def _rows(x: torch.Tensor) -> int:
    """How many rows an input has."""
    shape = x.shape
    return x.numel() // (shape[-1] or 1) if shape else 1


class OperationFuser:
    """Runs a fixed sequence of ops in the environment of each call: one plan for each key, many alive at once.

    names: those of ``ops`` in their module (default: numbers). alone: its one op was called as a module. imports, exports:
    channels that come from earlier pipelines, and that later ones read. before: the last key of a pipeline that this one
    replaces. extra_inputs: the channel of each extra input of a call, or None. extra_outputs: the channels of the extra outputs.
    places, slots: where the parameters of each op are found, and all in order. starts: the position of the first basic op of each
    of ``ops``, by name. last_missed: the number of its last miss among those of all pipelines, 0 before the first. members: ops
    that are run without calling their modules, so that module hooks do not run. path: of its module, once known. ticket: its
    number in graphs of torch.compile.
    """

    def __init__(
        self,
        ops: Sequence[FusibleOperation],
        *,
        rules: RuleSet | None = None,
        name: str = "",
        names: Sequence[str] | None = None,
        alone: bool = False,
        imports: Collection[str] = (),
        exports: Collection[str] = (),
        before: PlanKey | None = None,
    ) -> None:
        self.ticket = enroll(self)
        self.given = tuple(ops)
        self.names = tuple(map(str, range(len(self.given)))) if names is None else tuple(names)
        self.members = () if alone else self.given
        self.label = name or "pipeline"
        self.path = ""
        self.rules = rules
        self.imports = frozenset(imports)
        self.exports = frozenset(exports)
        self.cache: Cache[PlanKey, Plan] = Cache(PLANS, before)
        self._alone: dict[tuple[Any, ...], Plan] = {}  # the latest that somebody looked at op by op
        self.calls = RepeatedCalls()
        self.last_missed = 0
        self.history: deque[PlanRecord] = deque(maxlen=MADE)
        self._thrashing = ThrashingDetector(PLANS)
        for member in self.given:
            for op in member.basic_ops:
                op.pre_first_fuser_forward()
        self._read()

    def _read(self) -> None:
        """Read everything of the ops that calls do not change; from now on they report changes."""
        self._epoch = WatchedModule.epoch
        self._read_ops()
        self._read_structure()
        self.form = f"{self.structure} {sorted(self.imports)} {sorted(self.exports)}"
        self.slots = tuple(itertools.chain.from_iterable(self.places))
        self._trees = tuple([(op, Tree.of(op)) for op in {*self.ops, *self.given} if op._modules])

    def _read_ops(self) -> None:
        """The basic ops and where each of the given ones begins; the names of ops and of parameters in the pipeline's modules.

        Basic ops of an op with several are numbered. A call pays only for hooks that a class overrides.
        """
        ops: list[BasicOperation] = []
        names: list[str] = []
        parameters: list[str] = []
        places: list[ParameterPlaces] = []
        modal: list[BasicOperation] = []
        modal_names: list[str] = []
        self.starts: dict[str, int] = {}
        self.presets: tuple[tuple[int, FusedOperation], ...] = ()
        self._called_before: list[tuple[int, BasicOperation]] = []
        self._reset_by_recipes: list[BasicOperation] = []
        self._recipe: Any = _NONE_YET
        for name, member in zip(self.names, self.given):
            self.starts[name], parts = len(ops), member.basic_ops
            if isinstance(member, FusedOperation):
                self.presets += ((len(ops), member),)
            prefixes = {id(module._parameters): prefix for prefix, module in member.named_modules()}
            for i, op in enumerate(parts):
                op.capture()
                if type(op).pre_fuser_forward is not BasicOperation.pre_fuser_forward:
                    self._called_before.append((len(ops), op))
                if type(op).reset_recipe_state is not BasicOperation.reset_recipe_state:
                    self._reset_by_recipes.append(op)
                ops.append(op)
                names.append(".".join(filter(None, (name, str(i) if len(parts) > 1 else ""))))
                slots = op.parameter_slots()
                places.append(tuple([(held, key) for _, held, key in slots]))
                if op.reads_training:
                    modal.append(op)
                    modal_names.append(names[-1])
                for _, held, key in slots:
                    parameters.append(".".join(filter(None, (name, prefixes.get(id(held), ""), key))))
            member.capture(member=bool(self.members))
        self.ops, self._op_names, self._modal = tuple(ops), tuple(names), tuple(modal)
        self.places, self._parameters = tuple(places), record(parameters)
        self._modes = {len(modal): record(modal_names), len(ops): record(names)}

    def _read_structure(self) -> None:
        """The digest of specs and channels; which extra tensors a call takes, those of imported channels once, and returns."""
        check_channels(self.ops, self.imports)
        inputs: list[str | None] = []
        outputs: list[Channel] = []
        made_of, facts, sources = [], {}, {}
        for name, op in zip(self._op_names, self.ops):
            read, made = op.extra_input_channels, op.extra_output_channels
            for channel in read:
                if channel.name is None or (channel.name in self.imports and channel.name not in inputs):
                    inputs.append(channel.name)
            outputs += [channel for channel in made if channel.to_caller or channel.name in self.exports]
            channels = tuple([(channel.name, channel.to_caller) for channel in (*read, *made)])
            made_of.append((type(op), op.spec, op.parameter_names, channels, op.revision))
            facts[name] = Facts(op.label, op.parameter_names, channels, op.revision)
            sources[name] = op.made_at
        self.extra_inputs, self.extra_outputs = tuple(inputs), tuple(outputs)
        self.structure = Digest(digest(tuple(made_of)), lambda: facts, sources=sources)

    def _refresh(self) -> None:
        """Notice changes of modules inside of ops, and, by the count of all changes, of ops."""
        for op, tree in self._trees:
            if not tree.stands:
                op.changed()
        if self._epoch != WatchedModule.epoch:
            self._read()

    @property
    def handle(self) -> str:
        """Its name in this process."""
        return f"{type(self).__name__} {int(self.ticket)}"

    @property
    def where(self) -> str:
        """How messages call it: its label, after the path of its module if that is known."""
        return f"{self.path} {self.label}".strip()

    def key(
        self, x: torch.Tensor, extras: Sequence[torch.Tensor], rules: RuleSet, input_saved: bool | None = None
    ) -> tuple[Any, ...]:
        """Everything that the plan of this call may depend on: a :class:`PlanKey` as plain tuples, which are equal to it.

        input_saved: as ``Env.input_saved``, of an input without a node of autograd; None: its node tells.
        """
        if self._epoch != WatchedModule.epoch or self._trees:
            self._refresh()
        device, arch, has_autocast = _device(x.device)
        # A group that is made after a first call makes another plan: rows travel, and amaxes are shared.
        group = amax_group_here()
        grad = torch.is_grad_enabled()
        if input_saved is None:
            input_saved = grad and x.grad_fn is not None and is_saved_by_its_node(x)
        env = (
            current_recipe(),
            None if group is None else token(group),
            grad,
            torch.get_autocast_dtype(device) if has_autocast and torch.is_autocast_enabled(device) else None,
            device,
            arch,
            gcd(_rows(x), ROWS),
            x.data_ptr() % VECTOR == 0,
            rules.level,
            input_saved,
        )
        inputs = (
            input_signature(x),
            tuple(map(input_signature, extras)),
            parameter_signatures(self.slots),
            tuple(map(_TRAINING, self.ops if rules.functions else self._modal)),
        )
        return self.structure, env, inputs, rules.digest

    def named(self, key: tuple[Any, ...], call: tuple[torch.Tensor, RuleSet] | None = None) -> PlanKey:
        """A key with the names of its fields. call: its input and rules, for a key that tells where its values come from."""
        structure, env, (x, extras, params, training), rules = key
        named_params = self._parameters([None if p is None else TensorSig(*p) for p in params])
        modes = self._modes[len(training)](training)
        inputs = Inputs(TensorSig(*x), tuple(itertools.starmap(TensorSig, extras)), named_params, modes)
        around = _Around(*env)
        named = _LocatedKey(structure, around, inputs, rules)
        if call is not None:
            place, region = caller(), region_source()
            count, level = _rows(call[0]), call[1].source
            rows = f"{count} row{'' if count == 1 else 's'}"  # each first call enters these lines, and no more files
            around.sources = {"recipe": region, "amax_group": region, "rows_class": rows, "level": level}
            named.sources = {"env": place, "inputs": place}
        return named

    def plan(self, x: torch.Tensor, *extras: torch.Tensor, input_saved: bool | None = None) -> Plan:
        """The plan of this call, from the cache or made now. input_saved: as of :meth:`key`."""
        rules = self.rules or active_rules()
        try:
            key = self.key(x, extras, rules, input_saved)
        except (AttributeError, KeyError, RuntimeError):
            check_call(self, x, extras)
            raise
        plan = self.cache.get(key)
        if plan is None:
            check_call(self, x, extras)
            plan = self._miss(self.named(key, (x, rules)), rules)
        if key[1][0] is not None:
            mark_region_used()
        return plan

    def _miss(self, key: PlanKey, rules: RuleSet) -> Plan:
        check_miss(self.where, lambda: str(self.cache.why(key)))
        start = time.perf_counter()
        plan = self._compiled(key, rules)
        warn_of_machine(key.env.recipe, key.env.device, key.env.arch)
        why = self.cache.put(key, plan)
        self.last_missed = next(_misses)
        ms = (time.perf_counter() - start) * 1e3
        _log.info("plan miss in %s (+%.1f ms): %s", self.where, ms, why)
        thrash = self._thrashing.record(self.where, why)
        calls = self.cache.hits + self.cache.misses
        found = PlanRecord(self.last_missed, calls, since_start(), key, why, ms, thrash)
        self.history.append(found)
        emit(PlanMissed(self, found, plan))
        if thrash is not None:
            warnings.warn(thrash, OpfuseWarning, stacklevel=2)
        return plan

    def _compiled(self, key: PlanKey, rules: RuleSet) -> Plan:
        amaxes_meet = key.env.recipe is not None and key.env.amax_group is not None
        if amaxes_meet and (key.env.grad or is_trained()) and not is_recomputing():
            here = standing_here(behind=key.inputs.x.requires_grad)
            for name, op in zip(self._op_names, self.ops):
                op.__dict__["standing"] = here.of(name)
        plan = compile_plan(self.ops, key, rules, presets=self.presets, name=self.label, exports=self.exports)
        if key.env.recipe is not None and any(segment.requires_grad for segment in plan.segments):
            key.env.recipe.check_trainable()
        return plan

    def _trial(self, x: torch.Tensor, extras: Sequence[torch.Tensor], *, alone: bool) -> Plan:
        """A plan for this call, as :func:`~opfuse.runtime.plans.misses.trial_plans` says."""
        check_call(self, x, extras)
        rules = self.rules or active_rules()
        recipe = current_recipe()
        if alone and not rules.functions and (recipe is None or recipe.rounding == "per_op"):
            rules = rules.unfused
        key = self.key(x, extras, rules)
        plan = (self._alone.get(key) if alone else None) or self._compiled(self.named(key), rules)
        if alone:
            self._alone = {key: plan}
        if plan.key.env.recipe is not None:
            mark_region_used()
        return plan

    def __call__(
        self,
        x: torch.Tensor,
        *extras: torch.Tensor,
        kwargs: Sequence[Mapping[str, Any]] | None = None,
        instead: Mapping[int, torch.Tensor] | BackwardTape | None = None,
    ) -> Any:
        """The main output, or a tuple of it and the extra outputs that go to the caller.

        instead: tensors that take the gradients of parameters, by their ``id()``; or a tape, in which segments note their
        backward passes in place of autograd nodes.

        Under ``torch.compile`` it is one op of the graph, or a graph break where it cannot be one.
        """
        if torch.compiler.is_compiling():
            return self._call_compiling(x, extras, kwargs)
        input_saved = instead.input_saved if isinstance(instead, BackwardTape) else None
        if input_saved is None:  # inside of an op, that has asked
            if (repeat := repeated(self)) is not None:
                return repeat(partial(self, x, *extras, kwargs=kwargs, instead=instead))
            if not isinstance(x, torch.Tensor):
                check_proxy(self.label, x)
                check_tensors(self.label, x)
            if is_followed():
                check_followed(self.label, (x, *extras, *[slot.get(name) for slot, name in self.slots]))
        for op, given in zip(self.ops, kwargs or ()):
            op.check_kwargs(given)
        if self._reset_by_recipes:
            self._reset_under(current_recipe())
        policy = plan_policy()
        trial = policy.trial
        plan = self._trial(x, extras, alone=policy.alone) if trial else self.plan(x, *extras, input_saved=input_saved)
        if PlanUsed in listeners():
            emit(PlanUsed(plan))
        if isinstance(instead, BackwardTape):
            recomputed = plan.delays and current_pass() is not None  # a step counts in the pass that recomputes it
            instead.use = None if recomputed else partial(self.cache.use_of, plan)
        for i, op in self._called_before:
            op.pre_fuser_forward(requires_grad=i >= plan.first_trained)
        tensors = x, *extras
        if True in map(_NEGATIVE, tensors):  # kernels read what lies in memory
            tensors = resolved(self, tensors)
        run = run_grouped if plan.reads_sizes else run_plan
        outputs = run(plan, self.ops, tensors, kwargs or ({},) * len(self.ops), places=self.places, instead=instead)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _reset_under(self, recipe: Recipe | None) -> None:
        """Call the ops' ``reset_recipe_state`` if ``recipe`` is not that of the last call."""
        if recipe is not self._recipe and recipe != self._recipe:
            self._recipe = recipe
            for op in self._reset_by_recipes:
                op.reset_recipe_state(recipe=recipe)

    def _call_compiling(self, x: torch.Tensor, extras: Sequence[torch.Tensor], kwargs: Any) -> Any:
        """The call as one op of the graph, or a graph break that says why it cannot be one."""
        check_exported(self.label)
        why = hindrance(self, x, extras, kwargs)
        if not why:
            return follow(self, x, extras)
        break_graph(why)
        return outside(_call_outside)(self, x, *extras, kwargs=kwargs)

    # -- in a graph of torch.compile -------------------------------------------------------------------------------------------

    get_ready = _refresh

    def surroundings(self) -> tuple[Any, ...] | None:
        """What a call inside of an op depends on beside its tensors and modes; None if it is to be made step by step.

        It is made so if somebody looks at calls, and by ops that want to know of each call.
        """
        run = current_pass()
        if self._called_before or self._reset_by_recipes or plan_policy().trial or run is Pass.DRY_RUN or not repeats_here():
            return None
        if self._epoch != WatchedModule.epoch or self._trees:
            self._refresh()
        rules = self.rules or active_rules()
        if rules.functions or self._modal:
            return None
        mark_region_used()
        group = amax_group_here()
        return self.structure, current_recipe(), None if group is None else token(group), rules.level, rules.digest, run

    def run_inside(self, call: CallInside) -> tuple[torch.Tensor, ...]:
        """The call inside of an op of torch.compile: its segments are all that it runs."""

        def run() -> tuple[torch.Tensor, ...]:
            return call.recorded_on_tape(lambda given, tape: self(*given, instead=tape), self.calls, self.surroundings())

        repeat = repeated(self, call.checkpointed)
        found: tuple[torch.Tensor, ...] = run() if repeat is None else repeat(run)
        return found

    def outline(self, tensors: Sequence[torch.Tensor], autocast: torch.dtype | None) -> list[torch.Tensor]:
        """Stand-ins of the outputs for ``tensors``, which may have no values. Recipes, fusions and gradients change no shapes."""
        x, *extras = tensors
        check_count(self, extras)
        rules = replace(self.rules or active_rules(), level=0)
        device, arch, _ = _device(x.device)
        env = Env(None, None, False, autocast, device, arch, ROWS, True, rules.level)
        sigs = [TensorSig(tensor.dtype, None, False, tensor.device, None) for tensor in tensors]
        inputs = sigs[0], tuple(sigs[1:]), parameter_signatures(self.slots), tuple([op.training for op in self._modal])
        plan = self._compiled(self.named((self.structure, env, inputs, rules.digest)), rules)
        return outlined(plan, self.ops, tensors)

    reach = staticmethod(lambda *_: ())  # gradients come to all that ops read

    def cache_info(self) -> CacheInfo:
        """Plans alive, hits, misses, reason of the last miss, and what programs take."""
        return info_of([self])


def planned_on(device: str, ops: Sequence[FusibleOperation], x: torch.Tensor, rules: RuleSet) -> Plan:
    """The plan that ``ops`` would have on ``device``; they and ``x`` lie on the meta device. PipelineError if they take more."""
    fuser = OperationFuser(ops, rules=rules)
    if len(fuser.extra_inputs):
        cure = "write a plan that needs no tensors of the caller, or count what opfuse.explain returns"
        raise PipelineError(describe(fuser.label, wanted="no extra inputs", got=len(fuser.extra_inputs), cure=cure))
    key = fuser.named(fuser.key(x, [], rules), (x, rules))
    kind, arch, _ = _device(torch.device(device))
    mark_region_used()
    return fuser._compiled(key._replace(env=key.env._replace(device=kind, arch=arch)), rules)


def _call_outside(fuser: OperationFuser, x: torch.Tensor, *extras: torch.Tensor, kwargs: Any) -> Any:
    """What compiled code calls."""
    check_partial(fuser.label)
    return fuser(x, *extras, kwargs=kwargs)


def _alone(op: FusibleOperation) -> OperationFuser:
    """The pipeline that is the op alone."""
    fuser: OperationFuser | None = op.__dict__.get("_fuser")
    if fuser is None:
        fuser = op.__dict__["_fuser"] = OperationFuser((op,), name=op.label, names=("",), alone=True)
    return fuser


def _run_alone(op: Any, x: torch.Tensor, *extras: torch.Tensor, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        prepared(op.ticket)
        fuser: OperationFuser = op._fuser
    else:
        fuser = _alone(op)
    return fuser(x, *extras, kwargs=[kwargs, *[{}] * (len(fuser.ops) - 1)] if kwargs else None)


FusibleOperation.run_alone = staticmethod(_run_alone)
FusibleOperation.get_ready = _alone  # type: ignore[assignment]
FusibleOperation.cache_info = lambda op: _alone(op).cache_info()
