"""SIGTERM and SIGINT ask a run to save and stop; they do not stop it.

A signal reaches ranks at different moments, so no rank may act on its own: each contributes `flag` to a sum over all
ranks (the step's own reduction, where there is one) and all stop after the same step. A second SIGINT stops at once.
Left out on purpose: SIGKILL, which nobody hears; checkpoints are made to survive it.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist


class StopRequest:
    """Listens from construction to `close()`, which gives back the handlers it found."""

    def __init__(self) -> None:
        self._heard: str | None = None
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGTERM, signal.SIGINT)}

    @property
    def flag(self) -> float:
        """1.0 if this rank was asked to stop, else 0.0: a term of a sum over ranks."""
        return float(self._heard is not None)

    def agreed(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether any rank was asked to stop: the same answer on all. Collective over `group` (gloo), one number."""
        flags = torch.tensor(self.flag)
        dist.all_reduce(flags, group=group)
        return flags.item() > 0

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame) -> None:
        if self._heard is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._heard = signal.Signals(number).name
        message = f"{self._heard}: saving a checkpoint after this step, then stopping\n"
        os.write(sys.stderr.fileno(), message.encode())  # print is not safe here: it may be what was interrupted
