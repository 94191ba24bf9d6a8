"""Kernels, measured once they have been found right: `python -m recipes.benchmark kernels`.

For each shape: relative errors of outputs and gradients against float64 on the same device first (a wrong kernel is
not timed), then GPU time, wall time with launches (the median of turns, since the host's speed changes within seconds),
extra memory, and the share of a roofline whose two ceilings (a large copy, a large bfloat16 product) are measured in
the same run. Where flash-linear-attention can be imported its kernels run on the same inputs beside ours. Ratios to the
ceilings travel between machines; single times do not.
"""

import dataclasses
import importlib
import json
import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from components.kernels.gated_delta_rule import chunk, gated_delta_rule
from components.kernels.gated_delta_rule.reference import log_decay
from components.kernels.short_conv import short_conv
from components.kernels.short_conv.reference import short_conv_reference
from recipes.benchmark.timing import count_launches, device, extra_memory, gpu_time, measure_ceilings, wall_time
from registry import unknown

OUT_LIMIT, GRADIENT_LIMIT = 5e-3, 1.5e-2  # relative L2 error against float64
PEER_SLACK = 2  # a peer is timed, and its verdict printed, up to twice that error
TURNS = 5  # of each provider's wall time


@dataclass(frozen=True)
class Shape:
    """One problem. B rows, T tokens, H heads, K key and V value width (for the convolution C = H * V channels)."""

    B: int
    T: int
    H: int
    K: int
    V: int


SHAPES = {
    "hymo": Shape(4, 4096, 40, 32, 32),
    "k64_v128": Shape(16, 2048, 12, 64, 128),
    "k64_v128_h24": Shape(16, 2048, 24, 64, 128),
    "k128_v256": Shape(16, 2048, 12, 128, 256),
    "k128_v256_h24": Shape(16, 2048, 24, 128, 256),
}


@dataclass(frozen=True)
class Problem:
    """A kernel with its inputs, all of which need gradients, and their `names`; `exact` is the kernel in float64."""

    names: str
    forward: Callable[..., Tensor]
    exact: Callable[..., Tensor]
    inputs: list[Tensor]
    upstream: Tensor

    def both(self) -> tuple[Tensor, ...]:
        """Output and gradients."""
        o = self.forward(*self.inputs)
        return o, *torch.autograd.grad(o, self.inputs, self.upstream)


@dataclass(frozen=True)
class Result:
    """What was measured of one kernel at one shape. Times in ms; `gpu` without and `wall` with the host's launches."""

    kernel: str
    shape: str
    provider: str
    errors: dict[str, float]
    forward_gpu: float = math.nan
    both_gpu: float = math.nan
    both_wall: float = math.nan
    launches: float = math.nan
    extra_mib: float = math.nan
    roofline: float = math.nan

    @property
    def right(self) -> bool:
        return self.within(1)

    def within(self, slack: float) -> bool:
        return not self.over(slack)

    def over(self, slack: float = 1) -> dict[str, float]:
        """The errors over `slack` times what is allowed, or NaN."""
        limits = {name: slack * (OUT_LIMIT if name == "o" else GRADIENT_LIMIT) for name in self.errors}
        return {name: e for name, e in self.errors.items() if not e <= limits[name]}


def kernels(
    shapes: tuple[str, ...] = ("hymo", "k64_v128", "k128_v256"), json_file: Path | None = None, seconds: float = 0.25
) -> None:
    """Kernels against float64, then against the clock. Exits with an error if one of ours is wrong.

    Args:
        shapes: of hymo, k64_v128, k64_v128_h24, k128_v256 and k128_v256_h24 (key and value width, heads)
        json_file: also write every figure there
        seconds: of timed calls a figure
    """
    for name in shapes:
        if name not in SHAPES:
            sys.exit(unknown("shape", name, SHAPES))
    if not torch.cuda.is_available():
        sys.exit("recipes.benchmark kernels needs a CUDA device; the CPU forms are covered by tests/kernels")
    ceilings = measure_ceilings()
    providers = {"gated_delta_rule": rule_providers(), "short_conv": conv_providers()}
    results = []
    for name in shapes:
        for kernel, makes in providers.items():
            measured = [measure(kernel, name, *make, ceilings, seconds) for make in makes.items()]
            results += with_wall_times(measured, makes, seconds)
            print_table(results[-len(measured) :], ceilings)
    results = [with_launches(r, providers[r.kernel][r.provider]) for r in results]
    print_table(results, ceilings)
    if json_file:
        rows = [{**dataclasses.asdict(r), "right": r.right} for r in results]
        json_file.write_text(json.dumps({"device": device(), "ceilings": ceilings, "results": rows}, indent=1))
    wrong = [f"{r.kernel} at {r.shape}" for r in results if r.provider == "ours" and not r.right]
    if wrong:
        sys.exit(f"wrong against float64: {', '.join(wrong)}")


