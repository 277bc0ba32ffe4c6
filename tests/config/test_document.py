"""YAML text to values with positions."""

import math

import pytest

from opfuse.config.document import MAX_BYTES, MAX_DEPTH, meaning, read


def parsed(text):
    return read(text.encode(), "f.yaml")


def found(text):
    return [(finding.code, finding.span.line, finding.span.column) for finding in parsed(text).findings]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("1e-5", 1e-5), ("3.0e-3", 3e-3), (".5", 0.5), ("1.", 1.0), ("+7", 7), ("-0", 0), ("0o17", 15), ("0xFF", 255)],
        *[("null", None), ("~", None), ("", None), ("true", True), ("FALSE", False), ("-.inf", -math.inf)],
        *[
            ("no", "no"),
            ("on", "on"),
            ("yes", "yes"),
            ("1_000", "1_000"),
            ("2026-01-01", "2026-01-01"),
            ("1:30", "1:30"),
            ("nUll", "nUll"),
        ],
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text, value):
    got = meaning(text)
    assert got == value
    assert type(got) is type(value)


def test_nan_and_absurd_integers_do_no_harm():
    assert math.isnan(meaning(".nan"))
    assert meaning("9" * 700) == math.inf


def test_quoted_text_is_text():
    assert parsed("a: '1'\nb: \"true\"\nc: |\n  5\n").root.plain() == {"a": "1", "b": "true", "c": "5\n"}


def test_every_value_knows_its_place():
    document = parsed("version: 1\npipeline:\n  ops:\n    - {op: gelu, size: 12}\n")
    span = document.find(("pipeline", "ops", 0, "size"))
    assert (span.line, span.column, span.width) == (4, 24, 2)
    key = document.find(("pipeline", "ops", 0, "size"), on="key")
    assert (key.line, key.column, key.width) == (4, 18, 4)
    assert document.source(("pipeline", "ops", 0, "op")) == "f.yaml:4:12"


def test_what_is_absent_is_found_at_what_surrounds_it():
    document = parsed("recipe: {kind: mxfp8}\ndata:\n")
    assert document.find(("recipe", "nothing")).column == 9
    assert document.find(("data",)).column == 1, "an empty value stands where its key stands"


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("a: 1\nb: 2\na: 3\n", ("duplicate-key", 3, 1)),
        ("a: {b: 1, b: 2}\n", ("duplicate-key", 1, 11)),
        ("a: !!python/object/apply:os.system [ls]\n", ("yaml-tag", 1, 4)),
        ("a: !x 5\n", ("yaml-tag", 1, 4)),
        ("a: &x 5\n", ("yaml-alias", 1, 4)),
        ("a: [1\n", ("yaml-syntax", 2, 1)),
        ("a: 1\n b: 2\n", ("yaml-syntax", 2, 3)),
        ("a: 1\n---\nb: 2\n", ("yaml-syntax", 2, 1)),
        ("%YAML 1.1\n---\na: no\n", ("yaml-syntax", 2, 1)),
        ("a: \x07\n", ("yaml-syntax", 1, 4)),
        ("? [a]\n: 1\n", ("yaml-syntax", 1, 3)),
        ("a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH, ("yaml-depth", 1, 3 + MAX_DEPTH)),
        ("a: " + "x" * MAX_BYTES, ("too-large", 1, 1)),
    ],
    ids=lambda case: case[0] if isinstance(case, tuple) else None,
)
def test_r16_what_is_not_read(text, finding):
    assert finding in found(text)


def test_what_is_not_closed_is_told_with_the_place_where_it_began():
    told = parsed("a:\n  - [1, 2\nb: 3\n").findings[0]
    assert (told.code, told.span.line, told.help) == ("yaml-syntax", 3, "it begins at 2:5")


def test_a_tab_is_told_apart_from_spaces():
    told = parsed("a:\n\tb: 1\n").findings[0]
    assert (told.code, told.span.line, told.help) == ("yaml-syntax", 2, "indent with spaces: YAML takes no tabs there")


def test_aliases_are_refused_where_they_are_used():
    assert found("a: &x [1]\nb: *x\n") == [("yaml-alias", 1, 4), ("yaml-alias", 2, 4)]


def test_bytes_that_are_not_utf8_have_a_line_and_a_column():
    (finding,) = read(b"version: 1\nk: \xc3\xa9\xff\n", "f.yaml").findings
    assert (finding.code, finding.span.line, finding.span.column) == ("not-utf-8", 2, 5)


def test_a_byte_order_mark_is_no_content():
    assert read("\ufeffa: 1".encode(), "f.yaml").root.plain() == {"a": 1}
