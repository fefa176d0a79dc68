"""How large the KV cache may be: arithmetic, never a trial run. Torch-free.

    memory × utilisation − weights − activations − fixed cost of the processes = KV cache

The result is printed as the flag that skips the computation next time. A size that was passed is
used as it is, unless it exceeds what is free. When one request of the longest context does not fit,
the error carries the arithmetic and the largest values that fit; the context is never reduced
unasked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec import Struct

from hotstart.errors import DeviceError
from hotstart.units import format_size

CPU_FIXED = 450 << 20
"""Bytes: both processes' code and heaps beside weights and KV cache (measured as PSS)."""
CUDA_FIXED = 1536 << 20
"""Bytes: context, libraries' workspaces, and graphs captured later."""


_LARGEST_SHARE = 0.98
"""Of the memory; a larger one is not advised."""
_STEADY_SHARE = 0.98
"""Of what is free now: what advice may count on a little later."""
_USUAL_SHARE = 0.9
"""Whoever gave less had this machine in mind, not the larger one that is advised."""


class Memory(Struct, frozen=True):
    """What the device has."""

    name: str
    """``cpu``, or the GPU's name."""
    limit: int
    """Bytes that the limit of the device or cgroup allows."""
    limited_by: str
    free: int
    """Bytes free now, with nothing of ours loaded."""

    @property
    def steady(self) -> int:
        """Bytes that will still be free when advice is followed, as others come and go."""
        return int(self.free * _STEADY_SHARE)

    @property
    def held(self) -> int:
        """Bytes that others hold."""
        return max(0, self.limit - self.free)


