"""``--load-format dummy``: weights of a seed, and of nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from hotstart.loading.random_store import RandomStore
from hotstart.models.spec import WeightSpec

CPU = torch.device("cpu")
SPECS = [
    WeightSpec(slot="qk", stored=("q",), shape=(4, 3)),
    WeightSpec(slot="qk", stored=("k",), shape=(2, 3), at=4),
    WeightSpec(slot="norm", stored=("norm",), shape=(3,)),
]


def tensors(seed: int) -> dict[str, Tensor]:
    store = RandomStore(SPECS, torch.float32, CPU, seed)
    return {slot: store.tensor(slot) for slot in ("qk", "norm")}


def test_the_seed_decides_and_the_numbers_of_the_program_around_stay_its_own() -> None:
    state = torch.manual_seed(12).get_state()
    first = tensors(1)
    assert torch.equal(torch.default_generator.get_state(), state)
    torch.manual_seed(13)
    assert torch.equal(tensors(1)["qk"], first["qk"])
    assert not torch.equal(tensors(2)["qk"], first["qk"])


def test_matrices_are_stacked_and_vectors_are_ones() -> None:
    made = tensors(1)
    assert made["qk"].shape == (6, 3)
    assert made["norm"].tolist() == [1, 1, 1]
