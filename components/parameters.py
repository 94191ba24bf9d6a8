"""What every parameter is: its optimizer role, its logical matrices, its initial values.

Storage and meaning are kept apart. A parameter is *stored* in whatever shape is fast (two projections folded
into one matrix, all experts in one W_EDF) and *means* one or more logical tensors, each with a name of its own,
by physical layer: `layers.4.ffn.experts.3.w1`. Initialisation, checkpoints and orthogonalising optimizers speak
of logical tensors only, so none of them notices when the folding or the sharding changes.

A module that owns parameters directly declares them: `roles() -> {parameter name: Role}`.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

RoleName = Literal["matrix", "expert", "embedding", "router", "scalar"]
ROLE_NAMES: tuple[str, ...] = get_args(RoleName)

Init = Callable[[Tensor, torch.Generator], None]  # fills a whole logical tensor (fp32, CPU) in place
Axis = int | tuple[int, int]  # one index, or [start, stop)


@dataclass(frozen=True)
class Logical:
    """One logical tensor inside a stored parameter.

    `name` is relative to the owning module. `index` selects it, axis by axis from the first (an int drops its
    axis, a (start, stop) keeps a range); axes not named are whole.
    """

    name: str
    init: Init
    index: tuple[Axis, ...] = ()

    def ranges(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """The [start, stop) on every axis of the stored tensor of `shape`. A stored axis of size 1 (optimizer
        statistics that were reduced over it) is taken whole."""
        found = []
        for axis, size in enumerate(shape):
            chosen = self.index[axis] if axis < len(self.index) else (0, size)
            chosen = (chosen, chosen + 1) if isinstance(chosen, int) else chosen
            found.append((0, 1) if size == 1 else chosen)
        return found

    def dropped(self) -> tuple[int, ...]:
        """The stored axes that the logical tensor does not have."""
        return tuple(a for a, i in enumerate(self.index) if isinstance(i, int))

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The logical tensor's shape inside a stored tensor of shape `stored`."""
        kept = [r for axis, r in enumerate(self.ranges(stored)) if axis not in self.dropped()]
        return tuple(stop - start for start, stop in kept)


@dataclass(frozen=True)
class Role:
    """A stored parameter's role (which optimizer group), and the logical tensors it is made of.

    `transposed` says that logical matrices are laid out (in, out) instead of (out, in): rows, in the sense of
    output neurons, are then the last axis.
    """

    name: RoleName
    logical: tuple[Logical, ...]
    transposed: bool = False


@dataclass(frozen=True)
class LogicalView:
    """The part of a logical tensor that this rank holds: a view into local storage, and where it belongs.

    `name` is the full logical name, `shape` the whole logical tensor's, `offset` the position of `local` in it.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: Tensor


@dataclass(frozen=True)
class OwnedParameter:
    """A parameter with its full stored name, the module path of its owner and its role."""

    name: str
    owner: str
    parameter: nn.Parameter
    role: Role

    def logical_name(self, logical: Logical) -> str:
        return f"{self.owner}.{logical.name}" if self.owner else logical.name


def whole(role: RoleName, name: str, init: Init) -> Role:
    """The usual case: a parameter that is one logical tensor under its own name."""
    return Role(role, (Logical(name, init),))


def rows(role: RoleName, sizes: dict[str, int], inits: dict[str, Init] | Init) -> Role:
    """Logical matrices stacked along the first axis, `sizes` rows each, in order."""
    logical, start = [], 0
    for name, size in sizes.items():
        init = inits[name] if isinstance(inits, dict) else inits
        logical.append(Logical(name, init, ((start, start + size),)))
        start += size
    return Role(role, tuple(logical))


def owned_parameters(model: nn.Module) -> Iterator[OwnedParameter]:
    """Every parameter once, in definition order. Raises ValueError where a module's `roles()` and its own
    parameters differ: an undeclared parameter would silently not be trained."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        path = logical_path(path)
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if not own:
            continue
        declared = module.roles() if hasattr(module, "roles") else {}
        if set(declared) != set(own):
            raise ValueError(
                f"{path or 'model'} ({type(module).__name__}) owns parameters {sorted(own)} but its roles() declares "
                f"{sorted(declared)}; declare every parameter with exactly one role"
            )
        for name, parameter in own.items():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield OwnedParameter(f"{path}.{name}" if path else name, path, master(parameter), declared[name])


def master(parameter: nn.Parameter) -> nn.Parameter:
    """What is trained: the parameter itself, or what a plan made it a copy of, in another dtype or whole."""
    return getattr(parameter, "master", parameter)


def logical_path(path: str) -> str:
    """A module path without the wrappers that parallel plans put in."""
    return ".".join(p for p in path.split(".") if p not in ("_orig_mod", "_checkpoint_wrapped_module", "_whole"))


def local_region(stored: Tensor, logical: Logical) -> tuple[tuple[int | slice, ...], tuple[int, ...]] | None:
    """Where this rank's part of `logical` lies: the index into the local storage of `stored` (plain tensor or
    DTensor), and the offset of that part in the logical tensor. None if the rank holds nothing of it."""
    size, start = stored.shape, (0,) * stored.ndim
    if isinstance(stored, DTensor):
        size, start = compute_local_shape_and_global_offset(stored.shape, stored.device_mesh, stored.placements)
    index, offset = [], []
    for axis, (begin, stop) in enumerate(logical.ranges(tuple(stored.shape))):
        low, high = max(begin, start[axis]), min(stop, start[axis] + size[axis])
        if low >= high:
            return None
        if axis in logical.dropped():
            index.append(low - start[axis])
        else:
            index.append(slice(low - start[axis], high - start[axis]))
            offset.append(low - begin)
    return tuple(index), tuple(offset)


def local_view(stored: Tensor, logical: Logical, name: str) -> LogicalView | None:
    """This rank's part of `logical` inside `stored` (plain tensor or DTensor); None if it holds nothing of it."""
    region = local_region(stored, logical)
    if region is None:
        return None
    index, offset = region
    local = stored.to_local() if isinstance(stored, DTensor) else stored
    return LogicalView(name, logical.shape(tuple(stored.shape)), offset, local[index])


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter, logical tensor by logical tensor, from a generator seeded by (seed, logical name).

    Values are drawn on the CPU in fp32 and do not depend on the number of ranks, the device, the folding or the
    order of layers. Works on sharded parameters; each rank draws only what it holds a part of.
    """
    for owned in owned_parameters(model):
        for logical in owned.role.logical:
            view = local_view(owned.parameter, logical, owned.logical_name(logical))
            if view is not None:
                view.local.copy_(_draw(view, logical.init, seed))


def _draw(view: LogicalView, init: Init, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}:{view.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(view.shape, dtype=torch.float32)
    init(values, generator)
    for axis, (start, size) in enumerate(zip(view.offset, view.local.shape, strict=True)):
        values = values.narrow(axis, start, size)
    return values


# Initial values -----------------------------------------------------------------------------------


def normal(std: float) -> Init:
    return lambda values, generator: values.normal_(0.0, std, generator=generator) if std else values.zero_()


def uniform(low: float, high: float) -> Init:
    return lambda values, generator: values.uniform_(low, high, generator=generator)


def constant(value: float) -> Init:
    return lambda values, generator: values.fill_(value)


def log_uniform(low: float, high: float, transform: Callable[[Tensor], Tensor]) -> Init:
    """`transform` of values drawn log-uniformly from [low, high]."""

    def fill(values: Tensor, generator: torch.Generator) -> None:
        values.uniform_(math.log(low), math.log(high), generator=generator).exp_()
        values.copy_(transform(values))

    return fill
