"""Extra tensors of an op, and the channels that carry them from one op of a pipeline to another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from opfuse.domains import BOOLEAN, INTEGER
from opfuse.errors import ChannelError, PipelineError, PipelineIndexError, PipelineTypeError, describe


@dataclass(frozen=True)
class Channel:
    """Names an extra tensor, so that an op of the same pipeline consumes what another one produces."""

    name: str | None = None
    to_caller: bool = True


def cure_of_extras(ops: Iterable[Any]) -> str:
    """What a caller of ``ops`` passes beside the input: a tensor for each extra input without a channel."""
    asking = [op.label for op in ops for channel in op.extra_input_channels if channel.name is None]
    return f"pass x, and a tensor for each of {', '.join(asking)}, in this order" if asking else "pass x alone"


_OUTPUT = "a call makes its outputs: copy what it returns, or have opfuse.graphed give them addresses that stay"
_BUFFERS = {
    "output": _OUTPUT,
    "out": _OUTPUT,
    "grad_input": "autograd takes the gradient: copy it in a hook of the input; that of a weight can go to its main_grad",
}
"""Buffers of the caller, as te.ops takes them, and what to do instead: fused kernels write results, so no op could fill one."""


def cure_of_keywords(unknown: Iterable[str]) -> str:
    """What a caller does instead of passing keyword arguments that an op does not take."""
    return next((_BUFFERS[name] for name in unknown if name in _BUFFERS), "check the names")


class ChannelMixin:
    """What a basic op takes and returns beside its main input and output.

    Each extra tensor comes from the caller, or goes to it, unless it is given the name of a channel.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0
    label: Any
    _channels: tuple[list[Channel], list[Channel]]
    _captured: bool

    def _init_channels(self) -> None:
        self.__dict__["_channels"] = (
            [Channel() for _ in range(self.num_extra_inputs)],
            [Channel() for _ in range(self.num_extra_outputs)],
        )

    @property
    def extra_input_channels(self) -> tuple[Channel, ...]:
        """Channels of the extra inputs; a nameless one is given by the caller."""
        return tuple(self._known_channels()[0])

    @property
    def extra_output_channels(self) -> tuple[Channel, ...]:
        """Channels of the extra outputs."""
        return tuple(self._known_channels()[1])

    def set_extra_input_channel(self, index: int, name: str | None) -> None:
        """Take extra input ``index`` from the op of the same pipeline that produces ``name`` (None: from the caller)."""
        self._set_channel(0, index, Channel(self._channel_name(name)))

    def set_extra_output_channel(self, index: int, name: str | None, *, output_to_caller: bool = True) -> None:
        """Publish extra output ``index`` as ``name``; with ``output_to_caller=False`` the pipeline does not return it."""
        BOOLEAN.checked(f"{self.label} output_to_caller", output_to_caller, PipelineTypeError)
        self._set_channel(1, index, Channel(self._channel_name(name), output_to_caller))

    def _known_channels(self) -> tuple[list[Channel], list[Channel]]:
        if "_channels" not in self.__dict__:
            cure, cls = "call super().__init__() first in its constructor", type(self).__name__
            raise PipelineError(describe(f"class {cls}", wanted="the state of a BasicOperation", got="none", cure=cure))
        return self._channels

    def _channel_name(self, name: str | None) -> str | None:
        if name is not None and (not isinstance(name, str) or not name):
            raise PipelineError(
                describe(f"{self.label} channel", wanted="a non-empty string or None", got=repr(name), cure="name the channel")
            )
        return name

    def _set_channel(self, side: int, index: int, channel: Channel) -> None:
        channels = self._channels[side]
        what = ("input", "output")[side]
        index = INTEGER.checked(f"{self.label} extra {what} channel", index, PipelineTypeError)
        if not 0 <= index < len(channels):
            raise PipelineIndexError(
                describe(
                    f"{self.label} extra {what} channel",
                    wanted=f"an index below {len(channels)}",
                    got=index,
                    cure=f"this op has {len(channels)} extra {what}s",
                )
            )
        if self._captured:
            raise ChannelError(
                describe(
                    f"{self.label} extra {what} {index}",
                    wanted="channels set before the first call",
                    got="a captured op",
                    cure="set channels before the op enters a pipeline, or build a new op",
                )
            )
        channels[index] = channel
