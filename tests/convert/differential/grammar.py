"""Models and scripts from a random grammar: a case is its seed, and its source is a text that can be pasted.

``TABLE`` is the grammar. ``<name>`` stands for any alternative of that name, ``#`` for a number of its own, ``<@n>`` for the path
of a submodule whose name begins with n, ``Part#`` for a new class. All steps take and give 16 columns, so any of them can be
left out: ``minimised`` leaves out what a difference does not need.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

TABLE: dict[str, Sequence[str]] = {
    "bool": ("True", "False"),
    "norm": (
        *("nn.LayerNorm(16)", "nn.RMSNorm(16)", "nn.RMSNorm(16, eps=1e-5)", "LlamaNorm()", "GemmaNorm()") * 2,
        "nn.LayerNorm(16, bias=False)",
        "nn.LayerNorm(16, elementwise_affine=False)",
        *("GammaNorm()", "OutsideNorm(eps=1e-2)", "BareNorm()", "ClampedNorm()", "FirstNorm()", "FunctionalNorm()", "MeanNorm()"),
        *("ModalNorm()", "ConfigNorm()", "CountingNorm()", "DoubledNorm(16)"),
    ),
    "wide": ("nn.LayerNorm(1024)", "nn.RMSNorm(1024)", "LlamaNorm(1024)", "GemmaNorm(1024)", "BareNorm(1024)"),
    "act": (
        *("nn.SiLU()", "nn.GELU()", "nn.GELU(approximate='tanh')", "nn.ReLU()") * 2,
        *("nn.ReLU(inplace=True)", "nn.SiLU(inplace=True)", "nn.Tanh()", "nn.Identity()", "nn.LeakyReLU(0.1)", "nn.Dropout(<p>)"),
        *("ClampedReLU()", "SafeSiLU()", "FarSiLU()", "StraightThrough()", "OwnBackward()", "TanhGELU()", "QuickGELU()"),
        *(
            "SquaredReLU()",
            "PartialGELU()",
            "Sloped()",
            "ConfigAct()",
            "ModalAct()",
            "AskingAct()",
            "NarrowAct()",
            "WritingAct()",
            "LoggingAct(log)",
        ),
    ),
    "function": (
        *("F.silu(h)", "F.gelu(h)", "F.gelu(h, approximate='tanh')", "F.relu(h)", "h.relu()", "torch.relu(h)"),
        *("F.silu(h, inplace=True)", "F.relu(h, inplace=True)", "F.relu_(h)", "h.relu_()", "h * torch.sigmoid(h)"),
        *("torch.relu(h).clamp(max=65504)", "torch.nan_to_num(F.silu(h))", "h + (F.relu(h) - h).detach()", "F.relu(h) ** 2"),
    ),
    "p": ("0.0", "0.0", "0.5"),
    "linear": (
        *("nn.Linear(16, 16)", "nn.Linear(16, 16, bias=False)") * 3,
        *("Conv1D()", "Lora()", "NamedLinear(16, 16)", "OwnLinear(16, 16)", "CalledLinear(16, 16)", "normalized()"),
    ),
    "condition": (
        *("isinstance(x, torch.Tensor)", "torch.is_tensor(x)", "type(x) is torch.Tensor", "type(h) is torch.Tensor"),
        *("torch.is_grad_enabled()", "torch.is_inference_mode_enabled()", "torch.is_autocast_enabled('cpu')", "self.training"),
        *("x.requires_grad", "h.requires_grad", "x.shape[0] == 1", "x.dim() == 3", "x.dtype == torch.float32"),
        *("h.dtype == torch.float32", "h.is_contiguous()", "x.is_inference()", "x.is_leaf", "torch.compiler.is_compiling()"),
        *("flag", "flag is True", "flag is None"),
        *("not args", "args and args[-1] is True", "options.get('flag') is True") * 6,
        *("r is None", "r.dtype == h.dtype", "r.dim() == h.dim()", "r is x"),
    ),
    "touch": (
        *("pass",) * 4,
        *("q.mul_(0.5)", "q[..., :8].mul_(0.5)", "q *= 0.5", "q.view_as(q).mul_(0.5)", "v = v.detach()", "k = k + q", "k = q"),
        *("q = q * 1e-6", "q.add_(k)", "F.silu(q, inplace=True)"),
    ),
    "mixed": ("q * k.sigmoid() + v", "q * k.sigmoid() + v", "torch.softmax(q @ k.mT, -1) @ v", "q + v"),
    "residual": (
        *("h = h + x", "h = x + h", "h += x", "h = h.add_(x)", "h = torch.add(h, x)", "h = h + h"),
        *("h = h + r", "h = r + h", "h += r", "h = h.add_(r)", "h = torch.add(h, r)", "h = h + 2 * r", "h = torch.add(r, h)"),
        "h = h if r is None else h + r",
    ),
    "write": ("h.mul_(2)", "h = h.mul_(0.5)", "h[..., :4] *= 2", "h.clamp_(min=-1)", "x.mul_(2)", "h.add_(1)", "r.mul_(2)"),
    # What a module has | what it does.
    "step": (
        *("self.l# = <linear> | h = self.l#(h)",) * 3,
        *("self.n# = <norm> | h = self.n#(h)",) * 2,
        *("self.a# = <act> | h = self.a#(h)",) * 3,
        *("self.n# = <norm>; self.l# = <linear> | h = self.l#(self.n#(h))",) * 2,
        *("self.l# = <linear>; self.n# = <norm> | h = self.n#(self.l#(h) + r)",) * 2,
        *("self.u#, self.a#, self.d# = nn.Linear(16, 24), <act>, nn.Linear(24, 16) | h = self.d#(self.a#(self.u#(h)))",) * 2,
        "self.u#, self.d# = nn.Linear(16, 24), nn.Linear(24, 16) | h = self.u#(h); h = <function>; h = self.d#(h)",
        *(
            "self.g#, self.u#, self.a#, self.d# = nn.Linear(16, 24), nn.Linear(16, 24), <act>, nn.Linear(24, 16)"
            " | h = self.d#(self.a#(self.g#(h)) * self.u#(h))",
        )
        * 3,
        "self.u#, self.a#, self.d# = nn.Linear(16, 48), <act>, nn.Linear(24, 16)"
        " | a, b = self.u#(h).chunk(2, dim=-1); h = self.d#(self.a#(a) * b)",
        *(
            "self.q#, self.k#, self.v#, self.o# = (nn.Linear(16, 16) for _ in range(4))"
            " | q, k, v = self.q#(h), self.k#(h), self.v#(h); <touch>; h = self.o#(<mixed>)",
        )
        * 3,
        "self.n#, self.q#, self.k#, self.v# = <norm>, nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 16)"
        " | h = self.n#(h); q, k, v = self.q#(h), self.k#(h), self.v#(h); <touch>; h = <mixed>",
        "self.p# = nn.Dropout(<p>) | h = self.p#(h)",
        *("| <residual>",) * 3,
        "| h = <function>",
        "| <write>",
        "| log.append(('a step',))",
        "self.s# = nn.Parameter(torch.linspace(0.1, 1, 16)) | h = h * self.s#",
        "self.s# = nn.Parameter(torch.linspace(0.1, 1, 16)) | h = h + self.s#",
        *("self.s#, self.l# = nn.Parameter(torch.linspace(0.1, 1, 16)), <linear> | h = x + self.s# * self.l#(h)",) * 2,
        *("| h = h * 1.5 if <condition> else h",) * 2,
        "self.l#, self.m# = <linear>, <linear> | h = self.l#(h) if <condition> else self.m#(h)",
        "self.n# = <norm> | h = self.n#(h) if <condition> else h",
        "self.n#, self.l# = <norm>, <linear> | y = self.n#(h); h = self.l#(y) + (y if <condition> else 0)",
        "self.n#, self.l# = <norm>, <linear> | y = self.n#(h); y.mul_(2); h = self.l#(y)",
        "self.n#, self.a#, self.l# = <norm>, <act>, <linear> | h = self.l#(self.a#(self.n#(h)))",
        "self.n# = <wide> | h = h + self.n#(torch.cat([h] * 64, -1)).unflatten(-1, (64, 16)).mean(-2)",
        "self.l# = nn.Linear(16, 0) | h = h + self.l#(h).sum()",
        "self.e# = Sparse() | h = self.e#(h)",
        "self.e# = Dense() | h = self.e#(h)",
        *("self.t# = nn.Sequential(<norm>, <linear>, <act>, <linear>) | h = self.t#(h)",) * 2,
        "self.t# = nn.Sequential(<act>, <linear>, <act>) | h = self.t#(h)",
        "self.l# = nn.Linear(16, 16) | h = self.l#(input=h)",
        "self.l# = <linear> | h = checkpoint(self.l#, h, use_reentrant=<bool>)",
        "self.n#, self.t# = <norm>, nn.Sequential(<linear>, <act>) | h = checkpoint(self.t#, self.n#(h), use_reentrant=<bool>)",
        "self.f# = functools.partial(F.gelu, approximate='tanh') | h = self.f#(h)",
        "self.c# = SimpleNamespace(slope=0.0); self.l# = <linear> | h = F.leaky_relu(self.l#(h), self.c#.slope)",
        "self.l# = <linear>; self.f# = 0 | self.f# += 1; h = self.l#(h) * self.f#",
    ),
    # Of the model: a part behind a norm, in every way in which somebody else may see what the norm gives.
    "around": (
        *("self.n#, self.b# = <norm>, Part# | h = h + self.b#(self.n#(h)<args>)<result>",) * 4,
        *("self.b# = Part# | h = self.b#(h<args>)<result>",) * 3,
        "self.b# = Part# | h = h + self.b#(h<args>)<result>",
        "self.n#, self.b# = <norm>, Part# | h = self.b#(x=self.n#(h)<names>)<result>",
        "self.n#, self.b# = <norm>, Part# | y = self.n#(h); h = self.b#(y<args>)<result> + y",
        "self.n#, self.b# = <norm>, Part# | y = self.n#(h); y.mul_(2); h = self.b#(y<args>)<result>",
        "self.n#, self.b# = <norm>, Part# | y = self.n#(h); h = self.b#(y<args>)<result> + (y if <condition> else 0)",
        *("self.n#, self.b# = <norm>, Part# | y = self.n#(h); stop(fail); h = self.b#(y<args>)<result>",) * 2,
        "self.n#, self.b# = <norm>, Part# | y = self.n#(h) if <condition> else h; h = self.b#(y<args>)<result>",
        "self.n#, self.b# = <norm>, Part# | y = self.n#(h); y = y * 1.5 if <condition> else y; h = self.b#(y<args>)<result>",
        "self.n#, self.b# = <norm>, Part# | h = checkpoint(lambda y: self.b#(y<args>)<result>, self.n#(h), use_reentrant=<bool>)",
        "self.n#, self.b# = <norm>, Part# | h = checkpoint(lambda h: self.b#(self.n#(h)<args>)<result>, h, use_reentrant=<bool>)",
        "self.n#, self.t# = <norm>, nn.Sequential(<linear>, <act>, <linear>)"
        " | h = checkpoint(self.t#, self.n#(h), use_reentrant=<bool>)",
        "self.n#, self.t# = <norm>, nn.Sequential(<linear>, <act>, <linear>) | h = h + self.t#(self.n#(h))",
        "self.n#, self.b# = <norm>, Part# | y = self.n#(h); self.b#(y<args>); h = self.b#(y<args>)<result>",
        "self.n#, self.b# = <norm>, Part# | h = self.b#(self.n#(self.n#(h))<args>)<result>",
        "self.n#, self.b#, self.l# = <norm>, Part#, <linear> | y = self.n#(h); h = self.b#(y<args>)<result> + self.l#(y)",
        *("<step>",) * 5,
    ),
    "last": ("return h",) * 6 + ("return h, x", "return {'h': h, 'r': r}", "return Out(h, None)", "return [h, h]"),
    # -- scripts
    "shape": (*("2, 5, 16",) * 5, "3, 16", "1, 16", "2, 1, 16", "1, 7, 16", "0, 16", "2, 0, 16", "16", "2, 3, 2, 16", "16, 16"),
    "values": (
        *("randn(<shape>)",) * 8,
        *(
            "randn(<shape>) * 1e-3",
            "randn(<shape>) * 1e3",
            "randn(<shape>) * 1e5",
            "randn(<shape>) * 0",
            "padded(randn(2, 5, 16))",
        ),
        *("randn(16, 6).t()", "randn(2, 10, 16)[:, ::2]", "randn(2, 5, 32)[..., ::2]", "randn(5, 2, 16).transpose(0, 1)"),
        *("spoiled(randn(2, 5, 16), float('nan'))", "spoiled(randn(2, 5, 16), float('inf'))", "randn(2, 5, 16).float()"),
    ),
    "x": ("leaf(<values>)", "leaf(<values>)", "made(<values>)", "made(<values>)", "<values>"),
    "r": (
        *("leaf(randn(*x.shape))", "made(randn(*x.shape))", "randn(*x.shape)") * 2,
        *("leaf(randn(16))", "leaf(randn(1, 16))", "leaf(randn(*x.shape[:-1], 1))", "leaf(randn(1))", "leaf(randn(3, *x.shape))"),
        *(
            "leaf(randn(*x.shape).float())",
            "leaf(randn(*x.shape).bfloat16())",
            "leaf(randn(*x.shape).double())",
            "x",
            "leaf(randn())",
        ),
    ),
    "flag": ("",) * 4 + (", flag=True", ", flag=1", ", flag=None"),
    "mode": ("plain",) * 5 + ("no_grad", "inference", "autocast", "autocast", "autocast_no_grad", "eval", "eval_no_grad"),
    "call": ("x = <x>; call('<mode>', x, <r><flag>)",),
    "between": (
        *("<twist>",) * 4,
        "x = <x>; call('plain', x, <r>, fail=True)",
        "x = <x>; call('autocast', x, <r>, fail=True)",
        "step(model)",
        "model.eval()",
    ),
    "fuse": ("fuse(model)",) * 10 + ("fuse(model); fuse(model)", "fuse(model, pack=True)", "fuse(<@b>)"),
    "compile": (*("model.compile(backend='aot_eager')",) * 2, "<@b>.compile(backend='aot_eager')"),
    "twist": (
        "<@>.register_forward_hook(captured(log))",
        "<@>.register_forward_hook(captured(log), with_kwargs=True)",
        "<@>.register_forward_hook(captured(log), always_call=True)",
        "<@>.register_forward_hook(replaced)",
        "<@>.register_forward_hook(tapped(log))",
        "<@>.register_forward_hook(writing)",
        "<@>.register_forward_pre_hook(captured(log))",
        "<@>.register_forward_pre_hook(replaced)",
        "<@>.register_full_backward_hook(captured(log))",
        "<@>.register_full_backward_hook(replaced_gradients)",
        "<@>.register_full_backward_pre_hook(captured(log))",
        "<@>.register_full_backward_pre_hook(replaced)",
        "<@n>.register_forward_hook(captured(log))",
        "<@b>.register_forward_pre_hook(captured(log))",
        "<@l>.weight.register_hook(lambda gradient: gradient * 2)",
        "everywhere(log, of_all.register_module_forward_hook(captured(log)))",
        "everywhere(log, of_all.register_module_forward_pre_hook(captured(log)))",
        "everywhere(log, of_all.register_module_full_backward_hook(captured(log)))",
        *("<@n> = <@n>", "<@l> = <@l>", "<@a> = <@a>", "<@b> = <@b>", "<@u> = <@g>", "<@q> = <@k>"),
        *("<@n> = copy.deepcopy(<@n>)", "<@l> = copy.deepcopy(<@l>)", "<@b> = copy.deepcopy(<@b>)", "model = copied(model)"),
        *("<@n>.weight = <@n>.weight", "<@l>.weight = <@l>.weight", "<@q>.weight = <@k>.weight", "<@v>.weight = <@q>.weight"),
        *(
            "wrap(<@>)",
            "wrap(<@n>)",
            "patch(<@>)",
            "patch(<@n>)",
            "patch(<@b>)",
            "patch_class(log, <@>)",
            "patch_class(log, <@b>)",
        ),
        *("change(<@>)", "change(<@n>)", "change(<@a>)", "change(<@p>)", "renew(<@>)", "renew(<@l>)", "renew(<@n>)"),
        *("<@>.eval()", "<@>.requires_grad_(False)", "<@n>.requires_grad_(False)", "<@l>.bias = None"),
        *("<@a> = nn.Tanh()", "<@l> = nn.Linear(16, 16)", "<@b> = nn.Identity()", "<@n> = nn.LayerNorm(16)"),
    ),
}

SIGNATURES = (
    ("x", "", ""),
    ("x", "", ""),
    ("x", "", ""),
    ("x, r", ", r", ", r=r"),
    ("x, r=None", "", ""),
    ("x, r=None", ", r", ", r=r"),
    ("x, *, r=None", ", r=r", ", r=r"),
    ("x, r=None, flag=False", ", r, flag", ", flag=flag"),
    ("x, flag=False", ", flag is True", ", flag=flag is True"),
    ("x, flag=None", ", flag=flag", ""),
    ("x, *args", ", r, flag", ""),
    ("x, *args", ", flag is True", ""),
    ("x, **options", ", r=r, flag=flag", ", flag=flag"),
    ("x, r=None, **options", ", r, flag=flag", ", r=r"),
)
"""Of a part: what its forward takes, and how it is given that, by place and by name."""
RESULTS = (*(("return h", ""),) * 8, ("return h, None", "[0]"), ("return Out(h, None)", ".h"))
"""How a part returns, and what its caller reads."""
GIVEN = frozenset({"r", "flag", "fail", "args", "options"})
"""Names that an alternative may read only where the forward around has them."""
MODEL = "x, r, flag=False, fail=False"


def _words(text: str) -> frozenset[str]:
    """The names that ``text`` reads, beside those in strings and those that stand for alternatives."""
    return frozenset(re.findall(r"\b[a-z_]+\b", re.sub(r"'[^']*'|<@?\w*>", "", text)))


@dataclass(frozen=True)
class Block:
    """A class. steps: of each, lines of ``__init__`` and lines of ``forward``."""

    name: str
    signature: str
    steps: tuple[tuple[str, str], ...]
    last: str

    @property
    def text(self) -> str:
        made = [line for init, _ in self.steps for line in _lines(init)]
        done = [line for _, forward in self.steps for line in _lines(forward)]
        head = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        body = [f"    def forward(self, {self.signature}):", "        h = x"]
        return "\n".join(
            [*head, *(f"        {line}" for line in made), *body, *(f"        {line}" for line in [*done, self.last])]
        )


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"        {line}" for line in lines]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.split(";") if line.strip()]


@dataclass(frozen=True)
class Case:
    """A model and what is done to it. recipe: of RECIPES in ``runner.py``; dtype: of the model and of what it is given."""

    seed: int
    recipe: str
    dtype: str
    blocks: tuple[Block, ...]
    script: tuple[str, ...]

    @property
    def text(self) -> str:
        lines = [f"dtype = torch.{self.dtype}", *(block.text for block in self.blocks), "model = Model().to(dtype)", *self.script]
        return "\n".join(lines) + "\n"

    def without_reentrant(self) -> Case:
        """This case with checkpoints of the other kind only."""
        pair = "use_reentrant=True", "use_reentrant=False"
        blocks = (replace(each, steps=tuple((init, done.replace(*pair)) for init, done in each.steps)) for each in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def smaller(self) -> Iterator[Case]:
        """This case without one of its parts, for each."""
        for at, line in enumerate(self.script):
            yield replace(self, script=(*self.script[:at], *self.script[at + 1 :]))
            if line.startswith("for _ in range("):
                yield replace(self, script=(*self.script[:at], line.partition(": ")[2], *self.script[at + 1 :]))
        for place, block in enumerate(self.blocks):
            if f"{block.name}()" not in self.text:
                yield replace(self, blocks=(*self.blocks[:place], *self.blocks[place + 1 :]))
            for at in range(len(block.steps)):
                less = replace(block, steps=(*block.steps[:at], *block.steps[at + 1 :]))
                yield replace(self, blocks=(*self.blocks[:place], less, *self.blocks[place + 1 :]))


class Grammar:
    """Draws from TABLE."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.count = 0
        self.blocks: list[Block] = []
        self.paths: list[str] = []

    def any(self, name: str, given: frozenset[str]) -> str:
        """An alternative of ``name`` that reads nothing but ``given``, with what it stands for drawn as well."""
        kinds = {kind for each in self.paths for kind in ("", each.rpartition(".")[2][0])}
        known = [
            each for each in TABLE[name] if not (_words(each) & GIVEN) - given and kinds.issuperset(re.findall(r"<@(\w?)>", each))
        ]
        return self.filled(self.draw.choice(known), given)

    def filled(self, text: str, given: frozenset[str]) -> str:
        text = re.sub(r"<(\w+)>", lambda found: self.any(found[1], given) if found[1] in TABLE else found[0], text)
        return re.sub(r"<@(\w?)>", lambda found: self.path(found[1]), text)

    def path(self, kind: str) -> str:
        """A submodule whose name begins with ``kind``."""
        return f"model.{self.draw.choice([each for each in self.paths if each.rpartition('.')[2].startswith(kind)])}"

    def step(self, name: str, given: frozenset[str], prefix: str) -> tuple[str, str]:
        """A step and, if it has one, the part in it."""
        self.count += 1
        number = self.count
        text = self.any(name, given).replace("#", str(number))
        if f"Part{number}" in text:
            (signature, args, names), (last, result) = self.draw.choice(SIGNATURES), self.draw.choice(RESULTS)
            self.part(f"Part{number}", signature, last, f"{prefix}b{number}.")
            text = text.replace(f"Part{number}", f"Part{number}()").replace("<result>", result)
            text = text.replace("<args>", args).replace("<names>", names)
        init, _, forward = text.partition("|")
        self.paths += [f"{prefix}{each}" for each in re.findall(r"self\.([nlaugdqkvobptme]\d+)\b(?=[^|]*=)", init)]
        return init, forward

    def part(self, name: str, signature: str, last: str, prefix: str) -> None:
        given = frozenset(_words(signature) & GIVEN)
        steps = tuple(self.step("step", given, prefix) for _ in range(self.draw.choice((1, 1, 2, 2, 3, 4))))
        self.blocks.append(Block(name, signature, steps, last))

    def script(self, compiled: bool) -> Iterator[str]:
        given = GIVEN
        twists = self.draw.choice(((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1), (2, 0, 0), (0, 2, 1)))
        call = self.any("call", given)
        yield from (self.any("twist", given) for _ in range(twists[0]))
        yield self.any("fuse", given)
        yield from (self.any("twist", given) for _ in range(twists[1]))
        if compiled:
            yield self.any("compile", given)
        yield f"for _ in range(4): {call}"
        for _ in range(twists[2]):
            yield self.any("between", given)
            yield f"for _ in range(2): {call}"
        yield self.any("call", given)
        if self.draw.random() < 0.2:
            yield "unfuse(model)"
            yield call


def case(seed: int, *, compiled: bool = False) -> Case:
    """The case of a seed."""
    grammar = Grammar(seed)
    draw = grammar.draw
    recipe = draw.choice(("identity", "identity", "identity", "region", "none"))
    dtype = draw.choice(("float32",) * 7 + ("float64", "bfloat16"))
    given = frozenset(_words(MODEL) & GIVEN)
    steps = tuple(grammar.step("around", given, "") for _ in range(draw.choice((1, 1, 2, 2, 3))))
    last = grammar.any("last", given)
    blocks = (*grammar.blocks, Block("Model", MODEL, steps, last))
    script = grammar.script(compiled)
    if compiled:  # dynamo calls hooks of all modules on modules of its own, too, one for each part of a graph
        script = (line for line in script if not line.startswith("everywhere("))
    return Case(seed, recipe, dtype, blocks, tuple(script))


def minimised(found: Case, fails: Callable[[Case], bool]) -> Case:
    """``found`` without whatever can be left out so that it still ``fails``."""
    for less in found.smaller():
        if fails(less):
            return minimised(less, fails)
    return found
