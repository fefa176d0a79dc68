"""Ceph's radosgw: an S3 server that others run in production, with one monitor and one in-memory OSD.

Debian: ``apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from object_servers import KEY, SECRET
from running_server import free_port

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool")
ABSENT = ", ".join(name for name in PROGRAMS if shutil.which(name) is None)
"""Programs that are not installed; empty: it can be started."""
_SECONDS = 60.0
_LOST_RACES = ("wrong fsid", "problem getting command descriptions")
"""What the monitor answers to a command that is sent before it, or its sender, knows the cluster."""


class RadosGateway:
    """``with RadosGateway(tmp_path) as s3``: ``s3.environ`` is how a client reaches it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.endpoint = f"http://127.0.0.1:{free_port()}"
        self.environ = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "default",
        }

    def __enter__(self) -> RadosGateway:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait(_SECONDS)

    def upload(self, bucket: str, files: Mapping[str, bytes], *, public: bool = False) -> None:
        """Make a bucket and put objects into it; ``public`` ones may be read by all, and listed by none."""
        import obstore

        client = self.client(bucket)
        self._put(obstore.sign(self.client("x", virtual=True), "PUT", bucket, timedelta(hours=1)))
        for key, content in files.items():
            headers = {"x-amz-acl": "public-read"} if public else {}
            self._put(obstore.sign(client, "PUT", key, timedelta(hours=1)), content, headers)

    def client(self, bucket: str, *, virtual: bool = False) -> Any:
        """The bucket as ``obstore`` has it; ``virtual``: keys begin with the bucket's name."""
        from obstore.store import S3Store

        config: dict[str, Any] = {
            "endpoint": self.endpoint,
            "region": "default",
            "access_key_id": KEY,
            "secret_access_key": SECRET,
            "virtual_hosted_style_request": virtual,
        }
        return S3Store(bucket, config=config, client_options={"allow_http": True})

    def _put(self, url: str, content: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        request = urllib.request.Request(url, data=content, headers=dict(headers or {}), method="PUT")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            assert answer.status == 200

    def _start(self) -> None:
        cluster, osd = str(uuid.uuid4()), str(uuid.uuid4())
        monitor = f"v1:127.0.0.1:{free_port()}"
        config, map_file = self._folder / "ceph.conf", self._folder / "monmap"
        config.write_text(
            _CONFIG.format(folder=self._folder, cluster=cluster, monitor=monitor, endpoint=self.endpoint[7:])
        )
        for name in ("mon", "osd", "rgw"):
            (self._folder / name).mkdir()
        with_config = ("-c", str(config))
        self._run(
            "monmaptool",
            "--create",
            "--clobber",
            "--fsid",
            cluster,
            "--addv",
            "a",
            f"[{monitor}]",
            str(map_file),
        )
        self._run(
            "ceph-mon", *with_config, "--mkfs", "-i", "a", "--monmap", str(map_file), "--keyring", "/dev/null"
        )
        self._spawn("ceph-mon", "-f", *with_config, "-i", "a")
        self._run("ceph", *with_config, "osd", "new", osd)
        self._run("ceph-osd", *with_config, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._spawn_osd(with_config)
        user = (
            "user",
            "create",
            "--uid=test",
            "--display-name=test",
            f"--access-key={KEY}",
            f"--secret-key={SECRET}",
        )
        self._run("radosgw-admin", *with_config, *user)
        self._spawn("radosgw", "-f", *with_config, "-n", "client.rgw.a")
        self._wait()

    def _spawn_osd(self, with_config: tuple[str, ...]) -> None:
        """Again where it ends at once: see ``_LOST_RACES``."""
        for _ in range(8):
            self._spawn("ceph-osd", "-f", *with_config, "-i", "0")
            while self._processes[-1].poll() is None:
                if '"num_up_osds":1' in self._run("ceph", *with_config, "osd", "stat", "-f", "json"):
                    return
            self._processes.pop()
        raise AssertionError((self._folder / "ceph-osd.out").read_text())

    def _run(self, *command: str) -> str:
        said = ""
        for _ in range(8):
            done = subprocess.run(
                command, capture_output=True, timeout=_SECONDS, check=False, env=_environment()
            )
            if done.returncode == 0:
                return done.stdout.decode(errors="replace")
            said = done.stderr.decode(errors="replace")[-2000:]
            if not any(race in said for race in _LOST_RACES):
                break
            time.sleep(0.5)  # it is starting: nothing tells when it has
        raise AssertionError(f"{command[0]}: {said}")

    def _spawn(self, *command: str) -> None:
        with open(self._folder / f"{command[0]}.out", "wb") as out:
            self._processes.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=_environment()
                )
            )

    def _wait(self) -> None:
        deadline = time.monotonic() + _SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < deadline:
            for process in self._processes:
                assert process.poll() is None, f"{process.args[0]} ended"  # type: ignore[index]
            try:
                opener.open(self.endpoint, timeout=5).close()
            except urllib.error.HTTPError as error:
                error.close()
                return
            except OSError:
                time.sleep(0.1)
            else:
                return
        raise AssertionError("the object store does not answer")


def _environment() -> dict[str, str]:
    return {**os.environ, "CEPH_ARGS": ""}


_CONFIG = """[global]
fsid = {cluster}
mon_host = {monitor}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
osd_pool_default_size = 1
osd_pool_default_min_size = 1
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
osd_pool_default_pg_num = 8
osd_pool_default_pgp_num = 8
osd_pool_default_pg_autoscale_mode = off
mon_max_pg_per_osd = 1000
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
run_dir = {folder}
admin_socket = {folder}/$name.asok
pid_file = {folder}/$name.pid
log_file = {folder}/$name.log
osd_objectstore = memstore
memstore_device_bytes = 1073741824
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
[client]
keyring = /dev/null
[client.rgw.a]
rgw_frontends = beast endpoint={endpoint}
"""
