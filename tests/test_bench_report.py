"""The commands of the bench, and what they make of the figures."""

import argparse
import json
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_stand_ins import made_up_document

from replayssm.bench import kernel, report
from replayssm.bench.cases import CASES, PUBLISHED, Case
from replayssm.bench.command import add_parser, run
from replayssm.bench.progress import Progress


def test_a_table_has_a_row_for_each_run_and_names_each_loss() -> None:
    document = made_up_document()
    rows = report.table(document).splitlines()[2:]
    assert len(rows) == len(document["runs"])
    assert len({len(row) for row in rows}) == 1
    said = report.losses(document)
    assert all(f"{name} at batch 1 (0.80x)" in said for name in report.NAMES.values())
    assert "batch 32" not in said
    for each in document["runs"]:
        each["speedup"] = 1.0
    assert "No case" in report.losses(document)
    assert all(f"<{name}>" in report.conditions(document) for name in ("gpu", "driver", "torch", "triton", "commit"))


def test_the_plot_shows_every_point_inside_its_panel() -> None:
    document = made_up_document()
    document["runs"][0]["percent_of_ceiling"] = 20.0  # a floor of 4, at batch 1
    drawing = ElementTree.fromstring(report.plot(document))
    svg = "{http://www.w3.org/2000/svg}"
    dots = list(drawing.iter(f"{svg}circle"))
    diamonds = list(drawing.iter(f"{svg}polygon"))
    published = sum(each.speedup is not None for by_batch in PUBLISHED.values() for each in by_batch.values())
    assert len(dots) == len(document["runs"]) + 1  # and one in the legend
    assert len(diamonds) == published + 1
    for panel in drawing.iter(f"{svg}g"):
        heights = [float(dot.get("cy", "nan")) for dot in panel.iter(f"{svg}circle")]
        places = [float(dot.get("cx", "nan")) for dot in panel.iter(f"{svg}circle")]
        assert heights[0] > heights[1] == heights[2] > 0  # 0.8, then 1.5 twice: up is faster
        assert places == sorted(places)
        ends = [float(line.get("y1", "nan")) for line in panel.iter(f"{svg}line")]
        grid = [float(text.get("y", "nan")) - 4 for text in panel.iter(f"{svg}text") if text.get("x") == "-6.0"]
        assert min(grid) <= min(ends)
        assert max(ends) <= max(grid)
        assert places[-1] < max(float(line.get("x2", "nan")) for line in panel.iter(f"{svg}line"))


def test_a_report_rewrites_its_block_and_its_plot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = argparse.Namespace(json=None)
    with pytest.raises(ValueError, match="Run: replayssm bench kernel"):
        report.run(options)
    for name, date in [("a", "2026-02-01"), ("b", "2026-01-01")]:
        (tmp_path / f"kernel_{name}.json").write_text(json.dumps(made_up_document() | {"date": date, "gpu": name}))
    with pytest.raises(ValueError, match="source checkout"):
        report.run(options)
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        report.run(options)
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):  # again: the same
        assert report.run(options) == 0
        text = readme.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{report.BEGIN}\n")
        assert text.endswith(f"\n{report.END}\nafter\n")
        assert "old" not in text
        assert "one a (driver" in text  # the newest by its date, not by its name
        ElementTree.parse(tmp_path / report.PLOT)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[1]", b'{"runs": []}'])
def test_a_report_of_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} must .*; got .*\. Give a file"):
        bench("report", str(path))


def test_the_readme_shows_the_newest_measurement() -> None:
    if not list(report.RESULTS.glob("kernel_*.json")):
        pytest.skip("nothing has been measured yet")
    document = report.load(report.newest())
    readme = (report.ROOT / "README.md").read_text(encoding="utf-8")
    assert report.with_block(readme, report.block(document)) == readme, "run: replayssm bench report"
    assert (report.ROOT / report.PLOT).read_text(encoding="utf-8") == report.plot(document)


# the commands


def bench(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command"))
    return run(parser.parse_args(["bench", *arguments]))


def test_without_a_gpu_the_model_is_printed_and_nothing_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("kernel", "--layer", "mamba2", "gdn", "--batch", "1", "256") == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("| ")]
    assert [row[:3] for row in rows[2:]] == [
        [case.layer, case.geometry, batch] for case in CASES[:2] for batch in ("1", "256")
    ]
    assert [row[-1] for row in rows[2:]] == ["1.81", "1.81", "1.79", "1.79"]
    assert "Nothing was timed" in shown


@pytest.mark.parametrize("failing", [None, "gdn"])
def test_a_run_writes_what_passed_and_says_what_did_not(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceiling = pytest.importorskip("replayssm.bench.ceiling")
    document = made_up_document()

    def measured(case: Case, batch: int, **named: Any) -> dict[str, Any] | None:
        assert (named["window"], named["dtype"], named["ceiling"]) == (16, torch.bfloat16, 4.5)
        entry = next(each for each in document["runs"] if (each["layer"], each["batch"]) == (case.layer, batch))
        return None if case.layer == failing else entry

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(ceiling, "read_ceiling", lambda device: 4.5)
    monkeypatch.setattr(kernel, "measure_case", measured)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert bench("kernel", "--batch", "1", "32", "--commit", "abc") == (failing is not None)
    written = report.load(tmp_path / "kernel_nvidia-h200.json")
    assert set(written) == set(document)
    assert (written["gpu"], written["commit"], written["python"]) == ("NVIDIA H200", "abc", platform.python_version())
    assert written["command"].endswith("--batch 1 32 --window 16 --dtype bfloat16")
    expected = [each for each in document["runs"] if each["batch"] < 256 and each["layer"] != failing]
    assert written["runs"] == expected
    shown = capsys.readouterr()
    assert report.table(written) in shown.out
    assert ("2 of 6 cases gave wrong results" in shown.err) == (failing is not None)
    report.block(written), report.plot(written)  # a JSON without a case can still be shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--window", "1"), "--window must be 2 to 64 tokens; got 1"),
        (("--window", "65"), "--window must be 2 to 64 tokens; got 65"),
        (("--batch", "4", "0"), "--batch must be at least 1; got 0"),
        (("--layer", "gdn", "--geometry", "kimi-linear"), "must name one case at least"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bench("kernel", *arguments)


def test_the_commands_need_no_triton() -> None:
    script = "import sys; sys.modules['triton'] = None; import replayssm.bench.command"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_draws_a_bar_in_a_terminal_and_says_each_part_elsewhere(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    progress = Progress(2, 2)
    progress.stage("first")
    progress.part("one done")  # a part that ended early
    progress.stage("second")
    progress.stage("third")
    progress.part("two done")
    shown = capsys.readouterr().err
    if terminal:
        assert [f"{percent:3} %" in shown for percent in (0, 50, 75)] == [True] * 3
    else:
        assert shown == "one done\ntwo done\n"
