"""A recipe's whole step, measured on the device that is here, beside what that device reaches at best.

    python -m recipes.benchmark step --job.config_file train_configs/hymo_primary.toml --json-file step.json

The run is built and stepped by the trainer's own functions, on random tokens unless it is told to read the recipe's
text. It prints: the device's ceilings in this same run; forward and backward, and the whole step; what the update
takes by optimizer; device time by part of the model; and the optimisations that a recipe switches on and off, each
alone and all together. Every flag of the recipe works too. Nothing is saved.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console

from components.checkpoint.signals import StopRequest
from components.data.batch import Batch
from components.data.packing import pack
from components.metrics.flops import peak_tflops, throughput
from components.parallel.process_group import Place, init, shutdown
from recipes import pretrain
from recipes.benchmark.parts import time_by_part, wrapped
from recipes.benchmark.show import show
from recipes.benchmark.timing import Stopwatch, busy, device, measure_ceilings
from recipes.job import Job, load, load_or_exit
from recipes.job.flags import split_options

GIB = 2**30
SWITCHES = ("fused_gdn", "moe_mixed_precision", "compile", "cuda_graph")
ALONE = ("--validation.no_enable", "--checkpoint.no_enable")
PROFILED = 4  # micro-batches whose kernels are counted
EAGER = ("--compile.enable=false", "--cuda_graph.enable=false")

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A recipe's whole step, measured. Flags of the recipe, such as --training.local_batch_size, work too."""

    data: Literal["synthetic", "recipe"] = "synthetic"  # random tokens, or the recipe's text
    accumulation: int | None = None  # micro-batches a step on a rank; as the recipe says if left out
    micro_batches: int = 8  # timed
    steps: int = 5  # timed
    parts: bool = True  # device time by part of the model
    optimisations: bool = True  # each alone and all together
    json_file: Path | None = None  # also write every figure there


def step(arguments: list[str]) -> None:
    options, flags = split_options(Options, "python -m recipes.benchmark step", arguments)
    flags = [*flags, *ALONE]
    job = load_or_exit(flags, needs_data=options.data == "recipe")
    bench = Bench(options, flags, init(job.comm.init_timeout_seconds))
    figures = bench.figures()
    if bench.place.rank == 0:
        show(figures, Console(width=None if sys.stdout.isatty() else 120, highlight=False))
        if options.json_file:
            options.json_file.write_text(json.dumps(figures, indent=1))
    shutdown(0)


