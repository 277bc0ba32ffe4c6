"""What the memory of a training step comes to: its parts, its layers, its peak; as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from opfuse.inspect.alike import aligned, alike, counted, starred
from opfuse.inspect.charts import PageChart
from opfuse.inspect.page import Cell, Page, PageBytes, PageSection, PageTable, rounded_bytes


class LayerMemory(NamedTuple):
    """Bytes of one layer on a rank. saved: at the end of the forward pass, as far as the layer made it."""

    path: str
    weights: int
    gradients: int
    optimizer: int
    saved: int


class Proposal(NamedTuple):
    """A change of settings, on top of those before it, and the peak of all steps with all of them."""

    change: str
    peak: int
    fits: bool


@dataclass(frozen=True)
class MemorySettings:
    """What a step is estimated under."""

    recipe: str
    optimizer: str
    world: int
    checkpointing: str
    loss: str
    main_grads: bool

    def __str__(self) -> str:
        ranks = "one GPU" if self.world == 1 else f"each of {self.world} GPUs, sharded by FSDP2"
        told = (
            f"recipe {self.recipe}",
            f"optimizer {self.optimizer}",
            f"checkpointing {self.checkpointing}",
            f"loss {self.loss}",
        )
        return ", ".join((*told, *(("main gradients",) if self.main_grads else ()), ranks))


@dataclass(frozen=True)
class Memory:
    """Bytes of a training step on each rank.

    held: from step to step, by what it is. saved: by the forward pass for the backward pass. gradients: all of them, after the
    backward pass. peak: the most at once, at ``place``; at_peak: of what it consists. first_peak: of the first two steps, which
    no program repeats. layers: in the order of the model; what is saved by none, as a loss, stands under an empty path. timeline:
    bytes by the number of the op, thinned. budget, proposals: what there may be, and what to change.
    """

    settings: MemorySettings
    held: Mapping[str, int]
    saved: int
    gradients: int
    peak: int
    place: str
    at_peak: Mapping[str, int] = field(repr=False)
    first_peak: int
    layers: tuple[LayerMemory, ...] = field(repr=False)
    timeline: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    budget: int | None = None
    proposals: tuple[Proposal, ...] = field(default=(), repr=False)

    @property
    def most(self) -> int:
        """The peak of all steps, the first ones too."""
        return max(self.peak, self.first_peak)

    @property
    def fits(self) -> bool:
        """Whether every step stays within the budget; True without one."""
        return self.budget is None or self.most <= self.budget

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {"held": dict(self.held), "at_peak": dict(self.at_peak), "fits": self.fits}
        lists = {name: [each._asdict() for each in getattr(self, name)] for name in ("layers", "proposals")}
        return {**vars(self), "settings": asdict(self.settings), **plain, **lists, "timeline": [*map(list, self.timeline)]}

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def html(self) -> str:
        """A page in one file, which needs no network."""
        return _page(self).html()


# -- text ----------------------------------------------------------------------------------------------------------------------

HEAD = ("layer", "weights", "gradients", "optimizer", "saved")


def _folded(found: Memory) -> Iterator[tuple[str, *tuple[int, ...]]]:
    """The layers, those that are alike in one."""
    for same in alike(found.layers, lambda layer: starred(layer.path)):
        yield (
            counted([layer.path or "the call" for layer in same]),
            *(sum(column) for column in zip(*(layer[1:] for layer in same))),
        )


def _lines(found: Memory) -> Iterator[str]:
    yield str(found.settings)
    yield ""
    rows = [HEAD, *((name, *map(rounded_bytes, sizes)) for name, *sizes in _folded(found))]
    yield from aligned(rows, right=range(1, len(HEAD)))
    yield ""
    for name, size in (*found.held.items(), ("saved by the forward pass", found.saved), ("gradients", found.gradients)):
        if size:
            yield _line(name, size)
    yield _line("peak", found.peak, f"{found.place}: {_made(found)}")
    yield _line("peak of the first two steps", found.first_peak)
    if found.budget is not None:
        yield _line("budget", found.budget, "fits" if found.fits else f"{_excess(found)}; what to change, one after the other:")
        for change, peak, fits in found.proposals:
            yield _line(change, peak, "fits" if fits else "")


def _excess(found: Memory) -> str:
    return f"exceeded by {rounded_bytes(found.most - (found.budget or 0))}"  # a small one shows in no difference of rounded sizes


def _line(name: str, size: int, more: str = "") -> str:
    return f"{name:<28}{rounded_bytes(size):>10}  {more}".rstrip()


def _made(found: Memory) -> str:
    """Of what the peak consists."""
    return ", ".join(f"{name} {rounded_bytes(size)}" for name, size in found.at_peak.items() if size >= found.peak / 1000)


# -- page ----------------------------------------------------------------------------------------------------------------------


def _page(found: Memory) -> Page:
    facts: dict[str, Cell] = {"peak": PageBytes(found.peak), "at": found.place, "settings": str(found.settings)}
    if found.budget is not None:
        facts["budget"] = f"{rounded_bytes(found.budget)}: {'fits' if found.fits else _excess(found)}"
    parts = {**found.held, "saved by the forward pass": found.saved, "gradients": found.gradients}
    parts |= {"peak": found.peak, "peak of the first two steps": found.first_peak}
    sections = [
        PageSection("Parts", [_sizes(parts), _sizes(found.at_peak, "At the peak")]),
        PageSection(
            "Over the step",
            [PageChart("memory", {"memory": found.timeline}, "bytes", "op")],
            "From the first op of the forward pass to the last of the backward pass, once programs repeat calls.",
        ),
        PageSection("Layers", [PageTable("", HEAD, [(name, *map(PageBytes, sizes)) for name, *sizes in _folded(found)])]),
    ]
    if found.proposals:
        rows = [(each.change, PageBytes(each.peak), "fits" if each.fits else "") for each in found.proposals]
        note = "Each on top of those before it, in the order of what they cost."
        sections.append(PageSection("What to change", [PageTable("", ("change", "peak", ""), rows)], note))
    return Page("Memory of a training step", facts, sections)


def _sizes(parts: Mapping[str, int], title: str = "") -> PageTable:
    return PageTable(title, ("what", "bytes"), [(name, PageBytes(size)) for name, size in parts.items() if size])
