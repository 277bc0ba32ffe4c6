"""Keys whose fields have names, and which know where their values came from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from opfuse.compiler.lower import Inputs
from opfuse.compiler.plan import PlanKey
from opfuse.core.signature import Env
from opfuse.recipes import region_source
from opfuse.sources import caller


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


def named_key(structure: str, env: tuple[Any, ...], inputs: Inputs, rules: str, call: tuple[int, str] | None) -> PlanKey:
    """A plan's key. call: the rows of the input and the source of the rules, for a key that tells where its values come from."""
    around = _Around(*env)
    key = _LocatedKey(structure, around, inputs, rules)
    if call is not None:
        place, region = caller(), region_source()
        around.sources = {"recipe": region, "amax_group": region, "rows_class": f"{call[0]} rows", "level": call[1]}
        key.sources = {"env": place, "inputs": place}
    return key
