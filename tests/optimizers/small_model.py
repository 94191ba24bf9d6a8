"""A module with one parameter of every kind that optimizers must know: folded, transposed, uneven, vectors."""

import torch
from torch import nn

from components.optimizers import adamw, muon, normuon  # noqa: F401  enters them in the registry of a spawned rank
from components.optimizers.roles import JointOptimizer, build_optimizers
from components.parameters import Logical, Role, initialise, normal, rows, whole
from registry import Component, parse_component

ADAMW = {"name": "adamw", "lr": 1e-3}
NORMUON = {"name": "normuon", "lr": 0.02, "ns_dtype": "float32"}


class Mixer(nn.Module):
    """in|skip folded along the rows (sizes that divide by nothing), a plain matrix, a vector."""

    def __init__(self):
        super().__init__()
        self.folded = nn.Parameter(torch.empty(5 + 6, 7))
        self.out = nn.Parameter(torch.empty(7, 6))
        self.gain = nn.Parameter(torch.empty(3))

    def roles(self):
        return {
            "folded": rows("matrix", {"in": 5, "skip": 6}, normal(0.02)),
            "out": whole("matrix", "out", normal(0.02)),
            "gain": whole("scalar", "gain", normal(1.0)),
        }

    def forward(self, x_BTD):
        up, skip = (x_BTD @ self.folded.T).split([5, 6], dim=-1)
        up = torch.cat([torch.tanh(up * self.gain.sum()), up[..., :1]], dim=-1)
        return x_BTD + (up + torch.tanh(skip)) @ self.out.T


class Experts(nn.Module):
    """Three experts in one (E, in, out)."""

    def __init__(self):
        super().__init__()
        self.w1_EDF = nn.Parameter(torch.empty(3, 7, 5))
        self.router = nn.Parameter(torch.empty(3, 7))

    def roles(self):
        experts = tuple(Logical(f"{e}.w1", normal(0.02), (e,)) for e in range(3))
        return {
            "w1_EDF": Role("expert", experts, transposed=True),
            "router": whole("router", "router", normal(0.02)),
        }


class SmallModel(nn.Module):
    """tokens_BT -> scores_BTV, through every parameter. One row (`narrow`) leaves most ranks with empty shards."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(10, 7))
        self.narrow = nn.Parameter(torch.empty(1, 7))
        self.mixer, self.experts = Mixer(), Experts()

    def roles(self):
        return {
            "embedding": whole("embedding", "embedding", normal(0.2)),
            "narrow": whole("matrix", "narrow", normal(0.02)),
        }

    def forward(self, tokens_BT):
        x = self.mixer(self.embedding[tokens_BT])
        weight = torch.softmax(x @ self.experts.router.T, dim=-1)
        y = torch.einsum("btd,edf,bte->btf", x, self.experts.w1_EDF, weight)
        x = x + torch.cat([y, y[..., :2]], dim=-1) * (x @ self.narrow.T)
        return x @ self.embedding.T


def initialised(dtype: torch.dtype = torch.float32) -> SmallModel:
    model = SmallModel().to(dtype)
    initialise(model, seed=0)
    return model


def configs(matrix: dict | None = None, expert: dict | None = None) -> dict[str, Component]:
    tables = {role: ADAMW for role in ("expert", "embedding", "router", "scalar")}
    tables |= {"matrix": NORMUON | (matrix or {}), "expert": expert or ADAMW}
    return {role: parse_component("optimizer", table) for role, table in tables.items()}


def train(model: nn.Module, optimizer: JointOptimizer, steps: range, rows_of_batch: slice = slice(None)) -> None:
    """Some steps on tokens that depend on the step only; `rows_of_batch` is this rank's part of the 4 rows."""
    for step in steps:
        tokens = torch.randint(0, 10, (4, 6), generator=torch.Generator().manual_seed(step))[rows_of_batch]
        scores = model(tokens)
        nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.clip(1.0)
        optimizer.step(1.0 / (1 + step))
        optimizer.zero_grad()


def built(dtype: torch.dtype = torch.float32, **tables) -> tuple[SmallModel, JointOptimizer]:
    model = initialised(dtype)
    return model, build_optimizers(model, configs(**tables))
