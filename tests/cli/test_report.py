"""The report is one file that a strict parser reads, with everything in it, and nothing that it would fetch."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import opfuse
from opfuse import ops, recipes
from opfuse.cli.app import main
from opfuse.config import load
from opfuse.inspect.page import Page, PageTable
from opfuse.train import compare, write_report
from opfuse.train.report import write_values


def parsed(path: Path) -> tuple[str, ElementTree.Element]:
    """The text of a page, and the page as XML: every tag is closed, every character escaped."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#)""", text.replace("url(#arrow)", "")), "nothing is fetched"
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    return text, ElementTree.fromstring(text.partition("\n")[2].replace(script[1], ""))


@pytest.mark.parametrize("name", ["quickstart", "moe"])
def test_a_configuration(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["report", name, "--out", str(path)]) == 0
    text, page = parsed(path)
    drawings = page.findall(".//{http://www.w3.org/2000/svg}svg")
    assert len(drawings) % 3 == 0
    assert drawings
    titles = [each.text for each in page.iter("h2")]
    assert titles[-5:] == [
        "Rules, place by place",
        "Products",
        "Bytes saved, by backward override",
        "Saved for the backward pass",
        "Environment",
    ]
    statuses = {cell.text for cell in page.iter("td") if cell.get("class")}
    assert {"fused", "absent", "emulated"} <= statuses
    inside = [
        (rect, box)
        for svg in drawings
        for box in [svg.get("viewBox", "").split()]
        for rect in svg.iter("{http://www.w3.org/2000/svg}rect")
    ]
    for rect, (_, _, width, height) in inside:
        x, y, w, h = (float(rect.get(key, "nan")) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= float(width) + 1
        assert 0 <= y <= y + h <= float(height) + 1
    assert "epilogue" in text


def test_a_trace_has_plans_over_time(tmp_path: Path) -> None:
    model, x = ops.Sequential(ops.Linear(32, 32), ops.GELU()), torch.randn(32, 32)
    for rounding in ("per_op", "single"):
        with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(rounding=rounding)):
            model(x)
    path = opfuse.dump(tmp_path / "trace.jsonl")
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    text, page = parsed(tmp_path / "page.html")
    assert "env.recipe.rounding: &#x27;per_op&#x27; -&gt; &#x27;single&#x27;" in text
    assert "Plans over time" in [each.text for each in page.iter("h2")]


def test_a_run_has_its_losses_and_values(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(
        "version: 1\nrecipe: {kind: mxfp8}\npipeline: {ops: [{op: linear, in_features: 64, out_features: 256}]}\n"
        "data: {kind: pydoc_topics, context: 4, embedding: 16}\ntrain: {steps: 2, batch_size: 32}\nwatch: {every: 1}\n"
    )
    result = compare(load(run / "config.yaml"))
    write_report(result, run)
    write_values(result, run)
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 0
    text, _ = parsed(tmp_path / "page.html")
    assert text.count("<td>grad_output</td>") == 2
    assert "loss_first" in text


def test_what_a_page_tells_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script>"
    pipeline = {"name": evil, "nodes": [evil], "forward_groups": [{"fusion": evil, "nodes": [0]}], "backward_groups": []}
    made = Page(evil, {evil: evil}, [pipeline], [PageTable(evil, [evil], [[evil]])])
    (tmp_path / "page.html").write_text(made.html())
    _, page = parsed(tmp_path / "page.html")
    assert [each.text for each in page.iter("h1")] == [evil]


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    assert main(["report", "quickstart", "--out", str(tmp_path)]) == 1
    assert main(["report", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ((), "got a directory without report.json and *.jsonl. Cure: name what opfuse run or OPFUSE_TRACE wrote to"),
        (("mine.yaml",), "Cure: name a file in it: opfuse report mine.yaml"),
        (("config.yaml", "values.jsonl"), "got a run without report.json, which has not ended"),
    ],
)
def test_a_directory_that_is_no_subject_is_told_what_would_be(
    files: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert main(["report", "."]) == 1
    assert told in capsys.readouterr().err


def test_the_page_of_the_directory_one_is_in_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    monkeypatch.chdir(folder)
    opfuse.dump("one.jsonl")
    assert main(["report", "."]) == 0
    assert "wrote traces.html" in capsys.readouterr().out


BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")


def opened(page: Path) -> tuple[str, list[str]]:
    """What a browser makes of a page: its DOM, and what it wrote to the console."""
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1200,1150", "--dump-dom")
    done = subprocess.run([BROWSER, *flags, page.absolute().as_uri()], capture_output=True, text=True, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason=f"wants one of {', '.join(BROWSERS)} on PATH")
@pytest.mark.parametrize("name", ["quickstart", "moe"])
def test_a_browser_shows_it_and_its_console_says_nothing(name: str, tmp_path: Path) -> None:
    """Its filter leaves the rows that have the words; a page with an error in it is told."""
    path, tried, broken = (tmp_path / f"{part}.html" for part in ("page", "tried", "broken"))
    assert main(["report", name, "--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    tried.write_text(text.replace("</body>", f"<script>{TYPED}</script></body>"), encoding="utf-8")
    dom, said = opened(tried)
    assert said == []
    left = re.search(r"<title>left (\d+) of (\d+)</title>", dom)
    assert left is not None
    assert 0 < int(left[1]) == text.count(">fused</td>") < int(left[2])
    broken.write_text(text.replace("</body>", "<script>missing()</script></body>"), encoding="utf-8")
    _, said = opened(broken)
    assert "missing is not defined" in said[0]


TYPED = """
const box = document.querySelector("input"), rows = [...document.querySelectorAll("#" + box.dataset.of + " tbody tr")];
box.value = "fused";
box.dispatchEvent(new Event("input"));
document.title = "left " + rows.filter(row => row.offsetParent !== null).length + " of " + rows.length;
"""
