"""What the machine and its cgroups leave to this process, read from trees like the kernel's."""

from __future__ import annotations

from pathlib import Path

from hotstart.device import host

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def tree(tmp_path: Path, files: dict[str, object]) -> str:
    base = {
        "proc/meminfo": f"MemTotal: {16 * GIB // 1024} kB\nMemAvailable: {12 * GIB // 1024} kB\n",
        "sys/devices/system/cpu/online": "0-7",
    }
    for name, text in {**base, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return str(tmp_path)


def test_without_a_cgroup_limit_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert host.memory(tree(tmp_path, {})) == host.HostMemory(16 * GIB, "machine", 12 * GIB)


def test_without_proc_the_memory_is_that_of_the_machine(tmp_path: Path) -> None:
    found = host.memory(str(tmp_path))
    assert 0 < found.available <= found.limit
    assert found.limited_by == "machine; no /proc tells the limit of a container"


def test_the_tightest_group_on_the_path_sets_the_limit(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/pod/memory.max": 4 * GIB,
            "sys/fs/cgroup/pod/memory.current": GIB,
            "sys/fs/cgroup/pod/container/memory.max": "max",
        },
    )
    assert host.memory(root) == host.HostMemory(4 * GIB, "/sys/fs/cgroup/pod/memory.max", 3 * GIB)


def test_file_cache_of_the_group_counts_as_available(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": 4 * GIB,
            "sys/fs/cgroup/memory.current": 4 * GIB,
            "sys/fs/cgroup/memory.stat": f"anon {GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}",
        },
    )
    assert host.memory(root).available == 3 * GIB


def test_a_version_1_limit_is_seen_and_its_unlimited_number_is_not_one(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc",
        "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": 2 * GIB,
        "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": GIB,
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
    }
    found = host.memory(tree(tmp_path, files))
    assert found.limit == 2 * GIB
    assert found.limited_by == "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes"
    assert found.available == GIB


def test_a_container_sees_its_own_part_of_the_hierarchy(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc",
            "proc/self/mountinfo": "9 8 0:3 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": GIB,
        },
    )
    assert host.memory(root).limit == GIB


def test_a_group_outside_the_namespace_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../../elsewhere",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/memory.max": GIB,
        },
    )
    assert host.memory(root).limit == GIB


def test_cores_are_the_affinity_of_the_process(tmp_path: Path) -> None:
    assert host.cores(tree(tmp_path, {}), affinity=frozenset({1, 5})) == 2


def test_a_quota_of_one_and_a_half_cores_counts_as_one(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/cpu.max": "150000 100000",
        },
    )
    assert host.cores(root, affinity=frozenset(range(8))) == 1


def test_a_version_1_quota_is_seen(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/",
            "proc/self/mountinfo": "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": 300000,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000,
        },
    )
    assert host.cores(root, affinity=frozenset(range(8))) == 3


def test_this_machine_has_memory_and_cores() -> None:
    assert 0 < host.memory().available <= host.memory().limit
    assert host.cores() >= 1
