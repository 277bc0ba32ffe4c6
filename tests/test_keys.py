"""Keys: equal digests for equal values of equal types only, differences by path, and a cache that says why it missed."""

from __future__ import annotations

import enum
import gc
import math
import os
import string
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from opfuse.errors import KeyValueError
from opfuse.keys import Cache, Difference, Miss, diff, digest, key_fields, token


class Mode(enum.Enum):
    A = 1
    B = 2


class OtherMode(enum.Enum):
    A = 1


@dataclass(frozen=True)
class Inner:
    size: Any = 4
    note: str = field(default="", compare=False)


@dataclass(frozen=True)
class Twin:
    size: Any = 4


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Mutable:
    size: int = 4


@dataclass(frozen=True)
class Told:
    """A part that knows where its fields came from."""

    size: int
    sources: Any = field(default=None, compare=False)


DISTINCT = (
    *(True, 1, 1.0, "1", b"1", None, False, 0, 0.0, -0.0, "", b"", (), frozenset(), {}, math.nan, math.inf),
    *((1,), (1.0,), (True,), (1, 2), (2, 1), ((1,), 2), (1, (2,)), frozenset((1, 2)), frozenset((1, 2.0)), {1: 2}, {"1": 2}),
    *(torch.float32, torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1), torch.Size((1,)), torch.strided),
    *(Mode.A, Mode.B, OtherMode.A, Inner(), Inner(5), Inner(4.0), Inner(None), Twin(), Pair(1, 2), Pair(2, 1)),
    *(int, float, Inner, len, print, torch.relu),
)


def test_r9_digests_of_distinct_values_differ():
    digests = [digest(value) for value in DISTINCT]
    assert len(set(digests)) == len(DISTINCT)
    assert all(len(text) == 32 and int(text, 16) >= 0 for text in digests)


def test_digests_of_equal_values_agree():
    assert digest(math.nan) == digest(float("nan"))
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(frozenset(("x", "y", "z"))) == digest(frozenset(("z", "y", "x")))
    assert digest(Inner(4, note="here")) == digest(Inner(4, note="there"))
    assert digest(("ab", "c")) != digest(("a", "bc"))
    assert digest(("a;", "b")) != digest(("a", ";b"))


def test_digests_agree_between_processes():
    """Two whose sets have other orders."""
    value = ("x", 1, 2.5, None, torch.bfloat16, frozenset(string.ascii_letters), {"k": (True,)})
    code = (
        "import string, torch; from opfuse.keys import digest; letters = frozenset(string.ascii_letters); "
        "print(digest(('x', 1, 2.5, None, torch.bfloat16, letters, {'k': (True,)})), *letters)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    told, *letters = done.stdout.split()
    assert told == digest(value)
    assert letters != [*frozenset(string.ascii_letters)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda x: st.tuples(x, x) | st.dictionaries(st.text(), x),
    )
)
def test_digest_agrees_with_diff(value):
    """A value differs from itself nowhere, and from a change of its type in one place."""
    assert digest(value) == digest(value)
    assert not list(diff(value, value))
    assert digest((value, 1)) != digest((value, True))
    assert [d.path for d in diff((value, 1), (value, True))] == ["[1]"]


def test_namesakes_differ():
    """Two enums, or two subclasses of a number, of one name."""
    namesake = enum.Enum("Mode", {"A": 1, "B": 2})
    assert digest(namesake.A) != digest(Mode.A)
    assert digest(type("Real", (float,), {})(1.0)) != digest(1.0)


def _make(body: str) -> Any:
    scope: dict[str, Any] = {"__name__": "user_module"}
    exec(f"def act(x):\n    return {body}\n\nclass Rule:\n    pass\n", scope)
    return scope["act"], scope["Rule"]


def test_r9_a_redefined_function_or_class_is_another_value():
    (first, first_class), (second, second_class) = _make("x + 1"), _make("x + 1")
    assert token(first) == "user_module:act"
    assert token(second) == "user_module:act#2"
    assert digest(first) != digest(second)
    assert digest(first_class) != digest(second_class)
    assert token(first) == "user_module:act"
    del second
    gc.collect()
    third, _ = _make("x + 3")
    assert token(third) not in ("user_module:act", "user_module:act#2")


def test_lambdas_count_by_identity():
    lambdas = [lambda x: x for _ in range(2)]
    assert digest(lambdas[0]) == digest(lambdas[0])
    assert digest(lambdas[0]) != digest(lambdas[1])


class Bare:
    def method(self):
        return self


def test_s5_bound_methods_and_partials_count_by_identity():
    one, other = Bare(), Bare()
    assert digest(one.method) == digest(one.method) != digest(other.method)
    made = partial(int, base=2)
    assert digest(made) == digest(made) != digest(partial(int, base=2))
    seen = set()
    for _ in range(20):  # objects that die hand their address on, not their name
        seen.add(digest(Bare().method))
    assert len(seen) == 20
    with pytest.raises(KeyValueError, match=r"a\.b: wants .*, got int\. Cure: "):
        token((lambda number: number).__get__(3), "a.b")


