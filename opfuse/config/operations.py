"""The pipeline's ops, derived from their specs: fields, defaults and what each may hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import torch
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, create_model

from opfuse.config.fields import field_type
from opfuse.config.findings import Problem, Refused, guesses, sentence, shown, similar
from opfuse.config.models import FileSection
from opfuse.config.plugins import plugin_ops
from opfuse.core.operation import FusibleOperation
from opfuse.core.spec import argument, domains, spec_of
from opfuse.domains import keywords
from opfuse.errors import OpfuseError, PipelineError, describe, number_of
from opfuse.formats import DTYPES
from opfuse.ops import OPS as BUILT_IN
from opfuse.sources import DEFAULT

PLACEMENT = ("device", "dtype")
"""Parameters that the pipeline decides, for all its ops."""

IN_CODE = {
    "delay_wgrad_compute": "leave it out: what it puts off trains nothing until backward_dw(), which only Python code calls",
    "accumulate_into_main_grad": "leave it out: gradients would go to weight.main_grad, which only Python code makes and reads",
}
"""Parameters that only code which calls the op can make use of, and what to say of them in a file."""

SPELLINGS = {"normalized_shape": "size"}
"""Parameters that have a shorter name in a file."""

MAX_OPS = 256
MAX_ELEMENTS = 2**36
"""Ops of a file; elements of all parameters of one op, or of one tensor between two."""

IN_PYTHON = "build larger ones in Python"

MOST = {"num_groups": 1024}
"""What a file may ask for at most of things that are made one by one."""


def written(cls: type[FusibleOperation]) -> dict[str, tuple[Any, Any]]:
    """What a file may say of an op: type and default by the name of the constructor's argument."""
    spec = spec_of(cls)
    defaults = {argument(field.name): ... if field.default is MISSING else field.default for field in fields(spec)}
    read = {argument(name): domain for name, domain in domains(spec).items()}
    given = (name for name in defaults if name not in IN_CODE)
    return {name: (field_type(SPELLINGS.get(name, name), read[name]), defaults[name]) for name in given}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _without_default(schema: dict[str, Any]) -> None:
    schema.pop("default", None)


CHANNELS = ("extra_input", "extra_output")
"""Keys of an op that name channels."""


def _channel_field(least: int, most: int) -> tuple[Any, Any]:
    names = {"items": {"type": "string", "minLength": 1}, "type": "array", "minItems": least, "maxItems": most}
    schema = {"anyOf": [{"type": "string", "minLength": 1}, names]} if least == 1 else names
    name = Annotated[str, Field(min_length=1)]
    kind = Annotated[list[name], Field(min_length=least, max_length=most), BeforeValidator(_as_list), WithJsonSchema(schema)]
    return kind, Field(None, json_schema_extra=_without_default)


def _model(key: str, cls: type[FusibleOperation]) -> type[FileSection]:
    found: dict[str, Any] = {"op": (Literal[key], ...)}
    found |= {SPELLINGS.get(name, name): field for name, field in written(cls).items()}
    for side in CHANNELS:
        count = getattr(cls, f"num_{side}s")
        if isinstance(count, int) and count:
            found[side] = _channel_field(count, getattr(cls, f"most_{side}s", count))
    model = create_model(cls.__name__, __base__=FileSection, __doc__=cls.__doc__, **found)
    model.not_here = {name: help for name, help in IN_CODE.items() if name in domains(spec_of(cls))}
    return model


OPS: Mapping[str, type[FusibleOperation]] = {**BUILT_IN, **plugin_ops()}
"""Every op that a file may name."""

MODELS: Mapping[str, type[FileSection]] = {key: _model(key, cls) for key, cls in OPS.items()}
"""The model of a pipeline entry by its op."""


@dataclass(frozen=True)
class PipelineEntry:
    """One op of a pipeline, ready to be built any number of times. source: where it is written."""

    op: str
    arguments: tuple[tuple[str, Any], ...]
    extra_input: tuple[str, ...] = ()
    extra_output: tuple[str, ...] = ()
    source: str = field(default=DEFAULT, compare=False)

    @property
    def groups(self) -> int | None:
        """How many groups the op has, if it speaks of groups."""
        return dict(self.arguments).get("num_groups")

    def build(self, *, dtype: torch.dtype, device: Any = None) -> FusibleOperation:
        """A new op with its channels set; its parameters have ``dtype`` and lie on ``device``."""
        cls = OPS[self.op]
        placement = {"device": device, "dtype": dtype}
        taken = {name: placement[name] for name in PLACEMENT if name in (keywords(cls) or ())}
        op: FusibleOperation = cls(**dict(self.arguments), **taken)
        if self.extra_input and len(self.extra_input) != op.num_extra_inputs:
            wanted, cure = number_of(op.num_extra_inputs, "channel"), "name one for each"
            raise PipelineError(describe("extra_input", wanted=wanted, got=len(self.extra_input), cure=cure))
        for basic in (op, *op.basic_ops):
            basic.__dict__["made_at"] = self.source
        for i, name in enumerate(self.extra_input):
            op.set_extra_input_channel(i, name)
        for i, name in enumerate(self.extra_output):
            op.set_extra_output_channel(i, name, output_to_caller=False)
        return op


