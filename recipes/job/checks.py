"""What no section knows alone: does the vocabulary fit the tokenizer, do the ranks share the batch, is the data there.

A check's arguments are the sections it reads; it runs if those are valid, so that its findings stand in the same list
as all other problems. A model's own consistency (sizes that do not divide, labels that do not exist) is its Config's.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from components.data.config import check_data
from components.data.heldout import held_out_at
from components.data.shards import ShardError
from components.optimizers.roles import parameters_by_role
from components.parallel.apply import MICRO_BATCH, OPTIMIZER, recorded_parts
from components.parallel.compile import conflicts
from components.parallel.cuda_graph import obstacles
from registry import Problem, lookup, names, unknown

Check = Callable[..., Iterator[Problem]]


def run_checks(sections: Mapping[str, Any], *, needs_data: bool, ranks: int) -> list[Problem]:
    """The findings of every check whose sections are there (a section that could not be parsed is None)."""
    facts = {**sections, "ranks": ranks}
    found: list[Problem] = []
    for function in CHECKS + DATA_CHECKS * needs_data:
        values = [facts[name] for name in inspect.signature(function).parameters]
        if all(value is not None for value in values):
            found.extend(function(*values))
    return found


def _vocabulary(model: Any, tokenizer: Any) -> Iterator[Problem]:
    has, needs = model.config.vocab_size, tokenizer.config.vocab_size
    if has != needs:
        message = f"{has}, but tokenizer {tokenizer.name} has {needs} ids; state the same number in both"
        yield Problem(("model", "vocab_size"), message)


def _batch(training: Any, parallelism: Any, ranks: int) -> Iterator[Problem]:
    path = ("training", "global_batch_size")
    total, local = training.global_batch_size, training.local_batch_size
    if total % local:
        below = total // local * local
        near = f"{below} or {below + local}" if below else str(local)
        yield Problem(path, f"{total} is not a multiple of local_batch_size {local}; the nearest is {near}")
    elif total // local % ranks:
        message = (
            f"{total} sequences are {total // local} micro-batches of {local}, which {ranks} ranks cannot share evenly"
        )
        yield Problem(path, f"{message}; make it a multiple of {local * ranks}, or change local_batch_size")
    yield from _degrees(parallelism, ranks)


def _degrees(parallelism: Any, ranks: int) -> Iterator[Problem]:
    shard, replicate = parallelism.data_parallel_shard_degree, parallelism.data_parallel_replicate_degree
    if ranks % replicate:
        path = ("parallelism", "data_parallel_replicate_degree")
        yield Problem(path, f"{replicate} does not divide the {ranks} ranks of this run")
    elif shard != -1 and shard * replicate != ranks:
        message = f"{shard} shards x {replicate} copies are {shard * replicate} ranks, but this run has {ranks}; "
        yield Problem(("parallelism", "data_parallel_shard_degree"), message + "-1 takes what there is")


def _roles(model: Any, optimizer: Any) -> Iterator[Problem]:
    """Builds the model without memory: only it knows which roles its parameters have."""
    try:
        with torch.device("meta"):
            roles = parameters_by_role(model.build())
    except ValueError as error:
        yield Problem(("model",), str(error))
        return
    for role, parameters in roles.items():
        component, path = getattr(optimizer, role), ("optimizer", role)
        if component is None:
            yield Problem(path, f"is missing, but {len(parameters)} parameters such as {parameters[0].name} need it")
        elif role not in component.cls.roles:
            yield Problem(path, f"{component.name} serves {', '.join(component.cls.roles)} only; use adamw here")


def _validation_sources(validation: Any, data: Any) -> Iterator[Problem]:
    for i, label in enumerate(validation.sources):
        if label not in data.sources:
            yield Problem(("validation", "sources", str(i)), unknown("source", label, data.sources))


def _compiled(compile: Any, activation_checkpoint: Any, model: Any) -> Iterator[Problem]:
    yield from _no_part("compile", compile.components, {"model", "loss"} | _labels(model))
    ac = activation_checkpoint
    if compile.enable and ac.mode != "none":
        by_op = ac.mode == "selective" and ac.selective_ac_option == "op"
        for reason in conflicts(compile.components, ac.components, by_op):
            yield Problem(("compile", "components"), reason)


def _recomputed(activation_checkpoint: Any, model: Any) -> Iterator[Problem]:
    yield from _no_part("activation_checkpoint", activation_checkpoint.components, {"model"} | _labels(model))


def _labels(model: Any) -> set[str]:
    return {label for name in ("mixers", "ffns") for label in getattr(model.config, name, {})}


def _no_part(section: str, components: tuple[str, ...], known: set[str]) -> Iterator[Problem]:
    for i, label in enumerate(components):
        if label not in known:
            yield Problem((section, "components", str(i)), unknown("part", label, known))


def _planned(parallelism: Any) -> Iterator[Problem]:
    if parallelism.plan not in names("plan"):
        yield Problem(("parallelism", "plan"), unknown("plan", parallelism.plan, names("plan"), "Registered"))
        return
    for key, reason in lookup("plan", parallelism.plan).cls.obstacles(parallelism):
        yield Problem(("parallelism", key), reason)


def _recorded(
    cuda_graph: Any, model: Any, data: Any, compile: Any, activation_checkpoint: Any, parallelism: Any
) -> Iterator[Problem]:
    """What cannot be recorded as CUDA graphs."""
    if not cuda_graph.enable or parallelism.plan not in names("plan"):
        return
    known = {MICRO_BATCH, OPTIMIZER, *getattr(model.config, "mixers", {})}
    if wrong := list(_no_part("cuda_graph", cuda_graph.components, known)):
        yield from wrong
        return
    if not cuda_graph.components:
        yield Problem(("cuda_graph", "components"), "names nothing to record; name parts, or set enable = false")
        return
    parts, plan, path = recorded_parts(cuda_graph), parallelism.plan, ("cuda_graph", "components")
    whole = lookup("plan", plan).cls.whole
    if whole and set(parts) - {MICRO_BATCH}:
        remedy = f'record "{MICRO_BATCH}" (the whole micro-batch) in place of mixers, or set enable = false'
        yield Problem(path, f'plan = "{plan}" keeps all weights in place: {remedy}')
    elif not whole and MICRO_BATCH in parts:
        remedy = f'record labels of mixers in place of "{MICRO_BATCH}", or set enable = false'
        yield Problem(path, f'plan = "{plan}" moves weights within a micro-batch: {remedy}')
    elif not whole and parts:
        yield from _recorded_mixers(parts, model, data, compile, activation_checkpoint)


def _recorded_mixers(labels: tuple[str, ...], model: Any, data: Any, compile: Any, activation_checkpoint: Any):
    path = ("cuda_graph", "components")
    with torch.device("meta"):
        yield from (Problem(path, reason) for reason in obstacles(model.build(), labels))
    if data.packing == "document":
        message = 'recorded mixers have no mask of documents; set enable = false, or [data] packing to "window"'
        yield Problem(("cuda_graph", "enable"), message)
    for label in labels:
        if compile.enable and label in compile.components:
            yield Problem(path, f'mixer "{label}" is recorded whole and cannot be compiled too; name it in one place')
        if activation_checkpoint.mode != "none" and label in activation_checkpoint.components:
            message = "keeps its activations in the recording, so recomputing it frees nothing; name it in one place"
            yield Problem(path, f'mixer "{label}" {message}')


def _text(tokenizer: Any, data: Any, validation: Any, training: Any) -> Iterator[Problem]:
    try:
        built = tokenizer.build()
    except ValueError as error:
        yield Problem(("tokenizer",), str(error))
        return
    labels = [label for label in validation.sources or data.sources if label in data.sources]
    yield from check_data(
        data,
        built,
        seq_len=training.seq_len,
        validation_sources=labels if validation.enable else (),
        validation_sequences=validation.batches * training.local_batch_size,
    )
    if validation.enable and len(labels) == len(validation.sources or data.sources):
        yield from _longer_text(built, data, validation, training)


def _longer_text(tokenizer: Any, data: Any, validation: Any, training: Any) -> Iterator[Problem]:
    try:
        held_out_at(data, tokenizer, validation, training)
    except ShardError:
        return  # that there is no text has been said
    except ValueError as error:
        yield Problem(("validation", "lengths"), str(error))


CHECKS: tuple[Check, ...] = (  # of the recipe alone
    _vocabulary,
    _batch,
    _roles,
    _validation_sources,
    _compiled,
    _recomputed,
    _planned,
    _recorded,
)
DATA_CHECKS: tuple[Check, ...] = (_text,)  # of the files that it names
