"""What a person sees while a family runs: a bar over all steps with the time that is left, and one a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from recipes.result import read_result

if TYPE_CHECKING:
    from recipes.ablate.runs import Planned

WINDOW = 3600.0  # seconds over which the speed is measured that the remaining time is made of


class Display:
    """Bars on a terminal; a line a finished run everywhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, speed_estimate_period=WINDOW)
        self._total: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}
        self._steps: dict[str, int] = {}

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def begin(self, waiting: Sequence["Planned"], finished: int) -> None:
        """The runs to make. Steps that they have behind them already are no work to come."""
        self.console.print(f"{finished} runs finished before, {len(waiting)} to make")
        self._steps = {run.name: run.step() for run in waiting}
        left = sum(run.steps - self._steps[run.name] for run in waiting)
        self._total = self._progress.add_task("all steps", total=left)

    def update(self, run: "Planned") -> None:
        """Where a run stands."""
        if run.name not in self._tasks:
            self._tasks[run.name] = self._progress.add_task(run.name, total=run.steps)
        step = run.step()
        self._progress.update(self._tasks[run.name], completed=step)
        self._progress.advance(self._total, max(0, step - self._steps[run.name]))
        self._steps[run.name] = max(step, self._steps[run.name])

    def end(self, run: "Planned", reason: str | None) -> None:
        """A run is over, for a reason if it failed."""
        self._progress.remove_task(self._tasks.pop(run.name))
        if reason:
            self.console.print(f"{run.name} FAILED: {reason}")
            return
        validations = read_result(run.folder)["validations"]
        loss = f"held-out loss {validations[-1]['validation/loss']:.4f}" if validations else "not validated"
        self.console.print(f"{run.name}: {loss}")