class Bench:
    """One recipe and its variants on one device."""

    def __init__(self, options: Options, flags: list[str], place: Place):
        self.options, self.flags, self.place = options, flags, place
        self.ceilings = measure_ceilings(place.device)
        name = device(place.device)["name"]
        self.peak = peak_tflops(name) if place.device.type == "cuda" else None

    def figures(self) -> Figures:
        job, whole = self.job(), self.job(accumulation=False).training
        return {
            "recipe": [job.job.config_file, *job.job.overlay],
            "device": device(self.place.device),
            "ranks": self.place.ranks,
            "data": self.options.data,
            "ceilings": {**self.ceilings, "stated_tflops": self.peak},
            "tokens": {
                "micro_batch": job.training.local_batch_size * job.training.seq_len,
                "step": job.training.tokens_per_step,
                "recipe": whole.steps * whole.tokens_per_step,
            },
            "flops_per_token": self.flops(job),
            **self.attempt((), self._whole),
            **({"parts_ms": self.attempt(EAGER, self._parts, micro_batches=1)} if self.options.parts else {}),
            **({"optimisations": self._optimisations()} if self.options.optimisations else {}),
        }

    def job(self, flags: Iterable[str] = (), micro_batches: int | None = None, accumulation: bool = True) -> Job:
        """The recipe with more flags, and another number of micro-batches a step."""
        job = load([*self.flags, *flags], needs_data=self.options.data == "recipe", ranks=self.place.ranks)
        number = micro_batches or (self.options.accumulation if accumulation else None)
        if number is None:
            return job
        size = number * job.training.local_batch_size * self.place.ranks
        return replace(job, training=replace(job.training, global_batch_size=size))

    def attempt(self, flags: Iterable[str], measure: Callable[[pretrain.Run], Figures], **changes) -> Figures:
        """What `measure` finds of a run with these flags, or why it could not. Nothing of the run stays."""
        try:
            return measure(self._run(self.job(flags, **changes)))
        except Exception as error:  # recipes, compilers, drivers and allocators raise what they like
            return {"error": str(error).strip() or type(error).__name__}
        finally:
            self._free()

    def _run(self, job: Job) -> pretrain.Run:
        stop = StopRequest()
        stop.close()  # a benchmark has nothing to save: a signal ends it
        data = RandomTokens(job, self.place) if self.options.data == "synthetic" else None
        return pretrain.build(job, self.place, stop, data)

    def _free(self) -> None:
        torch._dynamo.reset()
        gc.collect()
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()

    # Figures of one run -----------------------------------------------------------------------------

    def _whole(self, run: pretrain.Run) -> Figures:
        found = {"forward_backward": self.forward_backward(run)}
        if self.place.device.type == "cuda":
            found["gpu"] = self._busy(run)
        return {**found, **self._steps(run)}

    def _busy(self, run: pretrain.Run) -> Figures:
        """Of one accumulation of a few micro-batches."""
        batches = self._batches(run, PROFILED)
        wall = statistics.median(self._clocked(lambda: gradients(run, batches)) for _ in range(3))
        return {"micro_batches": PROFILED, "wall_ms": wall, **busy(lambda: gradients(run, batches))}

    def forward_backward(self, run: pretrain.Run) -> Figures:
        """Median of micro-batches within one accumulation; the loss is that of the initial weights."""
        batches = self._batches(run, self.options.micro_batches)
        loss = gradients(run, batches[:1])[0]
        gradients(run, batches[:1])
        self._reset_memory()
        watch = Stopwatch(self.place.device)
        gradients(run, marked(batches, watch), batches)
        ms = statistics.median(watch.laps())
        return {"ms": ms, **self._speed(run.job, batches[0].position_BT.numel(), ms), **self._memory(), "loss": loss}

    def _steps(self, run: pretrain.Run) -> Figures:
        """Medians of whole steps, and of the parts of an update; the first step, which makes buffers, is left out."""
        self._reset_memory()
        times, wait = [], DataWait()
        with ExitStack() as until:
            watches = {label: until.enter_context(watched(*where, self.place.device)) for label, *where in stages(run)}
            for _ in range(1 + self.options.steps):
                times.append(self._clocked(lambda: pretrain.train_step(run, wait)))
            laps = {label: watch.laps()[::2] for label, watch in watches.items()}
        ms = statistics.median(times[1:])
        micro_batches = run.job.training.global_batch_size // (run.job.training.local_batch_size * self.place.ranks)
        step = {"ms": ms, "micro_batches": micro_batches, "data_wait_ms": statistics.median(wait.times[1:])}
        tokens = run.job.training.tokens_per_step // self.place.ranks
        return {
            "step": {**step, **self._speed(run.job, tokens, ms), **self._memory()},
            "update_ms": {label: statistics.median(found[1:]) for label, found in laps.items() if found[1:]},
            **({"by_rank_ms": self._by_rank(run)} if self.place.ranks > 1 else {}),
        }

    def _by_rank(self, run: pretrain.Run) -> list[Figures]:
        """What each rank's optimizer says of as many steps again: means."""
        run.job = replace(run.job, metrics=replace(run.job.metrics, log_freq=1))  # a logged step is measured
        run.optimizer.seconds()
        for _ in range(self.options.steps):
            pretrain.train_step(run, DataWait())
        mine = {name: 1e3 * seconds / self.options.steps for name, seconds in run.optimizer.seconds().items()}
        found: list = [None] * self.place.ranks
        dist.all_gather_object(found, mine)
        return found

    def _parts(self, run: pretrain.Run) -> Figures:
        """Of an eager step of one micro-batch; the first one, which compiles kernels, is left out."""
        wait = DataWait()
        pretrain.train_step(run, wait)
        return time_by_part(
            run.model, run.optimizer, lambda: (pretrain.train_step(run, wait), self._settle()), self.place.device
        )

    def _optimisations(self) -> list[Figures]:
        rows = []
        for label, on in {"none": (), **{name: (name,) for name in SWITCHES}, "all": SWITCHES}.items():
            flags = [f"--{name}.enable={str(name in on).lower()}" for name in SWITCHES]
            flags += [f"--{name}.on_failure=error" for name in on]
            rows.append({"on": label, **self.attempt(flags, self.forward_backward)})
        return rows

    # Helpers ----------------------------------------------------------------------------------------

    def _batches(self, run: pretrain.Run, number: int) -> list[Batch]:
        found, at = [], 0
        while len(found) < number:
            found += [batch.to(self.place.device) for batch in run.data.micro_batches(at)]
            at += 1
        return found[:number]

    def flops(self, job: Job) -> float:
        return sum(job.model.config.flops_per_token(job.training.seq_len).values())

    def _speed(self, job: Job, tokens: int, ms: float) -> Figures:
        """Of one rank that trains `tokens` in `ms`."""
        speed = throughput(tokens, ms / 1e3, 1, self.flops(job), self.peak)
        share = 100 * speed.tflops * 1e12 / self.ceilings["matmul_flops"]
        return {"tps": speed.tps, "tflops": speed.tflops, "ceiling_share": share, "mfu": speed.mfu}

    def _clocked(self, call: Callable[[], Any]) -> float:
        """ms from an idle device to an idle device."""
        self._settle()
        begin = time.perf_counter()
        call()
        self._settle()
        return 1e3 * (time.perf_counter() - begin)

    def _settle(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.synchronize()

    def _reset_memory(self) -> None:
        if self.place.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _memory(self) -> Figures:
        """Peaks since the last reset; empty on the CPU."""
        if self.place.device.type != "cuda":
            return {}
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"allocated_gib": allocated / GIB, "reserved_gib": reserved / GIB}


