"""Logical tensors to and from `torch.distributed.checkpoint`.

A rank holds parts of stored parameters: experts folded into one W_EDF, in|skip stacked, all of it sharded. On disk
there are logical tensors only, each in as many pieces as ranks held a part of it. So a checkpoint of four ranks loads
on two or on one, and a folded module loads what an unfolded one saved.

`Views` maps a checkpoint key to this rank's part of that tensor; a rank without any part of it lacks the key. Two
ranks with the same part (replicas) write it once. Left out on purpose: which tensors there are (`state.py`), and when
a checkpoint counts as complete (`checkpointer.py`).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from components.parameters import LogicalView

Views = dict[str, LogicalView]
FILES = 4  # that a rank writes at once


class CheckpointError(ValueError):
    """A checkpoint that cannot be written or read; the message says which one, why, and what to do."""


def write(folder: Path, views: Views, group: dist.ProcessGroup) -> None:
    """Write every logical tensor into `folder`, each rank its own parts. Collective over `group` (gloo)."""
    with _one_sentence(folder, "written"):
        torch_dcp.save(
            dict(views),
            storage_writer=torch_dcp.FileSystemWriter(folder, thread_count=FILES),
            planner=_SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
        )


def read(folder: Path, views: Views, group: dist.ProcessGroup) -> None:
    """Fill `views` in place from `folder`, converting dtypes. Collective over `group` (gloo).

    Every key must be in the checkpoint, with the same whole shape: see `saved_shapes`.
    """
    with _one_sentence(folder, "read"):
        torch_dcp.load(
            dict(views),
            storage_reader=torch_dcp.FileSystemReader(folder),
            planner=_LoadPlanner(),
            process_group=group,
        )


def saved_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The whole shape of every logical tensor in the checkpoint in `folder`."""
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    return {key: tuple(tensor.size) for key, tensor in metadata.state_dict_metadata.items()}


class _SavePlanner(DefaultSavePlanner):
    """Plans one piece a logical tensor and rank; the parent drops replicas and checks that pieces do not overlap."""

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(key, view) for key, view in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local.detach()


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reads that fill a rank's parts from whatever pieces were saved."""

    def set_up_planner(self, state_dict, metadata=None, is_coordinator=False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for key, view in self.state_dict.items() for item in self._reads(key, view)])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].local.detach()

    def _reads(self, key: str, view: LogicalView) -> list[ReadItem]:
        items = create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [_chunk(view)])
        # The library leaves what no saved piece covers as it was, without a word.
        if sum(math.prod(item.lengths) for item in items) != view.local.numel():
            raise CheckpointError(f"{key} is only partly in the checkpoint; it was saved by a faulty program")
        return items


def _chunk(view: LogicalView) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(view.offset), sizes=view.local.shape)


def _write_item(key: str, view: LogicalView) -> WriteItem:
    data = TensorWriteData(
        chunk=_chunk(view),
        properties=TensorProperties.create_from_tensor(view.local.detach()),
        size=torch.Size(view.shape),
    )
    return WriteItem(index=MetadataIndex(key, torch.Size(view.offset)), type=WriteItemType.SHARD, tensor_data=data)


@contextmanager
def _one_sentence(folder: Path, done: str) -> Iterator[None]:
    """The library's report of what failed on which ranks, with tracebacks, as one sentence."""
    try:
        yield
    except torch_dcp.CheckpointException as failure:
        rank, (error, _) = next(iter(failure.failures.items()))
        raise CheckpointError(f"{folder} could not be {done}: rank {rank}: {error}") from failure
