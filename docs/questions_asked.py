"""The questions of docs/questions.md: about what, the case, the command or call, and what its answer must say."""

from __future__ import annotations

from typing import NamedTuple

from docs.questions_cases import CONFIG, KERNELS, RANKS, TRACED, TWO_PLANS, TWO_RUNS, config


class Question(NamedTuple):
    """plant: code that makes the case. ask: a command line that begins with opfuse, else code. says: parts of the answer."""

    about: str
    title: str
    plant: str
    ask: str
    says: tuple[str, ...]


KEYS, FUSIONS, NUMBERS, MEMORY, MACHINE, FILES = (
    "Plans and their keys",
    "Fusions",
    "Recipes and values",
    "Memory",
    "This machine and its kernels",
    "Files, checkpoints and models",
)

QUESTIONS = (
    Question(
        KEYS,
        "Why was my model planned again?",
        TWO_PLANS,
        "print(model.cache_info().last_miss)",
        ("env.recipe.backward_override: None -> 'dequantized'", "now: train.py:4"),
    ),
    Question(
        KEYS,
        "Why was it planned again when only the batch changed?",
        "model = mlp()\nwith torch.no_grad():\n    model(batch(128)), model(batch(96))\n",
        "print(model.cache_info().last_miss)",
        ("env.rows_class: 128 -> 32", "was: 128 rows, now: 96 rows"),
    ),
    Question(
        KEYS,
        "Why does evaluation need another plan?",
        "model = ops.Sequential(ops.Linear(32, 32), ops.Dropout(0.1))\nmodel(batch().float())\nmodel.eval()(batch().float())\n",
        "print(model.cache_info().last_miss)",
        ("inputs.training.1: True -> False",),
    ),
    Question(
        KEYS,
        "Which plans are there, why was each made, and how long did it take?",
        TRACED,
        "opfuse cache ls --trace run",
        ("first plan: the cache was empty", "env.recipe.backward_override"),
    ),
    Question(
        KEYS,
        "Which plan was nearest to one that had to be made?",
        TRACED,
        "opfuse cache why run",
        ("nearest KEY1", "was: default, now: train.py:6"),
    ),
    Question(
        KEYS,
        "Where does a value of a key come from?",
        'import os\nos.environ |= {"OPFUSE_TRACE": "run", "NVTE_BACKWARD_OVERRIDE": "dequantized"}\n'
        'with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(scale_rule="ocp_floor")):\n    mlp()(batch())\n'
        "from opfuse.inspect.trace import read\nos.environ['KEY'] = read('run')[0].plans[0].key\n",
        "opfuse cache show $KEY --trace run --only env",
        ("environment NVTE_BACKWARD_OVERRIDE", "'ocp_floor'", "train.py:3", "default"),
    ),
    Question(
        KEYS,
        "Which rank makes other plans than the rest?",
        RANKS,
        "opfuse cache why run",
        ("rank 2 disagrees in plan 1", "env.recipe.rounding: 'per_op' -> 'single'"),
    ),
    Question(
        KEYS,
        "Is my model planned again in every step?",
        "model = mlp()\ndef step():\n    recipe = recipes.CustomRecipe(qfactory=lambda role: recipes.zoo.mxfp8_fwd_high_precision_bwd(role))\n"
        "    with opfuse.autocast(recipe=recipe):\n        model(batch())\nfor _ in range(16):\n    step()\n",
        "step()",
        ("16 misses in a row that differ in env.recipe.qfactory alone", "make the recipe once"),
    ),
    Question(
        KEYS,
        "How do I make sure that no plan is made while I serve?",
        "model = mlp().eval()\nwith torch.no_grad():\n    model(batch(128))\n",
        'with torch.no_grad(), opfuse.on_miss("error"):\n    model(batch(100))\n',
        ("PlanMissError", "env.rows_class: 128 -> 4"),
    ),
    Question(
        FUSIONS,
        "What fused?",
        "model, x = mlp(), batch().requires_grad_()\n",
        "with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):\n    print(opfuse.explain(model, x).fusions)\n",
        ("'epilogue'", "'backward_activation_bias'"),
    ),
    Question(
        FUSIONS,
        "Why did a rule not fire here, and what would make it fire?",
        config("  rules: [{use: epilogue, when: {env.arch: '>= 9.0'}}]"),
        "opfuse explain mine.yaml --why-not epilogue",
        ("missed", "env.arch: wants >= (9, 0), got (0, 0)", "to fire"),
    ),
    Question(
        FUSIONS,
        "Which rule took the ops that mine matches?",
        "model, x = ops.Sequential(ops.Linear(64, 64), ops.AddExtraInput(in_place=True)), torch.randn(32, 64)\n",
        "print(opfuse.explain(model, x, x.clone()).narrowed('epilogue'))\n",
        ("shadowed", "by linear_add", "to fire"),
    ),
    Question(
        FUSIONS,
        "Does one rule of my file hide another?",
        config(
            "  rules:\n    - {name: all, pattern: 'basic_linear bias? gelu'}\n    - {name: mine, pattern: 'basic_linear bias gelu', when: {recipe.kind: mxfp8}}"
        ),
        "opfuse check mine.yaml",
        ("shadowed-rule", "'all' comes first"),
    ),
    Question(
        FUSIONS,
        "Does my rule fire as often as I think?",
        config("  rules: [{name: mine, pattern: 'basic_linear bias gelu', expect: {fused: 2}}]"),
        "opfuse check mine.yaml",
        ("not-as-expected", "'mine' is fused 1 time, not 2"),
    ),
    Question(
        FUSIONS,
        "Did I mistype an op in a pattern?",
        config("  rules: [{name: mine, pattern: 'basic_linear bias gellu'}]"),
        "opfuse check mine.yaml",
        ("unknown-op", "did you mean 'gelu'?"),
    ),
    Question(
        FUSIONS,
        "In which order do rules take ops?",
        "",
        "print(*opfuse.active_rules().names, sep='\\n')",
        ("linear_scale_add", "epilogue"),
    ),
    Question(
        FUSIONS,
        "Does the fusion function that I registered do anything?",
        "model = mlp()\ndef mine(ops, *, recipe): return ops\n",
        "with opfuse.register_forward_fusion(mine):\n    model(batch())\n",
        ("mine", "OpfuseWarning"),
    ),
    Question(
        NUMBERS,
        "Where does a field of my recipe come from?",
        'import os\nos.environ["OPFUSE_BACKWARD_OVERRIDE"] = "high_precision"\nrecipe = recipes.MXFP8BlockScaling(rounding="single")\n',
        "print(dict(recipe.sources))",
        ("environment OPFUSE_BACKWARD_OVERRIDE", "train.py:3", "default"),
    ),
    Question(
        NUMBERS,
        "Why is my recipe refused?",
        "",
        'recipes.DelayedScaling(backward_override="dequantized")',
        ("RecipeError", "use another recipe with this override"),
    ),
    Question(
        NUMBERS,
        "Why does a quantized tensor lack its columnwise data?",
        "from opfuse.tensors.quantizers import MXFP8Quantizer\nt = MXFP8Quantizer(columnwise=False)(batch())\n",
        "t.record.plane('columnwise')",
        ("MissingPlaneError", "columnwise"),
    ),
    Question(
        NUMBERS,
        "Is anything quantized at all?",
        "model = torch.nn.Sequential(torch.nn.Linear(32, 32))\n",
        "with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):\n    model(batch().float())\n",
        ("OpfuseWarning", "ops of opfuse that run under the recipe", "got none"),
    ),
    Question(
        NUMBERS,
        "Did quantization saturate or underflow, in which op, tensor and step?",
        "model, x = ops.Sequential(ops.Linear(32, 32)), torch.ones(32, 32)\nx[0], x[1:9] = 4e3, 1e-4\n",
        "with opfuse.watch(model, every=100), opfuse.autocast(recipe=recipes.DelayedScaling()):\n    model(x)\n",
        ("op 0, input, step 1: wants a share saturated of at most 0.01, got 0.0312",),
    ),
    Question(
        NUMBERS,
        "How much does each cast lose?",
        "model, x = mlp(), batch()\n",
        "with opfuse.watch(model) as watch, opfuse.autocast(recipe=recipes.NVFP4BlockScaling()):\n    model(x).sum().backward()\nfor cast in watch.records:\n    print(cast['op'], cast['tensor'], cast['format'], f\"{cast['sqnr']:.0f} dB\" if cast['sqnr'] else 'nothing lost')\n",
        ("1 input nvfp4", "dB"),
    ),
    Question(
        NUMBERS,
        "Which op takes the most CPU time?",
        "model, x = mlp(), batch(128)\n",
        "with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):\n    print(sorted({row.name for row in opfuse.host_times(model, x).rows}))\n",
        ("epilogue", "backward_activation_bias"),
    ),
    Question(
        NUMBERS,
        "Which products are quantized, in which formats, and do they run natively here?",
        "model, x = mlp(), batch().requires_grad_()\n",
        "with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):\n"
        "    for product in opfuse.explain(model, x).to_dict()['pipelines'][0]['products']:\n"
        "        print(*product.values())\n",
        ("fprop", "wgrad", "emulated"),
    ),
    Question(
        MEMORY,
        "What does a call keep for its backward pass, and whose memory is it?",
        "model, x = mlp(), batch().requires_grad_()\n",
        "with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):\n    print(opfuse.saved(model, x))\n",
        ("mxfp8", "bytes for backward"),
    ),
    Question(
        MEMORY,
        "How many bytes does each backward override keep, and how far are its gradients from those without a recipe?",
        "model, x = mlp(), batch().requires_grad_()\n",
        "with opfuse.autocast(recipe=recipes.MXFP8BlockScaling()):\n"
        "    found = opfuse.saved(model, x, errors=True)\n"
        "for override, totals in found.by_override.items():\n"
        "    print(override, totals, f\"gradients {found.errors[f'backward_override={override}']:.1%} off\")\n",
        ("dequantized", "high_precision", "own=10368) gradients N% off"),
    ),
    Question(
        MACHINE,
        "Which recipes does a machine run natively, which does it emulate, and why?",
        "",
        "for kind in recipes.RECIPES:\n    print(f'{kind}: {recipes.support(kind, (9, 0))}')\n",
        ("fp8_current: native", "nvfp4: emulated"),
    ),
    Question(
        MACHINE,
        "Which environment variables have an effect?",
        'import os\nos.environ |= {"NVTE_BACKWARD_OVERRIDE": "dequantized", "OPFUSE_PROGRAMS": "0", "OPFUSE_TRACES": "run"}\n',
        "opfuse doctor --only environment",
        (
            "NVTE_BACKWARD_OVERRIDE=dequantized: the backward_override of recipes that are given none",
            "OPFUSE_TRACES=run: nothing reads it",
        ),
    ),
    Question(
        MACHINE,
        "Which kernel spills registers?",
        KERNELS,
        "opfuse cache ls",
        ("cast_row.cu", "48"),
    ),
    Question(
        MACHINE,
        "Could the cache of compiled kernels be stale, or damaged?",
        KERNELS + "next(location().glob('*.cubin')).write_bytes(b'cut')\n",
        "opfuse cache verify",
        ("is not what was stored", "no entry can be stale"),
    ),
    Question(
        MACHINE,
        "Which compiled kernels can be removed?",
        KERNELS + "for path in location().glob('*.cu'):\n    path.write_text(path.read_text().replace('blockIdx', 'block'))\n",
        "opfuse cache prune",
        ("removed 2 keys",),
    ),
    Question(
        FILES,
        "What changed between two runs, and when did their losses diverge?",
        TWO_RUNS % ("mxfp8", "mxfp8, backward_override: dequantized"),
        "opfuse diff one two",
        ("recipe.backward_override: None -> 'dequantized'", "losses differ from step 2 on"),
    ),
    Question(
        FILES,
        "Which op was the first whose values differ?",
        TWO_RUNS % ("mxfp8", "mxfp8, backward_override: dequantized"),
        "opfuse diff one two --localize",
        ("values differ first in step 2",),
    ),
    Question(
        FILES,
        "Is a result reproducible?",
        TWO_RUNS % ("nvfp4", "nvfp4"),
        "opfuse diff one two",
        ("3 losses are equal bit for bit", "no differences"),
    ),
    Question(
        FILES,
        "How do two configurations differ?",
        config("  rules: []")
        + 'Path("yours.yaml").write_text(Path("mine.yaml").read_text().replace("mxfp8", "fp8_block").replace("O1", "O2"))\n',
        "opfuse diff mine.yaml yours.yaml",
        ("recipe: 'mxfp8' -> 'fp8_block'", "fusions.level: 'O1' -> 'O2'"),
    ),
    Question(
        FILES,
        "Which layers should stay in bf16?",
        "model = torch.nn.ModuleDict({name: torch.nn.Linear(4096, size, device='meta') for name, size in "
        "(('up', 14336), ('gate', 64), ('lm_head', 32000), ('small', 32))})\n",
        "print(opfuse.advise(model))",
        ("up", "fp8_current", "a router", "the output head"),
    ),
    Question(
        FILES,
        "What is wrong with my file?",
        'Path("mine.yaml").write_text("version: 1\\nrecipe: {kind: mxfp9}\\npipeline:\\n  ops: [{op: linear, in_features: 64, out_featurs: 64}]\\n")\n',
        "opfuse check mine.yaml",
        ("did you mean 'mxfp8'?", "did you mean 'out_features'?"),
    ),
    Question(
        FILES,
        "What does my file set, with defaults and environment variables?",
        'import os\nos.environ["OPFUSE_BACKWARD_OVERRIDE"] = "high_precision"\n'
        + CONFIG.replace(", backward_override: dequantized", "") % "  rules: []",
        "opfuse check mine.yaml --values",
        ("recipe.backward_override", "environment OPFUSE_BACKWARD_OVERRIDE", "mine.yaml:8:7", "default"),
    ),
    Question(
        FILES,
        "Can weights stored quantized be used under another recipe?",
        "with opfuse.quantized_model_init(recipe=recipes.MXFP8BlockScaling()):\n    model = ops.Sequential(ops.Linear(32, 32, dtype=torch.bfloat16))\n",
        "with opfuse.autocast(recipe=recipes.NVFP4BlockScaling()):\n    print(opfuse.explain(model, batch()))\n",
        ("on_recipe_change",),
    ),
    Question(
        FILES,
        "Which modules of my model were not fused, and why?",
        "from torch import nn\nmodel = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LSTM(64, 32))\n",
        "for entry in opfuse.fuse_(model, recipes.MXFP8BlockScaling()):\n    if not entry.became:\n        print(entry.kind, entry.why)\n",
        ("LSTM",),
    ),
)
"""In the order of the page."""
