"""The embedding table."""

from __future__ import annotations

import torch

from flashpage.layers.embedding import Embedding


def test_rows_by_id() -> None:
    table = Embedding(6, 3)
    table.weight.data.normal_()
    ids = torch.tensor([5, 0, 5])
    assert torch.equal(table(ids), table.weight.data[ids])
    assert table(torch.empty(0, dtype=torch.int64)).shape == (0, 3)
