"""The limits of the process (ulimit): raised where that is allowed, named where they are too low."""

from __future__ import annotations

import contextlib
import resource

from hotstart.errors import ConfigError
from hotstart.units import format_size

FILES_NEEDED = 32
"""Descriptors: some 20 of the server's own, and a few connections."""
FEW_FILES = 1024
_MANY_FILES = 1 << 20
"""What Linux allows a process at most unless it is told otherwise (fs.nr_open in proc_sys_fs(5))."""

_NO_MEMORY = (
    r"allocate memory|out of memory|failed to map|memoryerror|bad_alloc|cannot load .*\.so"
    r"|can't start new thread"
)
"""Words of Python, of the dynamic linker, of torch and of the C++ library; a thread needs a stack."""


def raise_file_limit() -> str:
    """As many descriptors as are allowed: each connection takes one, and 1024 is a common default.

    Returns a warning, empty when there are many. Raises ConfigError when they are too few to start.
    """
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A soft limit above fs.nr_open is refused, and "unlimited" is above it.
    wanted = _MANY_FILES if hard == unlimited else min(hard, _MANY_FILES)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == unlimited or soft >= FEW_FILES:
        return ""
    if soft < FILES_NEEDED:
        raise ConfigError(
            f"this process may open {soft} files (ulimit -n)",
            expected=f"at least {FILES_NEEDED}, and one more for each connection",
            advice=f"Raise the limit: ulimit -n {_MANY_FILES >> 4}, or LimitNOFILE= of a systemd unit",
        )
    return f"at most {soft} files and connections may be open (ulimit -n); more are refused"


def memory_limit(error: BaseException) -> str:
    """The limit of the address space, where it explains an error; no figure of the machine shows it."""
    import re

    if not isinstance(error, MemoryError) and not re.search(_NO_MEMORY, str(error), re.IGNORECASE):
        return ""
    return address_space()


def address_space() -> str:
    """One clause about a limit of the address space; empty when there is none."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    if soft == resource.RLIM_INFINITY:
        return ""
    return (
        f"the address space of a process is limited to {format_size(soft)} (ulimit -v): mapped weights, "
        "libraries and memory that is only reserved count as well; ulimit -v unlimited lifts it"
    )
