"""The compiler's processes beside a run that is asked to stop."""

import os
import subprocess
import sys

from components.parallel import compile
from tests.models import tiny

PROGRAM = """
import signal, time
from components.parallel.compile import start_workers
from torch._inductor.async_compile import AsyncCompile

def after(*numbers):
    for number in numbers:
        workers.send_signal(number)
    time.sleep(1)
    return "alive" if workers.poll() is None else "ended"

start_workers()
workers = AsyncCompile.process_pool().process
starting = after(signal.SIGTERM, signal.SIGINT)
time.sleep(2)
later, killed = after(signal.SIGTERM, signal.SIGINT), after(signal.SIGKILL)
print(starting, later, killed, signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""


def test_what_asks_a_run_to_stop_leaves_the_compilers_processes_at_work():
    """They hear nothing of it while they start, nor later; a kill they hear, and their parent blocks no signal."""
    several = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "TORCHINDUCTOR_WORKER_START": "subprocess"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | several, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.strip() == "alive alive ended set()", ended.stderr


def test_they_are_started_for_what_inductor_compiles_alone(monkeypatch):
    started = []
    monkeypatch.setattr(compile, "start_workers", lambda: started.append(True))
    for backend in ("aot_eager", "inductor"):
        assert not started
        compile.apply_compile(tiny.model(), ("model",), backend, "error")
    assert started == [True]
