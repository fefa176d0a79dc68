"""Where caches live: one directory for ours, Triton's, Inductor's and the hub's.

First of: ``--cache-root``, ``HOTSTART_CACHE_ROOT``, ``VLLM_CACHE_ROOT``/hotstart,
``~/.cache/hotstart``. It is tried by writing, since rights alone say little (read-only mounts,
full disks, root). A place that cannot be written costs one log line, never the start.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

_PROBE_BYTES = 64 * 1024
"""Enough that a full disk shows, little enough to cost nothing."""

_COST = (
    "this start goes on without caches: downloads from the hub, and kernels where a GPU compiles any, "
    "go where their libraries put them by default; nothing else is lost"
)


class CacheRoot:
    """The outcome of :func:`resolve`."""

    __slots__ = ("chosen", "obstacle", "path", "reason")

    def __init__(self, path: str, *, chosen: bool, reason: str, obstacle: str = "") -> None:
        self.path = path
        """Absolute; empty when no place could even be named."""
        self.chosen = chosen
        """The user named it; False for the default below the home directory."""
        self.obstacle = obstacle
        """Why nothing can be written there, in a few words; empty: it can."""
        self.reason = reason
        """A log line: where the path comes from, or why there are no caches and what that costs."""

    @property
    def writable(self) -> bool:
        """Whether a file could be written there."""
        return not self.obstacle


def resolve(flag: str | None, environ: Mapping[str, str]) -> CacheRoot:
    """Find the cache root, create it, and try to write there. Never raises."""
    path, source = _choose(flag, environ)
    chosen = source != "default"
    if not path:
        obstacle = f"no home directory for user {os.getuid()}"
        reason = f"{obstacle} and no --cache-root: {_COST}"
        return CacheRoot("", chosen=False, reason=reason, obstacle=obstacle)
    obstacle = try_to_write(path)
    if obstacle:
        reason = (
            f"cache root {path} ({source}) cannot be written ({obstacle}): {_COST}; "
            "set --cache-root to a writable directory"
        )
        return CacheRoot(path, chosen=chosen, reason=reason, obstacle=obstacle)
    return CacheRoot(path, chosen=chosen, reason=f"cache root {path} ({source})")


def compiler_caches(path: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that move Triton's and Inductor's caches below a writable root; empty: no root.

    Both libraries read them when they first compile. Those that the user set stay.
    """
    if not path:
        return {}
    wanted = {
        "TRITON_CACHE_DIR": os.path.join(path, "triton"),
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(path, "inductor"),
    }
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def hub_caches(root: CacheRoot, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that move the hub's caches below a root that the user chose; those the user set stay.

    By default they stay where other tools share them. The token stays where ``hf auth login`` put it.
    """
    if not (root.writable and root.chosen):
        return {}
    if any(environ.get(name) for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE")):
        return {}
    wanted = {
        "HF_HUB_CACHE": os.path.join(root.path, "hub"),
        "HF_XET_CACHE": os.path.join(root.path, "xet"),
    }
    return {name: value for name, value in wanted.items() if not environ.get(name)}


def hub_cache(root: CacheRoot, environ: MutableMapping[str, str]) -> str | None:
    """Where a download puts its files; None: the library's own place.

    Call it before huggingface_hub is imported: the place of its transfer cache (Xet) is no argument
    of a download, only a variable, which is set here.
    """
    caches = hub_caches(root, environ)
    if "HF_XET_CACHE" in caches:
        environ["HF_XET_CACHE"] = caches["HF_XET_CACHE"]
    return caches.get("HF_HUB_CACHE")


def _choose(flag: str | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """``(absolute path, where it comes from)``; the path is empty when there is no home."""
    if flag:
        return _absolute(flag, environ), "--cache-root"
    if given := environ.get("HOTSTART_CACHE_ROOT"):
        return _absolute(given, environ), "HOTSTART_CACHE_ROOT"
    if given := environ.get("VLLM_CACHE_ROOT"):
        return os.path.join(_absolute(given, environ), "hotstart"), "VLLM_CACHE_ROOT"
    home = _home(environ)
    return (os.path.join(home, ".cache", "hotstart") if home else ""), "default"


def _absolute(path: str, environ: Mapping[str, str]) -> str:
    if path == "~" or path.startswith("~/"):
        path = _home(environ) + path[1:]
    try:
        return os.path.abspath(path)
    except FileNotFoundError:  # the working directory is gone: nothing can be written there, which is said
        return path


def _home(environ: Mapping[str, str]) -> str:
    """Empty for a user without one, as containers that run under a random uid have it."""
    if environ.get("HOME"):
        return environ["HOME"]
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return ""


def try_to_write(path: str) -> str:
    """Write into a directory, made if it is absent: empty when that went well, else what is in the way."""
    probe = os.path.join(path, f".probe-{os.getpid()}")
    try:
        os.makedirs(path, exist_ok=True)
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.strerror or str(error)
    try:
        written = os.write(descriptor, bytes(_PROBE_BYTES))
        return "" if written == _PROBE_BYTES else "no space left"
    except OSError as error:
        return error.strerror or str(error)
    finally:
        os.close(descriptor)
        os.unlink(probe)
