"""A recipe's sections: what each key is called, its type, its default and what it means.

Names and defaults are TorchTitan's wherever it has one. `[model]`, `[tokenizer]`, `[optimizer.*]` and `[lr_scheduler]`
are components: their keys are the fields of the registered class that `name` selects. A section holds only what some
part of the repository reads; what no section knows alone (does the vocabulary fit the tokenizer?) is in `checks.py`.
"""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from components.data.config import DataConfig
from registry import Component


def _at_least(section: Any, low: float, *names: str) -> None:
    for name in names:
        if getattr(section, name) < low:
            raise ValueError(f"{name} must be at least {low}, not {getattr(section, name)}")


@dataclass(frozen=True, kw_only=True)
class JobSection:
    dump_folder: str  # everything the run writes goes here; outputs/<recipe name> if not stated
    description: str = ""  # what the recipe is for, in a sentence
    imports: tuple[str, ...] = ()  # modules outside this repository whose components register themselves
    config_file: str = field(default="", compare=False)  # the recipe; a flag only
    overlay: tuple[str, ...] = field(default=(), compare=False)  # recipes laid over the root recipe; a flag, repeatable


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """One optimizer a role that the model has; `components/parameters.py` says which parameter has which role."""

    matrix: Annotated[Component, "optimizer"]  # 2-D weights of mixers, dense FFNs and MTP
    expert: Annotated[Component, "optimizer"] | None = None  # routed and shared expert weights
    embedding: Annotated[Component, "optimizer"]  # token embedding and head
    router: Annotated[Component, "optimizer"] | None = None  # MoE routers
    scalar: Annotated[Component, "optimizer"]  # norms, decays, convolutions, gates, biases


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    local_batch_size: int = 8  # sequences a rank in one micro-batch
    global_batch_size: int  # sequences a step, over all ranks and micro-batches
    seq_len: int = 2048  # trained positions a sequence
    steps: int = 10000  # optimizer steps
    max_norm: float = 1.0  # gradients are clipped to this global norm
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # compute; optimizer state is fp32 always
    master_dtype: Literal["float32", "bfloat16"] = "float32"  # weights are rounded to it; stored fp32: no memory saved
    tf32: bool = False  # fp32 matrix products in TF32, except where a part needs full fp32 (router)
    max_skipped_steps: int = 10  # stop after this many non-finite steps in a row

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len

    def __post_init__(self) -> None:
        _at_least(self, 1, "local_batch_size", "global_batch_size", "seq_len", "steps", "max_skipped_steps")
        if self.max_norm <= 0:
            raise ValueError(f"max_norm must be above 0, not {self.max_norm}; a large value never clips")


@dataclass(frozen=True, kw_only=True)
class ParallelismSection:
    plan: str = "fsdp2"  # a registered plan: `python -m registry plan`
    expert_wrapping: Literal["folded", "per_expert"] = "folded"  # experts sharded whole, or each its own FSDP unit
    data_parallel_shard_degree: int = -1  # ranks that share one copy of the weights; -1: all that replication leaves
    data_parallel_replicate_degree: int = 1  # copies of the weights (HSDP above 1)
    reduce_dtype: Literal["bfloat16", "float32"] = "float32"  # of the gradients between ranks
    reshard_after_forward: bool = True  # fsdp2: free gathered weights after forward: less memory, one more gather

    def __post_init__(self) -> None:
        _at_least(self, 1, "data_parallel_replicate_degree")
        if self.data_parallel_shard_degree != -1:
            _at_least(self, 1, "data_parallel_shard_degree")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointSection:
    mode: Literal["none", "full", "selective"] = "none"  # what is recomputed in backward: nothing, each block, a choice
    selective_ac_option: str = "op"  # "op": keep matrix products and attention; "2": every second block
    components: tuple[str, ...] = ("model",)  # "model" (whole blocks), or labels of mixers and ffns

    def __post_init__(self) -> None:
        option = self.selective_ac_option
        if option != "op" and not (option.isdecimal() and int(option) > 0):
            raise ValueError(f'selective_ac_option must be "op" or a number of blocks such as "2", not "{option}"')


@dataclass(frozen=True, kw_only=True)
class CompileSection:
    enable: bool = False  # torch.compile
    components: tuple[str, ...] = ("model", "loss")  # "model" (each block), "loss", or labels of mixers and ffns
    backend: str = "inductor"  # of torch.compile; "aot_eager" traces without generating code, to look for breaks
    on_failure: Literal["error", "plain"] = "error"  # stop, or warn and run uncompiled