def measure(kernel: str, name: str, provider: str, make: Callable, ceilings: dict, seconds: float) -> Result:
    """All but the host's side; errors alone of a kernel that is wrong."""
    shape = SHAPES[name]
    result = Result(kernel, name, provider, errors(make(dataclasses.replace(shape, B=1, T=700), 0)))
    if not result.within(1 if provider == "ours" else PEER_SLACK):
        return result
    problems = rotated(make, shape)
    forwards = [lambda p=p: p.forward(*(x.detach() for x in p.inputs)) for p in problems]
    boths = [p.both for p in problems]
    moved, operations = (rule_cost if kernel == "gated_delta_rule" else conv_cost)(shape)
    return dataclasses.replace(
        result,
        forward_gpu=gpu_time(forwards, seconds),
        both_gpu=gpu_time(boths, seconds),
        extra_mib=extra_memory(boths[0]) / 2**20,
        roofline=1e3 * max(moved / ceilings["copy_bytes"], operations / ceilings["matmul_flops"]),
    )


def rotated(make: Callable, shape: Shape) -> list[Problem]:
    """Problems that take turns, so that no input waits in the cache."""
    return [make(shape, seed) for seed in range(3)]


def with_wall_times(results: list[Result], providers: dict[str, Callable], seconds: float) -> list[Result]:
    """Results of one kernel and shape; those that were timed also with the median of their wall times in turns."""
    timed = [r.provider for r in results if not math.isnan(r.both_gpu)]
    calls = {name: [p.both for p in rotated(providers[name], SHAPES[results[0].shape])] for name in timed}
    turns = [{name: wall_time(both, seconds) for name, both in calls.items()} for _ in range(TURNS)]
    walls = {name: statistics.median(turn[name] for turn in turns) for name in timed}
    return [dataclasses.replace(r, both_wall=walls.get(r.provider, math.nan)) for r in results]


def with_launches(result: Result, make: Callable) -> Result:
    """To be called last: the profiler that counts them slows the launches of all that comes after it."""
    return dataclasses.replace(result, launches=count_launches(make(SHAPES[result.shape], 0).both))


# Problems -----------------------------------------------------------------------------------------


def rule_tensors(shape: Shape, seed: int) -> tuple[list[Tensor], Tensor]:
    """q, k, v, a, b in bfloat16 and A_log, dt_bias as Gated DeltaNet starts them, and the outputs' gradient."""
    generator = torch.Generator("cuda").manual_seed(seed)
    B, T, H, K, V = dataclasses.astuple(shape)

    def draw(*sizes):
        return torch.randn(*sizes, generator=generator, device="cuda")

    step = torch.exp(math.log(1e-3) + math.log(100) * torch.rand(H, generator=generator, device="cuda"))
    A_log = (16 * torch.rand(H, generator=generator, device="cuda") + 1e-3).log()
    b = draw(B, T, H).mul(2).clamp(-4, 4)  # beta must stay below one in bfloat16: fla's is turned back into a logit
    x = [draw(B, T, H, K), draw(B, T, H, K), draw(B, T, H, V), draw(B, T, H), b]
    x = [*(y.bfloat16() for y in x), A_log, step + torch.log(-torch.expm1(-step))]
    return [y.requires_grad_() for y in x], draw(B, T, H, V).bfloat16()


def our_outputs(*x: Tensor) -> Tensor:
    return gated_delta_rule(*x)[0]


def our_rule(shape: Shape, seed: int) -> Problem:
    x, do = rule_tensors(shape, seed)
    return Problem("q k v a b A_log dt_bias", our_outputs, our_outputs, x, do)


def fla_rule(shape: Shape, seed: int) -> Problem:
    """Its inputs are the decays and strengths themselves; ours computes them, and their gradients, inside."""
    rule = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    (q, k, v, a, b, A_log, dt_bias), do = rule_tensors(shape, seed)
    g = log_decay(a.detach().float(), A_log.detach(), dt_bias.detach())
    x = [q, k, v, g.requires_grad_(), b.detach().sigmoid().requires_grad_()]
    return Problem("q k v g beta", lambda *x: rule(*x, use_qk_l2norm_in_kernel=True)[0], exact_from_decays, x, do)


