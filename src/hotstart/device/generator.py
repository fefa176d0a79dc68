"""Random numbers of one's own: in the Python API, torch's global ones belong to the caller's program."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def new_generator(device: torch.device) -> torch.Generator:
    """A random state that nobody else draws from; seed it. Imports torch.

    It is a clone, which takes microseconds: since 2.12 ``torch.Generator()`` needs a part of torch
    that a start leaves out (150 ms).
    """
    import torch

    if device.type == "cpu":
        others = torch.default_generator
    else:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        others = torch.cuda.default_generators[index]
    return others.clone_state()
