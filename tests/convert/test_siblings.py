"""Query, key and value of one tensor are one product, of which each module hands out its columns."""

from __future__ import annotations

import copy
import functools
import gc
import importlib
import linecache
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import opfuse
from opfuse import ops
from opfuse.convert.converted import converted
from opfuse.errors import ConversionError, OpfuseWarning
from opfuse.recipes import DelayedScaling, Float8BlockScaling, MXFP8BlockScaling
from tests.convert.blocks import Attention
from tests.convert.test_fuse import EXACT, FP8, MAY_RUN_PLAIN, called, converted_exactly
from tests.plans import plans_used


class Heads(Attention):
    """As in transformers: the shape of the heads is made of that of the input."""

    def forward(self, x, mask=None, cache=None, **options):
        heads = (*x.shape[:-1], -1, 8)
        q = self.q(x).view(heads).transpose(1, 2)
        k = self.k(x).view(heads).transpose(1, 2)
        v = self.v(x).view(heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v)
        y = nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
        return self.o(y.reshape(*x.shape))


class Cross(Attention):
    """Queries of one tensor, keys and values of another."""

    def forward(self, x, other, mask=None):
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(other), self.v(other), mask))


class Written(Attention):
    """Queries of a tensor as it was, keys and values of what is left of it."""

    def forward(self, x, mask=None):
        q = self.q(x)
        x.add_(1)
        return self.o(nn.functional.scaled_dot_product_attention(q, self.k(x), self.v(x), mask))


class Twice(Attention):
    """Queries that are keys as well."""

    def forward(self, x, mask=None):
        return self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.q(x), self.k(x), mask))


class Fixed(Attention):
    """Queries that get no gradient."""

    def forward(self, x, mask=None):
        with torch.no_grad():
            q = self.q(x)
        return self.o(nn.functional.scaled_dot_product_attention(q, self.k(x), self.v(x), mask))


class Shaped(Attention):
    """As in Whisper: a method between the calls, of views alone."""

    def heads(self, x):
        return x.view(*x.shape[:-1], 4, 8).transpose(1, 2)

    def forward(self, x, mask=None):
        q, k, v = self.heads(self.q(x) * 0.5), self.heads(self.k(x)), self.heads(self.v(x))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).reshape(x.shape))


class Either(Attention):
    """As in T5: keys and values of the same tensor, or of another one."""

    def forward(self, x, other=None):
        is_cross = other is not None
        q = self.q(x)
        source = other if is_cross else x
        return self.o(nn.functional.scaled_dot_product_attention(q, self.k(source), self.v(source)))


def joined(report):
    return {entry.path: entry.became for entry in report.of("joined")}


def test_which_modules_read_one_tensor():
    assert joined(opfuse.fuse_(Heads(), FP8)) == joined(opfuse.fuse_(Attention(), FP8)) == {"k": "in q", "v": "in q"}
    assert joined(opfuse.fuse_(Shaped(), FP8)) == {"k": "in q", "v": "in q"}
    for one in (Cross, Written, Fixed, Either):
        assert joined(opfuse.fuse_(one(), FP8)) == {"v": "in k"}
    assert joined(opfuse.fuse_(Twice(), FP8)) == {}
    report = opfuse.fuse_(Heads(), FP8, policy={"k": MXFP8BlockScaling()})
    assert joined(report) == {"v": "in q"}
    assert report["k"].recipe == "MXFP8BlockScaling"
    assert report.share == 1
    assert joined(opfuse.fuse_(Heads(), FP8, filter_fn=lambda module, path: isinstance(module, nn.Linear))) == {}


@pytest.mark.parametrize("make", [Heads, Attention, Shaped, Either])
def test_columns_of_one_product_are_what_the_products_were(make):
    model, x = make().double(), [torch.randn(2, 16, 32, dtype=torch.float64)]
    converted_exactly(model, lambda: called(model, x))


class Projections(Attention):
    """What follows reads columns as a tensor of its own, which nothing says before."""

    def forward(self, x, mask=None):
        heads = (*x.shape[:-1], 4, 8)
        q, k, v = self.q(x).view(heads), self.k(x).view(heads), self.v(x).view(heads)
        torch.cumsum(q, 0)  # where a recording ends
        return torch.stack([each.view(-1) for each in (q, k, v)])


def test_the_product_is_the_one_that_one_would_write():
    model, x = Projections(), torch.randn(2, 16, 32)
    own = ops.Linear(32, 96)
    with torch.no_grad():
        own.weight.copy_(torch.cat([model.q.weight, model.k.weight, model.v.weight]))
        own.bias.copy_(torch.cat([model.q.bias, model.k.bias, model.v.bias]))
    with opfuse.autocast(recipe=FP8):
        wanted = own(x).split(32, -1)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        found = model(x)
    assert len(plans) == 1
    assert torch.equal(found, torch.stack([each.reshape(-1) for each in wanted]))


