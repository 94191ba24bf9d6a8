"""Held-out loss, perplexity and bits per byte by source, the MTP depths' quality, and a few continued prompts.

Losses are nats per target; bits per byte divide by the bytes that the targets stand for, so that runs with different
tokenizers compare. Every rank takes its share of the fixed batches; one reduction at the end.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from components.data.batch import Batch
from components.data.heldout import SURPLUS, HeldOut
from components.data.tokenizers import Tokenizer
from components.losses.targets import IGNORE, targets
from components.metrics.reduce import reduce_scalars
from components.models.stacked_lm import StackedLM
from components.parallel.process_group import Place

SAMPLE_TOKENS = 48
TEMPERATURE = 0.8


def validate(model: StackedLM, held_out: HeldOut, place: Place) -> dict[str, float]:
    """Metrics by their names in metrics.jsonl. `validation/loss` and its kin are over all sources' targets together."""
    return _metrics(_sums(model, held_out, place, mtp=model.mtp is not None), held_out.sources)


def validate_at(model: StackedLM, held_out: Mapping[int, HeldOut], place: Place) -> dict[str, float]:
    """`validation/at_<length>/loss`, `ppl` and `bpb` of held-out text cut to these lengths, all sources together."""
    found: dict[str, float] = {}
    for length, text in held_out.items():
        found |= _losses(_sums(model, text, place, mtp=False), text.sources, f"validation/at_{length}")
    return found


def _sums(model: StackedLM, held_out: HeldOut, place: Place, mtp: bool) -> dict[str, list[float]]:
    """Sums by source over all ranks' batches, `mtp` with what the depths' quality is made of."""
    bytes_V = torch.as_tensor(held_out.byte_lengths, device=place.device)
    sums: dict[str, Tensor] = {}
    with evaluating(model):
        for source in held_out.sources:
            for number, batch in enumerate(held_out.batches(source, place.rank, place.ranks)):
                part = _score(model, batch.to(place.device), bytes_V)
                if number == 0 and mtp:
                    # every rank runs it, since sharded weights are gathered; only rank 0's, the first row, counts
                    part |= {k: v * (place.rank == 0) for k, v in _score_mtp(model, batch.to(place.device)).items()}
                for name, value in part.items():
                    key = f"{source}/{name}"
                    sums[key] = sums[key] + value if key in sums else value
    return reduce_scalars(sums, device=place.device)


@contextmanager
def evaluating(model: StackedLM) -> Iterator[None]:
    """Evaluation mode, and back to training with the sharded fp32 weights in their places.

    A forward that no backward follows leaves gathered weights there, in the compute dtype; the next checkpoint would
    save these.
    """
    model.eval()
    try:
        yield
    finally:
        model.train()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _score(model: StackedLM, batch: Batch, bytes_V: Tensor) -> dict[str, Tensor]:
    """Sums over one batch, as vectors."""
    counted = float((batch.index != SURPLUS).all())
    with torch.no_grad():
        output = model(batch)
    target_BT = targets(batch, 1)
    target_bytes = bytes_V[target_BT.clamp(min=0)][target_BT != IGNORE].sum()
    return {
        "nats": counted * output.loss_sums.double(),
        "targets": counted * output.target_counts,
        "bytes": counted * target_bytes[None],
    }


def _score_mtp(model: StackedLM, batch: Batch) -> dict[str, Tensor]:
    """What costs whole tables of logits, on a sample: the batch's first row."""
    row = _first_row(batch)
    agreed, tried = model.acceptance(row)
    return {"agreed": agreed, "tried": tried, "gradients": model.gradient_norms(row).square()}


def _first_row(batch: Batch) -> Batch:
    length, document = batch.position_BT.shape[1], batch.document_BT1
    return Batch(
        tokens_BT1=batch.tokens_BT1[:1],
        position_BT=batch.position_BT[:1],
        index=batch.index[:1],
        document_BT1=None if document is None else document[:1],
        cu_seqlens=None if document is None else batch.cu_seqlens.clamp(max=length),
    )


def _metrics(sums: dict, sources: tuple[str, ...]) -> dict[str, float]:
    metrics = _losses(sums, sources, "validation")
    for source in sources:
        metrics |= _losses(sums, (source,), f"validation/{source}")
    nats, count = _total(sums, sources, "nats"), _total(sums, sources, "targets")
    for d in range(1, len(nats)):
        metrics[f"validation/loss_mtp/{d}"] = _ratio(nats[d], count[d])
        tried, agreed = _total(sums, sources, "tried"), _total(sums, sources, "agreed")
        metrics[f"validation/acceptance_mtp/{d}"] = _ratio(agreed[d - 1], tried[d - 1])
        gradients = _total(sums, sources, "gradients")
        metrics[f"validation/gradient_ratio_mtp/{d}"] = math.sqrt(_ratio(gradients[d], gradients[0]))
    return metrics


def _losses(sums: dict, sources: tuple[str, ...], prefix: str) -> dict[str, float]:
    nats = _total(sums, sources, "nats")[0]
    loss = nats / _total(sums, sources, "targets")[0]
    ppl = math.exp(loss) if loss < 700 else math.inf
    return {
        f"{prefix}/loss": loss,
        f"{prefix}/ppl": ppl,
        f"{prefix}/bpb": nats / math.log(2) / _total(sums, sources, "bytes")[0],
    }


def _ratio(part: float, whole: float) -> float:
    """nan where there is nothing to divide by: windows too short for a depth, a model that is no longer finite."""
    return part / whole if whole else math.nan


def _total(sums: dict, sources: tuple[str, ...], name: str) -> list[float]:
    """A vector summed over sources."""
    return [sum(values) for values in zip(*(sums[f"{s}/{name}"] for s in sources), strict=True)]


@torch.no_grad()
def continue_prompt(model: StackedLM, tokenizer: Tokenizer, prompt: str, place: Place, dtype: torch.dtype) -> str:
    """`prompt` with SAMPLE_TOKENS more, drawn at TEMPERATURE. Collective: every rank draws the same, from a seed of its
    own, so that a run's random state is not touched."""
    ids = tokenizer.encode(prompt)
    generator = torch.Generator().manual_seed(0)
    caches = model.new_caches(1, len(ids) + SAMPLE_TOKENS, dtype)
    with evaluating(model):
        for i in range(SAMPLE_TOKENS):
            new = ids if i == 0 else ids[-1:]
            logits = model.extend(torch.tensor([new], device=place.device), caches)[0].float().cpu()
            if not logits.isfinite().all():
                break  # the model is broken, which the loop will say; a sample must not be what ends the run
            ids.append(int(torch.multinomial((logits / TEMPERATURE).softmax(-1), 1, generator=generator)))
    return tokenizer.decode(ids)
