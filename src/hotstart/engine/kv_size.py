"""How large the KV cache may be: arithmetic, never a trial run. Torch-free.

    memory × utilisation − weights − activations − fixed cost of the processes = KV cache

The result is printed as the flag that skips the computation next time. A size that was passed is
used as it is, unless it exceeds what is free. When one request of the longest context does not fit,
the error carries the arithmetic and the largest values that fit; the context is never reduced
unasked.
"""

from __future__ import annotations

import math

from msgspec import Struct

from hotstart.errors import DeviceError
from hotstart.units import format_size

CPU_FIXED = 450 << 20
"""Bytes: both processes' code and heaps beside weights and KV cache (measured as PSS)."""
CUDA_FIXED = 1536 << 20
"""Bytes: context, libraries' workspaces, and graphs captured later."""


class Memory(Struct, frozen=True):
    """What the device has."""

    name: str
    """``cpu``, or the GPU's name."""
    limit: int
    """Bytes that the limit of the device or cgroup allows."""
    limited_by: str
    free: int
    """Bytes free now, with nothing of ours loaded."""


class Need(Struct, frozen=True):
    """What the model takes, in bytes."""

    weights: int
    activations: int
    fixed: int
    kv_per_token: int


class KVSize(Struct, frozen=True):
    """The decision."""

    bytes: int
    tokens: int
    max_model_len: int
    reason: str
    """For the log."""


def activation_bytes(
    *, tokens: int, seqs: int, hidden: int, intermediate: int, qkv: int, vocab: int, dtype_bytes: int
) -> int:
    """Upper bound of what one step holds at once.

    Per token: residual, normed, q, k, v, attention output and the gated MLP (two halves and their
    product), doubled for kernels that widen to float32; per sequence: three copies of the logits.
    """
    per_token = (4 * hidden + 2 * qkv + 3 * intermediate) * dtype_bytes * 2
    return tokens * per_token + 3 * seqs * vocab * 4


def kv_size(
    memory: Memory,
    need: Need,
    *,
    utilization: float,
    requested: int | None,
    max_model_len: int | None,
    model_max_len: int,
    block_size: int,
    given_by: str = "--kv-cache-memory-bytes",
) -> KVSize:
    """Decide. ``given_by`` is the flag behind ``requested``.

    ``max_model_len`` None: the model's; -1: as long as fits. Raises DeviceError (exit 5).
    """
    share = int(memory.limit * utilization)
    other = max(0, memory.limit - memory.free)
    room = min(share, memory.free) - need.weights - need.activations - need.fixed
    arithmetic = (
        f"{format_size(memory.limit)} ({memory.limited_by}) x {utilization:g} = {format_size(share)}, "
        f"{format_size(memory.free)} free (others hold {format_size(other)}); "
        f"weights {format_size(need.weights)}, activations {format_size(need.activations)}, "
        f"processes {format_size(need.fixed)}"
    )
    if requested is not None:
        limit = memory.free - need.weights - need.activations - need.fixed
        if requested > limit:
            raise DeviceError(
                f"--kv-cache-memory-bytes={requested} ({format_size(requested)}) is more than is free on "
                f"{memory.name}: {arithmetic}",
                expected=f"at most {max(0, limit)}",
                advice="Pass a smaller value, or leave the flag out to have it computed",
            )
        size, reason = requested, f"as given by {given_by}; nothing was measured"
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
        found = (
            f"one request of --max-model-len {wanted} needs {format_size(kv)} of KV cache "
            f"({wanted} tokens x {need.kv_per_token} bytes), and {format_size(size)} are left on "
            f"{memory.name}: {arithmetic}"
        )
        total = need.weights + need.activations + need.fixed + kv
        advice = [f"lower --max-model-len to at most {tokens}"] if tokens else []
        if requested is not None:
            advice.append(f"raise --kv-cache-memory-bytes to at least {kv}")
        advice += _more_memory(memory, total, other, utilization if requested is None else 1.0)
        raise DeviceError(
            found, expected=f"{format_size(total)} in all", advice="To start, " + ", or ".join(advice)
        )
    return KVSize(size, tokens, wanted, reason)


def _more_memory(memory: Memory, total: int, other: int, utilization: float) -> list[str]:
    """Ways to have ``total`` bytes, where ``utilization`` and what others hold leave less."""
    advice = []
    share = math.ceil(total / memory.limit * 100) / 100
    if utilization < share <= 0.98 and total <= memory.free:
        advice.append(f"raise --gpu-memory-utilization to {share:.2f}")
    if total > memory.free or share > utilization:
        # Sizes are printed with three figures: half a unit more than what is needed.
        needed = max(total / utilization, total + other) * 1.005
        advice.append(f"give the server {format_size(needed)}")
    return advice
