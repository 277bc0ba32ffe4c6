"""NVRTC, by NVIDIA's public bindings of it, ``cuda.bindings``, on which torch's CUDA builds depend.

CuPy's compiler is not used: it always passes ``-ftz=true``, and the scales of E8M0 need subnormals. Its public names for NVRTC
come with all of CuPy besides; these bindings import in a fiftieth of that time, so kernels compile while CuPy is imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple


class NvrtcError(RuntimeError):
    """The compiler refused a text; the message is its own."""


class Printout(NamedTuple):
    """The result of compiling one text, and the compiler's log."""

    cubin: bytes
    ptx: str
    log: str


class Nvrtc:
    """The compiler. Python's lock is free while it compiles. ImportError or RuntimeError if the bindings or the library lack."""

    def __init__(self) -> None:
        self._bindings: Any = importlib.import_module("cuda.bindings.nvrtc")
        major, minor = self._call("Version")
        self.version: tuple[int, int] = major, minor

    def compile(self, text: str, name: str, options: Sequence[str]) -> Printout:
        """The cubin of ``text``, of which messages speak as ``name``. NvrtcError with the messages if it does not compile."""
        (program,) = self._call("CreateProgram", text.encode(), name.encode(), 0, None, None)
        try:
            status, *_ = self._bindings.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            log = self._text("ProgramLog", program)
            if status:
                raise NvrtcError(log or self._reason(status))
            return Printout(self._read("CUBIN", program), self._text("PTX", program), log)
        finally:
            self._call("DestroyProgram", program)

    def _text(self, what: str, program: Any) -> str:
        """A text of the program, without the zero at its end."""
        return self._read(what, program).rstrip(b"\0").decode(errors="replace")

    def _read(self, what: str, program: Any) -> bytes:
        (size,) = self._call(f"Get{what}Size", program)
        room = bytearray(size)  # not bytes, of which Python may share one object
        self._call(f"Get{what}", program, room)
        return bytes(room)

    def _call(self, name: str, *arguments: object) -> Sequence[Any]:
        """What a function returns beside its status."""
        results: list[Any]
        status, *results = getattr(self._bindings, f"nvrtc{name}")(*arguments)
        if status:
            raise NvrtcError(self._reason(status))
        return results

    def _reason(self, status: Any) -> str:
        _, reason = self._bindings.nvrtcGetErrorString(status)
        return str(reason.decode())
