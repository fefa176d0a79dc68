"""How fast ranges of files come over HTTP and TLS: the plainest client, ours, and the cloud's.

nginx on loopback serves files that lie in memory; each client reads all of them once per round, in
8 MiB ranges by some threads, into memory touched beforehand. Rounds alternate; the table has medians
of GB/s and the client's CPU seconds.

    python benchmarks/http_readers.py --size-mb 1024 --rounds 5 --threads 4

Measured with 0.54 GB and 4 threads on 2 cores, which nginx needs too (it encrypts as long as we decrypt),
medians of 5 [min-max]:

    http    http.client, readinto   1.56 [1.30-3.16] GB/s   0.18 CPU s
    http    our source              1.78 [1.44-2.22]        0.21
    http    obstore.get_range       1.44 [1.05-1.59]        0.36
    https   http.client, readinto   0.67 [0.51-0.74]        0.47
    https   our source              0.70 [0.28-0.94]        0.49
    https   obstore.get_range       0.54 [0.39-0.78]        0.82

With 2 and 8 threads TLS was 0.37 and 0.59 by us, 0.44 and 0.62 by obstore. So on TLS the two are equally
fast within the noise where they share the cores with the server, and ours takes 0.6 of the CPU, which an
import under way wants: one path, ours, serves both.
"""

from __future__ import annotations

import argparse
import http.client
import os
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hotstart.storage.http_connection import HttpConnection
from hotstart.storage.location import parse_location
from hotstart.storage.object_store import NEVER, ObjectStore

RANGE = 8 << 20
CONFIG = """daemon off; pid {folder}/pid; error_log {folder}/error.log; worker_processes 2;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; keepalive_requests 100000; client_body_temp_path {folder}/b;
  proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  server {{ listen 127.0.0.1:{plain}; root {folder}/files; }}
  server {{ listen 127.0.0.1:{tls} ssl; root {folder}/files;
    ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem; }}
}}
"""

Take = Callable[[], tuple[str, int, memoryview] | None]
"""The next range: file, offset, destination."""


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--size-mb", type=int, default=1024)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int, default=4)
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        files = write_files(folder / "files", options.size_mb << 20)
        memory = bytearray(sum(files.values()))
        with nginx(folder) as ports:
            results: dict[tuple[str, str], list[tuple[float, float]]] = {}
            for _ in range(options.rounds):
                for scheme, port in ports.items():
                    for client, reader in CLIENTS.items():
                        took = measure(reader(scheme, port, folder), files, memory, options.threads)
                        results.setdefault((scheme, client), []).append(took)
    total = len(memory) / 1e9
    print(f"{total:.2f} GB, {options.threads} threads, {os.cpu_count()} cores, {options.rounds} rounds\n")
    print("| scheme | client | GB/s: median [min-max] | CPU s |\n| --- | --- | --- | --- |")
    for (scheme, client), rounds in results.items():
        rates = sorted(total / seconds for seconds, _ in rounds)
        rate = f"{statistics.median(rates):.2f} [{rates[0]:.2f}-{rates[-1]:.2f}]"
        print(f"| {scheme} | {client} | {rate} | {statistics.median(cpu for _, cpu in rounds):.2f} |")


