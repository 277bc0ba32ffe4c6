"""NVRTC, called by its C interface: CuPy's binding of it imports all of CuPy, which takes longer than a plan."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_FOLDERS = ("cu{major}/lib", "cuda_nvrtc/lib")
"""Where NVIDIA's wheels, which torch's depend on, put the library: below the package ``nvidia``, from CUDA 13 on and before."""


class NvrtcError(RuntimeError):
    """The compiler refused a text; the message is its own."""


class Printout(NamedTuple):
    """The result of compiling one text, and the compiler's log."""

    cubin: bytes
    ptx: str
    log: str


class Nvrtc:
    """The functions of the library. Python's lock is free while it compiles."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.version = self._version()

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("Version", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(self, text: str, name: str, options: Sequence[str]) -> Printout:
        """The cubin of ``text``, of which messages speak as ``name``. NvrtcError with the messages if it does not compile."""
        program = ctypes.c_void_p()
        self._call("CreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
            status = self._library.nvrtcCompileProgram(program, len(options), given)
            log = self._told("ProgramLog", program).decode(errors="replace")
            if status:
                raise NvrtcError(log or self._reason(status))
            return Printout(self._read("CUBIN", program), self._told("PTX", program).decode(), log)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _told(self, what: str, program: ctypes.c_void_p) -> bytes:
        """A text of the program, without the zero at its end."""
        return self._read(what, program).rstrip(b"\0")

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        room = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, room)
        return room.raw

    def _call(self, name: str, *arguments: object) -> None:
        function: Callable[..., int] = self._library[f"nvrtc{name}"]
        if status := function(*arguments):
            raise NvrtcError(self._reason(status))

    def _reason(self, status: int) -> str:
        text = self._library.nvrtcGetErrorString
        text.restype = ctypes.c_char_p
        reason: bytes = text(status)
        return reason.decode()


def find(major: str) -> Nvrtc:
    """The library for CUDA ``major``: from NVIDIA's wheels, or as the system or CUDA's own search finds it; else OSError."""
    reason = OSError(f"no libnvrtc.so.{major}")
    for path in _places(major):
        try:
            if Path(path).is_absolute():
                for needed in Path(path).parent.glob("libnvrtc-builtins.so.*"):  # the library looks for them by name alone
                    ctypes.CDLL(str(needed))
            return Nvrtc(ctypes.CDLL(path))
        except (OSError, AttributeError, NvrtcError) as error:  # not there, not this library, or one that cannot say its version
            reason = OSError(str(error))
    raise reason


def _places(major: str) -> Iterator[str]:
    name = f"libnvrtc.so.{major}"
    wheels = find_spec("nvidia")
    for root in (wheels and wheels.submodule_search_locations) or ():
        yield from map(str, filter(Path.is_file, (Path(root, folder.format(major=major), name) for folder in _FOLDERS)))
    yield name
    if (found := _searched(major)) is not None:
        yield found


def _searched(major: str) -> str | None:
    """What cuda.pathfinder finds, which knows conda, CUDA_HOME and more, but takes long to import; CuPy depends on it."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        path = load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError):
        return None
    return path if path and f".so.{major}" in path else None