def to_entry(section: Any) -> PipelineEntry:
    """The entry that ``section`` describes, built once to see that the op takes it."""
    names = {SPELLINGS.get(name, name): name for name in written(OPS[section.op])}
    given = {names[key]: getattr(section, key) for key in sorted(section.model_fields_set & names.keys())}
    channels = {side: tuple(getattr(section, side, None) or ()) for side in CHANNELS}
    entry = PipelineEntry(section.op, tuple(given.items()), channels["extra_input"], channels["extra_output"])
    for name, most in MOST.items():
        if given.get(name, 0) > most:
            raise Refused(Problem("too-large", f"a file has at most {name}: {most}, got {given[name]}", IN_PYTHON, (name,)))
    try:
        built = entry.build(dtype=torch.float32, device="meta")
    except (OpfuseError, RuntimeError) as error:
        message, cure = sentence(str(error))
        raise Refused(Problem("bad-value", f"{section.op} cannot be built: {message}", cure)) from error
    if (problem := _misplaced(section.op, built)) is not None:
        raise Refused(problem)
    if (elements := sum(parameter.numel() for parameter in built.parameters())) > MAX_ELEMENTS:
        raise Refused(Problem("too-large", f"an op of a file has at most {MAX_ELEMENTS} parameters, got {elements}", IN_PYTHON))
    return entry


def _misplaced(key: str, built: FusibleOperation) -> Problem | None:
    """What is wrong with an op, of another package, that does not make its parameters where a file's pipeline wants them."""
    taken = keywords(type(built))
    missing = [name for name in PLACEMENT if taken is not None and name not in taken]
    parameter = next(iter(built.named_parameters()), None)
    if parameter is None or (not missing and parameter[1].device.type == "meta"):
        return None
    what = f"does not take {' and '.join(missing)}" if missing else f"makes {parameter[0]} on {parameter[1].device.type}"
    message = f"{key} {what}, and a file's pipeline sets device and dtype of all parameters"
    cure = "take device=None, dtype=None in its constructor, and pass both on to what makes the parameters"
    return Problem("bad-value", message, cure)


def check_channels(entries: Sequence[PipelineEntry]) -> Sequence[PipelineEntry]:
    """Refused unless every channel has one producer, and a consumer after it of as many groups."""
    problems: list[Problem] = []
    producers: dict[str, int] = {}
    consumed = {name for entry in entries for name in entry.extra_input}
    consumed |= {*guesses(consumed, {name for entry in entries for name in entry.extra_output}).values()}
    for i, entry in enumerate(entries):
        for name in entry.extra_input:
            if name not in producers:
                message = f"no earlier op produces channel {shown(name)}"
                problems.append(Problem("unknown-channel", message, similar(name, producers), (i, "extra_input")))
            elif (groups := entries[producers[name]].groups) and entry.groups and groups != entry.groups:
                producer = f"op {producers[name]}, which produces channel {shown(name)}"
                message = f"{producer}, has {number_of(groups, 'group')}, this one {entry.groups}"
                problems.append(Problem("does-not-fit", message, f"write num_groups: {groups}", (i, "num_groups")))
        for name in entry.extra_output:
            if name in producers:
                message, help = f"channel {shown(name)} has a producer, op {producers[name]}", "rename one of the two"
                problems.append(Problem("duplicate-channel", message, help, (i, "extra_output")))
            elif name not in consumed:
                message, help = f"nothing reads channel {shown(name)}", "name it as the extra_input of a later op"
                problems.append(Problem("unused-channel", message, help, (i, "extra_output")))
            producers[name] = i
    if problems:
        raise Refused(*problems)
    return entries


if TYPE_CHECKING:
    OpSection = PipelineEntry
else:
    OpSection = Annotated[Union[tuple(MODELS.values())], Field(discriminator="op"), AfterValidator(to_entry)]  # noqa: UP007
"""One entry of ``pipeline.ops``; validates to an :class:`PipelineEntry`."""


class Pipeline(FileSection):
    """What is computed. dtype: of parameters and of what travels between ops."""

    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    ops: Annotated[list[OpSection], Field(min_length=1, max_length=MAX_OPS), AfterValidator(check_channels)]

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        return DTYPES[self.dtype]
