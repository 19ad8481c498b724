"""The commands of the bench, and what they make of the figures."""

import argparse
import json
import math
import platform
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_stand_ins import (
    made_up_document,
    made_up_drift,
    made_up_speculation,
    made_up_transformers,
    made_up_verification,
)

from replayssm.bench import kernel, kernel_report, readme, report, verify, verify_report
from replayssm.bench.cases import CASES, PUBLISHED, Case
from replayssm.bench.command import add_parser, run
from replayssm.bench.progress import Progress
from replayssm.plan import conventional_step, replay_step


def test_a_table_has_a_row_for_each_run_and_names_each_loss() -> None:
    document = made_up_document()
    rows = kernel_report.table(document).splitlines()[2:]
    assert len(rows) == len(document["runs"])
    assert len({len(row) for row in rows}) == 1
    said = kernel_report.losses(document)
    assert all(f"{name} at batch 1 (0.80x)" in said for name in report.NAMES.values())
    assert "batch 32" not in said
    for each in document["runs"]:
        each["speedup"] = 1.0
    assert "No case" in kernel_report.losses(document)
    assert all(
        f"<{name}>" in kernel_report.conditions(document) for name in ("gpu", "driver", "torch", "triton", "commit")
    )


def test_the_plot_shows_every_point_inside_its_panel() -> None:
    document = made_up_document()
    document["runs"][0]["percent_of_ceiling"] = 20.0  # a floor of 4, at batch 1
    drawing = ElementTree.fromstring(kernel_report.plots(document)[kernel_report.PLOT])
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


def test_a_report_rewrites_its_blocks_and_its_plots_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = argparse.Namespace(json=[])
    with pytest.raises(ValueError, match="Run: replayssm bench kernel"):
        readme.run(options)
    for name, date in [("a", "2026-02-01"), ("b", "2026-01-01")]:
        (tmp_path / f"kernel_{name}.json").write_text(json.dumps(made_up_document() | {"date": date, "gpu": name}))
    with pytest.raises(ValueError, match="source checkout"):
        readme.run(options)
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        readme.run(options)
    blocks = {bench: "\n".join([report.marks(bench)[0], "old", report.marks(bench)[1]]) for bench in readme.REPORTS}
    page.write_text("before\n" + "\nbetween\n".join(blocks.values()) + "\nafter\n")
    for _ in range(2):  # again: the same
        assert readme.run(options) == 0
        text = page.read_text(encoding="utf-8")
        assert text.startswith(f"before\n{report.marks('kernel')[0]}\n\n![Speed-up")
        others = "\nbetween\n".join(block for bench, block in blocks.items() if bench != "kernel")
        assert text.endswith(f"\nbetween\n{others}\nafter\n")
        assert "one a (driver" in text  # the newest by its date, not by its name
        ElementTree.parse(tmp_path / kernel_report.PLOT)
        assert not (tmp_path / verify_report.PLOT).exists()
    (tmp_path / "verify_a.json").write_text(json.dumps(made_up_verification()))
    assert readme.run(options) == 0
    (tmp_path / "speculative_a.json").write_text(json.dumps(made_up_speculation()))
    (tmp_path / "drift_a.json").write_text(json.dumps(made_up_drift()))
    (tmp_path / "hf_a.json").write_text(json.dumps(made_up_transformers()))
    text = page.read_text(encoding="utf-8")
    assert text.count("old") == 3
    assert readme.run(options) == 0
    text = page.read_text(encoding="utf-8")
    assert text.count("old") == 0
    assert "| prompt lookup " in text
    assert "| transformers, fla " in text
    assert "![Cost of a step" in text
    assert "![Divergence over position" in text
    ElementTree.parse(tmp_path / verify_report.PLOT)
    other = tmp_path / "other.json"
    other.write_text(json.dumps(made_up_document() | {"command": "replayssm bench prefill"}))
    with pytest.raises(ValueError, match=r"must be of replayssm bench kernel or .* got 'replayssm bench prefill'"):
        readme.run(argparse.Namespace(json=[other]))
    other.write_text(json.dumps({key: value for key, value in made_up_document().items() if key != "gpu"}))
    with pytest.raises(ValueError, match=r"must hold all that replayssm bench kernel writes; got one without 'gpu'"):
        readme.run(argparse.Namespace(json=[other]))
    assert page.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("bench", readme.REPORTS)
