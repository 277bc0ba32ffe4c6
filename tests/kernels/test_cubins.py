"""The cache of compiled kernels: what is found is what was stored, whatever happens to the files and to other processes."""

import os
import random
import time
import warnings
from multiprocessing import get_context

import pytest

from opfuse.errors import OpfuseWarning
from opfuse.kernels import cubins
from opfuse.kernels.cubins import CubinCache, cubin_cache, digest

KEY = digest(b"key")
CUBIN = bytes(random.Random(1).randbytes(50_000))


@pytest.fixture
def cache(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    return CubinCache(directory)


def test_r14_what_is_stored_is_found(cache):
    assert cache.find(KEY) is None
    path = cache.store(KEY, CUBIN)
    assert cache.find(KEY) == path
    assert path.read_bytes() == CUBIN
    assert cache.store_source(KEY, "the text").read_text() == "the text"
    assert cache.find(digest(b"another")) is None
    assert cache.find(KEY, cubins.FACTS) is None
    facts = cache.store(KEY, b"{}", cubins.FACTS)
    assert (cache.find(KEY), cache.find(KEY, cubins.FACTS)) == (path, facts)
    assert sorted(cache.files()) == sorted(cache.directory.iterdir())
    assert {p.stat().st_mode & 0o777 for p in cache.files()} == {0o600}


DAMAGE = {
    "truncated": lambda path: path.write_bytes(CUBIN[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": lambda path: path.write_bytes(bytes([CUBIN[0] ^ 1]) + CUBIN[1:]),
    "longer": lambda path: path.write_bytes(CUBIN + b"\0"),
    "unreadable": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
    "a link": lambda path: (path.rename(path.parent.parent / "elsewhere"), path.symlink_to(path.parent.parent / "elsewhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_r14_a_file_that_is_not_what_was_stored_is_never_returned(cache, damage):
    path = cache.store(KEY, CUBIN)
    DAMAGE[damage](path)
    assert cache.find(KEY) is None
    assert not path.is_symlink()
    assert cache.store(KEY, CUBIN) == path == cache.find(KEY)


def test_r14_a_forged_name_does_not_help(cache):
    forged = cache.directory / f"{KEY}-{digest(b'something else')}.cubin"
    forged.write_bytes(CUBIN)
    assert cache.find(KEY) is None
    good = cache.store(KEY, CUBIN)
    forged.write_bytes(CUBIN)
    assert cache.find(KEY) == good


@pytest.fixture
def fresh():
    """A process that has not looked at any cache."""
    caches = (cubins.cubin_cache, cubins.private_cache)
    yield [each.cache_clear() for each in caches]
    for each in caches:
        each.cache_clear()


def test_r14_what_a_killed_process_left_goes_at_a_later_write(cache):
    old, new = cache.directory / ".killed.tmp", cache.directory / ".writing.tmp"
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (time.time() - 7200,) * 2)
    stored = cache.store("key", b"cubin")
    assert sorted(cache.directory.iterdir()) == sorted([new, stored])
    assert cache.find("key") == stored


def test_r14_the_directory_is_made_for_its_owner_alone(tmp_path, fresh):
    directory = tmp_path / "a" / "b"
    assert cubin_cache(directory) == CubinCache(directory)
    assert directory.stat().st_mode & 0o777 == 0o700


UNSAFE = {
    "a symbolic link": lambda path: path.symlink_to(path.parent / "real"),
    "a file": lambda path: path.write_text(""),
    "the mode 0770": lambda path: (path.mkdir(), path.chmod(0o770)),
    "the mode 0777": lambda path: (path.mkdir(), path.chmod(0o777)),
    "FileNotFoundError": lambda path: path.symlink_to(path.parent / "none"),
}


@pytest.mark.parametrize("reason", UNSAFE)
def test_r14_an_unsafe_directory_is_left_alone_with_one_warning(tmp_path, reason, fresh):
    (tmp_path / "real").mkdir(mode=0o700)
    directory = tmp_path / "kernels"
    UNSAFE[reason](directory)
    with pytest.warns(
        OpfuseWarning, match="0700, got " + ("a file|FileExistsError" if "File" in reason or "file" in reason else reason)
    ):
        cache = cubin_cache(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubin_cache(directory) is cache
    path = cache.store(KEY, CUBIN)
    assert cache.find(KEY) == path
    assert cubins.unsafe(cache.directory) is None
    assert list((tmp_path / "real").iterdir()) == []
    assert not directory.is_dir() or directory.is_symlink() or list(directory.iterdir()) == []


def test_r14_a_directory_of_somebody_else_is_refused(tmp_path, fresh, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.warns(OpfuseWarning, match="got the owner"):
        cubin_cache(tmp_path / "kernels")


def test_r14_the_environment_names_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(cubins.ENVIRONMENT, str(tmp_path))
    assert cubins.location().parent == tmp_path
    monkeypatch.delenv(cubins.ENVIRONMENT)
    assert cubins.location().parent.name == "opfuse"


def _work(directory, seed, failures):
    """Stores and finds the same few keys as all the others, with contents of its own; what is found must be whole."""
    generator, cache = random.Random(seed), CubinCache(directory)
    for turn in range(40):
        key = digest(str(turn % 4).encode())
        cache.store(key, key.encode() + generator.randbytes(20_000))
        path = cache.find(key)
        content = None if path is None else cubins._read(path)
        if content is None or not content.startswith(key.encode()) or digest(content) != path.stem.partition("-")[2]:
            failures.value += 1


def test_r14_sixteen_processes_some_killed_while_they_write(cache):
    context = get_context("fork")
    failures = context.Value("i", 0)
    workers = [context.Process(target=_work, args=(cache.directory, seed, failures)) for seed in range(16)]
    for worker in workers:
        worker.start()
    time.sleep(0.05)
    for worker in workers[::2]:
        worker.kill()  # one that has ended already is left alone
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers[1::2]] == [0] * 8
    assert failures.value == 0
    for turn in range(4):
        key = digest(str(turn).encode())
        assert cache.find(key).read_bytes().startswith(key.encode())