class Need(Struct, frozen=True):
    """What the model takes, in bytes."""

    weights: int
    """In the dtype that they are used in."""
    activations: int
    fixed: int
    kv_per_token: int
    loading: int = 0
    """The most that weights occupy at once while they are loaded, where that is more than ``weights``."""

    @property
    def beside_cache(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.activations + self.fixed


class SizeFlag(Struct, frozen=True):
    """A flag that gives the size of the cache."""

    name: str = "--kv-cache-memory-bytes"
    unit: int = 1
    """Bytes that 1 stands for."""

    def of(self, nbytes: int) -> str:
        """The flag as it was passed."""
        return f"{self.name}={nbytes // self.unit}"


class KVSize(Struct, frozen=True):
    """The decision."""

    bytes: int
    tokens: int
    max_model_len: int
    reason: str
    """For the log."""
    arithmetic: str
    """How it was computed, or would have been."""


def kv_size(
    memory: Memory,
    need: Need,
    *,
    utilization: float,
    requested: int | None,
    max_model_len: int | None,
    model_max_len: int,
    block_size: int,
    given_by: SizeFlag = SizeFlag(),  # noqa: B008 - frozen
    smaller_step: Callable[[int], list[str]] = lambda room: [],
) -> KVSize:
    """Decide. ``requested`` is in bytes; ``given_by`` is the flag behind it.

    ``max_model_len`` None: the model's; -1: as long as fits. ``smaller_step`` says how activations
    would take so many bytes at most, for advice. Raises DeviceError (exit 5).
    """
    share = int(memory.limit * utilization)
    room = min(share, memory.free) - need.beside_cache
    steady = min(share, memory.steady) - need.beside_cache
    arithmetic = _arithmetic(memory, need, utilization)
    _check_loading(memory, need, arithmetic)
    if requested is not None:
        limit = memory.free - need.beside_cache
        if requested > limit:
            limit = memory.steady - need.beside_cache
            ways = ["pass a smaller value", "leave the flag out to have it computed"] if limit > 0 else []
            ways += smaller_step(need.activations + limit - requested)
            ways = ways or _more_memory(memory, need.beside_cache + requested, 1.0)
            raise _more_than_free(given_by, requested, limit, f"{memory.name}: {arithmetic}", ways)
        size, reason = requested, f"as given by {given_by.name}; nothing was measured"
    else:
        size, reason = max(0, room), arithmetic
    block = need.kv_per_token * block_size
    tokens = size // block * block_size
    wanted = model_max_len if max_model_len in (None, -1) else max_model_len
    assert wanted is not None
    if max_model_len == -1:
        wanted = min(wanted, max(tokens, block_size))
    if tokens < wanted:
        kv = -(-wanted // block_size) * block
        longest = {None: "the model's whole context", -1: f"{wanted} tokens"}.get(
            max_model_len, f"--max-model-len {wanted}"
        )
        found = (
            f"one request of {longest} needs {format_size(kv)} of KV cache "
            f"({wanted} tokens x {need.kv_per_token} bytes), and {format_size(size)} are left on "
            f"{memory.name}: {arithmetic}"
        )
        total = need.beside_cache + kv
        most = (size if requested is not None else max(0, steady)) // block * block_size
        ways = [f"lower --max-model-len to at most {most}"] if most else []
        if requested is None:
            ways += smaller_step(need.activations + steady - kv)
        else:
            ways.append(f"raise {given_by.name} to at least {-(-kv // given_by.unit)}")
        if not ways or total <= 2 * memory.limit:  # nobody adds that much where a flag helps
            ways += _more_memory(memory, total, utilization if requested is None else 1.0)
        raise DeviceError(found, expected=f"{format_size(total)} in all", advice=_to_start(ways))
    return KVSize(size, tokens, wanted, reason, arithmetic)


def _arithmetic(memory: Memory, need: Need, utilization: float) -> str:
    return (
        f"{format_size(memory.limit)} ({memory.limited_by}) x {utilization:g} = "
        f"{format_size(int(memory.limit * utilization))}, "
        f"{format_size(memory.free)} free (others hold {format_size(memory.held)}); "
        f"weights {format_size(need.weights)}, activations {format_size(need.activations)}, "
        f"processes {format_size(need.fixed)}"
    )


def _check_loading(memory: Memory, need: Need, arithmetic: str) -> None:
    """Weights that are converted exist twice for a while, when there is no cache yet."""
    total = need.loading + need.fixed
    if need.loading > need.weights and total > memory.free:
        raise DeviceError(
            f"the weights occupy {format_size(need.loading)} while they are converted, more than is free "
            f"on {memory.name}: {arithmetic}",
            expected=f"{format_size(total)} free",
            advice="To start, serve them as they are stored (--dtype auto), store the checkpoint in "
            f"that dtype, or give the server {format_size(_printed(total / _STEADY_SHARE + memory.held))}",
        )


def _more_than_free(
    given_by: SizeFlag, requested: int, limit: int, where: str, ways: list[str]
) -> DeviceError:
    return DeviceError(
        f"{given_by.of(requested)} ({format_size(requested)}) is more than is free on {where}",
        expected=f"at most {max(0, limit) // given_by.unit}",
        advice=_to_start(ways),
    )


def _to_start(ways: list[str]) -> str:
    return "To start, " + ", or ".join(ways)


def _more_memory(memory: Memory, total: int, utilization: float) -> list[str]:
    """A way to have ``total`` bytes, where ``utilization`` and what others hold leave less."""
    share = math.ceil(total / memory.limit * 100) / 100
    if utilization < share <= _LARGEST_SHARE and total <= memory.steady:
        return [f"raise --gpu-memory-utilization to {share:.2f}"]
    if total <= memory.steady and share <= utilization:
        return []
    usual = max(utilization, _USUAL_SHARE)
    needed = _printed(max(total / usual, total / _STEADY_SHARE + memory.held))
    with_share = f" and raise --gpu-memory-utilization to {usual:g}" if usual > utilization else ""
    return [f"give the server {format_size(needed)}{with_share}"]


def _printed(needed: float) -> float:
    """Sizes are printed with three figures: half a unit more than what is needed."""
    return needed * 1.005