def test_the_readme_shows_the_newest_measurement(bench: str) -> None:
    path = report.newest(bench)
    text = (readme.ROOT / "README.md").read_text(encoding="utf-8")
    if path is None:
        assert "\n".join(report.marks(bench)) in text, "nothing has been measured, and nothing is shown"
        return
    document, pages = report.load(path), readme.REPORTS[bench]
    assert report.with_block(text, bench, pages.block(document)) == text, "run: replayssm bench report"
    for name, drawing in pages.plots(document).items():
        assert (readme.ROOT / name).read_text(encoding="utf-8") == drawing


def test_a_verification_has_a_row_for_each_run_and_names_each_loss() -> None:
    document = made_up_verification()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in verify_report.table(document).splitlines()
    ]
    assert len(rows) == 2 + len(document["runs"])
    assert {len(row) for row in rows} == {len(rows[0])}
    shown = {(row[0], row[1], row[2]): row for row in rows[2:]}
    mamba2 = shown["Mamba-2", "256", "4"]
    assert (mamba2[3], mamba2[6], mamba2[8], mamba2[10], mamba2[11]) == ("8", "1.50", "1.35", "3.00", "0.65, 2.70")
    assert shown["Mamba-2", "1", "8"][-1] == shown["KDA", "256", "4"][-1] == ""
    said = verify_report.losses(document)
    assert all(f"{name} with 8 tokens at batch 1 (25.00 steps, native 6.00)" in said for name in report.NAMES.values())
    assert "16 tokens" not in said
    for each in document["runs"]:
        each["native_steps"] = 30.0
    assert "No case" in verify_report.losses(document)
    told = verify_report.conditions(document)
    assert all(f"<{name}>" in told for name in ("gpu", "driver", "torch", "triton", "commit"))


def test_the_plot_of_a_verification_shows_every_cost_and_what_is_published() -> None:
    document = made_up_verification()
    drawing = ElementTree.fromstring(verify_report.plots(document)[verify_report.PLOT])
    svg = "{http://www.w3.org/2000/svg}"
    panels = list(drawing.iter(f"{svg}g"))
    assert len(panels) == 3
    for panel, published in zip(panels, (2, 2, 0), strict=True):
        assert len(list(panel.iter(f"{svg}polygon"))) == published
        assert len(list(panel.iter(f"{svg}polyline"))) == 3
        dots = [dot for dot in panel.iter(f"{svg}circle") if dot.get("fill") != "white"]
        heights = [float(dot.get("cy", "nan")) for dot in dots]
        assert len(heights) == 3  # batch 1 is not in it
        assert heights == sorted(heights, reverse=True)  # 0.75, 1.5, 4.5: up costs more
        assert heights[0] - heights[1] == pytest.approx((heights[0] - heights[2]) / math.log2(6), abs=0.11)
        squares = [float(square.get("y", "nan")) + 4 for square in panel.iter(f"{svg}rect")]
        assert squares[0] == pytest.approx(heights[0], abs=0.11)  # both 0.75
        assert squares[2] < heights[2]
        lines = {text.text: float(text.get("y", "nan")) - 4 for text in panel.iter(f"{svg}text")}
        assert lines["16.0"] < squares[2] < lines["8.0"] < heights[2] < lines["4.0"]
    for each in document["runs"]:
        each["batch"] = 32  # nothing is published there
    assert not list(ElementTree.fromstring(verify_report.plots(document)[verify_report.PLOT])[3].iter(f"{svg}polygon"))


OTHER = [b"", b"\xff\xfe", b"{", b"[1]", b'{"runs": []}', b'{"command": 1, "date": "", "runs": []}']


@pytest.mark.parametrize("content", OTHER)
def test_a_report_of_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} must .*; got .*\. Give a file"):
        bench("report", str(path))


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
    expected = zip(CASES[:2], ("16", "12"), ("1.81", "1.77"), strict=True)
    assert [[*row[:4], row[-1]] for row in rows[2:]] == [
        [case.layer, case.geometry, window, batch, ratio] for case, window, ratio in expected for batch in ("1", "256")
    ]
    assert "Nothing was timed" in shown


