"""What a path lies on, against this machine's own mounts; and what a reboot does, against written ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotstart.errors import ModelError, StorageError
from hotstart.storage.mounts import Mount, Mounts, check_expected, container, mount_of, mounts
from hotstart.storage.reboot import after_reboot, unit_name

MEMORY = "/dev/shm"


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A directory on a real mount of its own."""
    if mount_of(MEMORY) is None or mount_of(MEMORY) == mount_of("/"):
        pytest.skip(f"{MEMORY} is no mount here")
    with tempfile.TemporaryDirectory(dir=MEMORY) as path:
        yield path


def mount(
    point: str = "/mnt/models", fs_type: str = "ext4", root: str = "/", source: str = "/dev/sdb1"
) -> Mount:
    return Mount(1, "8:17", root, point, "rw", fs_type, source)


def test_mount_of_a_file_in_memory(in_memory: str) -> None:
    found = mount_of(in_memory)
    assert found is not None
    assert (found.mount_point, found.fs_type, found.memory, found.network) == (MEMORY, "tmpfs", True, False)
    assert found.describe().startswith("tmpfs on ")


def test_mount_of_an_absent_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        mount_of(str(tmp_path / "gone"))


def test_a_mount_that_came_later_is_seen(in_memory: str, tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    now = Path("/proc/self/mountinfo").read_text()
    table.write_text("".join(line for line in now.splitlines(keepends=True) if f" {MEMORY} " not in line))
    seen = Mounts(str(table))
    table.write_text(now)
    assert seen.of(in_memory) == mount_of(in_memory)


def test_names_with_blanks_are_read_back(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text("36 35 98:0 /a\\040b /mnt/my\\040models rw,noatime shared:1 - nfs4 server:/x\\134y rw\n")
    [found] = mounts(str(table))
    assert (found.root, found.mount_point, found.source) == ("/a b", "/mnt/my models", "server:/x\\y")
    assert found.network


@pytest.mark.parametrize(
    ("fs_type", "network"), [("nfs4", True), ("lustre", True), ("fuse.s3fs", True), ("xfs", False)]
)
def test_file_systems_that_travel(fs_type: str, network: bool) -> None:
    assert mount(fs_type=fs_type).network == network


def test_expected_mount_of_the_right_type(in_memory: str) -> None:
    check_expected(MEMORY, in_memory)
    check_expected(f"{MEMORY}:tmpfs", in_memory)


def test_expected_mount_of_another_type(in_memory: str) -> None:
    with pytest.raises(StorageError, match=r"is a mount of type tmpfs .*expected type nfs"):
        check_expected(f"{MEMORY}:nfs", in_memory)


def test_expected_mount_that_is_a_plain_directory(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path} is not a mount point"):
        check_expected(str(tmp_path), str(tmp_path))


def test_expected_mount_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"--expect-mount .*does not exist"):
        check_expected(str(tmp_path / "gone"), str(tmp_path))


def test_model_beside_the_expected_mount(in_memory: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not lie on the mount"):
        check_expected(MEMORY, str(tmp_path))


def test_every_refusal_of_an_expected_mount_says_what_to_do(in_memory: str, tmp_path: Path) -> None:
    for expectation, model in (
        (str(tmp_path), str(tmp_path)),
        (str(tmp_path / "gone"), str(tmp_path)),
        (f"{MEMORY}:nfs", in_memory),
        (MEMORY, str(tmp_path)),
    ):
        with pytest.raises(StorageError) as error:
            check_expected(expectation, model)
        assert error.value.advice, expectation


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "container": "oci"}, "kubernetes"),
        ({"container": "lxc"}, "lxc"),
    ],
)
def test_container_is_named_by_what_runs_it(
    environ: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert container() == kind


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """A root directory with etc/."""
    (tmp_path / "etc" / "systemd" / "system").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "sure", "text"),
    [
        ("defaults", True, "is in /etc/fstab"),
        ("defaults,nofail", False, "has nofail"),
        ("noauto", False, "has noauto"),
        ("noauto,x-systemd.automount", True, "mounted on access"),
    ],
)
def test_fstab_decides(options: str, sure: bool, text: str, system: Path) -> None:
    (system / "etc" / "fstab").write_text(
        f"# comment\n\nUUID=1 / ext4 defaults 0 1\n/dev/sdb1 /mnt/models ext4 {options} 0 2\n"
    )
    found = after_reboot(mount(), root=str(system), table=[], inside="")
    assert (found.sure, text in found.text) == (sure, True)


def test_commented_line_of_fstab_does_not_count(system: Path) -> None:
    (system / "etc" / "fstab").write_text("#/dev/sdb1 /mnt/models ext4 defaults 0 2\n")
    found = after_reboot(mount(), root=str(system), table=[], inside="")
    assert not found.sure
    assert "'/dev/sdb1 /mnt/models ext4 defaults 0 0'" in found.text


def test_enabled_unit_brings_it_back(system: Path) -> None:
    units = system / "etc" / "systemd" / "system"
    (units / "mnt-models.mount").write_text("[Mount]\n")
    found = after_reboot(mount(), root=str(system), table=[], inside="")
    assert (found.sure, "is not enabled" in found.text) == (False, True)
    (units / "multi-user.target.wants").mkdir()
    (units / "multi-user.target.wants" / "mnt-models.mount").symlink_to("../mnt-models.mount")
    assert after_reboot(mount(), root=str(system), table=[], inside="").sure


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "-"),
        ("/mnt/models", "mnt-models"),
        ("/mnt/my-models", r"mnt-my\x2dmodels"),
        ("/.a/é", r"\x2ea-\xc3\xa9"),
    ],
)
def test_unit_names_are_systemds(path: str, name: str) -> None:
    assert unit_name(path) == name


def test_automount_brings_it_back(system: Path) -> None:
    table = [mount("/mnt", "autofs", source="systemd-1")]
    assert after_reboot(mount(), root=str(system), table=table, inside="").sure


@pytest.mark.parametrize(
    ("found", "inside", "sure", "text"),
    [
        (mount("/models"), "kubernetes", True, "volume of the pod"),
        (mount("/models", root="/p/volumes/kubernetes.io~empty-dir/x"), "kubernetes", False, "emptyDir"),
        (mount("/models"), "container", True, "container's runtime"),
        (mount("/", "overlay"), "container", True, "container's own layer"),
        (mount("/models", "tmpfs"), "", False, "gone after a reboot"),
        (mount("/models", "tmpfs"), "docker", False, "gone after a restart"),
        (mount("/"), "", True, "root file system"),
    ],
)
def test_containers_and_special_places(
    found: Mount, inside: str, sure: bool, text: str, system: Path
) -> None:
    persistence = after_reboot(found, root=str(system), table=[], inside=inside)
    assert (persistence.sure, text in persistence.text) == (sure, True)
