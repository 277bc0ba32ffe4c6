"""Every error and warning of opfuse. The class is the category; the text says where, what was wanted, what came, and the cure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn


class OpfuseError(Exception):
    """Base of every opfuse error.

    Subclasses also derive from the builtin exception a PyTorch user would expect (``ValueError``, ``TypeError`` …).
    """


class RecipeError(OpfuseError, ValueError):
    """A recipe field holds a value it cannot hold, or two fields contradict each other."""


class UnknownFieldError(RecipeError, TypeError):
    """A recipe was given a keyword that is not one of its fields."""


class ShapeError(OpfuseError, ValueError):
    """A tensor has a shape that an op or a format cannot take."""


class DtypeError(OpfuseError, TypeError, ValueError):
    """A tensor has a dtype that an op or a format cannot take."""


class QuantizerError(OpfuseError, ValueError):
    """A quantizer was built or asked for something its format does not have."""


class QuantizerTypeError(QuantizerError, TypeError):
    """Something that is not a quantizer was given where one is wanted."""


class MissingPlaneError(OpfuseError, RuntimeError):
    """Data was asked of a plane that was not made; the text says why it was not."""


class GemmError(OpfuseError, ValueError):
    """Two operands cannot meet in one matrix product: formats, shapes or layouts."""


class SpecError(OpfuseError, AttributeError, ValueError):
    """A hyper-parameter of an op is out of range, or was assigned after construction."""


class UnknownArgumentError(SpecError, TypeError):
    """An op was given a keyword that its constructor does not take."""


class PipelineError(OpfuseError, ValueError):
    """Ops, extra tensors or channels do not fit together."""


class PipelineIndexError(PipelineError, IndexError):
    """A module, an extra tensor or a channel was asked for under a number that none has."""


class PipelineTypeError(PipelineError, TypeError):
    """A channel was described by a value of another type."""


class ChannelError(PipelineError, RuntimeError):
    """A channel was changed after a pipeline captured it."""


class FusionError(OpfuseError, RuntimeError):
    """A fusion rule or function returned something that does not cover the pipeline."""


class PlanMissError(OpfuseError, RuntimeError):
    """A plan had to be made where the caller forbade it (``on_miss="error"``, graph capture)."""


class KeyValueError(OpfuseError, TypeError):
    """A value without value identity was put in a key."""


class SavedTensorError(OpfuseError, RuntimeError):
    """An op saved other names than it declared, or saved data changed between forward and backward."""


class MissingSavedError(SavedTensorError, AttributeError):
    """The backward pass of an op reads a name under which the forward pass kept nothing."""


class QuantizedTensorError(OpfuseError, RuntimeError):
    """An operation on a quantized tensor that would silently lose data."""


class OptimizerError(OpfuseError, TypeError, RuntimeError):
    """What was given is no torch optimizer, has masters already, or does not step on the tensors that its groups name."""


class ConversionError(OpfuseError, ValueError):
    """A model cannot be converted as was asked, or was changed since it was."""


class ConfigError(OpfuseError, ValueError):
    """One or more findings in a configuration file, its arguments; as text, one after the other."""

    @property
    def findings(self) -> tuple[Any, ...]:
        """The findings, in the order of the file."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


class TraceError(OpfuseError, ValueError):
    """A file is no trace, or a trace has no such key."""


class TrainingError(OpfuseError, ArithmeticError):
    """Training cannot go on: a loss is not a finite number."""


class OutputError(OpfuseError, OSError):
    """Results cannot be written where they were to go; the text says where they are, if there are any yet."""


class UnsupportedError(OpfuseError, RuntimeError):
    """This machine, or this version, cannot do it; the text names what can."""


class NotHereError(UnsupportedError, AttributeError):
    """A name of another library that opfuse has not; the text says what to use instead."""


class KernelError(OpfuseError, RuntimeError):
    """A kernel does not compile, or was registered without what a kernel needs."""


class OpfuseWarning(UserWarning):
    """Something the user should know and that opfuse could handle."""


class Described(str):
    """The text of an error, with parts as text of their own. problem: all but the cure. wanted, got: what was, and what came."""

    problem: str
    wanted: str
    got: str
    cure: str


