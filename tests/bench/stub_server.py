"""A server with a scripted start, for tests of the start benchmark: counts requests instead of waiting.

python stub_server.py PORT [--ready-after N] [--early hold|refuse] [--no-health] …
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PHASES = {"phases": [{"name": "read", "process": "engine", "start": 0.1, "end": 0.3}]}


class Stub(ThreadingHTTPServer):
    daemon_threads = True
    options: argparse.Namespace
    health_requests = 0
    ready = threading.Event()

    def count_health(self) -> None:
        self.health_requests += 1
        if self.health_requests > self.options.ready_after:
            self.ready.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    server: Stub

    def do_GET(self) -> None:
        options = self.server.options
        health = "/v1/models" if options.no_health else "/health"
        if self.path == health:
            self.server.count_health()
        status = 200 if self.server.ready.is_set() else 503
        if self.path == "/startup.json" and options.phases:
            self.reply(200, PHASES)
        elif self.path == "/v1/models":
            self.reply(status, {"data": [{"id": "stub"}]})
        elif self.path == health:
            self.reply(status, {})
        else:
            self.reply(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.options.early == "refuse" and not self.server.ready.is_set():
            self.reply(503, {"error": "starting"})
            return
        self.server.ready.wait()
        if self.server.options.rejects:
            self.reply(400, {"error": f"no {self.server.options.rejects} here"})
        elif body["model"] != "stub":
            self.reply(404, {"error": f"no model {body['model']}"})
        else:
            self.stream("" if self.server.options.silent else "word ")

    def stream(self, text: str) -> None:
        word = {"delta": {"reasoning_content": text}} if self.server.options.thinks else {"text": text}
        chunks = [{"choices": [{"text": ""}]}, *[{"choices": [word]}] * 3]
        chunks.append({"choices": [], "usage": {"completion_tokens": 4}})
        data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.send(200, "text/event-stream", data.encode())

    def reply(self, status: int, document: object) -> None:
        self.send(status, "application/json", json.dumps(document).encode())

    def send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--ready-after", type=int, default=3, help="503 for so many looks at its health")
    parser.add_argument("--early", choices=("hold", "refuse"), default="hold")
    parser.add_argument("--no-health", action="store_true")
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--silent", action="store_true", help="streams hold no text")
    parser.add_argument("--thinks", action="store_true", help="what is streamed are thoughts")
    parser.add_argument("--rejects", help="every request with this word")
    parser.add_argument("--dies", help="print this and exit with 3")
    parser.add_argument("--journal", help="a file to which --early is added")
    parser.add_argument("--prints", action="append", default=[], help="a line of its log")
    parser.add_argument("--reads", help="a file that is read before it answers")
    parser.add_argument("--orphan", action="store_true", help="leave a process behind")
    options = parser.parse_args()
    if options.dies:
        print(options.dies)
        return 3
    for line in options.prints:
        print(line, flush=True)
    if options.journal:
        with open(options.journal, "a") as journal:
            journal.write(f"{options.early}\n")
    if options.reads:
        with open(options.reads, "rb", buffering=0) as file:
            file.read()
    if options.orphan:
        waiter = "import signal; signal.pause()"
        subprocess.Popen([sys.executable, "-c", waiter], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with Stub(("127.0.0.1", options.port), Handler) as server:
        server.options = options
        server.serve_forever(poll_interval=0.01)
    return 0


if __name__ == "__main__":
    sys.exit(main())