# What a run is given and how it is watched ------------------------------------------------------------


class RandomTokens:
    """Micro-batches of random tokens, the same in every step; in document packing of four documents a row."""

    def __init__(self, job: Job, place: Place):
        training = job.training
        random, T = np.random.default_rng([job.debug.seed, place.rank]), training.seq_len
        starts = np.arange(1, 4) * T // 4
        vocabulary, rows = job.model.config.vocab_size, np.arange(training.local_batch_size)

        def batch() -> Batch:
            windows = [(random.integers(vocabulary, size=T + 1), starts) for _ in rows]
            made = pack(windows, rows, job.data.packing)
            return made.pin_memory() if place.device.type == "cuda" else made

        number = training.global_batch_size // (training.local_batch_size * place.ranks)
        self._batches = [batch() for _ in range(number)]

    def micro_batches(self, step: int) -> list[Batch]:
        return self._batches


class DataWait:
    """Stands where the trainer's meter does, and notes how long each step waits for its data, in ms."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.times.append(1e3 * (time.perf_counter() - since))


def gradients(run: pretrain.Run, batches: Iterable[Batch], counted: list[Batch] | None = None) -> list[float]:
    """Accumulate and drop the gradients of `batches`; each head's loss, nats per target. `counted` says what
    `batches` are where these can be gone through only once."""
    counts = pretrain.global_target_counts(run, batches if counted is None else counted)
    sums, _ = pretrain.accumulate_gradients(run, batches, counts)
    run.optimizer.zero_grad()
    dist.all_reduce(sums)  # counts are those of all ranks
    return (sums / counts.clamp(min=1)).tolist()


def marked(batches: list[Batch], watch: Stopwatch) -> Iterator[Batch]:
    """The batches, with a moment before each and after the last."""
    for batch in batches:
        watch.mark()
        yield batch
    watch.mark()


def stages(run: pretrain.Run) -> Iterator[tuple[str, Any, str]]:
    """What an update consists of: a label, and where it is called."""
    yield "reduce gradients", run.plan, "reduce_gradients"
    yield "clip", run.optimizer, "clip"
    for role, group in run.optimizer.groups.items():
        yield f"{group.component.name} of {role}", group.optimizer, "step"
    yield "refresh weights", run.plan, "refresh_weights"
    yield "balance", run.model, "update_balance"


@contextmanager
def watched(owner: Any, name: str, device: torch.device) -> Iterator[Stopwatch]:
    """While it lasts, calls of `owner.name` lie between two moments each."""
    watch = Stopwatch(device)

    def wrap(call: Callable) -> Callable:
        def timed(*arguments, **options):
            watch.mark()
            result = call(*arguments, **options)
            watch.mark()
            return result

        return timed

    with wrapped(owner, name, wrap):
        yield watch
