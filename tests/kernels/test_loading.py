"""From a variant to a kernel on a device: what is kept, what is loaded, what can be missing. No GPU is needed."""

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from opfuse.errors import KernelError, OpfuseWarning, UnsupportedError
from opfuse.kernels.engine import bindings, compiling, cubins, launch, nvrtc
from opfuse.kernels.engine.compiling import Variant

COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
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
    monkeypatch.setattr(compiling, "compile_text", None)
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
            monkeypatch.setattr(bindings.nvrtc(), "version", (99, 0))
    compiling.cubin(small, arch, cache)
    assert len({path.name[:64] for path in cache.directory.glob("*.cubin")} - {first.name[:64]}) == 1


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


class Driver:
    """The driver's functions, which remember what they were asked."""

    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1, 8

    def __init__(self):
        self.calls = []

    def ctxGetCurrent(self):
        return 1

    def moduleLoadData(self, image):
        self.calls.append(("load", image))
        return 7

    def moduleGetFunction(self, module, name):
        self.calls.append(("get", module, name))
        return 70

    def funcGetAttribute(self, attribute, function):
        return 1024 if attribute == self.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES else 0

    def funcSetAttribute(self, function, attribute, value):
        self.calls.append(("set", function, attribute, value))


def test_r14_the_bytes_that_were_compared_are_the_bytes_that_are_loaded(cache, small, monkeypatch):
    """No file is opened between the two, so nothing can be put in its place; all dynamic shared memory is allowed."""
    driver = Driver()
    monkeypatch.setattr(launch, "driver", lambda: driver)
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "cubin_cache", lambda directory: cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    properties = type("Properties", (), {"shared_memory_per_block_optin": 200_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert launch.load(small, "twice", 0) == 70
    assert driver.calls == [
        ("load", compiling.compile_variant(small, "sm_90a").cubin),
        ("get", 7, "twice"),
        ("set", 70, 8, 200_000 - 1024),
    ]
    assert launch._functions == {(small, "twice", 0): 70}


# -- what can be missing -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh():
    """The bindings, loaded anew."""
    imports = (bindings.nvrtc, bindings.driver, bindings.runtime)
    yield [each.cache_clear() for each in imports]
    for each in imports:
        each.cache_clear()


@pytest.mark.parametrize(("cuda", "package"), [("13.0", "cupy-cuda13x"), ("12.8", "cupy-cuda12x"), (None, "cupy-cuda13x")])
def test_without_cupy_the_error_says_what_to_install(cuda, package, fresh, monkeypatch):
    def refuse(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(bindings.importlib, "import_module", refuse)
    with pytest.raises(
        UnsupportedError, match=rf"wants CuPy, got No module named .*pip install '{package}>=14.2'.*OPFUSE_REFERENCE=1"
    ):
        bindings.driver()


DRIVER = """
extern "C" int cuCtxGetCurrent(void** context) { *context = (void*)7; return 0; }
"""
"""A driver of one function."""

FIRST_USES = """
import sys
import opfuse
from opfuse.kernels.engine import bindings
from opfuse.kernels.engine.compiling import compile_text
bindings.require_same_cuda()
assert bindings.driver().ctxGetCurrent() == 7
cubin = compile_text('extern "C" __global__ void f() {}', "sm_90a").cubin
print(cubin[:4], sorted({"cupy", "cuda.pathfinder"} & sys.modules.keys()))
"""


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_neither_compiling_nor_launching_imports_all_of_cupy_or_writes_a_file(tmp_path):
    """Which takes longer than a first plan; and which makes a directory, where it can."""
    home, library = tmp_path / "home", tmp_path / "lib"
    home.mkdir(), library.mkdir()
    (library / "driver.cpp").write_text(DRIVER)
    build = [COMPILER, "-shared", "-fPIC", "-o", str(library / "libcuda.so.1"), str(library / "driver.cpp")]
    subprocess.run(build, check=True)
    path = os.pathsep.join(filter(None, (str(library), os.environ.get("LD_LIBRARY_PATH"))))
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path), "LD_LIBRARY_PATH": path}
    done = subprocess.run([sys.executable, "-c", FIRST_USES], env=environment, capture_output=True, check=True, cwd=home)
    assert done.stdout.decode() == "b'\\x7fELF' []\n"
    assert [*home.iterdir()] == []


def test_who_imports_cupy_meanwhile_gets_it(monkeypatch):
    real = ModuleType("cupy")
    real.__path__, real.array = [], "array"
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(bindings.importlib, "import_module", lambda name: sys.modules.setdefault(name, real))
    with bindings._cupy_on_demand():
        import cupy

        cupy._environment._log("a function is loaded")
        assert cupy is not real
        assert cupy.array == "array"
        assert sys.modules["cupy"] is real
        assert cupy.array == "array"
    assert sys.modules.pop("cupy") is real
    with bindings._cupy_on_demand():
        assert "cupy" in sys.modules
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(("cuda", "package"), [("13.0", r"nvidia-cuda-nvrtc==13\.\*"), ("12.8", "nvidia-cuda-nvrtc-cu12")])
def test_without_nvrtc_the_error_says_what_to_install(cuda, package, fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc, "_places", lambda major: iter([f"libnone.so.{major}"]))
    with pytest.raises(UnsupportedError, match=rf"wants NVRTC, got libnone.*No such file.*Cure: pip install '{package}'"):
        compiling.compile_text(SMALL, "sm_90a")


def test_nvrtc_is_found_where_the_wheels_of_torch_have_it_or_where_cuda_is_searched(monkeypatch):
    wheel, *others = nvrtc._places("13")
    assert wheel.endswith("nvidia/cu13/lib/libnvrtc.so.13")
    assert others == ["libnvrtc.so.13", wheel]
    assert [*nvrtc._places("99")] == ["libnvrtc.so.99"]
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert [*nvrtc._places("13")] == [wheel, "libnvrtc.so.13"]


def test_what_the_compiler_refuses_is_told_in_its_words():
    with pytest.raises(KernelError, match=r"(?s)bad\.cu for sm_90a does not compile\.\nbad\.cu\(1\): error: .*nonsense"):
        compiling.compile_text("nonsense", "sm_90a", "bad.cu")
    with pytest.raises(KernelError, match="invalid value for --gpu-architecture"):
        compiling.compile_text(SMALL, "sm_1")
    with pytest.raises(nvrtc.NvrtcError, match="NVRTC_ERROR_INVALID_PROGRAM"):
        bindings.nvrtc()._read("CUBIN", ctypes.c_void_p())


def test_another_cuda_than_that_of_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(
        UnsupportedError, match=r"CuPy: wants a build for CUDA 12\.8, .*got CUDA 13\. Cure: pip install 'cupy-cuda12x"
    ):
        bindings.require_same_cuda()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    bindings.require_same_cuda()


def test_another_library_of_that_name_is_none(monkeypatch):
    monkeypatch.setattr(nvrtc, "_places", lambda major: ["libm.so.6"])
    with pytest.raises(OSError, match="nvrtc"):
        nvrtc.find("13")