def describe(where: str, *, wanted: object, got: object, cure: str) -> Described:
    """The one sentence every error of opfuse is made of.

    >>> describe("Linear(4, 8) input", wanted="last dimension 4", got=5, cure="pass a tensor of shape (..., 4)")
    'Linear(4, 8) input: wants last dimension 4, got 5. Cure: pass a tensor of shape (..., 4).'
    """
    return _described(f"{where}: wants {wanted}, got {got}", str(wanted), str(got), cure)


def notice(where: str, *, got: str, cure: str) -> Described:
    """The sentence of a warning where nothing was wanted: what happened, and the cure.

    >>> notice("mlp has changed since fuse_", got="'act' was SiLU(), is GELU()", cure="call opfuse.fuse_ again")
    "mlp has changed since fuse_: 'act' was SiLU(), is GELU(). Cure: call opfuse.fuse_ again."
    """
    return _described(f"{where}: {got}", "", got, cure)


def _described(problem: str, wanted: str, got: str, cure: str) -> Described:
    made = Described(f"{_ended(problem)} Cure: {_ended(cure.rstrip('.'))}")
    made.problem, made.wanted, made.got, made.cure = problem, wanted, got, cure
    return made


def number_of(count: int, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``2 losses``, ``2 matrices``."""
    several = f"{noun[:-1]}ces" if noun.endswith("ix") else f"{noun}es" if noun.endswith(("s", "x")) else f"{noun}s"
    return f"{count} {noun if count == 1 else several}"


def differing(count: int, total: int, noun: str) -> str:
    """``1 of 3 values differs``, ``2 of 3 values differ``."""
    return f"{count} of {number_of(total, noun)} {'differs' if count == 1 else 'differ'}"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def with_article(name: str) -> str:
    """The name of a class behind the article that it is spoken with: ``a ReLU``, ``an LSTM``, ``a UNet``."""
    spelled = re.match(r"[A-Z](?=[A-Z\d])", name)
    vowel = name[:1] in "AEFHILMNORSX" if spelled else re.match(r"(?!uni|eu|one)[aeiou]", name, re.IGNORECASE)
    return f"an {name}" if vowel else f"a {name}"


def problem_of(error: OpfuseError) -> str:
    """What the text of an error says but for the cure, for an error that has another one."""
    match error.args:
        case [Described() as text]:
            return text.problem
    return str(error)


def os_error_text(error: OSError) -> str:
    """What the system says of an error: ``OSError: No space left on device``."""
    return f"{type(error).__name__}: {error.strerror}"


def _ended(text: str) -> str:
    """With a full stop, unless it ends as a question: :func:`nearest` asks."""
    return text if text.endswith("?") else f"{text}."


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name closest to ``name`` in any case of letters, if one is close; first of those of which it is a part."""
    folded = {word.casefold(): word for word in known}
    asked = name.casefold()
    part = [word for word in folded if asked and asked in word.split("_")]  # linear: of basic_linear
    found = difflib.get_close_matches(asked, part or folded, n=1, cutoff=0.5)
    return folded[found[0]] if found else None


def nearest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'gelu'?"`` for the known name closest to ``name``, or an empty string."""
    found = closest(name, known)
    return f"; did you mean {found!r}?" if found else ""


def no_name(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """The error of a module that has not the attribute ``name``, with the nearest of those that it has.

    Notebooks, logs and ``str`` show that; the suggestion of Python itself stands in its own tracebacks alone, where it would be
    the second one, so the error has no ``name`` to look for. For private names, which tools ask of any object, nothing is near.
    """
    near = "" if name.startswith("_") else nearest(name, known)
    return AttributeError(f"module {module!r} has no attribute {name!r}{near}", name=None, obj=None)


def only_names(module: str, known: Sequence[str]) -> tuple[Callable[[str], NoReturn], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that lists the ``known`` names, and tells the nearest of a misspelt one."""

    def get(name: str) -> NoReturn:
        raise no_name(module, name, known)

    return get, lambda: sorted(known)
