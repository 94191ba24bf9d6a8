"""The one language model of this repository: an embedding, a stack of blocks written as zones, and its heads.

The recipe's grammar ([model.mixers], [model.ffns], [model.blocks], [model.zones], [model.wires]) is this file's
Config. The embedding and its norm, the final norm, the wires and the loss belong to the root, so that one sharding unit
holds what the tied head and the embedding share. Shapes: B batch, T sequence, D width, V vocabulary.
"""

import dataclasses
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.data.batch import Batch
from components.interfaces import BALANCE_LOSS, LENT, Aux, Cache, Context
from components.layers.initial import LINEAR_STD
from components.layers.rotary import Angles, rotary_angles
from components.losses.targets import IGNORE, target_counts, targets
from components.models.block import Block
from components.models.stack import Step, Zone, flatten
from components.parameters import Role, normal, whole
from registry import Component, Problem, RecipeError, register, unknown

NO_FFN = "none"  # the label of a block without an FFN


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """A named pair of parts."""

    mixer: str  # a label of [model.mixers]
    ffn: str = NO_FFN  # a label of [model.ffns], or "none"


class Output(NamedTuple):
    """What one micro-batch gives (a tuple, so that sharding hooks see its tensors).

    loss_sums: fp32 (heads,), nats summed over each head's targets, main head first. target_counts: int64 (heads,).
    aux: detached statistics by layer, such as `layers.4.counts`.
    """

    loss_sums: Tensor
    target_counts: Tensor
    aux: Aux


TINY_EXAMPLE = {
    "dim": 32,
    "vocab_size": 64,
    "order": ["trunk"],
    "mixers": {
        "gdn": {"name": "hymo_gdn", "inner": 32, "head_dim": 8, "state_dim": 8},
        "mla": {
            "name": "mla", "heads": 4, "kv_heads": 2, "q_rank": 16, "kv_rank": 8, "head_dim": 16, "rotary_dim": 4,
        },
    },
    "ffns": {"experts": {"name": "deepseek_moe", "experts": 4, "top_k": 2, "hidden": 16}},
    "blocks": {"gdn": {"mixer": "gdn"}, "mla": {"mixer": "mla", "ffn": "experts"}},
    "zones": {"trunk": {"pattern": ["mla", "gdn"], "repeat": 2}},
    "norm": {"name": "rmsnorm"},
    "head": {"name": "tied", "softcap": 15.0},
    "mtp": {"name": "mtp", "depth": 2, "weights": [0.3, 0.1], "hidden": 16},
    "loss": {"name": "chunked_cross_entropy", "chunk": 32},
}  # fmt: skip


