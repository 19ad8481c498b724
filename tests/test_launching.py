"""What launchers do to the tensors of a call before a kernel gets them."""

import pytest
import torch
from draws import DEVICE

pytest.importorskip("triton")

from replayssm.ops.launching import by_token, token_strides


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("t", [1, 2])
def test_a_part_of_a_projection_is_read_where_it_lies(rows: int, t: int) -> None:
    """As a layer leaves it: time or features innermost before the heads are told apart."""
    wide = torch.arange(rows * t * 20, device=DEVICE).reshape(rows, t, 20)
    part = wide[..., 3:15].unflatten(-1, (3, 4))
    got = by_token(part)
    assert torch.equal(got, part)
    assert got.data_ptr() == part.data_ptr()
    if rows > 1:
        assert token_strides(got) == (20,)
        assert got.stride(0) == 20 * t


def test_one_token_out_of_a_convolution_is_read_where_it_lies_and_several_are_copied() -> None:
    for t in (1, 2):
        part = torch.arange(3 * 20 * t, device=DEVICE).reshape(3, 20, t).transpose(1, 2)[..., :12].unflatten(-1, (3, 4))
        got = by_token(part)
        assert torch.equal(got, part)
        assert (got.data_ptr() == part.data_ptr()) == (t == 1)
        assert got[0, 0].is_contiguous()
        assert token_strides(got) == (got.stride(0) // t,)


@pytest.mark.parametrize("t", [1, 2])
def test_axes_of_one_may_have_any_stride(t: int) -> None:
    part = torch.arange(3 * t * 8, device=DEVICE).as_strided((3, t, 1, 4), (8 * t, 8, 99, 1))
    got = by_token(part)
    assert torch.equal(got, part)
    assert got.data_ptr() == part.data_ptr()
    assert token_strides(got) == (got.stride(0) // t,)
