"""The report is one file that a strict parser reads, with everything in it, and nothing that it would fetch."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import opfuse
from opfuse import ops, recipes
from opfuse.cli.app import main
from opfuse.cli.explain import explained as explain_config
from opfuse.config import load
from opfuse.inspect.charts import POINTS, ChartScale, PageChart, thinned
from opfuse.inspect.page import POLICY, Page, PageSection, PageTable, PageText, rounded, rounded_bytes
from opfuse.inspect.page_graphs import pipeline_folds, repeats
from opfuse.inspect.trace import read
from opfuse.runtime.plans import trace as writing
from opfuse.runtime.plans.written import sealed, unsealed
from opfuse.train import compare, write_report
from opfuse.train.report import write_values

SVG = "{http://www.w3.org/2000/svg}"


def parsed(path: Path) -> tuple[str, ElementTree.Element]:
    """The text of a page, and the page as XML: every tag is closed, every character escaped, every link leads to a part of it."""
    text = path.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    page = ElementTree.fromstring(text.partition("\n")[2].replace(script[1], ""))
    assert not re.findall(r"(?:src\s*=|url\s*\(|@import|fetch\s*\()", text), "nothing is fetched"
    assert {*re.findall(r"https?://[^\s\"']+", text)} <= {"http://www.w3.org/2000/svg"}
    assert page.find(".//meta[@http-equiv='Content-Security-Policy']").get("content") == POLICY  # type: ignore[union-attr]
    ids = [each.get("id") for each in page.iter() if each.get("id")]
    assert len(ids) == len({*ids})
    named = [each.get(key) for each in page.iter() for key in ("aria-labelledby", "data-of") if each.get(key)]
    assert {*named, *(each.get("href", "").removeprefix("#") for each in page.iter("a"))} <= {*ids}
    assert [each.text for each in page.findall(".//nav//li/a")] == [each.text for each in page.iter("h2")]
    drawn = [each for each in page.iter(f"{SVG}svg") if each.get("aria-hidden") != "true"]
    assert [each for each in drawn if each.get("role") != "img" or not each.get("aria-label")] == []
    assert [each for each in page.iter("th") if each.get("scope") != "col"] == []
    assert [each for each in page.iter("details") if each[0].tag != "summary"] == []
    assert [each for each in page.iter("input") if not each.get("aria-label")] == []
    return text, page


def texts(element: ElementTree.Element) -> list[str]:
    return ["".join(cell.itertext()) for cell in element]


def rows_of(page: ElementTree.Element, title: str) -> list[list[str]]:
    """The rows of the table under a heading."""
    (heading,) = (each for each in page.iter() if each.tag in ("h2", "h3") and each.text == title)
    name = heading.get("id", "").removesuffix("-title")
    (table,) = (each for each in page.iter("table") if each.get("id") in (name, f"{name}-0"))
    return [texts(row) for row in table.iter("tr")]


def chart_of(page: ElementTree.Element, title: str) -> ElementTree.Element:
    (figure,) = (each for each in page.iter("figure") if "".join(each.find("figcaption/b").itertext()) == title)  # type: ignore[union-attr]
    return figure


@pytest.mark.parametrize("name", ["quickstart", "moe"])
def test_a_configuration(name: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    assert main(["report", name, "--out", str(path)]) == 0
    text, page = parsed(path)
    assert [each.text for each in page.iter("h2")] == ["Fusions", "Pipelines", "Products", "Memory", "Environment"]
    statuses = {cell.text for cell in page.iter("span") if cell.get("class", "").startswith("tag ")}
    assert {"fused", "absent", "emulated"} <= statuses
    flows = [each for each in page.iter("ol") if each.get("class") == "flow"]
    assert len(flows) % 3 == 0
    explained = explain_config(load(name)).to_dict()
    fused = [each for side in ("forward", "backward") for each in explained[side] if each["status"] == "fused"]
    assert [row[:3] for row in rows_of(page, "Rules, place by place")[1:] if row[2] == "fused"] == [
        [each["direction"], each["rule"], "fused"] for each in fused
    ]
    assert "epilogue" in text


@pytest.mark.usefixtures("own_pipelines")
def test_a_trace_has_plans_over_time(tmp_path: Path) -> None:
    model, x = ops.Sequential(ops.Linear(32, 32), ops.GELU()), torch.randn(32, 32)
    for rounding in ("per_op", "single"):
        with opfuse.autocast(recipe=recipes.MXFP8BlockScaling(rounding=rounding)):
            model(x)
    path = opfuse.dump(tmp_path / "trace.jsonl")
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 0
    text, page = parsed(tmp_path / "page.html")
    assert "env.recipe.rounding: &#x27;per_op&#x27; -&gt; &#x27;single&#x27;" in text
    (trace,) = read(path)
    plans = rows_of(page, "Plans, one by one")[1:]
    assert [row[5] for row in plans] == [plan.key for plan in trace.plans]
    assert [row[4] for row in plans] == [f"{plan.ms:.1f}" for plan in trace.plans]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted model's run of 12 steps in two processes, the second of which makes steps 7 and 8 again."""
    place = tmp_path_factory.mktemp("recorded") / "run"
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)]
    model = nn.Sequential(*layers).train()
    opfuse.fuse_(model, recipes.Float8CurrentScaling())
    for done, last in ((0, 8), (6, 12)):
        writing._writer.cache_clear()
        with opfuse.watch(model, every=3, to=place, alarms={}) as watch:
            watch.step = done
            for step in range(done, last):
                loss = model(torch.randn(32, 32)).square().mean()
                loss.backward()
                watch.log(loss=loss, learning_rate=1e-3 * step, grad_norm=math.inf if step == 3 else 1.0)
        file = next(place.glob("rank0-[0-9]*.jsonl"))
        file.rename(place / f"rank0-of-{last:02}.jsonl")
    writing._writer.cache_clear()
    return place


