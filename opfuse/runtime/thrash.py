"""Misses that repeat: warns of a cache that makes plans again and again, and names the leaf of the key that changes."""

from __future__ import annotations

from collections import Counter, deque

from opfuse.errors import describe
from opfuse.keys import Miss

SAME, AGAIN = 16, 3
"""How many misses in a row are warned of: if all differ in the same single leaf; if their keys had plans that were dropped."""

CURES = {
    "env.recipe": "make the recipe once, outside of the loop, and pass that object",
    "env.rows_class": "pad the rows to a multiple of 128, or keep to few sizes",
    "env.aligned": "pass tensors whose memory begins at a multiple of 16 bytes",
    "env.amax_group": "make the process group once",
    "rules": "register fusions once, outside of the loop",
    "inputs": "keep dtypes, devices and requires_grad of inputs and parameters as they are",
    "ops": "build the ops once; a change of an op is another pipeline",
}
"""What to do about a leaf, by the beginning of its path."""


class Thrash:
    """Looks at the misses of one cache of ``size`` plans, in order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.told = False
        self._last: deque[Miss] = deque(maxlen=SAME)

    def note(self, where: str, miss: Miss) -> str | None:
        """The warning, once, when misses begin to repeat; else None. where: how the pipeline is called."""
        self._last.append(miss)
        if self.told or (found := self._pattern()) is None:
            return None
        self.told = True
        path, got = found
        cure = next((cure for begin, cure in CURES.items() if path.startswith(begin)), "keep this value as it is")
        return describe(f"plans of {where}", wanted="keys that come back", got=got, cure=cure)

    def _pattern(self) -> tuple[str, str] | None:
        """The path of the leaf that changes, and what happens."""
        again = [miss for miss in list(self._last)[-AGAIN:] if miss.again]
        paths = Counter(difference.path for miss in self._last for difference in miss.differences)
        if len(again) == AGAIN:
            path = paths.most_common(1)[0][0] if paths else "key"
            return path, f"more than {self.size} in turn, so that each is dropped before it comes back; what flips is {path}"
        alone = {difference.path for miss in self._last for difference in miss.differences if len(miss.differences) == 1}
        if len(self._last) == SAME and len(alone) == 1 and paths.total() == SAME:
            path, last = alone.pop(), self._last[-1].differences[0]
            return path, f"{SAME} misses in a row that differ in {path} alone, the last time {last}"
        return None
