"""``--load-format dummy``: weights that nobody reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotstart.messages import LoadStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hotstart.engine.assemble import Prepared
    from hotstart.loading.follower import Follower
    from hotstart.models.base import Store


class RandomWeights:
    """:class:`~hotstart.engine.placement.Weights` that nobody reads."""

    def __init__(self, prepared: Prepared) -> None:
        self.total = prepared.matched.nbytes
        self._prepared = prepared

    def follow(self, follower: Follower) -> Sequence[memoryview]:
        """See ``Weights``."""
        return ()

    def start(self, done: Callable[[object], None] = lambda report: None) -> None:
        """See ``Weights``."""
        done("random values")

    def wait(self) -> object:
        """See ``Weights``."""
        return "random values"

    def settle(self) -> None:
        """See ``Weights``."""

    def stats(self) -> LoadStats:
        """See ``Weights``."""
        return LoadStats()

    def describe(self) -> str:
        """See ``Weights``."""
        return "--load-format dummy"

    def store(self) -> Store:
        """See ``Weights``."""
        import torch

        from hotstart.loading.random_store import RandomStore

        p = self._prepared
        dtype = getattr(torch, p.matched.dtype)
        return RandomStore(p.family.specs(p.geometry), dtype, p.placement.device(), p.config.model.seed)

    def may_copy(self, slot: str) -> bool:
        """See ``Weights``."""
        return False

    def release(self, slot: str) -> None:
        """See ``Weights``."""

    def close(self) -> None:
        """See ``Weights``."""
