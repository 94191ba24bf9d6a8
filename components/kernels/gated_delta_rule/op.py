"""The gated delta rule as one op: checks, the choice of the form, and the registration with torch.

`torch.compile(fullgraph=True)` sees a single opaque op forward and one backward. Where nobody looks on, the same two
functions are called without torch's dispatch, which costs the host more than all of their launches. Left out on
purpose: second derivatives, and gradients of `cu_seqlens` and `scale`.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from components.kernels.gated_delta_rule import chunk
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.gated_delta_rule.forms import CHUNKS, capability_of, choose
from components.kernels.gated_delta_rule.launch import Launch, dense
from components.kernels.gated_delta_rule.reference import state_dtype


def gated_delta_rule(
    q_BTGK: Tensor,
    k_BTGK: Tensor,
    v_BTHV: Tensor,
    a_BTH: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    scale: float | None = None,
    initial_state_BHKV: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
    chunk: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """o_BTHV in the dtype of v, and final_state_BHKV (float32; float64 for float64 inputs) or None.

    q and k come raw (the L2 norm is inside), a is the raw gate: alpha = exp(-exp(A_log) softplus(a + dt_bias)), b the
    logit of beta. H is a multiple of G; value head h reads query/key head h // (H / G). `scale` is K**-0.5 by default.
    cu_seqlens: int32 starts of the documents over the flattened B*T tokens, every row's start among them, then B*T
    repeated; the state starts anew at each. States are one a row, or with `cu_seqlens` one a document: their first
    axis is then its length - 1, not B. `chunk` is how many tokens are worked on at once, 0 for what the form was tuned
    to: it changes rounding alone. Raises ValueError for shapes that do not fit and for a chunk that no kernel has.

    Inputs are float32, bfloat16, float16 or float64. On a GPU products of bfloat16 and float16 inputs take bfloat16
    operands, those of float32 three tf32 terms; sums and states are float32. float64 and K over 128 run in PyTorch,
    which is slow on a GPU.

    Source: arXiv 2412.06464, equation 10, in the chunked form of README.md.
    """
    _check(q_BTGK, k_BTGK, v_BTHV, a_BTH, b_BTH, A_log_H, dt_bias_H, initial_state_BHKV, cu_seqlens, chunk)
    scale = q_BTGK.shape[-1] ** -0.5 if scale is None else float(scale)  # of an int Triton compiles 1 in
    call = torch.ops.hymo.gated_delta_rule if _watched(v_BTHV) else _GatedDeltaRule.apply
    o_BTHV, state, *_ = call(
        q_BTGK, k_BTGK, v_BTHV, a_BTH, b_BTH, A_log_H, dt_bias_H, initial_state_BHKV, cu_seqlens, scale, chunk,
        return_state,
    )  # fmt: skip
    return o_BTHV, state if return_state else None


def _watched(x: Tensor) -> bool:
    """Whether a compiler, a mode or a kind of tensor has to see the op; meta tensors have its shapes alone."""
    kind = type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta
    return kind or torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _check(q, k, v, a, b, A_log, dt_bias, initial_state, cu_seqlens, chunk) -> None:
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"gated_delta_rule needs q and k of one shape (B, T, G, K), not {_shape(q)} and {_shape(k)}")
    if v.ndim != 4 or v.shape[:2] != q.shape[:2] or v.shape[2] % q.shape[2]:
        raise ValueError(
            f"gated_delta_rule needs v of shape (B, T, H, V) with q's B and T and H a multiple of q's {q.shape[2]} "
            f"heads, not {_shape(v)} beside q {_shape(q)}"
        )
    B, T, H, V = v.shape
    for name, x, shape in (
        ("a", a, (B, T, H)),
        ("b", b, (B, T, H)),
        ("A_log", A_log, (H,)),
        ("dt_bias", dt_bias, (H,)),
    ):
        if x.shape != shape:
            raise ValueError(f"gated_delta_rule needs {name} of shape {shape} for v {_shape(v)}, not {_shape(x)}")
    if cu_seqlens is not None and (cu_seqlens.ndim != 1 or cu_seqlens.dtype != torch.int32):
        raise ValueError(f"cu_seqlens must be a vector of int32, not {cu_seqlens.dtype} of shape {_shape(cu_seqlens)}")
    states = (B if cu_seqlens is None else cu_seqlens.shape[0] - 1, H, q.shape[-1], V)
    if initial_state is not None and initial_state.shape != states:
        raise ValueError(f"the initial state must have shape {states}, one a document, not {_shape(initial_state)}")
    if chunk and chunk not in CHUNKS:
        raise ValueError(f"a chunk holds {CHUNKS[0]} to {CHUNKS[-1]} tokens, a power of two, not {chunk}")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


_fused = True


def use_fused(allowed: bool) -> None:
    """Whether the Triton form may run, in this process, where device, dtype and head widths have one. To be said before
    anything is compiled or recorded."""
    global _fused
    _fused = allowed
    _forms.clear()


_forms: dict[tuple, tuple[Launch | None, bool]] = {}  # and whether inputs are copied for it, by their layout
MOST_FORMS = 256  # then all are made anew: prompts of any length come along


def _form(inputs: Inputs) -> Launch | None:
    """The Triton form of these dense inputs, or None where the chunked PyTorch form runs them."""
    if not _fused or inputs.v_BTHV.device.type != "cuda" or inputs.v_BTHV.dtype == torch.float64:
        return None
    v = inputs.v_BTHV
    config = choose(inputs.q_BTGK.shape[3], v.shape[3], v.dtype, capability_of(v.device), inputs.chunk)
    return None if config is None else config.launch(inputs)


def _form_again(inputs: Inputs) -> tuple[Launch | None, Inputs]:
    """The same, remembered, and its dense inputs: what a form works out once is what is launched every time."""
    layout = inputs.layout()
    if layout not in _forms:
        if len(_forms) == MOST_FORMS:
            _forms.clear()
        even = dense(inputs)
        _forms[layout] = _form(even), even is not inputs
    form, copied = _forms[layout]
    return form, dense(inputs) if copied else inputs


# Defined by their schemas: what `torch.library.custom_op` checks at every call takes longer than all our launches.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor? initial_state, "
    "Tensor? cu_seqlens, float scale, int chunk"
)
_FORWARD, _BACKWARD = "hymo::gated_delta_rule", "hymo::gated_delta_rule_backward"
_TAGS, _DEVICES = (torch.Tag.pt2_compliant_tag,), ("cpu", "cuda")
torch.library.define(_FORWARD, f"({_INPUTS}, bool return_state) -> (Tensor, Tensor, Tensor)", tags=_TAGS)
torch.library.define(_BACKWARD, f"(Tensor do, Tensor? dstate, Tensor kept, {_INPUTS}) -> Tensor[]", tags=_TAGS)


def _forward(*arguments) -> tuple[Tensor, Tensor | None, Tensor]:
    """o, the final state (None unless asked for) and the bytes kept for backward."""
    (form, inputs), return_state = _form_again(Inputs(*arguments[:-1])), arguments[-1]
    if form is not None:
        return form.forward(inputs, return_state)
    return *chunk.forward(inputs, return_state), inputs.v_BTHV.new_empty(0, dtype=torch.uint8)


@torch.library.impl(_FORWARD, _DEVICES)
def _(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    o, state, kept = _forward(*arguments)
    return o, o.new_empty(0, dtype=state_dtype(o.dtype)) if state is None else state, kept


@torch.library.register_fake(_FORWARD)
def _(*arguments):
    inputs, return_state = Inputs(*arguments[:-1]), arguments[-1]
    form, v, starts = _form(dense(inputs)), inputs.v_BTHV, inputs.starts_L1
    documents = v.shape[0] if starts is None else starts.shape[0] - 1
    shape = (documents, v.shape[2], inputs.q_BTGK.shape[3], v.shape[3]) if return_state else (0,)
    state = v.new_empty(shape, dtype=state_dtype(v.dtype))
    kept = v.new_empty(0 if form is None else form.kept.bytes, dtype=torch.uint8)
    return torch.empty_like(v, memory_format=torch.contiguous_format), state, kept


def _backward(do, dstate, kept, *arguments) -> list[Tensor]:
    """Gradients of q, k, v, a, b, A_log, dt_bias, and of the initial state if there is one."""
    form, inputs = _form_again(Inputs(*arguments))
    gradients = chunk.backward(inputs, do, dstate) if form is None else form.backward(inputs, kept, do, dstate)
    return [g for g in gradients if g is not None]


torch.library.impl(_BACKWARD, _DEVICES, _backward)


@torch.library.register_fake(_BACKWARD)
def _(do, dstate, kept, *arguments):
    like = [x for x in arguments[:8] if x is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in like]


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.chunk, _return_state = inputs
    ctx.save_for_backward(output[2], *tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dstate, _kept=None, *, backward=torch.ops.hymo.gated_delta_rule_backward):
    kept, *tensors = ctx.saved_tensors
    do = torch.zeros_like(tensors[2]) if do is None else do
    grads = backward(do, dstate, kept, *tensors, ctx.scale, ctx.chunk)
    initial = grads[7] if len(grads) > 7 else None
    return (*grads[:7], initial, None, None, None, None)


torch.library.register_autograd(_FORWARD, _gradients, setup_context=_setup_context)


class _GatedDeltaRule(torch.autograd.Function):
    """The op without torch's dispatch."""

    @staticmethod
    def forward(ctx, *arguments):
        outputs = _forward(*arguments)
        _setup_context(ctx, arguments, outputs)
        return outputs[:2]  # each output costs autograd time, and `kept` needs no gradient

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        return _gradients(ctx, *gradients, backward=_backward)
