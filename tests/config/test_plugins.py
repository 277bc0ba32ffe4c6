"""Files name ops and functions of other packages by the entry points of an installed distribution, and by nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from opfuse.config import loads
from opfuse.errors import ConfigError
from tests.processes import ran

MODULE = '''
import torch
from opfuse import ops
from opfuse.core.spec import Size, hyper_parameters

class Mish(ops.Activation):
    math = ops.formula("mish", lambda x: x * x.softplus().tanh())

class Gain(ops.BasicOperation):
    @hyper_parameters
    def __init__(self, size: Size, *, first: float = 1.0, device=None, dtype=None):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((size,), first, device=device, dtype=dtype))

    def op_forward(self, ctx, x):
        ctx.save_for_backward(x, self.gain)
        return x * self.gain

    def op_backward(self, ctx, dy):
        x, gain = ctx.saved_tensors
        return dy * gain, ((dy * x).flatten(0, -2).sum(0),)

TEXT = """
extern "C" __global__ void twice(const scalar_t* x, scalar_t* y, long long rows, long long columns) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < rows * columns) y[at] = x[at] + x[at];
}
extern "C" __global__ void twice_backward(const scalar_t* dy, const scalar_t* x, scalar_t* dx, long long rows,
                                          long long columns) {
    long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at < rows * columns) dx[at] = dy[at] + dy[at];
}
"""

@ops.raw_kernel(TEXT, forward="twice", backward="twice_backward", dtypes={torch.bfloat16: "__nv_bfloat16"})
class Twice(ops.RawKernelOperation):
    @hyper_parameters
    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def reference(x):
        return x + x

CALLS = []

def gemm_mish(x, *, basic_linear, bias, act):
    CALLS.append(type(act.op).__name__)
    y = basic_linear.op.produce(basic_linear, x)
    return act.op.op_forward(act, bias.op.op_forward(bias, y))
'''
POINTS = """[opfuse.ops]
mish = mine:Mish
gain = mine:Gain
twice = mine:Twice
other = mine:Gain
gelu = mine:Mish
lost = nowhere:Op
torch = torch:nn
[opfuse.fusions]
gemm_mish = mine:gemm_mish
chain = mine:gemm_mish
gone = mine:nothing
mish = mine:Mish
"""
CONFIG = """version: 1
recipe: {kind: mxfp8}
pipeline:
  dtype: bfloat16
  ops:
    - {op: gain, size: 64, first: 2.0}
    - {op: linear, in_features: 64, out_features: 64}
    - {op: mish}
    - {op: linear, in_features: 64, out_features: 256}
fusions:
  rules: [{name: mine, pattern: [basic_linear, bias, mish], expect: {fused: 1}}]
data: {kind: pydoc_topics, context: 4, embedding: 16}
train: {batch_size: 32, steps: 1}
"""
RULE = "{name: mine, pattern: [basic_linear, bias, mish], expect: {fused: 1}}"
OWN = "{name: own, pattern: [basic_linear, bias, act=mish|gelu], when: {recipe.kind: mxfp8}, emit: gemm_mish, expect: {fused: 1}}"
WRONG = {
    "forward": "{name: own, pattern: [basic_linear, bias, mish], forward: mine.gemm_mish}",
    "places": "{name: own, pattern: [basic_linear, bias, mish], emit: gemm_mish}",
    "joint": "{name: own, pattern: [basic_linear, bias, act=mish], emit: gemm_mish, direction: joint}",
    "module": "{name: own, pattern: [basic_linear, bias, act=mish], emit: 'os:system'}",
    "near": "{name: own, pattern: [basic_linear, bias, act=mish], emit: gemm_mesh}",
}
PROGRAM = """
import json, sys, warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import opfuse
    from opfuse.cli.app import main
    from opfuse.errors import ConfigError
    config = opfuse.load("mine.yaml")
found = {"warnings": [str(each.message) for each in told if "entry point" in str(each.message)]}
model = config.build()
found["ops"] = [repr(op) for op in model]
found["check"] = main(["check", "mine.yaml", "own.yaml"])

