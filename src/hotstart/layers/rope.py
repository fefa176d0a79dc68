"""Rotary position embedding (Su et al., https://arxiv.org/abs/2104.09864), halves convention.

Formulas of the scaled variants are those of transformers' ``modeling_rope_utils``, in float32 as
there, so that long contexts give the same text. Cosines are computed for the positions of a step
and not kept in a table: it costs a few microseconds once per step, and a start with a context of
128 k pays nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class Rope:
    """Cosines and sines of a step's positions.

    ``parameters``: what :func:`hotstart.models.rope.rope_parameters` returned.

    With ``dynamic`` scaling the frequencies depend on how long a sequence is. transformers takes the
    longest length it has seen, and keys already cached keep the frequencies they were made with: the
    tokens of a prompt are rotated for the prompt's length, each generated token for its own. That
    is a property of the token alone, ``max(prompt length, position + 1)``, passed as ``lengths``, so
    a sequence gets the same text alone, in a batch, in chunks and after recomputation.
    """

    def __init__(
        self, parameters: dict[str, Any], head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        frequencies, self.scale = frequencies_of(parameters, head_dim)
        self.frequencies = frequencies.to(device)
        self.dtype = dtype
        self.dynamic = parameters["rope_type"] == "dynamic"
        if self.dynamic:
            self.theta = float(parameters["rope_theta"])
            self.factor = float(parameters["factor"])
            self.trained = float(parameters["original_max_position_embeddings"])
            self.exponents = _exponents(head_dim).to(device)
            self.stretch = head_dim / (head_dim - 2)

    def __call__(self, positions: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [tokens, 1, head_dim] in the model's dtype, for :func:`rotate`.

        positions: int64 [tokens]; lengths: int64 [tokens], used by ``dynamic`` only (default:
        position + 1).
        """
        frequencies = self.frequencies
        if self.dynamic:
            frequencies = self._stretched(positions + 1 if lengths is None else lengths)
        angles = positions.float().unsqueeze(1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scale != 1.0:
            cos, sin = cos * self.scale, sin * self.scale
        cos = torch.cat((cos, cos), 1).to(self.dtype)
        sin = torch.cat((-sin, sin), 1).to(self.dtype)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def _stretched(self, lengths: Tensor) -> Tensor:
        """NTK-aware frequencies for each token's length: [tokens, head_dim / 2]."""
        ratio = lengths.clamp(min=int(self.trained)) * self.factor / self.trained - (self.factor - 1)
        theta = self.theta * ratio.unsqueeze(1) ** self.stretch
        return 1.0 / theta**self.exponents


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads. x: [tokens, heads, head_dim]; three kernels for q and k together."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[2] // 2, 2), sin)


def frequencies_of(parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2] on the CPU, and the factor on cos and sin."""
    theta = float(parameters["rope_theta"])
    plain = 1.0 / theta ** _exponents(head_dim)
    match parameters["rope_type"]:
        case "linear":
            return plain / parameters["factor"], 1.0
        case "llama3":
            return _llama3(plain, parameters), 1.0
        case "yarn":
            return _yarn(theta, head_dim, parameters), _yarn_scale(parameters)
    return plain, 1.0


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim


def _llama3(plain: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Long wavelengths are stretched by ``factor``, short ones kept, those between blended."""
    factor, low, high = (parameters[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = parameters["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    blend = (trained / wavelength - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    stretched = torch.where(wavelength > trained / low, plain / factor, plain)
    between = (wavelength >= trained / high) & (wavelength <= trained / low)
    return torch.where(between, blended, stretched)


def _yarn(theta: float, head_dim: int, parameters: dict[str, Any]) -> Tensor:
    """YaRN (Peng et al., https://arxiv.org/abs/2309.00071), section 3.2: NTK by parts."""
    trained = parameters["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(parameters["beta_fast"]), dimension(parameters["beta_slow"])
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    wavelengths = theta ** _exponents(head_dim)
    kept = 1 - ramp
    stretched = 1.0 / (float(parameters["factor"]) * wavelengths)
    return stretched * (1 - kept) + (1.0 / wavelengths) * kept


def _yarn_scale(parameters: dict[str, Any]) -> float:
    if "attention_factor" in parameters:
        return float(parameters["attention_factor"])

    def scale(by: float) -> float:
        factor = parameters["factor"]
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)