@pytest.mark.parametrize(
    ("value", "path", "text"),
    [
        ([1, 2], "key", "list"),
        (Inner([1]), "key.size", "list"),
        (Pair(1, Inner(Mutable())), "key.right.size", "mutable dataclass"),
        ((1, (2, set())), "key[1][1]", "set"),
        ({"a": {"b": torch.zeros(1)}}, "key['a']['b']", "Tensor"),
        (Bare(), "key", "Bare"),
        (frozenset((1, Bare())), "key", "Bare"),
        (Bare().__init__, "key", "method-wrapper"),
        (1j, "key", "complex"),
    ],
)
def test_r9_values_without_identity_are_refused_with_their_path(value, path, text):
    with pytest.raises(KeyValueError) as caught:
        digest(value)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)


def test_key_fields_of_composites():
    assert key_fields(Inner(3, note="no")) == {"size": 3}
    assert key_fields(Pair(1, 2)) == {"left": 1, "right": 2}
    assert key_fields((1, 2)) is None
    assert key_fields(Inner) is None


@pytest.mark.row("X01")
@pytest.mark.parametrize(
    ("old", "new", "want"),
    [
        (Inner(1), Inner(1), []),
        (Inner(1), Inner(2), [("size", 1, 2)]),
        (Inner(1), Inner(True), [("size", 1, True)]),
        (Inner(math.nan), Inner(float("nan")), []),
        (Pair(Inner(1), (1, 2)), Pair(Inner(2), (1, 3)), [("left.size", 1, 2), ("right[1]", 2, 3)]),
        (Pair(Inner(1), 0), Pair(Twin(1), 0), [("left", Inner(1), Twin(1))]),
        (Pair((1, 2), 0), Pair((1, 2, 3), 0), [("left", (1, 2), (1, 2, 3))]),
        (Pair(None, 0), Pair(Inner(1), 0), [("left", None, Inner(1))]),
    ],
)
def test_x01_differences_by_path(old, new, want):
    assert [(d.path, d.old, d.new) for d in diff(old, new)] == want


@pytest.mark.row("X01")
def test_x01_differences_tell_where_values_came_from():
    old, new = Pair(Told(1, {"size": "default"}), 0), Pair(Told(2, {"size": "fp8.yaml:7:12"}), 0)
    (found,) = diff(old, new)
    assert found == Difference("left.size", 1, 2, "default", "fp8.yaml:7:12")
    assert str(found) == "left.size: 1 -> 2 (was: default, now: fp8.yaml:7:12)"
    assert str(Difference("a", 1, 2, "default", "default")) == "a: 1 -> 2"


@pytest.mark.row("X01")
def test_x01_the_cache_counts_and_names_the_nearest_entry():
    cache: Cache[Pair, str] = Cache(8)
    assert cache.get(Pair(1, 1)) is None
    assert str(cache.put(Pair(1, 1), "a")) == "first plan: the cache was empty"
    cache.put(Pair(5, 5), "b")
    assert (cache.get(Pair(1, 1)), cache.get((5, 5))) == ("a", "b")
    why = cache.why(Pair(1, 7))
    assert (why.nearest, [str(d) for d in why.differences]) == (Pair(1, 1), ["right: 1 -> 7"])
    cache.put(Pair(1, 7), "c")
    assert str(cache.last_miss) == "right: 1 -> 7"
    assert (len(cache), cache.hits, cache.misses) == (3, 2, 3)


def test_equally_near_entries_yield_the_latest_used():
    cache: Cache[Pair, str] = Cache(8)
    cache.put(Pair(1, 1), "a")
    cache.put(Pair(2, 2), "b")
    cache.get(Pair(1, 1))
    assert cache.why(Pair(1, 2)).nearest == Pair(1, 1)


def test_the_least_recently_used_entry_is_dropped():
    cache: Cache[Pair, int] = Cache(3)
    for i in range(3):
        cache.put(Pair(i, 0), i)
    cache.get(Pair(0, 0))
    cache.put(Pair(3, 0), 3)
    assert [key.left for key, _ in cache.items()] == [2, 0, 3]
    assert cache.get(Pair(1, 0)) is None
    cache.clear()
    assert (len(cache), cache.hits, cache.misses) == (0, 1, 4)


def test_an_entry_that_two_threads_make_was_not_dropped():
    cache: Cache[Pair, str] = Cache(4)
    for value in "ab":  # of two calls that both missed
        cache.put(Pair(1, 1), value)
    assert not cast(Miss, cache.last_miss).again


def test_a_key_without_identity_is_refused_and_changes_nothing():
    cache: Cache[Any, int] = Cache(3)
    with pytest.raises(KeyValueError, match=r"key\.left"):
        cache.put(Pair(Bare(), 0), 1)
    assert (len(cache), cache.misses, cache.last_miss) == (0, 0, None)
