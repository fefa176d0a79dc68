"""What ``hotstart check`` says of the place that a model lies in, and of the one for its copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotstart.checkpoint.folder import LocalFolder
from hotstart.checkpoint.resolve import is_path
from hotstart.errors import ConfigError
from hotstart.storage.access import who
from hotstart.storage.location import is_location, shown
from hotstart.storage.mounts import check_expected, container, mount_of
from hotstart.storage.reboot import after_reboot

if TYPE_CHECKING:
    from hotstart.cli.check import Report
    from hotstart.config.settings import Config


def describe_folder(report: Report) -> str:
    """Which folder it is, and who reads it."""
    assert report.folder is not None
    path = report.folder.path
    if isinstance(report.folder, LocalFolder):
        return f"{path}, open to {who()}"
    return f"{path}, whose small files are in {report.path}"


def check_place(report: Report) -> None:
    """What the folder lies on, and whether that will be there tomorrow."""
    with report.check("storage"):
        if not isinstance(report.folder, LocalFolder):
            from hotstart.checkpoint.remote import ObjectFolder

            assert isinstance(report.folder, ObjectFolder)
            report.ok("storage", report.folder.store.settings.described)
            return
        report.mount = mount_of(report.path)
        if report.mount is None:
            report.warn(
                "storage",
                "/proc cannot be read: what the model lies on, whether that comes back after a reboot, and "
                "the limits of a container are unknown; mount it (mount -t proc proc /proc)",
            )
            return
        report.ok("storage", report.mount.describe())
        inside = container()
        persistence = after_reboot(report.mount, inside=inside)
        name = "restart" if inside else "reboot"  # what a container goes through
        (report.ok if persistence.sure else report.warn)(name, persistence.text)


def check_mount(config: Config) -> None:
    """``--expect-mount``, of a model that :func:`~hotstart.cli.check.located` has found or has not.

    Raises ConfigError for a model that lies on no mount, and StorageError.
    """
    model, expectation = config.model, config.load.expect_mount
    if expectation is None:
        return
    if is_location(model.model):
        raise ConfigError(
            f"--expect-mount {expectation} is given, and {shown(model.model)} is read over the network "
            "from no mount",
            expected="the directory of a model, or no --expect-mount",
            advice="Leave --expect-mount out; where the model is mounted too, pass its directory",
        )
    check_expected(expectation, model.path or (model.model if is_path(model.model) else ""))


def check_disk_cache(config: Config, report: Report) -> None:
    """``--disk-cache``; whether it can be written is asked by :func:`check_room_for_copies`."""
    if config.load.disk_cache is None:
        return
    from hotstart.storage.disk_copy import DiskCopies, Limit

    with report.check("disk cache"):
        limit = Limit.parse(config.load.disk_cache)
        if report.folder is None:
            report.skip("disk cache", "needs a model")
        elif isinstance(report.folder, LocalFolder):
            report.skip("disk cache", "the model lies in a directory, of which no copies are made")
        else:
            from hotstart.checkpoint.remote import ObjectFolder

            assert isinstance(report.folder, ObjectFolder)
            report.folder.copies = DiskCopies(limit)


def check_room_for_copies(report: Report) -> None:
    """Whether copies can be written; a start finds it out when it writes some, and goes on without."""
    from hotstart.checkpoint.remote import ObjectFolder
    from hotstart.config.cache_root import try_to_write

    if not isinstance(report.folder, ObjectFolder) or report.folder.copies is None:
        return
    limit = report.folder.copies.limit
    if obstacle := try_to_write(limit.directory):
        report.warn(
            "disk cache",
            f"{limit.directory} cannot be written ({obstacle}): every start reads from the store",
        )
    else:
        report.ok("disk cache", f"{limit.directory}, {limit.bound}")
