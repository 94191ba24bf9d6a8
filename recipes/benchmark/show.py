"""A step's figures as tables for a person."""

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Figures = dict[str, Any]

DATA = {"synthetic": "random tokens", "recipe": "the recipe's text"}
DAY = 86400
SHOWN, NAME = 16, 72  # kernels, and letters of their names; all that were noted are in the JSON file


def show(figures: Figures, console: Console) -> None:
    console.print(" + ".join(figures["recipe"]), style="bold")
    console.print(_where(figures))
    if "error" in figures:
        console.print(f"could not be measured: {figures['error']}", style="bold", markup=False)
    else:
        for heading, table in _whole(figures).items():
            _section(console, heading, table)
    if "parts_ms" in figures:
        heading = "device time by part: kernels of one micro-batch and one update in an eager run, forward and backward"
        _section(console, heading, _times(figures["parts_ms"]))
    if "optimisations" in figures:
        _section(console, "the optimisations: forward and backward, each alone and all", _optimisations(figures))
        for row in figures["optimisations"]:
            if "error" in row:
                console.print(f"{row['on']} failed: {row['error']}", markup=False)


def show_lengths(figures: Figures, console: Console) -> None:
    """A row a recipe and length."""
    device, rows = figures["device"], figures["rows"]
    console.print(
        f"{device['name']}, torch {device['torch']}, Triton {device['triton']}; rank 0 of {figures['ranks']}; "
        f"{figures['tokens']:,} random tokens a micro-batch, forward and backward"
    )
    columns = ("ms", "tok/s", "of ceiling", "MFU", "GiB reserved")
    table = _table("recipe", "rows × tokens", *columns, "kept a token", "of a sequence")
    for row in rows:
        ms, tps, _, share, mfu, _, reserved = ["failed", *[""] * 6] if "error" in row else _speed(row)
        kept = (f"{row['cache_bytes_a_token']:,.0f} B", f"{sequence_bytes(row) / 2**20:,.1f} MiB")
        table.add_row(row["recipe"], f"{row['sequences']} × {row['length']:,}", ms, tps, share, mfu, reserved, *kept)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row['recipe']} at {row['length']} failed: {row['error']}", markup=False)


def sequence_bytes(row: Figures) -> float:
    """What decoding keeps of a whole sequence."""
    return row["cache_bytes_a_token"] * row["length"] + row["state_bytes"]


def _section(console: Console, heading: str, content: Table | str) -> None:
    console.print(f"\n{heading}", style="bold")
    console.print(content, markup=False) if isinstance(content, str) else console.print(content)


def _where(figures: Figures) -> str:
    device, ceilings, tokens = figures["device"], figures["ceilings"], figures["tokens"]
    stated = ceilings["stated_tflops"]
    return (
        f"{device['name']}, torch {device['torch']}, Triton {device['triton']}; rank 0 of {figures['ranks']}\n"
        f"measured here: matrix product {ceilings['matmul_flops'] / 1e12:.3g} TFLOP/s "
        f"(stated {'N/A' if stated is None else f'{stated:g}'}), copy {ceilings['copy_bytes'] / 1e9:,.0f} GB/s\n"
        f"data: {DATA[figures['data']]}; {tokens['micro_batch']:,} tokens a micro-batch, {tokens['step']:,} a step; "
        f"{figures['flops_per_token'] / 1e9:.3g} GFLOP a token"
    )


def _whole(figures: Figures) -> dict[str, Table | str]:
    step = figures["step"]
    speeds = _table("", "ms", "tok/s", "TFLOP/s", "of ceiling", "MFU", "GiB allocated", "GiB reserved")
    speeds.add_row("forward + backward", *_speed(figures["forward_backward"]))
    speeds.add_row(f"step of {step['micro_batches']}", *_speed(step))
    found: dict[str, Table | str] = {"speed of one rank": speeds}
    update = {**figures["update_ms"], "waiting for data": step["data_wait_ms"]}
    found["within a step, once"] = _times(update, total=step["ms"])
    if "by_rank_ms" in figures:
        found["the optimizer by rank: its own matrices, and all with waits for others"] = _ranks(figures["by_rank_ms"])
    if "gpu" in figures:
        gpu = figures["gpu"]
        found[f"the GPU during {gpu['micro_batches']} micro-batches and the reduction of their gradients"] = (
            f"busy {gpu['busy_ms']:.1f} of {gpu['wall_ms']:.1f} ms ({gpu['busy_ms'] / gpu['wall_ms']:.0%}): "
            f"{gpu['kernels']:,} kernels and copies, started by {gpu['launches']:,} calls"
        )
        found["the kernels that took most, of one micro-batch"] = _slowest(gpu)
    return found


def _slowest(gpu: Figures) -> Table:
    table = _table("", "ms", "kernels", "share")
    for row in gpu["slowest"][:SHOWN]:
        ms, kernels = row["ms"] / gpu["micro_batches"], row["kernels"] / gpu["micro_batches"]
        table.add_row(escape(row["name"][:NAME]), f"{ms:.2f}", f"{kernels:,.0f}", f"{row['ms'] / gpu['busy_ms']:.1%}")
    return table


def _speed(row: Figures) -> list[str]:
    mfu = "N/A" if row["mfu"] is None else f"{row['mfu']:.1f}%"
    memory = [f"{row[key]:.1f}" if key in row else "" for key in ("allocated_gib", "reserved_gib")]
    return [
        f"{row['ms']:,.1f}", f"{row['tps']:,.0f}", f"{row['tflops']:.3g}", f"{row['ceiling_share']:.1f}%", mfu, *memory
    ]  # fmt: skip


def _times(times: Figures, total: float | None = None) -> Table | str:
    """ms by label, and the share of `total` (of their sum without one)."""
    if "error" in times:
        return f"could not be measured: {times['error']}"
    total = sum(times.values()) if total is None else total
    table = _table("", "ms", "share")
    for label, ms in times.items():
        table.add_row(label, f"{ms:,.2f}", f"{ms / total:.1%}")
    return table


def _ranks(rows: list[Figures]) -> Table:
    """A row a rank, and how far the slowest is from the mean."""
    table = _table("rank", "orthogonalising, ms", "optimizer, ms")
    columns = [[row[name] for row in rows] for name in ("orthogonalising", "optimizer")]
    for rank, times in enumerate(zip(*columns, strict=True)):
        table.add_row(str(rank), *(f"{ms:,.2f}" for ms in times))
    means = [sum(times) / len(times) for times in columns]  # 0 where nothing is orthogonalised
    table.add_row("slowest / mean", *(f"{max(t) / m:.3f}" if m else "" for t, m in zip(columns, means, strict=True)))
    return table


def _optimisations(figures: Figures) -> Table:
    tokens, ranks = figures["tokens"]["recipe"], figures["ranks"]
    days = f"days for {tokens / 1e9:.3g} B tokens"
    table = _table("on", "tok/s", "speedup", "GiB allocated", "first loss", days)
    slowest = figures["optimisations"][0].get("tps")
    for row in figures["optimisations"]:
        if "error" in row:
            table.add_row(row["on"], "failed")
            continue
        speedup = f"{row['tps'] / slowest:.2f}" if slowest else ""
        memory = f"{row['allocated_gib']:.1f}" if "allocated_gib" in row else ""
        span = f"{tokens / (row['tps'] * ranks) / DAY:,.1f}"
        table.add_row(row["on"], f"{row['tps']:,.0f}", speedup, memory, f"{row['loss']:.4f}", span)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", overflow="fold")
    return table
