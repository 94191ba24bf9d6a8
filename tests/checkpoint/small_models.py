"""Two modules with the same logical tensors, stored differently, and values for them that depend on names only."""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from components.checkpoint.dcp import Views
from components.parameters import Logical, LogicalView, Role, local_view, normal, owned_parameters, rows, whole

EXPERTS, D, F, VOCABULARY = 5, 4, 3, 7  # none divides by 2 or 4


def one(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape))


class FoldedExperts(nn.Module):
    """All experts in one (E, D, F), and the routing bias beside them."""

    def __init__(self):
        super().__init__()
        self.w1_EDF = one(EXPERTS, D, F)
        self.register_buffer("bias_E", torch.zeros(EXPERTS))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def roles(self):
        logical = tuple(Logical(f"experts.{e}.w1", normal(1.0), (e,)) for e in range(EXPERTS))
        return {"w1_EDF": Role("expert", logical, transposed=True)}


class FoldedProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_skip = one(3 + 7, D)

    def roles(self):
        return {"in_skip": rows("matrix", {"in": 3, "skip": 7}, normal(1.0))}


class Named(nn.Module):
    """Parameters under their own names."""

    def __init__(self, **parameters: nn.Parameter):
        super().__init__()
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def roles(self):
        return {name: whole("matrix", name, normal(1.0)) for name, _ in self.named_parameters(recurse=False)}


def folded() -> nn.Module:
    return _model(FoldedProjection(), FoldedExperts())


def unfolded() -> nn.Module:
    ffn = nn.Module()
    ffn.experts = nn.ModuleList(Named(w1=one(D, F)) for _ in range(EXPERTS))
    ffn.register_buffer("bias_E", torch.zeros(EXPERTS))
    return _model(Named(**{"in": one(3, D), "skip": one(7, D)}), ffn)


def sharded(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def optimizer_views(model: nn.Module) -> list[tuple[str, LogicalView]]:
    """Fresh state of three kinds: shaped and sharded as the parameter, reduced to its rows, and whole on one rank."""
    views = []
    for number, owned in enumerate(owned_parameters(model)):
        momentum, per_row = torch.zeros_like(owned.parameter), torch.zeros_like(owned.parameter[..., :1])
        for logical in owned.role.logical:
            name = owned.logical_name(logical)
            views += [
                ("momentum", local_view(momentum, logical, name)),
                ("per_row", local_view(per_row, logical, name)),
            ]
            if number % dist.get_world_size() == dist.get_rank():
                views.append(("kept", LogicalView(name, (2, 3), (0, 0), torch.zeros(2, 3))))
    return [(state, view) for state, view in views if view is not None]


@torch.no_grad()
def fill(views: Views, seed: int) -> None:
    for name, view in views.items():
        view.local.copy_(expected(name, view, seed))


def check(views: Views, seed: int) -> None:
    for name, view in views.items():
        assert torch.equal(view.local, expected(name, view, seed)), name


def expected(name: str, view: LogicalView, seed: int) -> torch.Tensor:
    """The part `view` of the values of the tensor called `name`, the same for any sharding."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    values = torch.randn(view.shape, generator=torch.Generator().manual_seed(int.from_bytes(digest[:4], "little")))
    for axis, (start, size) in enumerate(zip(view.offset, view.local.shape, strict=True)):
        values = values.narrow(axis, start, size)
    return values


def _model(mixer: nn.Module, ffn: nn.Module) -> nn.Module:
    model = nn.Module()
    model.embedding = Named(weight=one(VOCABULARY, D))
    model.norm = Named(weight=one(3))
    model.mixer, model.ffn = mixer, ffn
    return model
