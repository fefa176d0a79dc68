"""Linear layers over weights that may lie in parts, bound before their bytes have arrived."""

from __future__ import annotations

import itertools

import pytest
import torch

from hotstart.layers.linear import Linear

ROWS = 12
PARTITIONS = [(12,), (4, 8), (6, 2, 4)]


@pytest.mark.parametrize(
    ("weights", "biases"), [*itertools.product(PARTITIONS, [None, *PARTITIONS])], ids=str
)
def test_binding_reads_nothing_whatever_the_parts(
    weights: tuple[int, ...], biases: tuple[int, ...] | None
) -> None:
    # What a store hands out before its readers are done.
    weight, bias = torch.full((ROWS, 5), torch.nan), torch.full((ROWS,), torch.nan)
    parts = weight.split_with_sizes(list(weights))
    linear = Linear(
        weight if len(weights) == 1 else tuple(parts),
        None if biases is None else bias if len(biases) == 1 else tuple(bias.split_with_sizes(list(biases))),
    )
    weight.copy_(torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(0)))
    bias.copy_(torch.randn(ROWS, generator=torch.Generator().manual_seed(1)))
    x, residual = torch.randn(3, 5), torch.randn(3, ROWS)
    expected = x @ weight.t() + (0 if biases is None else bias)
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear.added_to(residual, x), residual + expected)
    linear.pack()
    torch.testing.assert_close(linear(x), expected)
    torch.testing.assert_close(linear.added_to(residual, x), residual + expected)
