"""From a variant to a kernel on a device: what is kept, what is loaded, what can be missing. No GPU is needed."""

import contextlib
import errno
import os
import re
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import opfuse
from opfuse.errors import KernelError, OpfuseWarning, UnsupportedError
from opfuse.kernels.engine import bindings, compiling, cubins, launch, nvrtc
from opfuse.kernels.engine.compiling import Variant
from tests.processes import ran

SMALL = 'extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }'


# -- the cache ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    return cubins.CubinCache(directory)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A variant of a small source."""
    (tmp_path / "small.cu").write_text(SMALL)
    monkeypatch.setattr(compiling, "SOURCES", tmp_path)
    _forget()
    yield Variant("small.cu")
    _forget()


def _forget():
    """Read sources anew."""
    for known in (compiling.assemble, compiling.code_of, compiling._sections_of):
        known.cache_clear()


def test_r14_the_second_use_compiles_nothing(cache, small, monkeypatch):
    cubin = compiling.cubin(small, "sm_90a", cache)
    assert cubin == compiling.compile_variant(small, "sm_90a").cubin
    assert [p.read_text() for p in cache.directory.glob("*.cu")] == [compiling.assemble(small)]
    used = compiling.compile_variant(small, "sm_90a").entries
    bindings.nvrtc_version.cache_clear()
    for module, name in ((compiling, "compile_text"), (compiling, "nvrtc"), (bindings, "nvrtc")):
        monkeypatch.setattr(module, name, None)  # the compiler is not even loaded
    assert compiling.cubin(small, "sm_90a", cache) == cubin
    assert compiling.resources(small, "sm_90a", cache) == used
    assert used["twice"].registers > 0


def test_r14_prose_compiles_nothing_anew(cache, small, monkeypatch):
    """A comment moves the lines behind it, which the text numbers for messages; the cubin is the same."""
    (compiling.SOURCES / "head.cuh").write_text("#pragma once\nconstexpr float TWO = 2.0f;\n")
    source = compiling.SOURCES / "small.cu"
    source.write_text('#include "head.cuh"\n' + SMALL.replace("2.0f", "TWO"))
    cubin, first = compiling.cubin(small, "sm_90a", cache), compiling.assemble(small)
    for path in (source, compiling.SOURCES / "head.cuh"):
        path.write_text("// What it is.\n\n/* In\n   short. */\n" + path.read_text())
    _forget()
    assert compiling.assemble(small) != first
    assert compiling.compile_variant(small, "sm_90a").cubin == cubin
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "compile_text", None)
        assert compiling.cubin(small, "sm_90a", cache) == cubin
    (compiling.SOURCES / "head.cuh").write_text("constexpr float TWO = 3.0f;\n")
    _forget()
    assert compiling.cubin(small, "sm_90a", cache) != cubin


def test_r14_lost_or_damaged_facts_are_found_again(cache, small):
    used = compiling.resources(small, "sm_90a", cache)
    cubin = compiling.cubin(small, "sm_90a", cache)
    (facts,) = cache.directory.glob("*.json")
    facts.write_text(facts.read_text()[:-1])
    assert compiling.resources(small, "sm_90a", cache) == used
    facts.unlink()
    assert compiling.resources(small, "sm_90a", cache) == used
    assert compiling.cubin(small, "sm_90a", cache) == cubin


@pytest.mark.parametrize("what", ["text", "architecture", "flags", "compiler"])
def test_r14_the_key_holds_all_that_a_cubin_is_made_from(what, cache, small, monkeypatch):
    compiling.cubin(small, "sm_90a", cache)
    (first,), arch = cache.directory.glob("*.cubin"), "sm_90a"
    match what:
        case "text":
            small = Variant("small.cu", ("UNUSED=1",))
        case "architecture":
            arch = "sm_90"
        case "flags":
            monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "--extra-device-vectorization"))
        case "compiler":
            monkeypatch.setattr(compiling, "nvrtc_version", lambda: (99, 0))
    compiling.cubin(small, arch, cache)
    assert len({path.name[:64] for path in cache.directory.glob("*.cubin")} - {first.name[:64]}) == 1


def test_the_version_of_the_compiler_is_that_of_its_package_or_of_the_library(monkeypatch):
    library = bindings.nvrtc().version
    bindings.nvrtc_version.cache_clear()
    assert bindings.nvrtc_version()[:2] == library
    for told in (PackageNotFoundError("none"), "12.9.1", "13.0rc1"):
        bindings.nvrtc_version.cache_clear()
        monkeypatch.setattr(bindings, "version", Mock(side_effect=told if isinstance(told, Exception) else [told]))
        assert bindings.nvrtc_version() == library
    bindings.nvrtc_version.cache_clear()


