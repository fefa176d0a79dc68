"""RMSNorm in every dtype against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from hotstart.layers.norm import RMSNorm


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)]
)
def test_rms_norm_equals_its_definition(dtype: torch.dtype, tolerance: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    # A mean far from zero shows whether it is left in.
    x = ((torch.randn(5, 3, 96, generator=generator) + 2) * scale).to(dtype)
    weight = torch.randn(96, generator=generator).to(dtype)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = RMSNorm(weight, 1e-5)(x)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=1e-6)