def write_files(folder: Path, size: int) -> dict[str, int]:
    """Four files of random bytes, which anybody may read."""
    folder.mkdir()
    folder.parent.chmod(0o755)
    block = os.urandom(16 << 20)
    for number in range(4):
        with (folder / f"{number}.bin").open("wb") as file:
            for _ in range(size // 4 // len(block)):
                file.write(block)
    return {path.name: path.stat().st_size for path in sorted(folder.iterdir())}


@contextmanager
def nginx(folder: Path) -> Iterator[dict[str, int]]:
    """Its ports by scheme."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    ports = {scheme: free_port() for scheme in ("http", "https")}
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, plain=ports["http"], tls=ports["https"]))
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    with subprocess.Popen(
        [program, "-c", str(config), "-p", str(folder)], stderr=subprocess.DEVNULL
    ) as server:
        try:
            time.sleep(1.0)
            yield ports
        finally:
            server.send_signal(signal.SIGTERM)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def measure(
    reader: Callable[[Take], None], files: dict[str, int], memory: bytearray, threads: int
) -> tuple[float, float]:
    """Seconds by the clock and of this process's CPU."""
    view, at = memoryview(memory), 0
    ranges: deque[tuple[str, int, memoryview]] = deque()
    for name, size in files.items():
        for offset in range(0, size, RANGE):
            length = min(RANGE, size - offset)
            ranges.append((name, offset, view[at : at + length]))
            at += length

    def take() -> tuple[str, int, memoryview] | None:
        try:
            return ranges.popleft()
        except IndexError:
            return None

    workers = [threading.Thread(target=reader, args=(take,)) for _ in range(threads)]
    began, cpu = time.perf_counter(), time.process_time()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began, time.process_time() - cpu


def trusting(folder: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / "cert.pem"))


def plain_client(scheme: str, port: int, folder: Path) -> Callable[[Take], None]:
    """``http.client`` and ``readinto``: the ceiling of a client without care for faults."""
    context = trusting(folder)

    def run(take: Take) -> None:
        connection = (
            http.client.HTTPSConnection("127.0.0.1", port, context=context)
            if scheme == "https"
            else http.client.HTTPConnection("127.0.0.1", port)
        )
        while (item := take()) is not None:
            name, offset, view = item
            connection.request(
                "GET", f"/{name}", headers={"Range": f"bytes={offset}-{offset + len(view) - 1}"}
            )
            response = connection.getresponse()
            at = 0
            while at < len(view):
                at += response.readinto(view[at:])
            response.read()
        connection.close()

    return run


def our_connection(scheme: str, port: int, folder: Path) -> Callable[[Take], None]:
    """:class:`HttpConnection` alone."""
    context = trusting(folder)

    def run(take: Take) -> None:
        connection = HttpConnection((scheme, "127.0.0.1", port), NEVER, patience=60.0, tls=context)
        while (item := take()) is not None:
            name, offset, view = item
            connection.ask(f"/{name}", {"Range": f"bytes={offset}-{offset + len(view) - 1}"}, NEVER)
            at = 0
            while at < len(view):
                at += connection.receive_into(view[at:], NEVER)
        connection.close()

    return run


def our_source(scheme: str, port: int, folder: Path) -> Callable[[Take], None]:
    """All of it: pool, checks, replacement of slow ranges."""
    store = ObjectStore(parse_location(f"{scheme}://127.0.0.1:{port}"), environ={}, patience=60.0)
    store.settings.ca_file = str(folder / "cert.pem")

    def run(take: Take) -> None:
        while (item := take()) is not None:
            name, offset, view = item
            size = (folder / "files" / name).stat().st_size
            source = store.source(name, size, "")
            source.read_into(view, offset, NEVER)
        store.close()

    return run


def clouds_client(scheme: str, port: int, folder: Path) -> Callable[[Take], None]:
    """``obstore.get_range`` and a copy, since it cannot write into memory of ours."""
    import obstore
    from obstore.store import HTTPStore

    options = {"allow_http": True, "allow_invalid_certificates": True}
    store = HTTPStore(f"{scheme}://127.0.0.1:{port}", client_options=options)  # type: ignore[arg-type]

    def run(take: Take) -> None:
        while (item := take()) is not None:
            name, offset, view = item
            view[:] = memoryview(obstore.get_range(store, name, start=offset, length=len(view)))

    return run


CLIENTS = {
    "http.client, readinto": plain_client,
    "our connection": our_connection,
    "our source": our_source,
    "obstore.get_range": clouds_client,
}

if __name__ == "__main__":
    main()