import mine, torch
own = opfuse.load("own.yaml")
fused, x = own.build(), torch.randn(32, 64, dtype=torch.bfloat16)
fused.load_state_dict(model.state_dict())
results = []
for each in (model, fused):
    taken = x.clone().requires_grad_()
    with opfuse.autocast(recipe=own.recipe):
        y = each(taken)
    y.sum().backward()
    results.append([y, taken.grad, *(p.grad for p in each.parameters())])
found["calls"] = mine.CALLS
found["equal"] = all(map(torch.equal, *results))

def finding(name):
    try:
        opfuse.load(name)
    except ConfigError as error:
        return str(error)

found["finding"] = finding("wrong.yaml")
found["wrong"] = {name: finding(f"wrong_{name}.yaml") for name in NAMES}
print(json.dumps(found))
"""


def test_own_ops_and_functions_come_from_entry_points(tmp_path: Path) -> None:
    """As built-in ones in fields, patterns and bits; entry points that are none of an op or function are told, with a cure."""
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "mine-1.0.dist-info").mkdir()
    (tmp_path / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (tmp_path / "mine-1.0.dist-info" / "entry_points.txt").write_text(POINTS)
    config = CONFIG.replace("out_features: 256}", "out_features: 256}\n    - {op: twice}")
    (tmp_path / "mine.yaml").write_text(config)
    (tmp_path / "wrong.yaml").write_text(CONFIG.replace("size: 64, first: 2.0", "size: 64, frist: 2.0"))
    path = os.pathsep.join((str(tmp_path), *filter(None, (os.environ.get("PYTHONPATH"), os.getcwd()))))
    (tmp_path / "own.yaml").write_text(config.replace(RULE, OWN))
    for name, rule in WRONG.items():
        (tmp_path / f"wrong_{name}.yaml").write_text(CONFIG.replace(RULE, rule))
    done = ran(PROGRAM.replace("NAMES", repr(list(WRONG))), cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ops"][0] == "Gain(size=64, first=2.0)"
    assert found["ops"][2] == "Mish()"
    assert found["ops"][-1] == "Twice()"
    assert found["check"] == 0
    assert "wrong.yaml:6:28: error[unknown-key]" in found["finding"]
    assert "did you mean 'first'?" in found["finding"]
    told = "\n".join(found["warnings"])
    for point, why in {
        "gelu = mine:Mish of mine": "wants a name that no op of opfuse has, got 'gelu'",
        "lost = nowhere:Op of mine": "wants one that can be imported, got ModuleNotFoundError",
        "other = mine:Gain of mine": "wants the kind of its op, which patterns say, got 'other'. Cure: name the entry point gain",
        "torch = torch:nn of mine": "wants a class of opfuse.ops, got <module",
        "chain = mine:gemm_mish of mine": "wants a name that opfuse does not emit itself, got 'chain'",
        "gone = mine:nothing of mine": "wants one that can be imported, got AttributeError",
        "mish = mine:Mish of mine": "wants a function, got <class",
    }.items():
        assert f"entry point {point}: {why}" in told
    assert (found["calls"], found["equal"]) == (["Mish"], True)
    for name, told in {
        "forward": "unknown key 'forward'\n.*help: write `emit: NAME` of a function that an installed package offers",
        "places": r"wants keyword-only parameters \('basic_linear', 'bias', 'mish'\), got \('basic_linear', 'bias', 'act'\)",
        "joint": "a function runs forward or backward; register_fusion takes two of them",
        "module": "emit wants 'epilogue' or 'chain' or 'gemm_mish', got 'os:system'\n.*help: write `emit: NAME`",
        "near": "did you mean 'gemm_mish'?",
    }.items():
        assert re.search(told, found["wrong"][name], re.DOTALL), found["wrong"][name]


PAGE = Path(__file__).resolve().parents[2] / "docs" / "ops.md"
SHIFT = CONFIG.replace("{op: gain, size: 64, first: 2.0}", "{op: shift, size: 64, start: 0.5}").replace(
    "- {op: mish}", "- {op: silu}"
)
SHIFT = SHIFT.replace(RULE, "")


Done = subprocess.CompletedProcess[str]
CHECKED = """
import runpy, sys
sys.argv = ["opfuse", "check", "mine.yaml"]
runpy.run_module("opfuse", run_name="__main__")
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Done]:
    """``opfuse check`` of a file with the op that ops.md shows, by what its package holds; each in a process of its own."""
    (points,) = re.findall(
        r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8").partition("### Use your op in a file")[2], re.DOTALL
    )
    declared = tomllib.loads(points)["project"]["entry-points"]["opfuse.ops"]
    lines = "".join(f"{name} = {value}\n" for name, value in declared.items())
    folders = {name: tmp_path_factory.mktemp(name) for name in modules()}
    for name, module in modules().items():
        (folders[name] / "my_ops.py").write_text(module)
        (folders[name] / "my_ops-0.1.dist-info").mkdir()
        (folders[name] / "my_ops-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: my-ops\nVersion: 0.1\n")
        (folders[name] / "my_ops-0.1.dist-info" / "entry_points.txt").write_text(f"[opfuse.ops]\n{lines}")
        (folders[name] / "mine.yaml").write_text(SHIFT)
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.getcwd())))
    found = {}
    for name, folder in folders.items():
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), path))}
        found[name] = ran(CHECKED, cwd=folder, env=environment, check=False)
    return found


