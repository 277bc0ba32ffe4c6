"""The cache of compiled kernels: what is found is what was stored, whatever happens to the files and to other processes."""

import os
import random
import sys
import time
import warnings
from multiprocessing import get_context
from pathlib import Path

import pytest

from opfuse.errors import OpfuseWarning
from opfuse.kernels.engine import cubins
from opfuse.kernels.engine.cubins import CubinCache, cubin_cache, digest

KEY = digest(b"key")
CUBIN = bytes(random.Random(1).randbytes(50_000))


@pytest.fixture
def cache(tmp_path):
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    return CubinCache(directory)


def file_of(cache, key=KEY, kind=cubins.CUBIN):
    """The one file of a key."""
    (path,) = cache.directory.glob(f"{key}-*.{kind}")
    return path


def test_r14_what_is_stored_is_found(cache):
    assert cache.find(KEY) is None
    cache.store(KEY, CUBIN)
    assert cache.find(KEY) == CUBIN == file_of(cache).read_bytes()
    cache.store_source(KEY, "the text")
    assert (cache.directory / f"{KEY}.cu").read_text() == "the text"
    assert cache.find(digest(b"another")) is None
    assert cache.find(KEY, cubins.FACTS) is None
    cache.store(KEY, b"{}", cubins.FACTS)
    assert (cache.find(KEY), cache.find(KEY, cubins.FACTS)) == (CUBIN, b"{}")
    assert {p.stat().st_mode & 0o777 for p in cache.directory.iterdir()} == {0o600}
    assert cache.memory == {}