def test_a_converted_models_training_has_its_curves_and_values(recorded: Path, tmp_path: Path) -> None:
    assert main(["report", str(recorded), "--out", str(tmp_path / "page.html")]) == 0
    _, page = parsed(tmp_path / "page.html")
    traces = read(recorded)
    assert [line.step for trace in traces for line in trace.steps] == [*range(1, 9), *range(7, 13)]
    losses = {line.step: line.figures["loss"] for trace in traces for line in trace.steps}
    chart = chart_of(page, "Loss")
    shown = [texts(row) for row in next(chart.iter("tbody"))]
    assert shown == [[str(step), rounded(loss)] for step, loss in losses.items()]
    (line,) = chart.iter(f"{SVG}polyline")
    heights = [float(point.partition(",")[2]) for point in line.get("points", "").split()]
    assert len(heights) == 12
    order = sorted(losses.values())
    assert max(range(12), key=lambda i: heights[i]) == [*losses.values()].index(order[0])  # the lowest is the least
    assert min(range(12), key=lambda i: heights[i]) == [*losses.values()].index(order[-1])
    times = texts(next(chart_of(page, "Time of a step (ms)").iter("tbody"))[0])
    assert times[0] == "2"
    assert [each.text for each in page.iter("h2")] == [
        *("Training", "Values by layer", "Modules", "Fusions", "Pipelines", "Products", "Plans over time", "Environment"),
    ]
    folds = ["".join(each.itertext()) for each in page.iter("summary") if each.get("class") == "row"]
    casts = [line.sqnr for trace in traces for line in trace.casts if line.tensor == "input" and line.sqnr is not None]
    assert folds[0] == f"*.* ×6, fp8_tensor_e4m3{rounded(min(casts))} dB"
    runs_as = " → ".join(["Linear → GELUErf → Linear"] * 3)
    assert rows_of(page, "Modules")[1:] == [["(model)", "Sequential", "Float8CurrentScaling", "fused", runs_as]]


