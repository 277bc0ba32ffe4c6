"""What a class declares of its methods holds for those methods, and ends where a subclass or an instance replaces one.

A fusion computes what an op's traits say, and calls none of the op's protocol methods. So once a class replaces one, directly or
by a mixin, what its bases declared about the methods no longer holds: it has the traits that it declares itself, and no others.

Such an op matches no built-in pattern and runs by itself. It gets its tensors uncast; the methods of its base cast, by
``ctx.cast``, as quantize nodes would. A class that declares the traits again promises that fusions may take it. An op with its
own ``forward`` is called as a module, outside of pipelines.

Helpers that fused implementations call as well (``produce``, ``forward_stage``, ``input_gradient``, ``make_quantizer`` ...) may
be replaced without losing fusions. Helpers that a fusion would skip (``compute_dtype`` of an elementwise op, ``produce`` of a
norm) count as protocol methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

METHODS = ("op_forward", "op_backward", "fuser_forward", "fuser_backward")
"""What the compiler calls to run a basic op."""

CALLS = ("forward", "__call__")
"""What torch calls to run a module; a pipeline calls neither."""

WITHOUT: Mapping[str, Any] = {"traits": frozenset(), "is_cast": False, "accepts_quantized": False}
"""What classes declare about their protocol methods, with the values that hold where nothing is declared."""

_WORDS: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
"""The class that each word of patterns means."""


def place(cls: type, names: Collection[str]) -> int:
    """How far up the bases of ``cls`` the first class that has one of these names is: 0 for ``cls`` itself."""
    return next((i for i, base in enumerate(cls.__mro__) if not vars(base).keys().isdisjoint(names)), len(cls.__mro__))


def is_unchanged(cls: type, declared: Collection[str], methods: Collection[str]) -> bool:
    """Whether none of ``methods`` is overridden below the nearest class that has one of ``declared``."""
    return place(cls, declared) <= place(cls, methods)


def adds_code(cls: type) -> bool:
    """Whether ``cls``, or a mixin of it, comes from outside of opfuse and has methods or properties that no op speaks for."""
    nearest = next((i for i, base in enumerate(cls.__mro__[1:], 1) if "reads_training" in vars(base)), len(cls.__mro__))
    return any(
        not base.__module__.startswith("opfuse.")
        and any(callable(part) or isinstance(part, property) for part in vars(base).values())
        for base in cls.__mro__[:nearest]
    )


def word_of(cls: type, kind: str, *, declared: bool) -> str:
    """What patterns call ``cls``: its kind, behind the name of its module where another class has that kind.

    declared: the class says itself that patterns which name the kind mean it, too.
    """
    first = _WORDS.setdefault(kind, cls)
    if first is cls or declared:
        return kind
    if (first.__module__, first.__name__) == (cls.__module__, cls.__name__):  # defined once more
        _WORDS[kind] = cls
        return kind
    return f"{cls.__module__}.{kind}"


def calls(cls: type, method: str, other: str) -> bool:
    """Whether ``method`` of ``cls`` leads to ``other``, as far as its code and that of the bases that it calls tell."""
    for base in cls.__mro__:
        code = getattr(vars(base).get(method), "__code__", None)
        if code is None and method in vars(base):
            return True
        if code is not None and (other in code.co_names or method not in code.co_names):
            return other in code.co_names
    return True


def kind_of(name: str) -> str:
    """The kind of an op whose class has this name and declares none: ``MyLinear`` is ``my_linear``."""
    out = ""
    for i, char in enumerate(name):
        after_lower = i and name[i - 1].islower() and char.isupper()
        before_lower = i and char.isupper() and i + 1 < len(name) and name[i + 1].islower() and name[i - 1] != "_"
        out += ("_" if after_lower or before_lower else "") + char.lower()
    return out
