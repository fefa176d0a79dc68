"""What a path lies on: mount point, file system, device, and whether it is what the operator thinks.

Everything comes from /proc/self/mountinfo (proc_pid_mountinfo(5)) and sysfs; nothing is executed.
"""

from __future__ import annotations

import os
from contextlib import suppress

from msgspec import Struct

from hotstart.errors import HotstartError, StorageError
from hotstart.storage.access import read_error

NETWORK = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "ceph", "glusterfs", "9p", "virtiofs", "beegfs"}
    | {"gpfs", "pvfs2", "orangefs", "afs", "wekafs"}
)
"""And every FUSE file system: what stands behind it cannot be seen from here."""
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
_READ_AHEAD = 512 << 10
"""Bytes; what most devices read ahead at once, where they do not tell."""
_VIRTUAL_DISKS = ("vd", "xvd")
"""They call themselves rotational whatever is behind them."""
_CONTAINER_ROOT = frozenset({"overlay", "aufs", "fuse.fuse-overlayfs"})


class Mount(Struct, frozen=True):
    """One line of mountinfo."""

    id: int
    device: str
    """``major:minor``."""
    root: str
    """Which directory of the file system is mounted here; other than ``/``: a bind mount."""
    mount_point: str
    options: str
    fs_type: str
    source: str

    @property
    def network(self) -> bool:
        """Whether reads may travel: never mapped, and pages may change under us."""
        return self.fs_type in NETWORK or self.fuse

    @property
    def fuse(self) -> bool:
        """Whether the kernel's FUSE client reads, which asks for 128 KiB at a time through the page cache."""
        return self.fs_type.startswith("fuse") or self.fs_type == "virtiofs"

    @property
    def memory(self) -> bool:
        """Whether the files are in memory already."""
        return self.fs_type in MEMORY

    @property
    def rotational(self) -> bool | None:
        """True: spinning disk; False: flash; None: no local block device, or unknown."""
        if os.path.basename(self.source).startswith(_VIRTUAL_DISKS):
            return None
        told = self._of_queue("rotational")
        return None if told is None else told == 1

    @property
    def window(self) -> int:
        """Bytes that the kernel reads ahead of somebody who reads in order; 0: unknown."""
        return (self._of_queue("read_ahead_kb") or 0) << 10

    @property
    def read_ahead(self) -> int:
        """Bytes of a range that the kernel reads ahead for one call; of a longer range it forgets the rest.

        Its ``force_page_cache_ra`` has this bound (mm/readahead.c).
        """
        request = self._of_queue("max_sectors_kb")
        return _READ_AHEAD if request is None else max(self.window, request << 10)

    def _of_queue(self, name: str) -> int | None:
        """A number that the block device's queue has in sysfs; None: no local block device."""
        names = (f"/sys/dev/block/{self.device}", f"/sys/class/block/{os.path.basename(self.source)}")
        for device in filter(os.path.exists, names):
            for queue in ("queue", "../queue"):  # of the disk, or of a partition's disk
                path = f"{os.path.realpath(device)}/{queue}/{name}"
                with suppress(OSError, ValueError), open(path) as file:
                    return int(file.read())
        return None

    def describe(self) -> str:
        """``ext4 on /dev/nvme0n1p1 (flash), mounted at /models``."""
        kind = "network" if self.network else "memory" if self.memory else None
        if kind is None:
            kind = {True: "spinning disk", False: "flash", None: "local"}[self.rotational]
        return f"{self.fs_type} on {self.source} ({kind}), mounted at {self.mount_point}"


def mounts(table: str = "/proc/self/mountinfo") -> list[Mount]:
    """All mounts that this process sees, in the order in which they were made; none where /proc is absent."""
    try:
        with open(table, encoding="utf-8", errors="surrogateescape") as file:
            return [_parse(line) for line in file if " - " in line]
    except OSError:
        return []


class Mounts:
    """The mounts as they are now, read once, for asking about many files; made anew for each checkpoint.

    A file on a mount that came later makes it look again. One that went, and whose number another
    has got since, is not noticed.
    """

    def __init__(self, table: str = "/proc/self/mountinfo") -> None:
        self._path = table
        self._look()

    def _look(self) -> None:
        self.table = mounts(self._path)
        self._by_id = {mount.id: mount for mount in self.table}

    def of(self, path: str) -> Mount | None:
        """The mount that a file or directory lies on; exact under bind mounts and mounts over mounts.

        None where /proc is absent. Raises the errors of :func:`hotstart.storage.access.read_error`
        when the path cannot be reached.
        """
        number = _mount_id(path)
        if number is not None and number not in self._by_id:
            self._look()
        found = None if number is None else self._by_id.get(number)
        return found or _longest_prefix(os.path.realpath(path), self.table)


