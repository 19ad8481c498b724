"""The bench of prefill, as far as it goes without a GPU: what it says, its gate, and the layout that it imitates."""

import pytest
import torch
from budgets import assert_same_bits
from draws import draw
from geometries import G

from replayssm import cli
from replayssm.bench import prefill


def test_the_bench_of_prefill_says_that_nothing_was_timed(capsys, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["bench", "prefill", "--out", str(tmp_path / "times.json")]) == 0
    assert "Nothing was timed" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["state", "output", "nan"])
def test_the_gate_of_the_bench_sees_a_fault_anywhere(fault):
    exact = draw(1, 2, 9, 3, 4), draw(2, 2, 3, 4, 5)
    assert prefill.relative_error(exact, exact) == 0
    y, final = (x.clone() for x in exact)
    if fault == "state":
        final[0, 1] *= -1
    else:
        y[1, 8, 2, 3] = torch.nan if fault == "nan" else 20.0
    assert not prefill.relative_error((y, final), exact) <= prefill.BUDGET


def test_the_bench_knows_how_a_convolution_leaves_its_outputs():
    """In one sequence time is innermost; when this fails, the layers have been repaired and the arm can go."""
    layer = G.build()
    v = layer.project(G.input(1, 9), None, None)[1].v
    x = prefill.time_innermost(v.contiguous())
    assert_same_bits(x, v)
    assert x.stride()[1:] == v.stride()[1:] == (1, 5 * 9, 9)


def test_the_table_of_the_bench_has_a_row_for_each_case():
    times = dict(direct_ms=1.0, scan_ms=1.125, scan_transposed_ms=1.5, torch_ms=50.0)
    run = dict(layer="gdn", tokens=8192, ratio=1.125, **times)
    cells = [cell.strip() for cell in prefill.table([run]).splitlines()[-1].strip("|").split("|")]
    assert cells == ["gdn", "8192", "1.000", "1.125", "1.500", "50.000", "1.12"]
