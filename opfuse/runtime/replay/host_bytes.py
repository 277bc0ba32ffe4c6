"""Bytes of the host's memory that recordings take."""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Collection, Iterable
from types import CodeType

_PLAIN = (dict, list, tuple, frozenset, str, bytes, int, float, CodeType, memoryview)
_OWN = (*("opfuse.runtime.replay.", "opfuse.runtime.interpret.interpreter", "opfuse.core.context", "opfuse.tensors.storage"),)
"""Modules whose objects belong to one recording. What else it holds, as ops, torch's functions and tensors, is shared."""


def bytes_of(things: Iterable[object], *, without: Collection[object] = ()) -> int:
    """Bytes of objects and of what belongs to them, each object once. without: objects that others count."""
    seen, waiting, total = {id(vars(builtins)), *map(id, without)}, [*things], 0
    while waiting:
        each = waiting.pop()
        if id(each) not in seen and (isinstance(each, _PLAIN) or type(each).__module__.startswith(_OWN)):
            seen.add(id(each))
            total += sys.getsizeof(each)
            waiting += _parts(each) if isinstance(each, CodeType) else gc.get_referents(each)
    return total


def _parts(code: CodeType) -> tuple[object, ...]:
    """What Python's collector does not see of code, since it is in no cycle."""
    return code.co_consts, code.co_names, code.co_varnames, code.co_linetable, code.co_exceptiontable
