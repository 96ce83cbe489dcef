"""`flash_attn.bert_padding` of the shim: there and back again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("installed")

masks = st.integers(1, 4).flatmap(
    lambda width: st.lists(
        st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4
    )
)
lengths = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=3)
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@quick
@given(masks, st.data())
def test_pad_undoes_unpad(mask_rows: list[list[bool]], data: st.DataObject):
    from flash_attn.bert_padding import pad_input, unpad_input

    mask = torch.tensor(mask_rows)
    unused = torch.zeros_like(mask)
    if data.draw(st.booleans()):
        unused = (torch.rand(mask.shape) < 0.3) & ~mask
    x = torch.randn(*mask.shape, 2, 3)
    kept = mask | unused
    flat, indices, cu_seqlens, max_seqlen, seqused = unpad_input(x, mask, unused)
    assert torch.equal(flat, x[kept])
    assert cu_seqlens.dtype == seqused.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, *kept.sum(1).cumsum(0).tolist()]
    assert max_seqlen == int(kept.sum(1).max())
    assert torch.equal(seqused, mask.sum(1, dtype=torch.int32))
    assert torch.equal(pad_input(flat, indices, *mask.shape), x * kept[..., None, None])


@quick
@given(lengths)
def test_rows_of_several_sequences(rows: list[list[int]]):
    from flash_attn.bert_padding import unpad_input_for_concatenated_sequences

    width = max(1, *(sum(row) for row in rows)) + 1
    in_length = torch.zeros(len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        in_length[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    x = torch.randn(len(rows), width, 3)
    flat, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, in_length)
    assert torch.equal(flat, torch.cat([x[i, : sum(row)] for i, row in enumerate(rows)]))
    assert torch.equal(flat, x.flatten(0, 1)[indices])
    seqlens = [n for row in rows for n in row]
    assert cu_seqlens.diff().tolist() == seqlens
    assert cu_seqlens.dtype == torch.int32
    assert max_seqlen == max(seqlens, default=0)


def test_both_branches_of_a_residual_reach_x():
    from flash_attn.bert_padding import index_first_axis, index_first_axis_residual

    x = torch.randn(5, 2, requires_grad=True)
    indices = torch.tensor([3, 1])
    rows, residual = index_first_axis_residual(x, indices)
    assert torch.equal(rows, index_first_axis(x, indices))
    assert torch.equal(residual, x)
    (2 * rows.sum() + residual.sum()).backward()
    assert x.grad[:, 0].tolist() == [1, 3, 1, 3, 1]