def modules() -> dict[str, str]:
    """That of the page, and with each fault."""
    page = module_of_the_page()
    found = {"page": page}
    for fault, (old, new, _) in WITHOUT.items():
        module = page.replace(", device=device, dtype=dtype", "") if fault == "placement" else page
        assert old in module
        found[fault] = module.replace(old, new)
    found["decorator"] = page.replace("    @hyper_parameters", "    #").replace("class Shift", "@hyper_parameters\nclass Shift")
    return found


def module_of_the_page() -> str:
    """The module that ops.md shows."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if "@hyper_parameters" in block)


def test_the_package_of_the_page_gives_files_an_op(checked: dict[str, Done]) -> None:
    done = checked["page"]
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


WITHOUT = {
    "placement": (
        ", device=None, dtype=None",
        "",
        "error\\[bad-value\\]: shift does not take device and dtype, .*help: take device=None, dtype=None in its constructor",
    ),
    "device": ("device=device", "device='cpu'", "error\\[bad-value\\]: shift makes shift on cpu"),
    "types": (
        "size: int",
        "size",
        r"wants arguments with types that a file can hold, got Shift\(..., size, ...\). Cure: .*size: int",
    ),
    "package": (
        "class Shift",
        "class Shifts",
        r"there is no op 'shift'.*An op of your own comes from an installed package, by its entry point in opfuse\.ops",
    ),
}


@pytest.mark.parametrize("fault", WITHOUT)
def test_an_op_that_no_file_can_use_is_told_with_what_to_do(fault: str, checked: dict[str, Done]) -> None:
    done, (_, _, told) = checked[fault], WITHOUT[fault]
    assert done.returncode == 1
    assert re.search(told, done.stdout + done.stderr, re.DOTALL), done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_decorator_on_the_class_says_where_it_belongs(checked: dict[str, Done]) -> None:
    told = checked["decorator"].stderr
    assert "got SpecError: hyper_parameters: wants the constructor of an op, got <class 'my_ops.Shift'>" in told
    assert re.findall("Cure: .*", told) == ["Cure: write @hyper_parameters on the line above def __init__."]


def test_a_file_imports_nothing() -> None:
    """A name with a module is no op, whatever can be imported under it."""
    for name in ("torch.nn:Linear", "opfuse.ops.GELU", "mish"):
        with pytest.raises(ConfigError, match="unknown-op"):
            loads(CONFIG.replace("op: mish", f"op: '{name}'"), "f.yaml")
