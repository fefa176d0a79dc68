"""How many descriptors a server allows itself.

No process may make its own limit "unlimited", so the kernel's rule is written down here.
"""

from __future__ import annotations

import resource

import pytest

from hotstart.cli.limits import raise_file_limit

UNLIMITED = resource.RLIM_INFINITY
NR_OPEN = 1 << 20


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, UNLIMITED), (NR_OPEN, UNLIMITED)),
        ((1024, NR_OPEN * 4), (NR_OPEN, NR_OPEN * 4)),
        ((NR_OPEN * 2, NR_OPEN * 4), (NR_OPEN * 2, NR_OPEN * 4)),
        ((UNLIMITED, UNLIMITED), (UNLIMITED, UNLIMITED)),
    ],
    ids=str,
)
def test_soft_limit_rises_as_far_as_the_kernel_allows_and_never_sinks(
    before: tuple[int, int], after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [before]

    def setrlimit(kind: int, wanted: tuple[int, int]) -> None:
        if not 0 <= wanted[0] <= NR_OPEN:
            raise ValueError("not allowed to raise maximum limit")
        limits.append(wanted)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    raise_file_limit()
    assert limits[-1] == after