def test_recorded_runs_are_compared_by_their_losses(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = next(recorded.glob("*-08.jsonl"))
    other = tmp_path / "other.jsonl"
    lines = [unsealed(line) for line in first.read_text().splitlines()]
    steps = [line for line in lines if line["record"] == "step"]
    steps[4]["figures"]["loss"] *= 2
    other.write_text("".join(sealed(line) + "\n" for line in lines if line not in steps[:2]))
    assert main(["diff", str(first), str(other)]) == 1
    assert "losses differ from step 5 on" in capsys.readouterr().out
    assert main(["diff", str(first), str(first)]) == 0
    assert "8 losses are equal bit for bit" in capsys.readouterr().out


def test_a_trace_is_written_for_perfetto(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert main(["report", str(recorded), "--format", "perfetto", "--out", str(path)]) == 0
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    traces = read(recorded)
    slices = [event for event in events if event["ph"] == "X"]
    plans = [plan for trace in traces for plan in trace.plans]
    assert [event["dur"] for event in slices if event["cat"] == "plan"] == [plan.ms * 1e3 for plan in plans]
    steps = [line for trace in traces for line in trace.steps]
    assert [event["name"] for event in slices if event["cat"] == "step"] == [f"step {s.step}" for s in steps if s.ms is not None]
    losses = [event["args"]["loss"] for event in events if event["ph"] == "C" and event["name"] == "loss"]
    assert losses == [line.figures["loss"] for line in steps]
    assert all(event["ts"] >= 0 for event in events if "ts" in event)
    assert len([event for event in events if event["name"] == "grad_norm"]) == len(steps) - 1, "infinity is no number of JSON"
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in slices} <= threads
    assert main(["report", "quickstart", "--format", "perfetto", "--out", str(path)]) == 1


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
    text, page = parsed(tmp_path / "page.html")
    shown = [texts(row) for row in next(chart_of(page, "Loss").iter("tbody"))]
    assert [row[1] for row in shown] == [rounded(loss) for loss in result.run.losses]
    assert "grad_output" in text
    assert "training loss, mean of the last steps" in text
    (run / "report.json").write_text('{"curves": []}')
    assert main(["report", str(run), "--out", str(tmp_path / "page.html")]) == 1


def test_what_a_page_tells_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('&')</script>"
    pipeline = {"name": evil, "nodes": [evil], "forward_groups": [{"fusion": evil, "nodes": [0]}], "backward_groups": []}
    parts = [
        PageTable(evil, [evil], [[evil]], by=evil),
        PageText(evil),
        *pipeline_folds([pipeline]),
        PageChart(evil, {evil: [(1, 2.0), (2, 3.0)], evil + "2": [(1, math.nan)]}, evil),
    ]
    made = Page(evil, {evil: evil}, [PageSection(evil, parts, evil)])
    (tmp_path / "page.html").write_text(made.html())
    _, page = parsed(tmp_path / "page.html")
    assert [each.text for each in page.iter("h1")] == [evil]


def test_a_page_says_what_repeats_once() -> None:
    assert [*repeats("abababc")] == [(0, 2, 3), (6, 1, 1)]
    assert [*repeats("xaaay")] == [(0, 1, 1), (1, 1, 3), (4, 1, 1)]
    assert [*repeats("aabc")] == [(0, 4, 1)]
    assert [*repeats("")] == []


def test_figures_are_rounded() -> None:
    assert [rounded(each) for each in (4.844134, 1234567, 12345.6, 1.2e-8, 0.0)] == [
        "4.844",
        "1,234,567",
        "12,346",
        "1.2e-08",
        "0",
    ]
    assert [rounded_bytes(each) for each in (512, 2048, 2015744, 80 * 2**30)] == ["512 bytes", "2.00 KiB", "1.92 MiB", "80.0 GiB"]
    line = [(step, float(step == 5000)) for step in range(10_000)]
    kept = thinned(line)
    assert len(kept) <= POINTS
    assert (5000, 1.0) in kept


def test_a_scale_holds_its_values() -> None:
    flat = ChartScale.of([3.0, 3.0], curved=True)
    assert 0 < flat.share(3.0) < 1
    steep = ChartScale.of([0.001, 1.0, 1.1, 1000.0], curved=True)
    assert steep.log
    assert [*steep.ticks()] == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100, 1000])
    assert not ChartScale.of([0.0, 1.0, 1000.0], curved=True).log
    assert [*ChartScale.of([1, 60]).ticks()] == [20, 40, 60]
    assert [*ChartScale.of([358 * 2.0**20, 372 * 2.0**20]).ticks(1024)] == [each * 2**20 for each in (360, 365, 370)]


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


def opened(page: Path, width: int = 1200) -> tuple[str, list[str]]:
    """What a browser makes of a page: its DOM, and what it wrote to the console."""
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        f"--window-size={width},1150",
        "--dump-dom",
    )
    done = subprocess.run([BROWSER, *flags, page.absolute().as_uri()], capture_output=True, text=True, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason=f"wants one of {', '.join(BROWSERS)} on PATH")
@pytest.mark.parametrize(("name", "width"), [("quickstart", 1000), ("moe", 420)])
def test_a_browser_shows_it_and_its_console_says_nothing(name: str, width: int, tmp_path: Path) -> None:
    """Its filter leaves the rows that have the words; a page with an error in it is told."""
    path, tried, broken = (tmp_path / f"{part}.html" for part in ("page", "tried", "broken"))
    assert main(["report", name, "--out", str(path)]) == 0
    text = path.read_text(encoding="utf-8")
    tried.write_text(text.replace("</body>", f"<script>{TYPED}</script></body>"), encoding="utf-8")
    dom, said = opened(tried, width)
    assert said == []
    left = re.search(r"<title>typed (\d+), pressed (\d+), of (\d+), wide (\d+)</title>", dom)
    assert left is not None
    typed, pressed, rows, wider = map(int, left.groups())
    assert 0 < typed == pressed == text.count('<span class="tag fused">') < rows
    assert wider == 0, "the page is as wide as the window"
    broken.write_text(text.replace("</body>", "<script>missing()</script></body>"), encoding="utf-8")
    _, said = opened(broken)
    assert "missing is not defined" in said[0]


TYPED = """
const bar = document.querySelector(".filters"), rows = [...document.querySelectorAll("#" + bar.dataset.of + " tbody tr")];
const box = bar.querySelector("input");
box.value = "fused";
const shown = () => rows.filter(row => row.offsetParent !== null).length;
box.dispatchEvent(new Event("input"));
const typed = shown();
box.value = "";
bar.querySelector("[data-is=fused]").click();
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.title = `typed ${typed}, pressed ${shown()}, of ${rows.length}, wide ${wide}`;
"""
