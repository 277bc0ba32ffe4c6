"""The command line: exit codes, formats, and that help costs nothing."""

import inspect
import json
import subprocess
import sys
import warnings

import pytest

import opfuse.cli.check
from opfuse.cli import commands, main
from opfuse.cli.commands import COMMANDS
from opfuse.errors import RecipeError, UnsupportedError
from opfuse.train.study import POINTS

GOOD = "version: 1\nrecipe: {kind: none}\npipeline: {ops: [{op: gelu}]}\n"
BAD = "version: 1\nrecipe: {kind: mxfp}\npipeline: {ops: [{op: gellu}]}\n"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.yaml").write_text(GOOD)
    (tmp_path / "bad.yaml").write_text(BAD)


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_check_of_good_files_is_0(files, capsys):
    assert main(["check", "good.yaml", "good.yaml"]) == 0
    assert capsys.readouterr().out == "no findings in 2 files\n"


def test_check_of_bad_files_is_1_and_tells_all(files, capsys):
    assert main(["check", "good.yaml", "bad.yaml", "none.yaml"]) == 1
    out = capsys.readouterr().out
    assert "bad.yaml:2:16: error[unknown-recipe]: there is no recipe 'mxfp'\n    2 | recipe: {kind: mxfp}\n" in out
    assert "bad.yaml:3:23: error[unknown-op]" in out
    assert "none.yaml:1:1: error[no-file]" in out
    assert out.endswith("3 findings in 3 files\n")


@pytest.mark.parametrize("option", [["--json"], ["--format", "json"]])
def test_check_as_json(files, capsys, option):
    assert main(["check", "bad.yaml", *option]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["code"], first["line"], first["column"], first["width"]) == ("unknown-recipe", 2, 16, 4)
    assert second["help"] == "did you mean 'gelu'?"
    assert main(["check", "good.yaml", *option]) == 0
    assert json.loads(capsys.readouterr().out) == []


POLICY = """version: 1
recipe: {kind: fp8_current}
policy:
  model.layers.0: {kind: none}
  lm_head: {kind: default}
  "*.mlp": {kind: mxfp8, backward_override: dequantized}
"""


def test_check_of_a_policy(files, tmp_path, capsys):
    """A file for `opfuse.fuse_`, also one whose key is mistyped; commands that want a pipeline say what it is for."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    (tmp_path / "typo.yaml").write_text(POLICY.replace("policy:", "polcy:").replace("dequantized", "dequantised"))
    assert main(["check", "policy.yaml", "--values"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["policy.model.layers.0", "none", "policy.yaml:4:19"] in lines
    assert ["policy.lm_head", "default", "policy.yaml:5:12"] in lines
    assert ["policy.*.mlp.backward_override", "dequantized", "policy.yaml:6:45"] in lines
    assert ["recipe.scale_rule", "te", "default"] in lines
    assert main(["check", "typo.yaml"]) == 1
    out = capsys.readouterr().out
    assert "typo.yaml:3:1: error[unknown-key]: unknown key 'polcy'\n" in out
    assert "= help: did you mean 'policy'?" in out
    assert out.endswith("1 finding in 1 file\n")
    assert main(["explain", "policy.yaml"]) == 1
    assert "= help: this file is for a model that you convert: opfuse.fuse_(model, **opfuse" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rest", "found"),
    [
        ("train: {steps: 3}", ["train"]),
        ("train: {steps: 3, batch_size: 64}\nwatch: {every: 1}", ["train", "watch"]),
        ("train: {batch_size: 64}", []),
        ("train: {steps: 3}\ndata: {kind: pydoc_topics, context: 4, embedding: 8}", []),
    ],
)
def test_sections_that_do_nothing_without_data_are_told(files, tmp_path, capsys, rest, found):
    (tmp_path / "rest.yaml").write_text(GOOD.replace("{op: gelu}", "{op: linear, in_features: 32, out_features: 256}") + rest)
    assert main(["check", "rest.yaml"]) == bool(found)
    assert [line.split("error")[1] for line in capsys.readouterr().out.splitlines() if "error" in line] == [
        f"[missing-key]: {name!r} needs a key 'data' in the file" for name in found
    ]


BAD_SIZES = """
version: 1
recipe: {kind: KIND}
pipeline:
  ops:
    - {op: linear, in_features: 33, out_features: 20}
    - {op: gelu}
    - {op: linear, in_features: 20, out_features: 64}
    - {op: linear, in_features: 64, out_features: 7}
