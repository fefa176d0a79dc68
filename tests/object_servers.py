"""Object stores for tests: real servers of other people, each over a folder, each a child process."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from running_server import DEADLINE, free_port

KEY, SECRET = "AKIAEXAMPLE", "not-a-secret-of-anybody"


class S3Server:
    """``with S3Server(folder) as s3``: hadro, whose buckets are the folders in ``root``.

    It checks signatures, and can be slow or faulty by its own flags (``--latency-ms`` and so on).
    """

    def __init__(self, root: Path, *flags: str) -> None:
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.environ = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "eu-west-2",
        }
        program = Path(sys.executable).with_name("hadro")
        auth = ("--access-key", KEY, "--secret-key", SECRET)
        self._process = subprocess.Popen(
            [str(program), str(root), "--port", str(self.port), *auth, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> S3Server:
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            assert self._process.poll() is None, "the object store ended"
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.02)
            else:
                return self
        raise AssertionError("the object store does not listen")

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE)