BETWEEN = {
    "nothing": lambda x: None,
    "a write": lambda x: x.mul_(2),
    "a write that nothing counts": lambda x: x.data.mul_(2),
    "a write by NumPy": lambda x: np.multiply(x.numpy(), 2, out=x.numpy()),
    "other data": lambda x: setattr(x, "data", 2 * x),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("between", BETWEEN)
def test_calls_from_elsewhere_compute_by_themselves(between, mode):
    model = Heads()
    opfuse.fuse_(model, FP8)
    with mode(), plans_used() as plans:
        x = torch.randn(2, 16, 32)
        model.q(x)
        BETWEEN[between](x)
        found = model.k(x)
        assert torch.equal(found, model.k(x.clone()))
    assert len(plans) == 3


def test_two_backward_passes_through_calls_from_elsewhere():
    model, x = Heads(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    q, v = model.q(x), model.v(x)
    q.sum().backward()
    v.sum().backward()
    assert all(p.grad is not None for p in (model.q.weight, model.v.weight))


class Interfering(Attention):
    """Has a branch that no recording takes, and does what it is given."""

    def forward(self, x, act=None):
        q = self.q(x)
        if act is not None:
            act(x)
        return torch.stack([q, self.k(x), self.v(x)])


class Doubling(Attention):
    def forward(self, x, mask=None):
        q = self.q(x)
        if mask is not None:
            x.data.mul_(2)
        return torch.stack([q, self.k(x), self.v(x)])


class Scaling(Attention):
    def forward(self, x, mask=None):
        q = self.q(x)
        if mask is not None:
            x *= 2
        return torch.stack([q, self.k(x), self.v(x)])


class Storing(Attention):
    def forward(self, x, mask=None):
        q = self.q(x)
        if mask is not None:
            x[0] = 0
        return torch.stack([q, self.k(x), self.v(x)])


class Untracked(Attention):
    def forward(self, x, mask=None):
        if mask is not None:
            with torch.no_grad():
                q = self.q(x)
        else:
            q = x
        return torch.stack([q, self.k(x), self.v(x)])


class Looping(Attention):
    def forward(self, x, mask=None):
        return torch.stack([one(x) for one in (self.q, self.k, self.v)])


class Branching(Attention):
    """One product or the other, never both."""

    def forward(self, x, mask=None):
        return self.q(x) if mask is None else self.k(x)


class Rounds(Attention):
    """Keys of a tensor that a round before has written."""

    def forward(self, x, mask=None):
        q = self.q(x)
        for at in range(2):
            if at:
                q = q + self.k(x)
            x.data.mul_(2)
        return q


class Later(Attention):
    """Keys of a tensor that is written after they were asked for."""

    def forward(self, x, mask=None):
        q, later = self.q(x), lambda: self.k(x)
        x.data.mul_(2)
        return q + later()


class Handing(Attention):
    """Nothing but views of its parts, on each of which a backward pass may start."""

    def forward(self, x, mask=None):
        return self.q(x).view(-1), self.k(x).view(-1)


class Target(Attention):
    """Keys of a tensor into which queries were written: the target of an assignment stands before its value, and runs after."""

    def forward(self, x, mask=None):
        y = x.clone()
        y[:, 0] = self.q(y)[:, 0]
        return self.k(y) + y


class Writer:
    """An object of somebody's own, each of whose methods writes to the tensor that it has."""

    def __init__(self, x):
        self.x = x
        Writer.last = self

    def _write(self, *_):
        self.x.data.mul_(2)
        return 1

    __add__ = __radd__ = __mul__ = __rmul__ = __getitem__ = __eq__ = __len__ = get = _write
    size = property(_write)

    def view(self, *_):
        return self._write()

    def __bool__(self):
        return bool(self._write())

    def __setitem__(self, at, value):
        pass

    def __str__(self):
        return str(self._write())

    def __format__(self, spec):
        return str(self._write())

    def __iter__(self):
        yield self._write()
        yield 1

    def __call__(self, x):
        return self._write()


class Between(Attention):
    """Something that may be of somebody's own class stands between the calls. Its code is in no recording."""

    def forward(self, x, other=None):
        raise NotImplementedError


class Sums(Between):
    def forward(self, x, other=None):
        q = self.q(x) if other is None else self.q(x) + other
        return q + self.k(x)


class Indexes(Between):
    def forward(self, x, other=None):
        q, _ = self.q(x), None if other is None else other[0]
        return q + self.k(x)


class Compares(Between):
    def forward(self, x, other=None):
        q, _ = self.q(x), other == 1
        return q + self.k(x)


class Measures(Between):
    def forward(self, x, other=()):
        q, _ = self.q(x), len(other)
        return q + self.k(x)


class Gets(Between):
    def forward(self, x, other=None):
        q, _ = self.q(x), other is not None and other.get(0)
        return q + self.k(x)


class Asks(Between):
    def forward(self, x, other=None):
        q, _ = self.q(x), None if other is None else other.size
        return q + self.k(x)


class Decides(Between):
    def forward(self, x, other=False):
        q = self.q(x)
        if other:
            pass
        return q + self.k(x)


class Formats(Between):
    def forward(self, x, other=None):
        q, _ = self.q(x), f"{other}"
        return q + self.k(x)


class Unpacks(Between):
    def forward(self, x, other=(1, 1)):
        q = self.q(x)
        _one, _two = other
        return q + self.k(x)


class Owns(Between):
    """A property."""

    @property
    def scale(self):
        return self.writer.size

    def forward(self, x, other=None):
        q, _ = self.q(x), self.scale
        return q + self.k(x)


class Acts(Between):
    """An activation of the input, which may be in place."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU()

    def forward(self, x, other=None):
        q, _ = self.q(x), self.act(x)
        return q + self.k(x)


class Tries(Between):
    """Keys of a run in which queries may have failed."""

    def forward(self, x, other=None):
        try:
            q = self.q(x if other is None else other)
        except Exception:
            q = x
        return q + self.k(x)


class Perhaps(Between):
    """Keys of a run that may have no queries."""

    def forward(self, x, other=None):
        q = self.q(x) if other is None else x
        return q + self.k(x)


class Hands(Between):
    """A method that runs nothing, and returns an object of somebody's own."""

    def of(self, x):
        return self.writer

    def forward(self, x, other=None):
        q = self.q(x)
        if other is not None:
            self.of(q).view(1)
        return q + self.k(x)


class Skips(Between):
    """A variable that was not assigned after all."""

    def forward(self, x, other=None):
        t = other
        try:
            raise ValueError
            t = self.o(x)  # pyright: ignore
        except ValueError:
            pass
        q = self.q(x)
        _ = 1 if t is None else t * 1
        return q + self.k(x)


class Captures(Between):
    """A variable that a loop assigns."""

    def forward(self, x, other=None):
        t = self.o(x)
        for t in [other]:  # noqa: B007
            pass
        q = self.q(x)
        _ = t if t is None else t * 1
        return q + self.k(x)


class Another(Between):
    """Another module by the name of this one."""

    def forward(self, x, other=None):
        me = self
        q = self.q(x)
        self = me if other is None else Acting(me, x)  # noqa: PLW0642
        return q + self.k(x)


class Acting:
    def __init__(self, module, x):
        self.module, self.x = module, x

    @property
    def k(self):
        self.x.data.mul_(2)
        return self.module.k


def writing(method):
    @functools.wraps(method)
    def wrapped(self, y):
        if hasattr(self, "writer"):
            self.writer(y)
        return method(self, y)

    return wrapped


class Decorated(Between):
    @writing
    def heads(self, y):
        return y.view(y.shape)

    def forward(self, x, other=None):
        return self.heads(self.q(x)) + self.k(x)


class Nested(Between):
    def forward(self, x, other=(1, 1)):
        q = self.q(x)
        (_one, _two), _three = other, 1
        return q + self.k(x)


class Augmented(Between):
    """What is added to is read before what is added."""

    def forward(self, x, other=None):
        q, places = self.q(x), [0] if other is None else other
        places[0] += self.k(x)
        return q + places[0] if other is None else self.k(x)


class Keyed(Between):
    def forward(self, x, other=None):
        both = {"q": self.q(x), str(other): self.k(x)}
        return both["q"] + both[str(other)]


class Twofold(Between):
    """The same module by another way, after a write."""

    def forward(self, x, other=None):
        q = self.q(x)
        if other is None:
            return q + self.k(x)
        x.data.mul_(2)
        return q + getattr(self, "k")(x)  # noqa: B009


class OfProperty(Between):
    """A property in the place of a submodule."""

    @property
    def k(self):
        module = self._modules["k"]
        if hasattr(self, "writer"):
            module.weight.data.mul_(0.5)
        return module

    def forward(self, x, other=None):
        return self.q(x) + self.k(x)


class OfMethod(Between):
    """A method in the place of a submodule."""

    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()

    def act(self, y):
        if hasattr(self, "writer"):
            self.k.weight.data.mul_(0.5)
        return y

    def forward(self, x, other=None):
        return self.act(self.q(x)) + self.k(x)


class Replaced(Between):
    """A method that the module has in place of that of its class."""

    def __init__(self):
        super().__init__()
        self.heads = lambda y: Writer.last(y) * y

    def heads(self, x):
        return x.view(x.shape)

    def forward(self, x, other=None):
        return (self.q(x) if other is None else self.heads(self.q(x))) + self.k(x)


def size(x):
    return x.data.mul_(2).shape


class Sizes(Between):
    """A function of the name of a method of tensors."""

    def forward(self, x, other=None):
        q, _ = self.q(x), size(x)
        return q + self.k(x)


NOT_TOGETHER = [Interfering, Doubling, Scaling, Storing, Untracked, Looping, Branching, Rounds, Later, Handing, Target]
NOT_TOGETHER += [
    Sums,
    Indexes,
    Compares,
    Measures,
    Gets,
    Asks,
    Decides,
    Formats,
    Unpacks,
    Owns,
    Acts,
    Tries,
    Perhaps,
    Sizes,
    Hands,
    Replaced,
    Skips,
    Captures,
    Another,
    Decorated,
    Nested,
    Augmented,
    Keyed,
    Twofold,
    OfProperty,
    OfMethod,
]


@pytest.mark.parametrize("make", NOT_TOGETHER)
def test_where_code_may_do_more_between_the_calls_nothing_is_shared(make):
    model, x = make(), torch.randn(2, 16, 32)
    plain = copy.deepcopy(model)
    report = opfuse.fuse_(model, EXACT)
    assert "q" not in {entry.became.removeprefix("in ") for entry in report.of("joined")}
    if issubclass(make, Between):
        found, wanted = [], []
        for each, results in ((plain, wanted), (model, found)):
            given = x.clone()
            each.writer = other = Writer(given)
            with torch.inference_mode():
                results += [each(given), each(given, torch.ones(()) if make in {Perhaps, Tries} else other), given]
        torch.testing.assert_close(found, wanted)


def test_a_source_that_is_not_that_of_the_code_joins_nothing(tmp_path, monkeypatch):
    """A file that was edited since it was imported, one that was imported anew, and code that bears the name of a file."""
    file, name = tmp_path / "edited_attention.py", "edited_attention"
    monkeypatch.syspath_prepend(tmp_path)
    text = (
        "import torch\nfrom tests.convert.blocks import Attention\n\n\nclass Edited(Attention):\n    def forward(self, x):\n"
        "        q = self.q(x)\n        {}\n        return q + self.k(x)\n"
    )
    calm, writing = text.format("y = q.view(-1)"), text.format("y = x.mul_(2)")
    x = torch.randn(2, 16, 32)

    def check(module, together):
        model = module.Edited()
        with torch.no_grad():
            wanted = model(x.clone())
            assert bool(joined(opfuse.fuse_(model, EXACT))) is together
            torch.testing.assert_close(model(x.clone()), wanted)

    file.write_text(calm)
    check(module := importlib.import_module(name), together=True)
    file.write_text(writing)
    check(importlib.reload(module), together=False)
    file.write_text(calm)
    check(importlib.reload(module), together=True)
    file.write_text(writing)
    importlib.reload(module)
    file.write_text(calm)
    check(module, together=False)
    spaces = SimpleNamespace(**{"__name__": name})
    exec(compile(writing, file, "exec"), vars(spaces))
    check(spaces, together=False)
    monkeypatch.delitem(sys.modules, name)


def test_what_the_code_calls_is_not_the_code():
    """A child, a helper and a callback, called where the products of the code around are: each call computes by itself."""

    class Calling(Attention):
        def helper(self, x):
            found = [self.q(x)]
            x.data.mul_(2)
            return [*found, self.v(x)]

        def forward(self, x, act=None):
            q, k = self.q(x), self.k(x)
            found = self.helper(x)
            if act is not None:
                found += act(self, x)
            return torch.stack([q, k, self.v(x), *found])

    model, x = Calling(), torch.randn(2, 16, 32)
    with torch.no_grad():
        wanted = model(x.clone(), Calling.helper)
        assert joined(opfuse.fuse_(model, EXACT)) == {"k": "in q"}
        torch.testing.assert_close(model(x.clone(), Calling.helper), wanted)


def test_a_run_that_ended_between_the_calls_leaves_nothing_to_the_next():
    """The same tensor again: neither without gradients, nor after the backward pass of the first run."""
    model, x = Leaving(), torch.randn(2, 16, 32)
    assert joined(opfuse.fuse_(model, FP8)) == {"k": "in q", "v": "in q"}
    replaced = nn.Linear(32, 32)
    with torch.no_grad(), pytest.raises(RuntimeError, match="invalid for input"):
        model(x, (7,))
    assert model(x)[1].requires_grad
    for _ in range(3):
        with pytest.raises(RuntimeError, match="invalid for input"):
            model(x, (7,))
        model(x).sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="invalid for input"):
        model(x, (7,))
    with torch.no_grad():
        model.q = replaced
        x.data.mul_(2)
        assert torch.equal(model(x)[1], model.k(x))


@pytest.mark.parametrize("replaces", [False, True])
def test_a_parameter_that_changes_between_the_calls_ends_the_sharing(replaces):
    class Norms(nn.Module):
        def forward(self, x):
            with torch.no_grad():
                if replaces:
                    model.k.weight = nn.Parameter(model.k.weight * 2)
                else:
                    model.k.weight.mul_(2)
            return x

    class Normed(Attention):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(32)

        def forward(self, x, mask=None):
            return torch.stack([self.norm(self.q(x)), self.k(x), self.v(x)])

    plain = Normed()
    converted_one, x = copy.deepcopy(plain), torch.randn(2, 16, 32)
    assert joined(opfuse.fuse_(converted_one, EXACT)) == {"k": "in q", "v": "in q"}
    found = []
    for model in (plain, converted_one):
        model.norm = Norms()
        found.append(model(x))
    torch.testing.assert_close(found[1], found[0])


APART = {
    "variable": "pair = q, k\n    return pair",
    "list": "return [q, k]",
    "dictionary": "return {'q': q, 'k': k}",
    "sum": "return (q,) + (k,)",
    "walrus": "return (pair := (q, k))",
    "function": "return tuple([q, k])",
    "lambda": "return (lambda: (q, k))()",
    "condition": "return (q, k) if x is not None else (k, q)",
    "keywords": "return dict(q=q, k=k)",
    "a class": "return Pair(q, k)",
    "append": "both = []\n    both.append(q)\n    both.append(k)\n    return both",
    "a key": "both = {}\n    both['q'] = q\n    both['k'] = k\n    return both",
}


class Pair(NamedTuple):
    one: torch.Tensor
    other: torch.Tensor


def of_text(body):
    """An attention whose forward has this text after the calls of q and k."""
    text, space = f"def forward(self, x):\n    q, k = self.q(x), self.k(x)\n    {body}\n", {"Pair": Pair}
    name = f"<{body}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), space)
    return type("OfText", (Attention,), {"forward": space["forward"]})()


def test_reading_a_long_method_takes_no_longer_for_each_line():
    lines = [f"h{i + 1} = h{i} + torch.relu(h{i})" for i in range(60)]
    model = of_text("\n    ".join(["h0 = q + k", *lines, "return h60"]))
    assert joined(opfuse.fuse_(model, FP8)) == {"k": "in q"}


class Bert(Attention):
    """As BERT and Whisper were written for years: a method of more arguments, and numbers of the module in a shape."""

    def __init__(self):
        super().__init__()
        self.heads, self.size, self.scaling = 4, 8, 0.5

    def transpose_for_scores(self, x):
        x = x.view(x.size()[:-1] + (self.heads, self.size))
        return x.permute(0, 2, 1, 3)

    def _shape(self, tensor, length, rows):
        return tensor.view(rows, length, self.heads, self.size).transpose(1, 2).contiguous()

    def forward(self, x):
        rows, length, _ = x.size()
        q = self._shape(self.q(x) * self.scaling, length, rows)
        k = self.transpose_for_scores(self.k(x))
        return q * k * self._shape(self.v(x), -1, rows)


def test_methods_that_shape_heads_part_no_products():
    plain, x = Bert(), torch.randn(2, 16, 32)
    model = copy.deepcopy(plain)
    assert joined(opfuse.fuse_(model, EXACT)) == {"k": "in q", "v": "in q"}
    torch.testing.assert_close(model(x), plain(x))


def test_what_a_class_does_when_it_is_asked_breaks_no_conversion():
    class Asked:
        def __init__(self, function):
            self.function = function

        def __get__(self, instance, kind):
            if instance is None:
                raise TypeError("no class access")
            return functools.partial(self.function, instance)

    class OfDescriptor(Attention):
        @Asked
        def helper(self, x):
            return x * 2

        def forward(self, x):
            return self.helper(self.q(x) + self.k(x))

    class OfC(Attention):
        forward = torch.Tensor.relu

    for make in (OfDescriptor, OfC):
        assert opfuse.fuse_(make(), FP8).share == 1


def test_a_text_may_return_what_is_made_of_all():
    assert joined(opfuse.fuse_(of_text("return q * k, q + k"), FP8)) == {"k": "in q"}


@pytest.mark.parametrize("how", APART)
def test_columns_that_are_returned_apart_are_of_products_apart(how):
    model = of_text(APART[how])
    assert joined(opfuse.fuse_(model, FP8)) == {}
    parts = model(torch.randn(2, 16, 32))
    for part in parts.values() if isinstance(parts, dict) else parts:
        part.sum().backward()


@pytest.mark.parametrize("around", [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode])
def test_an_adapter_may_change_modes_around_the_layer(around):
    class Frozen(Adapter):
        def forward(self, x):
            with around():
                return self.base_layer(x)

    for name in ("q", "k"):
        plain, given = of_text("return q * k + self.v(x)"), torch.randn(2, 16, 32, requires_grad=True)
        setattr(plain, name, Frozen(getattr(plain, name)))
        model = copy.deepcopy(plain)
        opfuse.fuse_(model, EXACT)
        if around is torch.inference_mode:
            with torch.no_grad():
                assert torch.allclose(model(given), plain(given), atol=1e-5)
            continue
        for each in (plain, model):
            each.grad = torch.autograd.grad(each(given).float().sum(), given)[0]
        torch.testing.assert_close(model.grad, plain.grad, rtol=1e-2, atol=1e-2)
        for one, other in zip(called(model, [given]), called(plain, [given])):
            assert (one is None) == (other is None)


def test_two_modules_around_the_same_layers():
    """The second has a key of its own, which writes to the tensor of all."""

    class Doubling(nn.Module):
        def forward(self, x):
            return x.mul_(2) * 1

    first, second = Attention(), Attention()
    second.q, second.v, second.k = first.q, first.v, Doubling()
    plain = copy.deepcopy((first, second))
    opfuse.fuse_(first, EXACT)
    with torch.inference_mode():
        for each in ((first, second), plain):
            each[1].found = each[1](torch.ones(2, 16, 32))
    torch.testing.assert_close(second.found, plain[1].found)


def test_a_copy_whose_code_has_the_same_bytes_is_read_anew():
    class Squeezing(Attention):
        def forward(self, x):
            return self.q(x) + self.k(x)

    def writing(self, x):
        return self.v(x) + self.k(x)

    model = Squeezing()
    assert joined(opfuse.fuse_(model, EXACT)) == {"k": "in q"}
    assert Squeezing.forward.__code__.co_code == writing.__code__.co_code
    Squeezing.forward = writing
    assert converted(copy.deepcopy(model).q).shared.code is None


def test_a_method_of_the_class_that_is_replaced_is_read_anew():
    class Calm(Shaped):
        def forward(self, x):
            return self.heads(self.q(x)) + self.heads(self.k(x))

    def heads(self, y):
        return self.other(y)

    before = Calm()
    assert joined(opfuse.fuse_(before, EXACT)) == {"k": "in q"}
    Calm.heads = heads
    assert joined(opfuse.fuse_(Calm(), EXACT)) == {}
    with plans_used() as plans:
        before.other = nn.Identity()
        before(torch.randn(2, 16, 32))
    assert len(plans) == 2


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_that_gets_no_gradient_do_not_run(register):
    model, x = Idle(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    ran = []
    for name, parameter in model.named_parameters():
        getattr(parameter, register)(lambda one, name=name: ran.append(name) or None)
    model(x).sum().backward()
    assert {name for name, parameter in model.named_parameters() if parameter.grad is not None} == {*ran}


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_weights_of_one_half_type_under_autocast_of_the_other(dtype, other):
    plain, x = Heads().to(dtype), torch.randn(2, 16, 32).to(dtype)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    with torch.autocast("cpu", other):
        torch.testing.assert_close(model(x), plain(x), rtol=2**-5, atol=2**-5)


@MAY_RUN_PLAIN
def test_a_sparse_parameter_is_multiplied_by_the_module():
    plain, x = Attention(), torch.randn(16, 32)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    with torch.no_grad():
        for each in (plain, model):
            each.k.weight = nn.Parameter(each.k.weight.to_sparse_csr())
        torch.testing.assert_close(model.k(x), plain.k(x))


def test_an_activation_in_place_of_a_result_is_no_write_to_the_input():
    """Columns are memory of their own."""

    class Gate(Attention):
        def __init__(self):
            super().__init__()
            self.act = nn.ReLU(inplace=True)

        def forward(self, x, mask=None):
            return self.o(self.act(self.q(x)) * self.k(x) + self.v(x))

    class Same(Gate):
        """Of a result that the products read."""

        def forward(self, x, mask=None):
            x = self.o(x)
            q = self.q(x)
            return q + self.act(x) + self.k(x)

    assert joined(opfuse.fuse_(Same(), EXACT)) == {}

    model, x = Gate().double(), [torch.randn(2, 16, 32, dtype=torch.float64)]
    report = converted_exactly(model, lambda: called(model, x))
    assert joined(report) == {"k": "in q", "v": "in q"}


def test_torch_autocast_around_the_backward_pass_changes_nothing():
    plain, x = Attention(), torch.randn(2, 16, 32)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    for each in (plain, model):
        y = each(x).sum()
        with torch.autocast("cpu", torch.bfloat16):
            y.backward()
    for one, other in zip(model.parameters(), plain.parameters()):
        assert one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, other.grad, rtol=2**-4, atol=0.2)


class Hearing(nn.Parameter):
    """Makes something else of a product."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            y = function(*args, **(kwargs or {}))
        return 2 * y if function is nn.functional.linear else y


@MAY_RUN_PLAIN
@pytest.mark.parametrize("name", ["q.weight", "o.weight", "k.bias"])
def test_a_parameter_whose_class_hears_of_functions_is_multiplied_by_the_module(name):
    plain, x = Attention(), torch.randn(2, 16, 32)
    model = copy.deepcopy(plain)
    opfuse.fuse_(model, EXACT)
    for each in (plain, model):
        owner, own = each.get_submodule(name[0]), name[2:]
        setattr(owner, own, Hearing(getattr(owner, own).data))
    torch.testing.assert_close(model(x), plain(x))


def test_hooks_between_the_calls_end_the_sharing():
    model, x = Heads(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    with plans_used() as plans:
        model(x)
        hook = model.q.register_forward_hook(lambda module, args, y: None)
        model(x)
        hook.remove()
        model(x)
    assert len(plans) == 2 + 4 + 2


def test_a_forward_put_over_that_around_computes_one_by_one():
    model, x = Heads(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    model.forward = lambda x: torch.stack([model.q(x), model.k(x.mul_(2)), model.v(x)])
    with plans_used() as plans:
        model(x)
    assert len(plans) == 3


def test_a_parametrization_of_one_ends_the_sharing():
    model, x = Projections(), torch.randn(2, 16, 32)
    plain = copy.deepcopy(model)
    opfuse.fuse_(model, EXACT)
    for each in (model, plain):
        torch.manual_seed(0)
        parametrizations.weight_norm(each.k)
        with torch.no_grad():
            each.k.parametrizations.weight.original0.mul_(2)
    with pytest.warns(OpfuseWarning, match=r"k has changed since fuse_: 'parameters' was .*'weight'.*, is .*'bias'"):
        found = model(x)
    torch.testing.assert_close(found, plain(x))


def test_columns_are_written_as_tensors_of_their_own():
    """In place on a view of the query: what a plain model does, and key and value keep what they save for their backward pass."""

    class Scaling(Heads):
        def forward(self, x, mask=None):
            heads = (*x.shape[:-1], 4, 8)
            q, k, v = self.q(x).view(heads).transpose(1, 2), self.k(x).view(heads), self.v(x).view(heads).transpose(1, 2)
            k = (k * k).transpose(1, 2)
            q.mul_(0.5)
            return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    model, x = Scaling().double(), [torch.randn(2, 16, 32, dtype=torch.float64)]
    report = converted_exactly(model, lambda: called(model, x))
    assert joined(report) == {"k": "in q", "v": "in q"}


class Idle(Attention):
    """A key that no result depends on."""

    def forward(self, x, mask=None):
        q, k, v = self.q(x), self.k(x), self.v(x)
        y = q * v
        torch.cumsum(k, 0)
        return y


def test_a_module_whose_result_no_loss_depends_on_gets_no_gradient():
    """An optimizer with weight decay would shrink its weights over zeros."""
    model, x = Idle(), torch.randn(2, 16, 32)
    for pack in (False, True):
        opfuse.fuse_(model, FP8, pack=pack)
        with plans_used() as plans:
            model(x).sum().backward()
        assert len(plans) == 1
        assert {name for name, p in model.named_parameters() if p.grad is None} == {"k.weight", "k.bias", "o.weight", "o.bias"}
        model.zero_grad()


class Overwritten(Attention):
    """A key whose variable is assigned anew."""

    def forward(self, x, mask=None):
        q, k, v = self.q(x), self.k(x), self.v(x)
        k = q.sigmoid()
        return q * k + v


@pytest.mark.parametrize("make", [Idle, Overwritten])
def test_nor_does_it_in_compiled_code(make):
    model, x = make(), torch.randn(2, 16, 32)
    assert joined(opfuse.fuse_(model, FP8)) == {"k": "in q", "v": "in q"}
    torch.compile(model, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is None} == {"k.weight", "k.bias", "o.weight", "o.bias"}


def test_columns_of_one_row_are_written_in_compiled_code():
    """A slice of one row is contiguous as it is, and torch refuses to write to one of several views."""

    class Halved(Attention):
        def forward(self, x, mask=None):
            q, k, v = self.q(x), self.k(x), self.v(x)
            q *= 0.5
            return q * k + v

    model, x = Halved(), torch.randn(1, 32)
    wanted = model(x)
    assert joined(opfuse.fuse_(model, EXACT)) == {"k": "in q", "v": "in q"}
    with plans_used() as plans:
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert len(plans) == 1
    torch.testing.assert_close(found, wanted)


class Adapter(nn.Module):
    """As peft wraps a layer."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = layer, nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_layers_with_adapters_stay_joined_and_adapters_stay_in_high_precision():
    model = Heads()
    for name in ("q", "k", "v"):
        setattr(model, name, Adapter(getattr(model, name)))
    report = opfuse.fuse_(model, FP8)
    assert joined(report) == {"k.base_layer": "in q.base_layer", "v.base_layer": "in q.base_layer"}
    assert report["q.lora_A"].got == "a low-rank adapter stays in high precision by default"


class WritingAdapter(Adapter):
    def forward(self, x):
        y = super().forward(x)
        x.mul_(2)
        return y


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_adapter_may_write_to_what_its_siblings_read(mode):
    model, x = Heads(), torch.randn(2, 16, 32)
    for name in ("q", "k", "v"):
        setattr(model, name, WritingAdapter(getattr(model, name)))
    with mode():
        wanted = model(x.clone())
        opfuse.fuse_(model, EXACT)
        torch.testing.assert_close(model(x.clone()), wanted)


class Leaving(Attention):
    """Ends between the calls for another number of values."""

    def forward(self, x, shape=(2, 16, 32)):
        return torch.stack([self.q(x).view(shape), self.k(x), self.v(x)])


class NarrowAdapter(Adapter):
    """Around a layer in 16 bits, as those of frozen models are."""

    def forward(self, x):
        return self.base_layer(x.bfloat16()).to(x.dtype) + self.lora_B(self.lora_A(x))


def test_a_layer_of_another_dtype_has_a_product_of_its_own():
    model, x = Heads(), torch.randn(2, 16, 32)
    model.k = NarrowAdapter(model.k.bfloat16())
    wanted = model(x)
    assert joined(opfuse.fuse_(model, EXACT)) == {"v": "in q"}
    torch.testing.assert_close(model(x), wanted, rtol=2**-7, atol=2**-9)


def test_nothing_is_kept_longer_than_the_tensor():
    model, x = Leaving(), torch.randn(2, 16, 32)
    opfuse.fuse_(model, FP8)
    shared = converted(model.q).shared
    model(x)
    assert len(shared.waiting) == 0
    with pytest.raises(RuntimeError, match="invalid for input"):
        model(x, (7,))
    assert len(shared.waiting) == 1
    del x
    gc.collect()
    assert len(shared.waiting) == 0


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), None], ids=["delayed", "ambient"])
def test_checkpoints_and_copies_share_anew(recipe):
    plain = Heads()
    models = [plain, copy.deepcopy(plain)]
    opfuse.fuse_(plain, recipe)
    models.append(copy.deepcopy(plain))
    opfuse.fuse_(models[1], recipe)
    runs = (lambda m, x: m(x), lambda m, x: checkpoint(m, x, use_reentrant=False), lambda m, x: m(x))
    found = []
    for model, run in zip(models, runs):
        for scale in (1.0, 3.0):
            x = (scale * torch.linspace(-1, 1, 1024).view(2, 16, 32)).requires_grad_()
            with opfuse.autocast(recipe=recipe or FP8):
                y = run(model, x)
            y.square().sum().backward()
            found.append([y.detach(), x.grad, *[p.grad.clone() for p in model.parameters()]])
            model.zero_grad()
    for others in (found[2:4], found[4:]):
        for one, other in zip(found[:2], others):
            assert all(map(torch.equal, one, other))