@register("model", "stacked_lm", example=TINY_EXAMPLE)
class StackedLM(nn.Module):
    """A language model of named blocks in zones, with a tied head and optional multi-token prediction."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        dim: int  # width D of the residual stream
        vocab_size: int  # rows of the embedding; the tokenizer's size, padding included
        order: tuple[str, ...]  # zones, first to last
        mixers: dict[str, Annotated[Component, "mixer"]]  # by label
        blocks: dict[str, BlockConfig]  # by label
        zones: dict[str, Zone]  # by label
        norm: Annotated[Component, "norm"]  # before mixers, FFNs and the head
        head: Annotated[Component, "head"]  # hidden states to logits
        loss: Annotated[Component, "loss"]  # logits to nats
        ffns: dict[str, Annotated[Component, "ffn"]] = field(default_factory=dict)  # by label
        mtp: Annotated[Component, "mtp"] | None = None  # multi-token prediction
        wires: dict[str, Annotated[Component, "wire"] | None] = field(default_factory=dict)  # by label, in order
        embedding_norm: Annotated[Component, "norm"] | None = None  # between the embedding and the first block
        residual: float = 0.0  # initial value of learned factors on the residual stream, two a block; 0 for none
        share: tuple[str, ...] = ()  # labels of mixers or ffns that the whole model has once

        def __post_init__(self):
            dangling = self._dangling()
            problems = [*dangling, *self._misfits()]
            if not dangling:
                problems += [*self._unlaid_wires(), *self._unlent()]
            if problems:
                raise RecipeError(problems)

        def _dangling(self) -> list[Problem]:
            """Labels that name nothing."""
            found = [Problem(("order",), unknown("zone", z, self.zones)) for z in self.order if z not in self.zones]
            for label, block in self.blocks.items():
                if block.mixer not in self.mixers:
                    found.append(Problem(("blocks", label, "mixer"), unknown("mixer label", block.mixer, self.mixers)))
                if block.ffn != NO_FFN and block.ffn not in self.ffns:
                    known = [*self.ffns, NO_FFN]
                    found.append(Problem(("blocks", label, "ffn"), unknown("ffn label", block.ffn, known)))
            for label, zone in self.zones.items():
                missing = dict.fromkeys(b for b in zone.pattern if b not in self.blocks)
                found += [Problem(("zones", label, "pattern"), unknown("block", b, self.blocks)) for b in missing]
                found += self._dangling_shares(("zones", label, "share"), zone.share)
            return found + self._dangling_shares(("share",), self.share)

        def _dangling_shares(self, path: tuple[str, ...], labels: tuple[str, ...]) -> list[Problem]:
            parts = {**self.mixers, **self.ffns}
            return [
                Problem(path, unknown("mixer or ffn label", label, parts)) for label in labels if label not in parts
            ]

        def _misfits(self) -> list[Problem]:
            """Parts that cannot work at this width."""
            found = []
            for table, parts in (("mixers", self.mixers), ("ffns", self.ffns)):
                for label, part in parts.items():
                    reason = part.config.check(self.dim) if hasattr(part.config, "check") else None
                    found += [Problem((table, label), reason)] if reason else []
            return found

        def _unlaid_wires(self) -> list[Problem]:
            """Wires that cannot lie in this stack."""
            checked = [(label, w.config) for label, w in self.laid_wires().items() if hasattr(w.config, "check")]
            reasons = [(label, config.check(self.steps())) for label, config in checked]
            return [Problem(("wires", label), reason) for label, reason in reasons if reason]

        def _unlent(self) -> list[Problem]:
            """Mixers that borrow from an earlier layer what no earlier layer lends."""
            found, lent = {}, None
            for step in self.steps():
                label = self.blocks[step.block].mixer
                config = self.mixers[label].config
                lent, wanted = getattr(config, "lends", None) or lent, getattr(config, "borrows", None)
                if wanted and wanted != lent:
                    what = "no layer before it lends" if lent is None else f"the layer before it lends {lent}"
                    found[label] = f"borrows keys and values of (heads, width) {wanted}, but {what} (step {step.index})"
            return [Problem(("mixers", label), reason) for label, reason in found.items()]

        def laid_wires(self) -> dict[str, Component]:
            """Without those that a child recipe took away."""
            return {label: wire for label, wire in self.wires.items() if wire is not None}

        def steps(self) -> list[Step]:
            return flatten(self.order, self.zones)

        def heads(self) -> int:
            """Losses: the main head's and each MTP depth's."""
            return 1 + (self.mtp.config.depth if self.mtp else 0)

        def loss_weights(self) -> tuple[float, ...]:
            return (1.0, *(self.mtp.config.weights if self.mtp else ()))

        def branches(self) -> int:
            """Residual branches a token passes: every step's mixer and FFN."""
            return sum(1 + (self.blocks[step.block].ffn != NO_FFN) for step in self.steps())

        def parameter_table(self) -> dict[str, tuple[int, int]]:
            """Stored and active parameters of each part that stands in memory once, by its path in the model. Active
            are those that one token uses: of the routed experts only the chosen ones."""
            norm = self.norm.config.parameters(self.dim)
            table = {"embedding": (self.dim * self.vocab_size,) * 2, "norm": (norm, norm)}
            if self.embedding_norm:
                table["embedding_norm"] = (self.embedding_norm.config.parameters(self.dim),) * 2
            for layer, (label, zone) in enumerate(self._physical()):
                table |= self._layer_table(layer, label, zone)
            if self.mtp:
                config = self.mtp.config
                table["mtp"] = (config.parameters(self.dim), config.active_parameters(self.dim))
            for label, wire in self.laid_wires().items():
                table[f"wires.{label}"] = (wire.config.parameters(self.dim, self.steps()),) * 2
            return table

        def _layer_table(self, layer: int, block: str, zone: str) -> dict[str, tuple[int, int]]:
            """The part of `parameter_table` that one physical layer has, or shares with others."""
            table, norm = {}, self.norm.config.parameters(self.dim)
            for kind, label, part in self._parts(block):
                own, shared = f"layers.{layer}.{kind}", self.shared_name(label, zone)
                counts = (part.parameters(self.dim), part.active_parameters(self.dim))
                if shared and hasattr(part, "pool_parameters"):
                    pool = part.pool_parameters(self.dim, self._passes(shared))
                    rest = part.parameters(self.dim) - pool[0]
                    table |= {shared: pool, own: (rest, rest)}
                else:
                    table[shared or own] = counts
                table[f"{own}_norm"] = (norm, norm)
            if self.residual:
                factors = len(list(self._parts(block)))
                table[f"layers.{layer}.residual"] = (factors, factors)
            return table

        def _passes(self, name: str) -> int:
            """How many steps lead through the shared part of this path."""
            labels = [(label, step.zone) for step in self.steps() for _, label, _ in self._parts(step.block)]
            return sum(self.shared_name(*label) == name for label in labels)

        def flops_per_token(self, seq_len: int) -> dict[str, float]:
            """Training FLOPs a token by term: three times what the forward does. The head counts once a loss."""
            terms: dict[str, float] = {}
            parts = [part for step in self.steps() for _, _, part in self._parts(step.block)]
            forward = [part.flops(self.dim, seq_len) for part in [*parts, *([self.mtp.config] if self.mtp else [])]]
            forward += [self.head.config.flops(self.dim, self.vocab_size)] * self.heads()
            for part in forward:
                for term, flops in part.items():
                    terms[term] = terms.get(term, 0.0) + 3 * flops
            return terms

        def _physical(self) -> list[tuple[str, str]]:
            """Block label and zone of every physical layer."""
            return [(label, zone) for zone in self.order for label in self.zones[zone].layers]

        def _parts(self, block: str):
            """(kind, label, config) of a block's mixer and, where it has one, FFN."""
            labels = self.blocks[block]
            yield "mixer", labels.mixer, self.mixers[labels.mixer].config
            if labels.ffn != NO_FFN:
                yield "ffn", labels.ffn, self.ffns[labels.ffn].config

        def shared_name(self, label: str, zone: str) -> str | None:
            """The path of a part that a zone or the model has once; None for a part of its own."""
            if label in self.share:
                return f"shared.{label}"
            return f"shared.{zone}_{label}" if label in self.zones[zone].share else None

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.steps = config.steps()
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.embedding_norm = config.embedding_norm.build(dim=config.dim) if config.embedding_norm else None
        self.norm = config.norm.build(dim=config.dim)
        self.head = config.head.build()
        self.loss = config.loss.build()
        self.shared = nn.ModuleDict()  # before `layers`, so that shared parameters are named here
        self.layers = nn.ModuleList(self._block(i, *where) for i, where in enumerate(config._physical()))
        self.mtp = config.mtp.build(dim=config.dim, branches=config.branches()) if config.mtp else None
        wires = config.laid_wires().items()
        self.wires = nn.ModuleDict({label: wire.build(dim=config.dim, steps=self.steps) for label, wire in wires})

    def _block(self, layer: int, label: str, zone: str) -> Block:
        config, labels = self.config, self.config.blocks[label]
        mixer = self._part("mixer", labels.mixer, layer, zone)
        ffn = None if labels.ffn == NO_FFN else self._part("ffn", labels.ffn, layer, zone)
        return Block(lambda: config.norm.build(dim=config.dim), mixer, ffn, config.residual)

    def _part(self, kind: str, label: str, layer: int, zone: str) -> nn.Module:
        """A part of the block's own, or the one instance that its zone or the model shares. One whose Config counts
        `pool_parameters` shares only its submodule `pool`; the rest each layer has."""
        config, mixer = self.config, kind == "mixer"
        component = (config.mixers if mixer else config.ffns)[label]
        facts = {"dim": config.dim, "branches": config.branches()} | ({"layer": layer} if mixer else {})
        shared = config.shared_name(label, zone)
        if shared is None:
            return component.build(**facts)
        name = shared.split(".")[1]
        held = dict(self.shared).get(name)
        if hasattr(component.config, "pool_parameters"):
            part = component.build(**facts, pool=held)
            self.shared[name] = part.pool
            return part
        self.shared[name] = component.build(**facts) if held is None else held
        return self.shared[name]

    def roles(self) -> dict[str, Role]:
        return {"embedding": whole("embedding", "embedding", normal(LINEAR_STD))}

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Initial values of everything that is not a parameter; needed after building on the meta device."""
        for module in self.modules():
            if module is not self and hasattr(module, "reset_buffers"):
                module.reset_buffers()

    # Training -------------------------------------------------------------------------------------

    def forward(self, batch: Batch) -> Output:
        """Loss sums of every head over one micro-batch."""
        sums, aux = [], {}
        for ahead, h_BTD in enumerate(self._heads(batch, aux), start=1):
            sums.append(self.loss(self.norm(h_BTD), self.embedding, targets(batch, ahead), self.head.softcap))
        counts, balance = target_counts(batch, len(sums)), aux.pop(BALANCE_LOSS, None)
        if balance is not None:  # a gradient without a value: the loss stays the cross-entropy
            sums[0] = sums[0] + counts[0] * (balance - balance.detach())
        return Output(torch.stack(sums), counts, aux)

    def logits(self, batch: Batch) -> list[Tensor]:
        """Each head's logits (B, T, V), main head first. For evaluation and tests: the whole table exists."""
        return [self.head.logits(self.norm(h_BTD), self.embedding) for h_BTD in self._heads(batch, {})]

    @torch.no_grad()
    def acceptance(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """How often depth d's guess is the main head's later one: (agreements, guesses), int64 (depths,). Depth d at i
        and the main head at i + d predict the same token; agreement is what lets a drafted token stand."""
        guesses = [self.head.logits(self.norm(h), self.embedding).argmax(-1) for h in self._heads(batch, {})]
        agreed, tried = [], []
        for d, guess_BT in enumerate(guesses[1:], start=1):
            valid = targets(batch, 1 + d)[:, :-d] != IGNORE
            agreed.append(((guess_BT[:, :-d] == guesses[0][:, d:]) & valid).sum())
            tried.append(valid.sum())
        return torch.stack(agreed), torch.stack(tried)

    def gradient_norms(self, batch: Batch) -> Tensor:
        """The norm of each head's weighted loss gradient at the stack's output, fp32 (heads,): how much of what the
        trunk learns from comes from each."""
        with torch.no_grad():
            h_BTD, *_ = self._heads(batch, {})
            embedded = F.embedding(batch.tokens_BT1[:, 1:], self.embedding)
        # A leaf for each loss and one backward for all: sharding frees gathered weights after a backward.
        leaves = [h_BTD.detach().clone().requires_grad_() for _ in range(self.config.heads())]
        with torch.enable_grad():
            losses = [self._head_loss(d, h, embedded, batch) for d, h in enumerate(leaves)]
            gradients = torch.autograd.grad(sum(losses), leaves)
        return torch.stack([gradient.float().norm() for gradient in gradients])

    def _head_loss(self, d: int, h_BTD: Tensor, embedded_BTD: Tensor, batch: Batch) -> Tensor:
        """Depth d's weighted loss (0 is the main head's) from the stack's output."""
        if d:
            *_, h_BTD = islice(self.mtp(h_BTD, embedded_BTD, self._context(batch)), d)
        loss = self.loss(self.norm(h_BTD), self.embedding, targets(batch, 1 + d), self.head.softcap)
        return self.config.loss_weights()[d] * loss

    def _heads(self, batch: Batch, aux: Aux):
        """Each head's hidden states before the final norm, main head first; the layers' statistics go into `aux`."""
        ctx = self._context(batch)
        embedded_BT1D = F.embedding(batch.tokens_BT1, self.embedding)
        h_BTD = self._stack(embedded_BT1D[:, :-1], ctx, aux)
        yield h_BTD
        if self.mtp is not None:
            yield from self.mtp(h_BTD, embedded_BT1D[:, 1:], ctx)

    def _context(self, batch: Batch) -> Context:
        document_BT = None if batch.document_BT1 is None else batch.document_BT1[:, :-1]
        angles = self._angles(batch.position_BT)
        return Context(batch.position_BT, document_BT, batch.cu_seqlens, angles=angles)

    def _angles(self, position_BT: Tensor) -> dict[tuple[int, float], Angles]:
        """Of every rotary embedding in the stack: layers would otherwise each compute the same ones."""
        mixers = [mixer.config for mixer in self.config.mixers.values()]
        rotations = dict.fromkeys(getattr(mixer, "rotation", None) for mixer in mixers)
        return {rotation: rotary_angles(position_BT, *rotation) for rotation in rotations if rotation}

    def _stack(self, x_BTD: Tensor, ctx: Context, aux: Aux, caches: list[Cache] | None = None) -> Tensor:
        """The stack's output, from embeddings. The layers' statistics and the sum of balance losses go into `aux`."""
        state: dict[str, Tensor] = {}  # what wires carry from step to step
        x_BTD = x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)
        for step in self.steps:
            for wire in self.wires.values():
                x_BTD = wire.before(x_BTD, step, state)
            cache = caches[step.index] if caches else None
            x_BTD, block_aux = self.layers[step.layer](x_BTD, ctx, cache, self._mixer_input(step))
            for wire in self.wires.values():
                x_BTD = wire.after(x_BTD, step, state)
            lent = {name: block_aux.pop(name) for name in LENT if name in block_aux}
            ctx = dataclasses.replace(ctx, **lent) if lent else ctx
            for name, value in block_aux.items():
                key = name if name == BALANCE_LOSS else f"layers.{step.layer}.{name}"
                aux[key] = aux[key] + value if key in aux else value
        return x_BTD

    def _mixer_input(self, step: Step) -> Tensor | None:
        """What the wires add to the mixer's input at this step."""
        added = [x for wire in self.wires.values() if (x := wire.mixer_input(step)) is not None]
        return sum(added[1:], added[0]) if added else None

    @torch.no_grad()
    def update_balance(self, aux: Aux) -> None:
        """Once an optimizer step: every FFN that balances its load sees the step's counts, summed over micro-batches
        and ranks (and over the layers that share it)."""
        counts: dict[nn.Module, Tensor] = {}
        for layer, block in enumerate(self.layers):
            key = f"layers.{layer}.counts"
            if key in aux:
                counts[block.ffn] = counts[block.ffn] + aux[key] if block.ffn in counts else aux[key]
        for ffn, counts_E in counts.items():
            ffn.update_balance(counts_E)

    # Decoding -------------------------------------------------------------------------------------

    def new_caches(self, batch: int, max_len: int, dtype: torch.dtype) -> list[Cache]:
        """One cache a step: a looped layer has a state for each pass."""
        device = self.embedding.device
        return [self.layers[s.layer].mixer.new_cache(batch, max_len, dtype, device) for s in self.steps]

    def extend(self, tokens_BT: Tensor, caches: list[Cache]) -> Tensor:
        """Take in T more tokens (a prompt, or one decoded token); the logits (B, V) of what follows the last."""
        start_B1 = caches[0].lengths_B[:, None]
        position_BT = start_B1 + torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        ctx = Context(position_BT, angles=self._angles(position_BT))
        with torch.compiler.set_stance("force_eager"):  # caches fill up: compiled code would be made anew each token
            h_BTD = self._stack(F.embedding(tokens_BT, self.embedding), ctx, {}, caches)
        return self.head.logits(self.norm(h_BTD[:, -1]), self.embedding)