def mount_of(path: str) -> Mount | None:
    """:meth:`Mounts.of` as the mounts are now."""
    return Mounts().of(path)


def _mount_id(path: str) -> int | None:
    """The number of a path's mount in mountinfo; None where the kernel does not tell."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise read_error(path, error, doing="open") from None
    try:
        with open(f"/proc/self/fdinfo/{fd}") as file:
            return next((int(line.split()[1]) for line in file if line.startswith("mnt_id:")), None)
    except OSError:
        return None
    finally:
        os.close(fd)


def check_expected(expectation: str, model_path: str) -> None:
    """``--expect-mount PATH[:TYPE]``: PATH is a mount of its own, of that type, and the model lies on it.

    ``model_path``: empty where it is not known.

    Raises StorageError. A volume that failed to mount leaves an empty directory of the root disk
    behind, and a copy there is read at the wrong speed without a word: this is the guard against it.
    Where /proc is absent, that the device is another than the parent's has to do; types are unknown.
    """
    path, _, wanted = expectation.partition(":")
    path = os.path.realpath(os.path.expanduser(path))
    seen = Mounts()
    try:
        mount = seen.of(path)
    except HotstartError as error:
        raise StorageError(
            f"--expect-mount {expectation}: {error.found}",
            expected=f"a volume mounted at {path}",
            advice=error.advice or f"Create the directory and mount the volume there, {_OR_CORRECT}",
        ) from None
    if mount is None:
        if not os.path.ismount(path):
            raise _no_mount(path, "it is on the device of the directory above")
    elif mount.mount_point != path:
        root = ", the root disk" if mount.mount_point == "/" else ""
        raise _no_mount(path, f"it is a directory of {mount.mount_point} ({mount.fs_type}{root})")
    else:
        _check_volume(mount, wanted, seen)
    if model_path and os.path.commonpath([path, os.path.realpath(model_path)]) != path:
        raise StorageError(
            f"{model_path} does not lie on the mount {path}",
            expected="the model below the mount that --expect-mount names",
            advice="Correct one of the two paths",
        )


_OR_CORRECT = "or correct --expect-mount (leave it out where no mount is meant)"


def _no_mount(path: str, but: str) -> StorageError:
    return StorageError(
        f"{path} is not a mount point: {but}",
        expected=f"a volume mounted at {path} (--expect-mount)",
        advice=f"Mount it (mount {path}; systemctl status and dmesg tell why it is not), {_OR_CORRECT}",
    )


def _check_volume(mount: Mount, wanted: str, seen: Mounts) -> None:
    """Not the root disk a second time, and of the type that is wanted."""
    path = mount.mount_point
    at_root = seen.of("/")
    if at_root is not None and path != "/" and mount.device == at_root.device:
        raise StorageError(
            f"{path} is a part of the root disk ({mount.source}) mounted a second time",
            expected="a volume of its own (--expect-mount)",
            advice=f"Mount the volume there, {_OR_CORRECT}",
        )
    if wanted and wanted not in (mount.fs_type, mount.fs_type.partition(".")[0], mount.fs_type.rstrip("4")):
        raise StorageError(
            f"{path} is a mount of type {mount.fs_type} ({mount.source})",
            expected=f"type {wanted} (--expect-mount)",
            advice=f"Mount the right volume there, {_OR_CORRECT}",
        )


def container() -> str:
    """What this process is contained by: ``kubernetes``, ``docker``, …; empty when nothing shows."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    for mark, runtime in (("/.dockerenv", "docker"), ("/run/.containerenv", "podman")):
        if os.path.exists(mark):
            return runtime
    if named := os.environ.get("container"):  # noqa: SIM112 - systemd's and podman's spelling
        return named
    roots = (m.fs_type for m in mounts() if m.mount_point == "/" and m.fs_type in _CONTAINER_ROOT)
    return next((f"its root is {fs_type}" for fs_type in roots), "")


def _parse(line: str) -> Mount:
    before, _, after = line.rstrip("\n").partition(" - ")
    number, _, device, root, point, options, *_ = before.split(" ")
    fs_type, source, *_ = after.split(" ")
    return Mount(int(number), device, unescape(root), unescape(point), options, fs_type, unescape(source))


def unescape(text: str) -> str:
    r"""mountinfo and fstab write space, tab, newline and backslash as \040, \011, \012, \134."""
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, char)
    return text


def _longest_prefix(path: str, table: list[Mount]) -> Mount | None:
    found = None
    for mount in table:
        below = mount.mount_point.rstrip("/") + "/"
        if (path + "/").startswith(below) and (
            found is None or len(mount.mount_point) >= len(found.mount_point)
        ):
            found = mount
    return found
