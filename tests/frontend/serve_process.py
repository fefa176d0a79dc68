"""A frontend on inherited sockets: ``serve_process.py LISTENER ENGINE MODEL_DIR SHUTDOWN_TIMEOUT``.

Prints each state of the start on a line, and logs to stderr as JSON.
"""

from __future__ import annotations

import socket
import sys

import uvloop

from hotstart.checkpoint.base import ModelFiles
from hotstart.cli import logs
from hotstart.config.settings import Config, HttpConfig, LogConfig, ModelConfig
from hotstart.frontend.engine_writer import EngineWriter
from hotstart.frontend.server import serve
from hotstart.frontend.start import load_text
from hotstart.frontend.startup import Checked, Startup
from hotstart.timeline import Timeline


def main(listener: str, engine: str, model_dir: str, timeout: str) -> int:
    logs.setup(LogConfig(log_format="json"))
    config = Config(
        model=ModelConfig(model="tiny", served_model_name=("tiny",)),
        http=HttpConfig(shutdown_timeout=float(timeout)),
    )
    files = ModelFiles(
        path=model_dir, config={"vocab_size": 400}, tokenizer_json=f"{model_dir}/tokenizer.json"
    )
    startup = Startup()
    text = load_text(files, config)
    startup.pass_checks(Checked(files=files, text=text, served_names=("tiny",), max_model_len=64))
    startup.listen(lambda: print(startup.state.value, flush=True))
    print("passed", flush=True)
    sockets = [socket.socket(fileno=int(listener))]
    writer = EngineWriter(socket.socket(fileno=int(engine)))
    return uvloop.run(serve(config, sockets, writer, Timeline("frontend"), startup))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
