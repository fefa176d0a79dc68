"""Rotary positions of published configurations, as far as their contexts reach."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hotstart.layers.rope import Rope, rotate
from hotstart.models.registry import family_for
from tiny_models import CONFIGS

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

HEAD_DIM = 128
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2": {"rope_theta": 1e4, "max_position_embeddings": 4096},
    "Llama 3.1": {"rope_theta": 5e5, "max_position_embeddings": 131072, "rope_scaling": LLAMA_3},
    "Qwen 2.5 with yarn": {
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    },
    "linear": {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}


def both(values: dict[str, Any], dtype: torch.dtype) -> tuple[Rope, LlamaRotaryEmbedding, int]:
    config = CONFIGS["llama"] | {"head_dim": HEAD_DIM} | values
    geometry = family_for(config).geometry(config)
    ours = Rope(geometry.rope, HEAD_DIM, dtype=dtype, device=torch.device("cpu"))
    theirs = LlamaRotaryEmbedding(LlamaConfig(head_dim=HEAD_DIM, **values))
    return ours, theirs, geometry.max_position_embeddings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_are_rotated_as_in_transformers_up_to_the_longest_context(
    name: str, dtype: torch.dtype
) -> None:
    ours, theirs, longest = both(PUBLISHED[name], dtype)
    positions = torch.tensor([0, 1, 1000, longest // 2, longest - 1])
    x = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = theirs(x, positions[None])
    expected, _ = apply_rotary_pos_emb(x[None], x[None], cos, sin, unsqueeze_dim=2)
    got = rotate(x, *ours(positions, torch.full((5,), longest)))
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got, expected[0], rtol=tolerance, atol=tolerance)


def test_dynamic_frequencies_follow_each_token_s_own_length() -> None:
    ours, _, _ = both(PUBLISHED["dynamic"], torch.float32)
    positions = torch.tensor([100, 100, 5000])
    together = ours(positions, torch.tensor([101, 9000, 9000]))
    for row, length in enumerate((101, 9000, 9000)):
        alone = ours(positions[row : row + 1], torch.tensor([length]))
        assert all(torch.equal(t[row : row + 1], a) for t, a in zip(together, alone, strict=True))
    assert not torch.equal(together[0][0], together[0][1])
