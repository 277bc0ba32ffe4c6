"""A rehearsal costs little whatever a file asks for: sizes that no machine has are findings, at their place."""

import pytest

from opfuse.config import loads, trial
from opfuse.config.operations import MAX_OPS
from opfuse.errors import ConfigError

HUGE = 2**31


def load(*ops, recipe="none", rest="train: {batch_size: 128}"):
    lines = "".join(f"    - {op}\n" for op in ops)
    return loads(f"version: 1\nrecipe: {{kind: {recipe}}}\npipeline:\n  ops:\n{lines}{rest}\n", "f.yaml")


def grouped(groups, splits="s"):
    return f"{{op: grouped_linear, num_groups: {groups}, in_features: 64, out_features: 64, bias: false, extra_input: {splits}}}"


def dispatch(groups, top_k=2):
    return f"{{op: token_dispatch, num_groups: {groups}, features: 64, top_k: {top_k}, extra_output: [s, p, w]}}"


def experts(groups, most):
    return dispatch(groups), grouped(most), "{op: scaled_srelu, extra_input: p}", "{op: token_combine, extra_input: w}"


LINEAR = "{{op: linear, in_features: {}, out_features: {}}}".format
DATA = f"data: {{kind: pydoc_topics, context: {HUGE}, embedding: {HUGE}}}"
TOO_LARGE = {
    "groups": ((grouped(HUGE),), {}, "5:40", str(HUGE)),
    "parameters": ((LINEAR(2**20, 2**17),), {}, "5:7", str(2**37 + 2**17)),
    "input": ((LINEAR(2**20, 8),), {"rest": f"train: {{batch_size: {2**20}}}"}, "5:7", str(2**40)),
    "data": ((LINEAR(64, 256),), {"rest": DATA}, "6:7", str(2**62 * 128)),
    "output": (("{op: gelu}", LINEAR(64, 2**24)), {"rest": f"train: {{batch_size: {2**13}}}"}, "6:7", str(2**37)),
}


@pytest.mark.parametrize("what", TOO_LARGE)
def test_what_no_machine_holds_is_a_finding_at_its_place(what):
    ops, options, place, number = TOO_LARGE[what]
    with pytest.raises(ConfigError) as raised:
        load(*ops, **options)
    (finding,) = raised.value.findings
    assert str(finding).startswith(f"f.yaml:{place}: error[too-large]: a"), finding
    assert finding.message.endswith(f"got {number}")


def test_more_ops_than_a_file_has_are_a_finding():
    with pytest.raises(ConfigError, match=rf"f.yaml:5:5: error\[bad-value\]: ops .*at most {MAX_OPS} "):
        load(*["{op: gelu}"] * (MAX_OPS + 1))


def test_a_product_of_many_blocks_is_rehearsed_without_its_sums(monkeypatch):
    """131072 blocks are as quick as one: nothing is summed where there is no data."""
    sums = []
    monkeypatch.setattr("opfuse.kernels.products.emulated._matrix_product", lambda a, b: sums.append(a) or a @ b)
    trial._rehearse.cache_clear()
    load(LINEAR(2**24, 128), recipe="fp8_block")
    assert sums == []


@pytest.mark.parametrize(("groups", "made"), [(512, 2), (3, 2), (1, 1)])
def test_few_groups_stand_for_all(groups, made, monkeypatch):
    built = []
    build = trial.PipelineEntry.build

    def watched(entry, **options):
        built.append(entry.groups)
        return build(entry, **options)

    trial._rehearse.cache_clear()
    monkeypatch.setattr(trial.PipelineEntry, "build", watched)
    config = load(LINEAR(64, 64), dispatch(groups, min(groups, 2)), *experts(groups, groups)[1:], recipe="mxfp8")
    assert config.pipeline[2].groups == groups
    assert built.count(made) >= 2
    assert set(built) == {None, groups, made}


def test_numbers_of_groups_that_differ_are_found_whatever_stands_for_them():
    told = r"f.yaml:6:40: error\[does-not-fit\]: op 0, .* has 512 groups, this one 256\n"
    with pytest.raises(ConfigError, match=told) as raised:
        load(*experts(512, 256))
    assert raised.value.findings[0].help == "write num_groups: 512"


def test_findings_speak_of_the_groups_in_the_file():
    wide = grouped(512).replace("in_features: 64", "in_features: 32")
    with pytest.raises(ConfigError, match="does-not-fit") as raised:
        load(LINEAR(64, 64), dispatch(512), wide, *experts(512, 512)[2:])
    assert "num_groups=512" in raised.value.findings[0].message