def exact_from_decays(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The rule on log-decays and strengths, through the gates that give them."""
    one = torch.zeros(g.shape[2], dtype=g.dtype, device=g.device)
    return gated_delta_rule(q, k, v, torch.log(torch.expm1(-g)), torch.logit(beta), one, one)[0]


def rule_providers() -> dict[str, Callable]:
    return {"ours": our_rule, "fla": fla_rule} if fla_runs() else {"ours": our_rule}


def conv_tensors(shape: Shape, seed: int) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    C = shape.H * shape.V
    x, dy = torch.randn(2, shape.B, shape.T, C, generator=generator, device="cuda").bfloat16()
    w = torch.randn(C, 4, generator=generator, device="cuda").bfloat16()
    return [x.contiguous().requires_grad_(), w.requires_grad_()], dy.contiguous()


def our_conv(shape: Shape, seed: int) -> Problem:
    return Problem("x w", short_conv, short_conv_reference, *conv_tensors(shape, seed))


def fla_conv(shape: Shape, seed: int) -> Problem:
    conv = importlib.import_module("fla.modules.convolution").causal_conv1d
    x, dy = conv_tensors(shape, seed)

    def outputs(x: Tensor, w: Tensor) -> Tensor:
        y = conv(x, w, activation="silu")
        return y[0] if isinstance(y, tuple) else y

    return Problem("x w", outputs, short_conv_reference, x, dy)


def conv_providers() -> dict[str, Callable]:
    return {"ours": our_conv, "fla": fla_conv} if fla_runs() else {"ours": our_conv}


def fla_runs() -> bool:
    """Whether fla can be imported. Its refusal to run backward with Triton 3.4.0 to 3.7.0 on Hopper is lifted: the
    gate checks its gradients like ours, which is what the refusal is for."""
    try:
        importlib.import_module("fla.ops.common.chunk_o").TRITON_ABOVE_3_7_1 = True
    except ImportError:
        return False
    return True


def rule_cost(shape: Shape) -> tuple[int, int]:
    """Least bytes (every input and gradient once, in bfloat16) and operations in chunks of 64, forward and backward."""
    B, T, H, K, V = dataclasses.astuple(shape)
    C, tokens = chunk.CHUNK, B * T * H
    moved = tokens * (4 * K + 4 * V + 6 + 8 * K + 6 * V + 12)
    per_chunk = 2 * C * C * (12 * K + 7 * V) + 22 * C * K * V + 5 * C**3
    return moved, tokens // C * per_chunk


def conv_cost(shape: Shape) -> tuple[int, int]:
    return 10 * shape.B * shape.T * shape.H * shape.V, 0


# Measuring ----------------------------------------------------------------------------------------


def errors(problem: Problem) -> dict[str, float]:
    """Relative L2 error of the output and of every gradient against float64."""
    exact_inputs = [x.detach().double().requires_grad_() for x in problem.inputs]
    exact = Problem(problem.names, problem.exact, problem.exact, exact_inputs, problem.upstream.double()).both()
    pairs = zip(["o", *problem.names.split()], problem.both(), exact, strict=True)
    return {n: ((one.double() - other).norm() / other.norm()).item() for n, one, other in pairs}


# Printing -----------------------------------------------------------------------------------------


def print_table(results: list[Result], ceilings: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"copy {ceilings['copy_bytes'] / 1e9:.0f} GB/s, bf16 {ceilings['matmul_flops'] / 1e12:.0f} TFLOP/s"
    table = Table(title=title)
    for column in (
        "kernel",
        "shape",
        "",
        "forward ms",
        "both ms",
        "wall ms",
        "launches",
        "MiB",
        "roofline",
        "worst error",
    ):
        table.add_column(column, justify="left" if column in ("kernel", "shape", "") else "right")
    for r in results:
        times = [figure(x, ".3f") for x in (r.forward_gpu, r.both_gpu, r.both_wall)]
        counts = [figure(r.launches, ".0f"), figure(r.extra_mib, ".0f"), figure(r.roofline / r.both_gpu, ".0%")]
        table.add_row(r.kernel, r.shape, r.provider, *times, *counts, verdict(r))
    Console(width=160).print(table)


def figure(x: float, form: str) -> str:
    return "" if math.isnan(x) else f"{x:{form}}"


def verdict(result: Result) -> str:
    over = ", ".join(f"{name} {e:.1e}" for name, e in result.over().items())
    return f"WRONG: {over}" if over else f"{max(result.errors.values()):.1e}"