@pytest.mark.parametrize("failing", [None, "gdn"])
def test_a_run_writes_what_passed_and_says_what_did_not(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceiling = pytest.importorskip("replayssm.bench.ceiling")
    document = made_up_document()

    def measured(case: Case, batch: int, **named: Any) -> dict[str, Any] | None:
        window = {"mamba2": 16, "gdn": 12, "kda": 8}[case.layer]
        assert (named["window"], named["dtype"], named["ceiling"]) == (window, torch.bfloat16, 4.5)
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
    assert written["command"].endswith("--batch 1 32 --window auto --dtype bfloat16")
    expected = [each for each in document["runs"] if each["batch"] < 256 and each["layer"] != failing]
    assert written["runs"] == expected
    shown = capsys.readouterr()
    assert kernel_report.table(written) in shown.out
    assert ("2 of 6 cases gave wrong results" in shown.err) == (failing is not None)
    kernel_report.block(written), kernel_report.plots(written)  # a JSON without a case can still be shown


@pytest.mark.parametrize("failing", [None, "gdn"])
def test_a_run_of_verification_writes_what_passed_and_says_what_did_not(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ceiling = pytest.importorskip("replayssm.bench.ceiling")
    document = made_up_verification()

    def measured(case: Case, batch: int, windows: dict[int, int], **named: Any) -> list[dict[str, Any]]:
        assert (windows, named["ceiling"]) == ({1: 16, 4: 32, 16: 64}, 4.5)
        if case.layer == failing:
            return []
        return [each for each in document["runs"] if (each["layer"], each["batch"]) == (case.layer, batch)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(ceiling, "read_ceiling", lambda device: 4.5)
    monkeypatch.setattr(verify, "measure_batch", measured)
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert bench("verify", "--tokens", "1", "4", "16", "--commit", "abc") == (failing is not None)
    written = report.load(tmp_path / "verify_nvidia-h200.json")
    assert set(written) == set(document)
    assert written["command"].endswith("--batch 256 --tokens 1 4 16 --window 16 32 64 --dtype bfloat16")
    assert written["runs"] == [each for each in document["runs"] if each["batch"] == 256 and each["layer"] != failing]
    shown = capsys.readouterr()
    assert verify_report.table(written) in shown.out
    assert ("3 of 9 cases gave wrong results" in shown.err) == (failing is not None)
    verify_report.block(written), verify_report.plots(written)  # a JSON without a case can still be shown


def test_without_a_gpu_verification_counts_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench("verify", "--layer", "mamba2", "--tokens", "1", "4", "--window", "16", "32") == 0
    shown = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if line.startswith("| ")]
    assert [row[:4] for row in rows[2:]] == [["mamba2", "256", "1", "16"], ["mamba2", "256", "4", "32"]]
    (*_, replay, half, native), four = rows[2:]
    sizes = CASES[0].layer_bytes(torch.bfloat16)
    ratio = replay_step(sizes, 16).moved / conventional_step(sizes).moved
    assert (replay, half, native) == (f"{ratio:.2f}", f"{ratio:.2f}", "1.00")
    assert float(four[5]) < 1 < float(four[7])
    assert float(four[7]) == pytest.approx(2.5, abs=0.03)  # five states beside two
    assert "Nothing was timed" in shown


def test_windows_follow_the_tokens_or_what_is_asked_for() -> None:
    assert verify.chosen_windows(verify.TOKENS, ["auto"]) == {1: 16, 2: 16, 4: 32, 8: 32, 16: 64}
    assert verify.chosen_windows([3, 20], ["auto"]) == {3: 32, 20: 80}
    assert verify.chosen_windows([1, 2], ["32"]) == {1: 32, 2: 32}
    assert verify.chosen_windows([1, 8], ["16", "auto"]) == {1: 16, 8: 32}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokens", "4", "0"), "--tokens must be at least 1; got 0"),
        (("--window", "16", "32"), "--window must be 1 value, or 5, one for each of --tokens; got 2"),
        (("--tokens", "8", "--window", "7"), "--window must be 8 to 256 for 8 tokens; got 7"),
        (("--tokens", "1", "--window", "1"), "--window must be 2 to 256 for 1 tokens; got 1"),
        (("--window", "long"), "--window must be \"auto\" or numbers of tokens; got 'long'"),
        (("--batch", "0"), "--batch must be at least 1; got 0"),
        (("--layer", "gdn", "--geometry", "kimi-linear"), "must name one case at least"),
    ],
)
def test_impossible_options_of_verification_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        bench("verify", *arguments)


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