DAMAGE = {
    "truncated": lambda path: path.write_bytes(CUBIN[:1000]),
    "empty": lambda path: path.write_bytes(b""),
    "one bit": lambda path: path.write_bytes(bytes([CUBIN[0] ^ 1]) + CUBIN[1:]),
    "longer": lambda path: path.write_bytes(CUBIN + b"\0"),
    "unreadable": lambda path: (path.unlink(), path.symlink_to("/nowhere")),
    "a link": lambda path: (path.rename(path.parent.parent / "elsewhere"), path.symlink_to(path.parent.parent / "elsewhere")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_r14_a_file_that_is_not_what_was_stored_is_never_returned(cache, damage):
    cache.store(KEY, CUBIN)
    path = file_of(cache)
    DAMAGE[damage](path)
    assert cache.find(KEY) is None
    assert not path.is_symlink()
    cache.store(KEY, CUBIN)
    assert cache.find(KEY) == CUBIN == path.read_bytes()


def test_r14_a_full_directory_in_place_of_a_file_costs_a_warning(cache):
    cache.store(KEY, CUBIN)
    path = file_of(cache)
    path.unlink()
    (path / "more").mkdir(parents=True)
    assert cache.find(KEY) is None
    with pytest.warns(OpfuseWarning, match="IsADirectoryError|OSError"):
        cache.store(KEY, CUBIN)
    assert cache.find(KEY) == CUBIN == cache.memory[f"{KEY}.cubin"]


def test_r14_a_forged_name_does_not_help(cache):
    forged = cache.directory / f"{KEY}-{digest(b'something else')}.cubin"
    forged.write_bytes(CUBIN)
    assert cache.find(KEY) is None
    cache.store(KEY, CUBIN)
    forged.write_bytes(b"another")
    assert cache.find(KEY) == CUBIN


def test_r14_what_a_killed_process_left_goes_when_a_kernel_is_looked_for(cache):
    old, new = cache.directory / ".killed.tmp", cache.directory / ".writing.tmp"
    for path in (old, new):
        path.write_bytes(b"part")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.store("key", b"cubin")
    assert cache.find("another") is None
    assert sorted(cache.directory.iterdir()) == sorted([new, file_of(cache, "key")])
    assert cache.find("key") == b"cubin"


def test_r14_what_others_store_is_found_and_a_full_directory_is_listed_once(cache, monkeypatch):
    """Thousands of files take longer to list than a kernel to load."""
    other, listed, listdir = CubinCache(cache.directory), [], os.listdir
    monkeypatch.setattr(cubins.os, "listdir", lambda path: listed.append(path) or listdir(path))
    assert cache.find(KEY) is None
    other.store(KEY, CUBIN)
    other.store(KEY, b"{}", cubins.FACTS)
    assert cache.find(KEY) == CUBIN
    assert len(listed) == 2
    assert [cache.find(KEY, kind) for kind in (cubins.CUBIN, cubins.FACTS) * 2] == [CUBIN, b"{}"] * 2
    assert len(listed) == 2
    file_of(cache).unlink()
    assert cache.find(KEY) is None
    other.store(KEY, CUBIN)
    assert cache.find(KEY) == CUBIN


# -- whose directory it is ---------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh():
    """A process that has not looked at any cache, nor warned of one."""
    caches = (cubins.cubin_cache, cubins._tell)
    yield [each.cache_clear() for each in caches]
    for each in caches:
        each.cache_clear()


def keeps(cache, *keys):
    """Whether a cache gives what it was given."""
    for key in keys or (KEY,):
        cache.store(key, CUBIN)
    return all(cache.find(key) == CUBIN for key in keys or (KEY,))


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_r14_directories_are_made_for_their_owner_alone_and_when_something_is_stored(tmp_path, umask):
    directory = tmp_path / "a" / "b"
    cache = cubin_cache(directory)
    assert cache is cubin_cache(directory)
    before = os.umask(umask)
    try:
        assert cache.find(KEY) is None
        assert not directory.parent.exists()
        cache.store(KEY, CUBIN)
    finally:
        os.umask(before)
    assert [place.stat().st_mode & 0o777 for place in (directory.parent, directory)] == [0o700, 0o700]


UNSAFE = {
    "a symbolic link": lambda path: path.symlink_to(path.parent / "real"),
    "a file": lambda path: path.write_text(""),
    "the mode 0770": lambda path: (path.mkdir(), path.chmod(0o770)),
    "the mode 0777": lambda path: (path.mkdir(), path.chmod(0o777)),
    "a symbolic link to nothing": lambda path: path.symlink_to(path.parent / "none"),
}


@pytest.mark.parametrize("reason", UNSAFE)
def test_r14_an_unsafe_directory_is_left_alone_with_one_warning(tmp_path, reason):
    (tmp_path / "real").mkdir(mode=0o700)
    directory = tmp_path / "kernels"
    UNSAFE[reason](directory)
    with pytest.warns(OpfuseWarning, match=f"0700 .*, got {reason.removesuffix(' to nothing')}"):
        assert cubin_cache(directory).find(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cubin_cache(directory).store_source(KEY, "text")
        assert keeps(cubin_cache(directory))
    assert list((tmp_path / "real").iterdir()) == []
    assert not directory.is_dir() or directory.is_symlink() or list(directory.iterdir()) == []


ABOVE = {
    "writable by others": (lambda path: path.chmod(0o757), "above with the mode 0757, in which others can write.*chmod go-w"),
    "writable by a group": (lambda path: path.chmod(0o770), "above with the mode 0770"),
    "of others": (lambda path: os.chown(path, 12345, -1), "above, which belongs to user 12345"),
    "a link to such": (
        lambda path: (path.rename(path.with_name("real")), path.with_name("real").chmod(0o777), path.symlink_to("real")),
        "real with the mode 0777",
    ),
    "reached through such": (
        lambda path: (
            (path.with_name("open") / "in").mkdir(parents=True),
            path.with_name("open").chmod(0o777),
            path.rename(path.with_name("real")),
            path.symlink_to("open/in/../../real"),
        ),
        "open with the mode 0777",
    ),
}


@pytest.mark.parametrize("what", ABOVE)
def test_r14_what_others_could_put_in_the_place_of_the_directory_is_not_read(tmp_path, what):
    """Who can rename what lies above the directory can put one of his own, with a forged cubin in it, in its place."""
    if what == "of others" and os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    directory = tmp_path / "above" / "kernels"
    cache = cubin_cache(directory)
    cache.store(KEY, CUBIN)
    assert cache.find(KEY) == CUBIN
    spoil, reason = ABOVE[what]
    spoil(directory.parent)
    with pytest.warns(OpfuseWarning, match=reason) as told:
        assert cache.find(KEY) is None
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert keeps(cache)
    assert cache.memory


def test_r14_a_sticky_directory_and_links_of_ones_own_are_trusted(tmp_path):
    """Nobody renames what others have in a sticky directory; many a home is reached by a link."""
    (tmp_path / "sticky" / "home").mkdir(parents=True)
    (tmp_path / "sticky").chmod(0o1777)
    (tmp_path / "home").symlink_to(tmp_path / "sticky" / "home")
    cache = cubin_cache(tmp_path / "home" / "kernels")
    cache.store(KEY, CUBIN)
    assert cache.find(KEY) == CUBIN
    assert cache.memory == {}


def test_links_without_an_end_are_survived(tmp_path):
    (tmp_path / "round").symlink_to("round")
    with pytest.warns(OpfuseWarning, match="Too many levels"):
        assert cubin_cache(tmp_path / "round" / "kernels").find(KEY) is None


def test_r14_a_directory_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "kernels").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    monkeypatch.setattr(cubins, "_fault_on_the_way", lambda place, state: None)
    with pytest.warns(OpfuseWarning, match="got the owner"):
        assert cubin_cache(tmp_path / "kernels").find(KEY) is None


# -- where it is -------------------------------------------------------------------------------------------------------------


def test_r14_the_environment_names_the_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(cubins.ENVIRONMENT, str(tmp_path))
    assert cubins.location().parent == tmp_path
    monkeypatch.delenv(cubins.ENVIRONMENT)
    assert cubins.location().parent.name == "opfuse"


def test_a_tilde_is_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(cubins.ENVIRONMENT, "~/kernels")
    assert cubins.location().parent == tmp_path / "kernels"


def test_a_home_that_is_not_known_costs_one_warning_and_makes_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cubins.ENVIRONMENT, "~nobody-of-this-name/kernels")
    with pytest.warns(OpfuseWarning, match="a home directory that is not known") as told:
        assert keeps(cubin_cache(cubins.location()))
    assert len(told) == 1
    assert list(tmp_path.iterdir()) == []


def test_r14_where_nothing_can_be_written_kernels_stay_in_memory_with_one_warning(monkeypatch):
    monkeypatch.setenv(cubins.ENVIRONMENT, "/dev/null/kernels")
    with pytest.warns(OpfuseWarning, match=r"/dev/null, which is no directory.*another directory in OPFUSE_CACHE_DIR") as told:
        assert keeps(cubin_cache(cubins.location()), KEY, digest(b"another"))
    assert len(told) == 1


# -- processes ---------------------------------------------------------------------------------------------------------------


def test_r14_a_forked_child_takes_nothing_from_its_parent(tmp_path, monkeypatch):
    """What a process keeps for itself lies in memory: no file goes when a child of it ends."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cubins.tempfile, "tempdir", None)
    with pytest.warns(OpfuseWarning, match="/dev/null"):
        cubin_cache(Path("/dev/null/kernels")).store(KEY, CUBIN)
    child = get_context("fork").Process(target=sys.exit)
    child.start()
    child.join()
    assert cubin_cache(Path("/dev/null/kernels")).find(KEY) == CUBIN
    assert list(tmp_path.iterdir()) == []


def _work(directory, seed, failures):
    """Stores and finds the same few keys as all the others, with contents of its own; what is found must be whole."""
    generator, cache = random.Random(seed), CubinCache(directory)
    for turn in range(40):
        key = digest(str(turn % 4).encode())
        cache.store(key, key.encode() + generator.randbytes(20_000))
        content = cache.find(key)
        if content is None or not content.startswith(key.encode()) or len(content) != len(key) + 20_000:
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
        worker.join()
    assert [worker.exitcode for worker in workers[1::2]] == [0] * 8
    assert failures.value == 0
    for turn in range(4):
        key = digest(str(turn).encode())
        assert cache.find(key).startswith(key.encode())