def test_r14_a_damaged_cubin_is_compiled_again(cache, small):
    good = compiling.cubin(small, "sm_90a", cache)
    (path,) = cache.directory.glob("*.cubin")
    path.write_bytes(good[: len(good) // 2])
    assert compiling.cubin(small, "sm_90a", cache) == good == path.read_bytes()


def test_r14_a_directory_that_vanishes_is_made_again(cache, small):
    cache.directory.rmdir()
    cubin = compiling.cubin(small, "sm_90a", cache)
    assert [path.read_bytes() for path in cache.directory.glob("*.cubin")] == [cubin]


def test_r14_where_nothing_can_be_written_each_kernel_is_compiled_once(cache, small, monkeypatch):
    monkeypatch.setattr(cubins.tempfile, "mkstemp", full)
    with pytest.warns(OpfuseWarning, match="No space left.*compiles its kernels anew") as told:
        cubin = compiling.cubin(small, "sm_90a", cache)
    assert len(told) == 1
    assert cubin.startswith(b"\x7fELF")
    used = compiling.resources(small, "sm_90a", cache)
    monkeypatch.setattr(compiling, "compile_text", None)
    assert compiling.cubin(small, "sm_90a", cache) == cubin
    assert compiling.resources(small, "sm_90a", cache) == used
    assert list(cache.directory.iterdir()) == []


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FakeCupy:
    """What is used of CuPy, where modules are read from files; it notes what it was asked."""

    def __init__(self):
        self.calls, self.shared_size_bytes = [], 1024
        self.kernel = SimpleNamespace(ptr=70)

    def RawModule(self, *, path):
        self.calls.append(("load", Path(path).read_bytes()))
        return self

    def get_function(self, name):
        self.calls.append(("get", name))
        return self

    @property
    def max_dynamic_shared_size_bytes(self):
        raise NotImplementedError

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        self.calls.append(("set", size))


@pytest.fixture
def device(cache, monkeypatch):
    """A device that loads kernels by a :class:`FakeCupy`, which this is."""
    cupy = FakeCupy()
    monkeypatch.setattr(launch, "cupy", lambda: cupy)
    monkeypatch.setattr(launch, "_loaded", {})
    monkeypatch.setattr(launch, "cubin_cache", lambda directory: cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    properties = type("Properties", (), {"shared_memory_per_block_optin": 200_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return cupy


@pytest.mark.parametrize("damage", ["none", "altered", "a full disk"])
def test_r14_cupy_loads_the_bytes_that_were_compiled(damage, cache, small, device, monkeypatch):
    """From the file that was compared with its digest, or from memory; all dynamic shared memory is allowed."""
    if damage == "altered":
        compiling.cubin(small, "sm_90a", cache)
        (path,) = cache.directory.glob("*.cubin")
        path.write_bytes(b"another kernel")
    if damage == "a full disk":
        monkeypatch.setattr(cubins.tempfile, "mkstemp", full)
    with pytest.warns(OpfuseWarning) if damage == "a full disk" else contextlib.nullcontext():
        made = launch.loaded(small, "twice", 0)
    assert made == (device, 70)
    wanted = [("load", compiling.compile_variant(small, "sm_90a").cubin), ("get", "twice"), ("set", 200_000 - 1024)]
    assert device.calls == wanted
    assert launch.loaded(small, "twice", 0) == made
    assert device.calls == wanted
    launch.loaded(small, "twice", 1)
    assert device.calls == 2 * wanted


def test_r14_a_kernel_in_memory_has_one_path_that_stays_its_own(cache, monkeypatch):
    """CuPy remembers modules by their paths."""
    monkeypatch.setattr(cubins.tempfile, "mkstemp", full)
    contents = {"one": b"1" * 100_000, "two": b"22"}
    with pytest.warns(OpfuseWarning):
        cache.store("one", contents["one"])
    cache.store("two", contents["two"])
    paths = {key: cache.path(key, content) for key, content in contents.items()}
    assert {key: Path(path).read_bytes() for key, path in paths.items()} == contents
    assert {key: cache.path(key, content) for key, content in contents.items()} == paths


# -- what can be missing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """The bindings, loaded anew."""
    imports = (bindings.nvrtc, bindings.cupy, bindings.driver, bindings.runtime)
    yield [each.cache_clear() for each in imports]
    for each in imports:
        each.cache_clear()


CUDA_PACKAGES = [("13.0", "cupy-cuda13x"), ("12.8", "cupy-cuda12x"), (None, "cupy-cuda13x")]


@pytest.mark.parametrize(("cuda", "package"), CUDA_PACKAGES)
def test_without_cupy_the_error_says_what_to_install(cuda, package, fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setitem(sys.modules, "cupy", None)
    wanted = rf"wants CuPy, got import of cupy halted.*pip install '{package}>=14.2', or set OPFUSE_REFERENCE=1"
    with pytest.raises(UnsupportedError, match=wanted):
        bindings.driver()


FIRST_USES = """
import sys
import opfuse
from opfuse.kernels.engine import bindings
from opfuse.kernels.engine.compiling import compile_text
cubin = compile_text('extern "C" __global__ void f() {}', "sm_90a").cubin
print(cubin[:4], "cupy" in sys.modules)
stream = bindings.stream_at(7)
print(stream.ptr, bindings.stream_at(7) is stream, hasattr(bindings.driver(), "launchKernel"))
"""


def test_compiling_imports_no_cupy_and_no_file_is_written(tmp_path):
    """CuPy makes an empty directory for kernels that it would compile."""
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = ran(FIRST_USES, env=environment, cwd=tmp_path)
    assert done.stdout == "b'\\x7fELF' False\n7 True True\n"
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_where_cupy_has_no_home_the_error_names_its_variable(tmp_path):
    (tmp_path / "file").touch()
    environment = {**os.environ, "HOME": str(tmp_path / "file"), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("CUPY_CACHE_DIR", None)
    script = "from opfuse.kernels.engine import bindings; bindings.driver()"
    done = ran(script, env=environment, check=False)
    assert "UnsupportedError: CUDA kernels: wants a home for CuPy, got [Errno 20]" in done.stderr
    assert "Cure: name a directory that can be written in CUPY_CACHE_DIR" in done.stderr


def test_who_imports_a_deferred_package_meanwhile_gets_it(monkeypatch):
    real = ModuleType("nvmath")
    real.__path__, real.array = [], "array"
    monkeypatch.delitem(sys.modules, "nvmath", raising=False)
    monkeypatch.setattr(bindings, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[]))
    monkeypatch.setattr(bindings.importlib, "import_module", lambda name: sys.modules.setdefault(name, real))
    with bindings.on_demand("nvmath"):
        import nvmath

        assert nvmath is not real
        assert nvmath.array == "array"
        assert sys.modules["nvmath"] is real
        assert nvmath.array == "array"
    assert sys.modules.pop("nvmath") is real
    with bindings.on_demand("nvmath"):
        assert "nvmath" in sys.modules
    assert "nvmath" not in sys.modules


@pytest.mark.parametrize(("cuda", "package"), [("13.0", r"nvidia-cuda-nvrtc==13\.\*"), ("12.8", "nvidia-cuda-nvrtc-cu12")])
@pytest.mark.parametrize("missing", ["bindings", "library"])
def test_without_nvrtc_the_error_says_what_to_install(missing, cuda, package, fresh, monkeypatch):
    def absent():
        raise RuntimeError("libnvrtc: no such file")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    bound = None if missing == "bindings" else SimpleNamespace(nvrtcVersion=absent)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", bound)
    got = "import of cuda.bindings.nvrtc halted" if missing == "bindings" else "libnvrtc: no such file"
    wanted = rf"wants NVRTC, got {got}.*Cure: pip install 'cuda-bindings=={cuda[:2]}\.\*' '{package}'"
    with pytest.raises(UnsupportedError, match=wanted):
        compiling.compile_text(SMALL, "sm_90a")


def test_what_the_compiler_refuses_is_told_in_its_words():
    with pytest.raises(KernelError, match=r"(?s)bad\.cu for sm_90a does not compile\.\nbad\.cu\(1\): error: .*nonsense"):
        compiling.compile_text("nonsense", "sm_90a", "bad.cu")
    with pytest.raises(KernelError, match="invalid value for --gpu-architecture"):
        compiling.compile_text(SMALL, "sm_1")
    with pytest.raises(nvrtc.NvrtcError, match="NVRTC_ERROR_INVALID_PROGRAM"):
        bindings.nvrtc()._read("CUBIN", bindings.nvrtc()._bindings.nvrtcProgram())


@pytest.mark.parametrize(
    ("first_use", "what", "package"),
    [(bindings.cupy, "CuPy", "cupy-cuda12x"), (bindings.nvrtc, "NVRTC", r"cuda-bindings==12\.\*")],
)
def test_another_cuda_than_that_of_torch_is_refused(first_use, what, package, fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(
        UnsupportedError, match=rf"{what}: wants a build for CUDA 12\.8, .*got CUDA 13\. Cure: pip install '{package}"
    ):
        first_use()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    first_use()


PRIVATE = re.compile(r"cupy_backends|\bcupy(x|\.\w+)*\._[a-z]|on_demand\([^)]*cupy|modules\[.cupy")
"""Names of CuPy that it does not promise to keep, and modules in its place."""


def test_of_cupy_only_public_names_are_used_and_nothing_stands_in_for_it():
    root = Path(opfuse.__file__).parents[1]
    places = [path for each in ("opfuse", "benchmarks", "tests", "examples") for path in (root / each).rglob("*.py")]
    found = {path.name for path in places if path != Path(__file__) and PRIVATE.search(path.read_text(encoding="utf-8"))}
    assert found == set()
    for private in ("import cupy_backends.cuda", "cupy._core.core", "cupy.cuda._compiler_cache", 'on_demand("cupy")'):
        assert PRIVATE.search(private)
    assert not PRIVATE.search("cupy.cuda.driver.launchKernel")
