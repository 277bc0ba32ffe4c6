"""``opfuse parity``: two checkpoints side by side, tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import typer

from opfuse.cli.output import echo, echo_json
from opfuse.errors import number_of
from opfuse.interchange.parity import Verdict, compare, load

_NAMED = 8  # tensors of one kind of difference that are named; the others are counted


def parity(
    model: Path, checkpoint: Path, *, source: Path | None, cast: bool, plain: Collection[str] | None, as_json: bool
) -> None:
    """Print what differs between the two, and end with 1 if anything does."""
    chosen = {} if plain is None else {"plain": plain}
    values = None if source is None else load(source)
    verdicts = compare(load(model), load(checkpoint), source=values, cast=cast, **chosen)
    if as_json:
        echo_json([verdict._asdict() for verdict in verdicts])
    else:
        echo("\n".join(_lines(verdicts)))
    raise typer.Exit(0 if all(verdict.is_equal for verdict in verdicts) else 1)


def _lines(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """Counts of what is equal; then what differs, by name, the rarest kind first: it is the likeliest mistake."""
    equal = [verdict for verdict in verdicts if verdict.is_equal]
    verb = "is" if len(equal) == 1 else "are"
    yield f"{len(equal)} of {number_of(len(verdicts), 'tensor')} {verb} equal"
    for (status, left, right, why), group in sorted(_kinds(equal), key=lambda kind: -len(kind[1])):
        yield f"  {len(group)} {status}: {left}{f' beside {right}' if left != right else ''}{f', {why}' if why else ''}"
    others = [verdict for verdict in verdicts if not verdict.is_equal]
    for (status, left, right, _), group in sorted(_kinds(others, whys=False), key=lambda kind: len(kind[1])):
        yield f"{status}: {left} beside {right}"
        yield from (f"  {verdict.name}{f': {verdict.why}' if verdict.why else ''}" for verdict in group[:_NAMED])
        if len(group) > _NAMED:
            yield f"  and {len(group) - _NAMED} more"


def _kinds(verdicts: Sequence[Verdict], *, whys: bool = True) -> list[tuple[tuple[str, ...], list[Verdict]]]:
    def kind(verdict: Verdict) -> tuple[str, ...]:
        return verdict.status, verdict.left, verdict.right, verdict.why if whys else ""

    return [(key, [*group]) for key, group in groupby(sorted(verdicts, key=kind), key=kind)]
