"""Will a mount come back after a reboot? Whoever makes it is looked up; nothing is assumed.

A server that starts by itself after a power cut finds an empty directory when the model's volume
was mounted by hand. The answer is at worst a warning, never a reason to refuse.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from msgspec import Struct

from hotstart.storage.mounts import Mount, container, mounts, unescape

_UNIT_FOLDERS = ("etc/systemd/system", "usr/local/lib/systemd/system", "usr/lib/systemd/system")


class Persistence(Struct, frozen=True):
    """``sure``: the mount comes back, or only the reader can know; otherwise ``text`` is a warning that says
    what to do.
    """

    sure: bool
    text: str


def after_reboot(
    mount: Mount, *, root: str = "/", table: list[Mount] | None = None, inside: str | None = None
) -> Persistence:
    """Who makes ``mount`` again after a reboot, if anybody.

    ``root`` is where etc/ and usr/ lie, ``table`` the mounts of this process and ``inside`` the kind
    of container; all three are looked up when left out.
    """
    point = mount.mount_point
    inside = container() if inside is None else inside
    if mount.memory:
        event = "restart" if inside else "reboot"
        return Persistence(
            False, f"{point} is in memory ({mount.fs_type}): its files are gone after a {event}"
        )
    if inside:
        return _in_container(mount, inside)
    if point == "/":
        return Persistence(True, "on the root file system")
    by_autofs = [m for m in (mounts() if table is None else table) if m.fs_type == "autofs"]
    if any(point == m.mount_point or point.startswith(m.mount_point + "/") for m in by_autofs):
        return Persistence(True, f"{point} is mounted on access (automount)")
    return (
        _in_fstab(mount, root)
        or _in_systemd(mount, root)
        or Persistence(
            False,
            f"nothing known mounts {point} after a reboot (no line in /etc/fstab, no systemd unit, no "
            "automount): add a line to /etc/fstab, such as "
            f"'{mount.source} {point} {mount.fs_type} defaults 0 0'",
        )
    )


def unit_name(mount_point: str) -> str:
    """The name systemd gives to a mount point, without ``.mount``: systemd.unit(5), string escaping."""
    path = mount_point.strip("/")
    escaped = re.sub(
        r"[^A-Za-z0-9:_./]", lambda m: "".join(f"\\x{byte:02x}" for byte in os.fsencode(m[0])), path
    )
    if escaped.startswith("."):
        escaped = "\\x2e" + escaped[1:]
    return escaped.replace("/", "-") or "-"


def _in_container(mount: Mount, inside: str) -> Persistence:
    """Mounts are made by whoever starts the container; what lies behind them is the host's business."""
    if mount.mount_point == "/":
        # Images that hold their model are usual, and cannot be told from files that were copied into a
        # container: of those the next container says at once that there is no such path.
        return Persistence(
            True,
            "the model lies in the container's own layer: a new container has it only if its image has it",
        )
    if "kubernetes.io~empty-dir" in mount.root:
        return Persistence(
            False, f"{mount.mount_point} is an emptyDir volume: a new pod starts without its files"
        )
    if inside == "kubernetes":
        return Persistence(True, f"{mount.mount_point} is a volume of the pod: the cluster mounts it again")
    return Persistence(
        True,
        f"{mount.mount_point} was mounted by the container's runtime, which does so at each start; "
        "whether the host mounts what lies behind it after a reboot cannot be seen from here",
    )


def _in_fstab(mount: Mount, root: str) -> Persistence | None:
    point = mount.mount_point
    try:
        with open(os.path.join(root, "etc/fstab"), encoding="utf-8", errors="surrogateescape") as file:
            rows = [line.split() for line in file if not line.lstrip().startswith("#")]
    except OSError:
        return None
    row = next((row for row in rows if len(row) > 2 and unescape(row[1]).rstrip("/") == point), None)
    if row is None:
        return None
    options = row[3].split(",") if len(row) > 3 else []
    if "x-systemd.automount" in options:
        return Persistence(True, f"{point} is mounted on access (/etc/fstab)")
    if "noauto" in options:
        return Persistence(
            False, f"{point} has noauto in /etc/fstab: nothing mounts it after a reboot; remove noauto"
        )
    if "nofail" in options:
        return Persistence(
            False,
            f"{point} has nofail in /etc/fstab: a reboot does not wait for it; let the server's unit wait "
            f"(RequiresMountsFor={point}) or remove nofail",
        )
    return Persistence(True, f"{point} is in /etc/fstab")


def _in_systemd(mount: Mount, root: str) -> Persistence | None:
    """Its unit file, and whether another unit pulls it in: the links that ``systemctl enable`` makes."""
    name = unit_name(mount.mount_point)
    units = [f"{name}.automount", f"{name}.mount"]
    for unit in units:
        if any(os.path.lexists(os.path.join(folder, unit)) for folder in _link_folders(root)):
            return Persistence(True, f"{mount.mount_point} is mounted by the systemd unit {unit}")
    for unit in units:
        if any(os.path.exists(os.path.join(root, folder, unit)) for folder in _UNIT_FOLDERS):
            return Persistence(
                False,
                f"the systemd unit {unit} is not enabled, so nothing mounts {mount.mount_point} after a "
                f"reboot: systemctl enable '{unit}'",
            )
    return None


def _link_folders(root: str) -> Iterator[str]:
    for folder in _UNIT_FOLDERS:
        base = os.path.join(root, folder)
        if os.path.isdir(base):
            for name in os.listdir(base):
                if name.endswith((".wants", ".requires")):
                    yield os.path.join(base, name)