"""


@pytest.mark.parametrize(
    ("kind", "cures"),
    [
        (
            "mxfp8",
            [
                "write in_features: 64, and give its input 31 more columns",
                "write in_features: 32, and give its input 12 more columns",
                "write out_features: 32, or compute gradients in high precision, backward_override: dequantized in the recipe",
            ],
        ),
        ("nvfp4", ["write dtype: bfloat16 in the pipeline, or do without the rotation (disable_rht: true in the recipe)"]),
        ("fp8_current", []),
    ],
)
def test_each_op_that_the_recipe_does_not_fit_is_told_with_what_to_write(kind, cures, tmp_path, capsys):
    file = tmp_path / "sizes.yaml"
    file.write_text(BAD_SIZES.replace("KIND", kind))
    assert main(["check", str(file), "--json"]) == (1 if cures else 0)
    assert [finding["help"] for finding in json.loads(capsys.readouterr().out)] == cures


def test_a_file_that_begins_with_a_gated_unit_is_right(tmp_path):
    """Nothing tells how many columns go in: half of what the unit takes come out."""
    file = tmp_path / "gated.yaml"
    ops = "[{op: swiglu}, {op: linear, in_features: 64, out_features: 64}]"
    file.write_text(f"version: 1\nrecipe: {{kind: fp8_current}}\npipeline: {{ops: {ops}}}\n")
    assert main(["check", str(file)]) == 0


def test_check_as_workflow_commands(files, capsys):
    assert main(["check", "bad.yaml", "--format", "github"]) == 1
    assert capsys.readouterr().out.startswith("::error file=bad.yaml,line=2,col=16,title=unknown-recipe::")


@pytest.mark.parametrize("arguments", [["check"], ["check", "--bogus"], ["bogus"], ["check", "x", "--format", "xml"]])
def test_usage_is_2(arguments, capsys):
    assert main(arguments) == 2
    assert "Usage" in capsys.readouterr().err


def test_no_arguments_show_the_help(capsys):
    main([])
    assert "Commands" in "".join(capsys.readouterr())


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"opfuse {opfuse.__version__}\n"


@pytest.mark.parametrize(("error", "code"), [(UnsupportedError("no such device"), 3), (RecipeError("bad recipe"), 1)])
def test_errors_are_one_message(files, capsys, monkeypatch, error, code):
    def broken(path):
        raise error

    monkeypatch.setattr(opfuse.cli.check, "check_file", broken)
    assert main(["check", "good.yaml"]) == code
    captured = capsys.readouterr()
    assert captured.err == f"{error}\n"
    assert captured.out == ""
    monkeypatch.setenv("OPFUSE_DEBUG", "1")
    with pytest.raises(type(error)):
        main(["check", "good.yaml"])


def test_schema_prints_the_schema(capsys):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["version", "recipe", "pipeline"]


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text
    assert "fp8_current" in text
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipes"]["mxfp8"]["status"] in ("native", "emulated", "refused")
    assert {row["arch"] for row in found["matrix"]} >= {"0.0", "9.0", "10.0"}


HELP = """
import sys
from opfuse.cli import main
assert main(["--help"]) == 0
for name in sys.argv[1:]:
    assert main([name, "-h"]) == 0
print(sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "networkx", "ruamel"}))
"""


def test_defaults_that_help_shows_are_those_of_the_library():
    assert inspect.signature(commands.study).parameters["points"].default == POINTS


def test_help_imports_no_torch():
    done = run("-c", HELP, *(command.__name__ for command in COMMANDS))
    assert done.returncode == 0, done.stderr
    assert all(f"Usage: opfuse {command.__name__}" in done.stdout for command in COMMANDS)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_exits_with_the_code_and_loads_no_compiler(tmp_path):
    """torch.compile takes as long to import as torch; shapes of a pipeline's tensors are computed without it."""
    (tmp_path / "bad.yaml").write_text(BAD)
    done = run("-X", "importtime", "-m", "opfuse", "check", str(tmp_path / "bad.yaml"), "quickstart", "moe")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "opfuse.config.trial" in done.stderr
    assert "torch._dynamo" not in done.stderr


def test_a_rehearsal_warns_of_no_region(tmp_path, monkeypatch):
    """Each op of a file runs once, alone, under the recipe: also those that have nothing to quantize."""
    monkeypatch.setattr(sys.modules["opfuse.recipes.autocast"], "_warned", set())
    path = tmp_path / "norm.yaml"
    path.write_text("version: 1\nrecipe: {kind: mxfp8}\npipeline: {ops: [{op: rms_norm, size: 96}]}\n")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert main(["check", str(path)]) == 0
    assert [str(warning.message) for warning in told] == []
