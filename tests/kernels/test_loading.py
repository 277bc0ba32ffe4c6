"""From a variant to a kernel on a device: what is kept, what is loaded, what can be missing. No GPU is needed."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from opfuse.errors import OpfuseWarning, UnsupportedError
from opfuse.kernels.engine import bindings, compiling, cubins, launch
from opfuse.kernels.engine.compiling import Variant

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
    compiling.assemble.cache_clear()
    yield Variant("small.cu")
    compiling.assemble.cache_clear()


def test_r14_the_second_use_compiles_nothing(cache, small, monkeypatch):
    cubin = compiling.cubin(small, "sm_90a", cache)
    assert cubin == compiling.compile_variant(small, "sm_90a").cubin
    assert [p.read_text() for p in cache.directory.glob("*.cu")] == [compiling.assemble(small)]
    used = compiling.compile_variant(small, "sm_90a").entries
    monkeypatch.setattr(compiling, "compile_text", None)
    assert compiling.cubin(small, "sm_90a", cache) == cubin
    assert compiling.resources(small, "sm_90a", cache) == used
    assert used["twice"].registers > 0


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
            monkeypatch.setattr(bindings.nvrtc(), "getVersion", lambda: (99, 0), raising=False)
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
    """The bindings of CuPy, imported anew."""
    imports = (bindings.nvrtc, bindings.driver)
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
        compiling.compile_text(SMALL, "sm_90a")


IMPORT = """
import sys
from opfuse.kernels.engine.compiling import compile_text
sys.stdout.buffer.write(compile_text('extern "C" __global__ void f() {}', "sm_90a").cubin[:4])
"""


@pytest.mark.parametrize("own", ["~/.cache", "/dev/null/cache"])
def test_a_home_that_nothing_can_be_written_in_is_no_obstacle(own, tmp_path):
    """CuPy makes a directory when it is imported: that of its caller, of the home, or of our own cache, if any."""
    own = own.replace("~", str(tmp_path))
    environment = {**os.environ, "HOME": "/dev/null", "PYTHONPATH": os.pathsep.join(sys.path), cubins.ENVIRONMENT: own}
    environment.pop("CUPY_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, check=True, cwd=tmp_path)
    assert done.stdout == b"\x7fELF"
    assert [path.stat().st_mode & 0o777 for path in sorted(tmp_path.rglob("*"))] == ([0o700] * 2 if "null" not in own else [])


def test_a_directory_of_cupy_that_cannot_be_made_is_an_error_with_its_name(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CUPY_CACHE_DIR": "/dev/null/x"}
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=False)
    assert "UnsupportedError: import of CuPy: wants a directory that CuPy can make" in done.stderr
    assert "set CUPY_CACHE_DIR" in done.stderr


def test_without_nvrtc_the_error_says_what_to_install(fresh, monkeypatch):
    def refuse():
        raise RuntimeError("Failed to find libnvrtc\nand more")

    monkeypatch.setattr(bindings.nvrtc(), "getVersion", refuse, raising=False)
    bindings.nvrtc.cache_clear()
    with pytest.raises(
        UnsupportedError, match=r"wants NVRTC, got Failed to find libnvrtc\. Cure: pip install 'nvidia-cuda-nvrtc"
    ):
        compiling.compile_text(SMALL, "sm_90a")


def test_another_cuda_than_that_of_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(
        UnsupportedError, match=r"CuPy: wants a build for CUDA 12\.8, .*got CUDA 13\. Cure: pip install 'cupy-cuda12x"
    ):
        bindings.require_same_cuda()
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    bindings.require_same_cuda()