def test_threads_that_call_one_model_take_their_own_columns():
    """Also where they call it with one tensor, whose columns wait for whoever runs that forward."""
    model = Heads()
    assert joined(opfuse.fuse_(model, EXACT)) == {"k": "in q", "v": "in q"}
    inputs = [torch.randn(2, 16, 32) for _ in range(2)]
    wanted = [model(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(lambda i: model(inputs[i % 2]), range(64))]
    assert all(torch.equal(result, wanted[i % 2]) for i, result in enumerate(results))


class Gated(nn.Module):
    """The gated unit of a Llama."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def shrunk(model, name, factor):
    """The model with a matrix so many times smaller; what reads its results undoes that."""
    with torch.no_grad():
        model.get_submodule(name).weight.mul_(factor)
        model.get_submodule(name).bias.mul_(factor)
        if name == "up":
            model.down.weight.div_(factor)
    return model


@pytest.mark.few
@pytest.mark.parametrize("recipe", [FP8, Float8BlockScaling(), MXFP8BlockScaling()], ids=lambda recipe: recipe.kind)
@pytest.mark.parametrize(("factor", "together"), [(2.0**-9, True), (2.0**-11, False), (1e-6, False), (0.0, True)])
def test_weights_whose_values_are_far_apart_are_not_joined(factor, together, recipe):
    """The small ones would be lost under a scale of both. Blocks of 128 rows have rows of both here."""
    if factor:
        model, x = shrunk(Gated(), "up", factor), torch.randn(128, 64)
        wanted = model(x)
        report = opfuse.fuse_(model, recipe)
        assert list(report.counts) == (["Linear×2 → SwiGLU → Linear"] if together else ["Linear"])
        assert (model(x) - wanted).norm() < 0.09 * wanted.norm()
    attention = shrunk(Attention(), "k", factor)
    assert joined(opfuse.fuse_(attention, recipe)) == ({"k": "in q", "v": "in q"} if together else {"v": "in q"})


def test_no_two_of_a_product_are_far_apart():
    """Though each is near to the first one. Without values, as on meta, and with NaN, nothing is known of them."""
    model = shrunk(shrunk(Attention(), "k", 2.0**-6), "v", 2.0**6)
    assert joined(opfuse.fuse_(model, FP8)) == {"k": "in q"}
    assert joined(opfuse.fuse_(Attention().to("meta"), FP8)) == {"k": "in q", "v": "in q"}
    assert joined(opfuse.fuse_(shrunk(Attention(), "k", float("nan")), FP8)) == {"k": "in q", "v": "in q"}


@pytest.mark.parametrize(("make", "name"), [(Attention, "k"), (Gated, "up")])
def test_a_state_dict_may_bring_weights_that_are_far_apart(make, name):
    """Loaded after the conversion: the next call says so, and runs the modules one by one."""
    torch.manual_seed(0)
    model, other = make(), shrunk(make(), name, 1e-6)
    opfuse.fuse_(model, FP8)
    alone = copy.deepcopy(other)
    opfuse.fuse_(alone, FP8)  # in which nothing is joined with it
    x = torch.randn(2, 64, model.get_submodule(name).in_features)
    for _ in range(3):
        model(x).sum().backward()
    model.load_state_dict(model.state_dict())  # as near as they were
    model(x)
    model.load_state_dict(other.state_dict())
    with pytest.warns(
        OpfuseWarning, match="changed since fuse_: the largest values of the loaded weights are more than 1024 times apart"
    ):
        found = model(x)
    wanted = other(x)
    assert (found - wanted).norm() < 0.09 * wanted.norm()
    assert torch.equal(found, model(x))
    if make is Gated:
        assert torch.equal(found, alone(x))


def test_a_graph_over_weights_that_are_far_apart_by_now_is_refused():
    model, x = Gated(), torch.randn(128, 64)
    opfuse.fuse_(model, FP8)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x)
    model.load_state_dict(shrunk(Gated(), "up", 1e-6).state_dict())
    with pytest.raises(ConversionError, match="more than 1024 times apart"):
        compiled(x)


class CutOff(nn.Module):
    """No gradient reaches the second projection."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        b = b.detach()
        return a + b


def test_in_a_graph_a_module_whose_result_is_detached_gets_no_gradient():
    model = CutOff()
    opfuse.fuse_(model, FP8)
    torch.compile(model, backend="aot_eager")(torch.randn(32, 16, requires_grad=True)).sum().backward()
    assert model.a.weight.grad is not None
    assert model.b.weight.grad is None


class Residual(nn.Module):
    """The input of all three is read once more, so the order in which its gradients are added shows in their last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        return q * k + v + x.tanh()


def gradient_of_input(model, around=nullcontext):
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    with around():
        model(x).square().sum().backward()
    return x.grad


def test_in_a_graph_without_a_recipe_gradients_of_the_input_are_added_as_torch_adds_them():
    model = Residual()
    wanted = gradient_of_input(torch.compile(copy.deepcopy(model), backend="aot_eager"))
    opfuse.fuse_(model)
    assert torch.equal(gradient_of_input(torch.compile(model, backend="aot_eager")), wanted)


def test_a_graph_that_was_traced_without_a_recipe_says_that_its_products_stay_apart():
    model, region = Residual(), partial(opfuse.autocast, recipe=FP8)
    report = opfuse.fuse_(model)
    assert joined(report) == {"k": "in q", "v": "in q"}
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradient_of_input(compiled)
    with plans_used() as plans, pytest.warns(OpfuseWarning, match="traced without a recipe"):
        gradient_of_input(compiled, region)
    assert len(plans) == 3
    torch.compiler.reset()
    with plans_used() as plans:
        gradient_of_input(torch.compile(model, backend="aot_eager", fullgraph=True), region)
    assert len(plans) == 1
