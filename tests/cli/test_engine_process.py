"""The engine as a child: its end is news to every thread that waits for it."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hotstart.cli import engine_process
from hotstart.cli.engine_process import EngineProcess


@pytest.mark.parametrize("turn", range(5))
def test_all_who_wait_for_the_same_child_learn_how_it_ended(
    turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_CODE", "import os; os._exit(7)  # {fd} {parent}")
    engine = EngineProcess()
    ends: list[int | None] = []
    waiting = [threading.Thread(target=lambda: ends.append(engine.reap(60))) for _ in range(8)]
    for thread in waiting:
        thread.start()
    for thread in waiting:
        thread.join()
    engine.socket.close()
    assert ends == [7] * 8


def test_a_signal_to_the_group_does_not_end_an_engine_whose_interpreter_is_not_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_process, "_CODE", "import sys; sys.stdin.read(); {fd}, {parent}")
    read, write = os.pipe()
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        engine = EngineProcess()
    finally:
        os.dup2(saved, 0)
        for fd in (read, saved):
            os.close(fd)
    os.kill(engine.pid, signal.SIGTERM)
    os.close(write)
    assert engine.reap(60) == 0
    engine.socket.close()
