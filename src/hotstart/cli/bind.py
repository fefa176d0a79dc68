"""The listening socket, taken before anything that takes time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from hotstart.config.settings import HttpConfig
from hotstart.errors import ConfigError

_BACKLOG = 2048
_LONGEST_UNIX_PATH = 107
"""``sun_path`` in unix(7), without its closing zero."""


def bind(http: HttpConfig) -> list[socket.socket]:
    """Bound and listening sockets. Raises ConfigError that names who holds the port."""
    if http.uds is not None:
        return [_bind_unix(http.uds)]
    return [_bind_tcp(http.host, http.port)]


class UnixPath:
    """Where the socket of ``--uds`` lies; whoever bound it removes it."""

    def __init__(self, path: str) -> None:
        """Take note of the socket that was just bound there."""
        self._path = path
        self._bound = os.stat(path)

    def remove(self) -> None:
        """Unlink it, unless another server has put its own there meanwhile."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self._path), self._bound):
                os.unlink(self._path)


def url(http: HttpConfig, listening: socket.socket) -> str:
    """What to type into a client on this machine."""
    if listening.family == socket.AF_UNIX:
        return f"unix:{http.uds}"
    scheme = "https" if http.ssl_certfile else "http"
    host, port = listening.getsockname()[:2]
    shown = "localhost" if host in ("::", "0.0.0.0") else f"[{host}]" if ":" in host else host
    return f"{scheme}://{shown}:{port}{http.root_path}"


def loopback_only(listening: socket.socket) -> bool:
    """Whether nobody outside this machine (or container) can connect."""
    if listening.family == socket.AF_UNIX:
        return False
    host = listening.getsockname()[0]
    return bool(host == "::1" or host.startswith("127."))


def _bind_tcp(host: str | None, port: int) -> socket.socket:
    try:
        if host is None:
            return _listen_everywhere(port)
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        return _listen(listening, address)
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host} does not resolve ({error.strerror})",
            expected="an address of this machine, or a name that resolves to one",
            advice="Leave --host out to listen on all interfaces",
        ) from None
    except OSError as error:
        raise _cannot_bind(host, port, error) from None


def _listen_everywhere(port: int) -> socket.socket:
    """IPv6 and IPv4 on one socket; IPv4 alone where the kernel has no IPv6."""
    try:
        listening = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        return _listen(listening, ("::", port))
    except OSError as error:
        if error.errno not in (
            errno.EAFNOSUPPORT,
            errno.EADDRNOTAVAIL,
            errno.EPROTONOSUPPORT,
            errno.ENOPROTOOPT,
        ):
            raise
    return _listen(socket.socket(socket.AF_INET, socket.SOCK_STREAM), ("0.0.0.0", port))


def _listen(listening: socket.socket, address: object) -> socket.socket:
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)  # type: ignore[arg-type]
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _bind_unix(path: str) -> socket.socket:
    length = len(os.fsencode(path))
    if length > _LONGEST_UNIX_PATH:
        raise ConfigError(
            f"--uds {path} is {length} bytes long",
            expected=f"at most {_LONGEST_UNIX_PATH}, which is what a socket's address holds",
            advice="Choose a shorter path, or a relative one",
        )
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)  # left by a server that was killed
        listening.bind(path)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"--uds {path} cannot be bound: {error.strerror}",
            expected="a path in a writable directory that no server listens on",
        ) from None
    return listening


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == 0


def _cannot_bind(host: str | None, port: int, error: OSError) -> ConfigError:
    where = f"port {port}" if host is None else f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        holder = _holder(port)
        return ConfigError(
            f"{where} is taken" + (f" by {holder}" if holder else ""),
            expected="a free port",
            advice="Stop that process, or choose another port with --port",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(
            f"{where} needs rights that uid {os.geteuid()} does not have",
            expected="a port of 1024 or higher, or the capability to bind lower ones",
            advice="Choose another port with --port",
        )
    return ConfigError(
        f"{where} cannot be bound: {error.strerror}",
        expected="an address of this machine",
        advice="Leave --host out to listen on all interfaces",
    )


def _holder(port: int) -> str:
    """``name (pid N)`` of the process that listens on a TCP port, if this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as file:
            for line in list(file)[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return ""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in inodes:
                    with open(f"/proc/{pid}/comm", errors="replace") as file:
                        return f"{file.read().strip()} (pid {pid})"
    return ""