@dataclass(frozen=True, kw_only=True)
class CudaGraphSection:
    enable: bool = False  # record forward and backward as CUDA graphs
    components: tuple[str, ...] = ("mla",)  # mixers' labels (fsdp2) or "model": a micro-batch (zero1); and "optimizer"
    on_failure: Literal["error", "plain"] = "error"  # stop, or warn and run without recordings


@dataclass(frozen=True, kw_only=True)
class FusedGDNSection:
    enable: bool = True  # the gated delta rule's Triton form where device and head widths have one; else PyTorch's
    on_failure: Literal["error", "plain"] = "error"  # stop, or warn and run PyTorch's


@dataclass(frozen=True, kw_only=True)
class MoeMixedPrecisionSection:
    enable: bool = True  # routed experts compute in [training] dtype; else in fp32
    on_failure: Literal["error", "plain"] = "error"  # stop, or warn and compute in fp32


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    enable: bool = False  # save, and resume from the newest complete checkpoint
    folder: str = "checkpoint"  # under the dump folder
    interval: int = 500  # steps between saves; the last step is always saved
    keep_latest_k: int = 10  # older ones are removed; 0 keeps all
    keep_best: bool = True  # keep the best by validation loss too
    async_mode: Literal["disabled", "async"] = "disabled"  # write while training goes on
    load_step: int = -1  # resume from this step; -1 from the newest complete one
    allow_changes: bool = False  # resume although keys differ that fix the run's meaning
    initial_load_path: str | None = None  # start from the weights of this checkpoint (no optimizer, no step)
    initial_load_partial: bool = False  # ... even where some weights are missing there or here

    def __post_init__(self) -> None:
        _at_least(self, 1, "interval")
        _at_least(self, 0, "keep_latest_k")
        _at_least(self, -1, "load_step")


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    enable: bool = False  # held-out loss, perplexity, bits per byte
    freq: int = 500  # steps between validations; the last step is always validated
    batches: int = 32  # fixed micro-batches of held-out text of each source, shared by the ranks
    sources: tuple[str, ...] = ()  # labels of [data.sources]; all of them if empty
    lengths: tuple[int, ...] = ()  # positions a sequence to validate at too, beside [training] seq_len; as many tokens
    prompts: tuple[str, ...] = ()  # continued with each validation, as text in TensorBoard

    def __post_init__(self) -> None:
        _at_least(self, 1, "freq", "batches")
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"lengths must be at least 1, not {list(self.lengths)}")


@dataclass(frozen=True, kw_only=True)
class MetricsSection:
    log_freq: int = 10  # steps between log lines; one host sync each
    enable_tensorboard: bool = True  # under <dump folder>/tb; metrics.jsonl is always written

    def __post_init__(self) -> None:
        _at_least(self, 1, "log_freq")


@dataclass(frozen=True, kw_only=True)
class ProfilingSection:
    enable_profiling: bool = False  # a trace every profile_freq steps under <dump folder>/profile_traces
    profile_freq: int = 10
    enable_memory_snapshot: bool = False  # CUDA allocator history under <dump folder>/memory_snapshot

    def __post_init__(self) -> None:
        _at_least(self, 3, "profile_freq")


@dataclass(frozen=True, kw_only=True)
class CommSection:
    init_timeout_seconds: int = 300  # collectives until the first step is done (compilation, loading)
    train_timeout_seconds: int = 100  # collectives after that

    def __post_init__(self) -> None:
        _at_least(self, 1, "init_timeout_seconds", "train_timeout_seconds")


@dataclass(frozen=True, kw_only=True)
class DebugSection:
    seed: int = 0  # initial weights
    deterministic: bool = False  # deterministic kernels: the same bits on the same ranks, slower


@dataclass(frozen=True, kw_only=True)
class Job:
    """A complete, valid recipe: what `load` gives and every command reads."""

    job: JobSection
    model: Annotated[Component, "model"]
    tokenizer: Annotated[Component, "tokenizer"]
    data: DataConfig
    optimizer: OptimizerSection
    lr_scheduler: Annotated[Component, "schedule"]
    training: TrainingSection
    parallelism: ParallelismSection = field(default_factory=ParallelismSection)
    activation_checkpoint: ActivationCheckpointSection = field(default_factory=ActivationCheckpointSection)
    compile: CompileSection = field(default_factory=CompileSection)
    cuda_graph: CudaGraphSection = field(default_factory=CudaGraphSection)
    fused_gdn: FusedGDNSection = field(default_factory=FusedGDNSection)
    moe_mixed_precision: MoeMixedPrecisionSection = field(default_factory=MoeMixedPrecisionSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    metrics: MetricsSection = field(default_factory=MetricsSection)
    profiling: ProfilingSection = field(default_factory=ProfilingSection)
    comm: CommSection = field(default_factory=CommSection)
    debug: DebugSection = field(default_factory=DebugSection)
