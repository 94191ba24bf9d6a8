"""The Triton form of the gated delta rule against the chunked PyTorch form in float64.

Without a GPU the kernels run in Triton's interpreter at small sizes, in float32, and where rounding is what is tested
with operands in float16 (its bfloat16 is unreliable); the marked tests need a GPU and go through the op. Tolerances:
relative L2 errors of one rounding to bfloat16 at a few places in a chain (0.4% measured; 0.5% for outputs and 1.5% for
gradients allowed), 1e-5 in float32.
"""

import dataclasses
import itertools

import pytest
import torch
import triton.language as tl

from components.kernels.gated_delta_rule import chunk, gated_delta_rule, op
from components.kernels.gated_delta_rule.chunk import Inputs
from components.kernels.gated_delta_rule.forms import choose, chunks
from components.kernels.gated_delta_rule.launch import dense
from components.kernels.gated_delta_rule.launch_small import SmallHeads
from components.kernels.gated_delta_rule.launch_wide import WideHeads
from tests.kernels.recording import recorded
from tests.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = SmallHeads(segment=32, chunks_per_program=1)
WIDE = WideHeads(chunk=16, sweep_block=16, query_block=16, key_block=16)
NAMES = ("o", "state", "q", "k", "v", "a", "b", "A_log", "dt_bias", "initial_state")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN, so that reading what was never written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def inputs(B, T, G, H, K, V, *, starts=None, initial=True, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    starts = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    documents = B if starts is None else len(starts) - 1
    wide = torch.float32
    state = draw(documents, H, K, V, dtype=wide) if initial else None
    A_log, dt_bias = draw(H, dtype=wide) * 0.5, draw(H, dtype=wide) * 0.5 - 1
    x = draw(B, T, G, K), draw(B, T, G, K), draw(B, T, H, V), draw(B, T, H), draw(B, T, H)
    return Inputs(*x, A_log, dt_bias, state, starts, K**-0.5)


def in_float64(x):
    fields = (getattr(x, f.name) for f in dataclasses.fields(x))
    return Inputs(*(y.double() if torch.is_tensor(y) and y.is_floating_point() else y for y in fields))


def upstream(x, seed=1):
    """Gradients of the outputs and of the final states."""
    generator = torch.Generator().manual_seed(seed)
    documents = len(x.v_BTHV) if x.starts_L1 is None else len(x.starts_L1) - 1
    do = torch.randn(x.v_BTHV.shape, generator=generator).to(x.v_BTHV)
    shape = documents, *x.v_BTHV.shape[2:3], x.q_BTGK.shape[3], x.v_BTHV.shape[3]
    return do, torch.randn(shape, generator=generator).to(DEVICE)


def run(x, do, dstate, config):
    x = dense(x)
    return run_form(config.launch(x), x, do, dstate)


def run_form(form, x, do, dstate):
    o, state, kept = form.forward(x, True)
    return [o, state, *form.backward(x, kept, do, dstate)]


def exact(x, do, dstate):
    x = in_float64(x)
    return [*chunk.forward(x), *chunk.backward(x, do.double(), None if dstate is None else dstate.double())]


def least(expected):
    """What errors are at least measured against: a hundredth of dv, and what float32 can hold (a state that only decays
    ends far below)."""
    return max(0.01 * expected[4].norm().item(), 1e-30)


def mean_log_decay(x):
    """The mean size of log alpha, counted up to the kernels' floor."""
    rate = x.A_log_H.double().exp() * torch.nn.functional.softplus(x.a_BTH.double() + x.dt_bias_H)
    return rate.clamp(max=80).mean().item()


def check(x, found, expected, out, grad):
    """Relative L2 errors. The gates' gradients are sums that may cancel to nothing: they are measured against what is
    summed, which for A_log is the gradient of log alpha times log alpha."""
    floor = least(expected)
    gates = max(floor, *(expected[i].norm().item() for i in (5, 7, 8)))
    sizes = {"a": gates, "dt_bias": gates, "A_log": gates * max(1.0, mean_log_decay(x))}
    for name, one, other in zip(NAMES, found, expected, strict=True):
        if other is None:
            continue
        size = sizes.get(name, max(floor, other.norm().item()))
        error = (one.double() - other).norm().item()
        assert error <= (out if name in ("o", "state") else grad) * size, f"{name}: {error / size:.1e}"


CASES = {
    "one token": (dict(B=1, T=1, G=1, H=1, K=16, V=16), SMALL),
    "ragged tail, several segments": (dict(B=1, T=75, G=1, H=2, K=32, V=16), SMALL),
    "no initial state": (dict(B=1, T=33, G=1, H=1, K=16, V=16, initial=False), SMALL),
    "odd widths": (dict(B=1, T=40, G=1, H=1, K=12, V=20), SMALL),
    "more heads than a program of the gates takes": (dict(B=1, T=2, G=1, H=17, K=16, V=16), SMALL),
    "chunks of 32": (dict(B=1, T=70, G=1, H=1, K=16, V=16), dataclasses.replace(SMALL, chunk=32)),
    "packed": (dict(B=2, T=34, G=1, H=1, K=16, V=16, starts=[0, 1, 1, 18, 34, 68, 68]), SMALL),
    "packed, several segments": (dict(B=1, T=170, G=1, H=1, K=16, V=16, starts=[0, 40, 165, 165, 170]), SMALL),
    "wide": (dict(B=1, T=40, G=1, H=2, K=16, V=32), WIDE),
    "wide, odd widths": (dict(B=2, T=20, G=1, H=1, K=12, V=20, initial=False), WIDE),
    "wide, larger blocks of values to walk": (
        dict(B=1, T=20, G=1, H=1, K=16, V=30),
        dataclasses.replace(WIDE, sweep_block=32),
    ),
    "chunks of 32, packed": (
        dict(B=1, T=170, G=1, H=1, K=16, V=16, starts=[0, 40, 165, 165, 170]),
        dataclasses.replace(SMALL, chunk=32),
    ),
    "wide, packed": (dict(B=2, T=34, G=1, H=1, K=16, V=16, starts=[0, 1, 1, 18, 34, 68, 68]), WIDE),
}


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_equal_the_chunked_form_in_float64(case):
    sizes, config = CASES[case]
    x = inputs(**sizes)
    do, dstate = upstream(x)
    check(x, run(x, do, dstate, config), exact(x, do, dstate), 1e-5, 1e-5)


OFFERED = [(w, chunk) for w in ((16, 16), (32, 20), (16, 40), (64, 64)) for chunk in chunks(*w)]


@pytest.mark.parametrize(("widths", "chunk"), OFFERED)
def test_every_chunk_that_is_offered_gives_the_outputs_and_gradients_of_float64(widths, chunk):
    """As the op launches it: of small heads two segments, the last all but full, so that every program has chunks."""
    config = choose(*widths, chunk=chunk)
    assert config.chunk == chunk
    x = inputs(1, 2 * chunk + 3 if max(widths) > 32 else 2 * config.segment - 10, 1, 1, *widths)
    do, dstate = upstream(x)
    check(x, run(x, do, dstate, config), exact(x, do, dstate), 1e-5, 1e-5)


def test_a_chunk_without_a_kernel_is_refused_with_those_that_have_one():
    for K, V, refused, offered in ((32, 32, 64, "16 and 32"), (64, 128, 128, "32 and 64"), (16, 40, 16, "32 and 64")):
        with pytest.raises(ValueError, match=f"chunk = {refused}: heads of .* {K} .* {V} have kernels .* {offered} "):
            choose(K, V, chunk=refused)
    assert choose(32, 32, chunk=16) == choose(32, 32) and choose(64, 128, chunk=64) == choose(64, 128)


def test_registers_of_small_heads_are_held_down_only_where_nothing_spills_then():
    whole = SmallHeads().summary_registers
    assert choose(32, 32).summary_registers < whole
    for elsewhere in (dict(capability=(8, 0)), dict(dtype=torch.float32), dict(chunk=32)):
        assert choose(32, 32, **elsewhere).summary_registers == whole, elsewhere


def test_registers_of_wide_heads_are_held_down_only_where_that_was_measured():
    names = ("map_registers", "query_registers", "key_registers")
    held, whole = ([getattr(config, name) for name in names] for config in (choose(64, 128), WideHeads()))
    assert held == [128, 168, 168]
    elsewhere = [dict(capability=(8, 0)), dict(chunk=32), dict(dtype=torch.float16), dict(dtype=torch.float32)]
    for config in (choose(128, 256), *(choose(64, 128, **options) for options in elsewhere)):
        assert [getattr(config, name) for name in names] == whole, config


@dataclasses.dataclass(frozen=True)
class WithHalfOperands:
    """A form whose products take float16 operands instead of bfloat16: three bits more, and rounded in the interpreter
    as on a GPU."""

    form: SmallHeads | WideHeads

    def launch(self, x):
        launch = self.form.launch(x)
        launch.compute_dtype = torch.float16
        for shared in (launch.numbers, launch.sizes):
            shared["CT"] = tl.float16
        return launch


FORMS = {
    "small": SMALL,
    "small, chunks of 32": dataclasses.replace(SMALL, chunk=32),
    "wide": WIDE,
    "wide, chunks of 32": dataclasses.replace(WIDE, chunk=32),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("T", "initial"), [(1, False), (16, True), (17, False)])
def test_rounded_operands_cost_no_more_than_their_rounding(form, T, initial):
    """An eighth of what bfloat16 is allowed on the GPU. Without a state before it, a first token's decay has no
    gradient, and what is summed for it has to cancel."""
    x = inputs(1, T, 1, 2, 16, 16, initial=initial, dtype=torch.float16)
    do, dstate = upstream(x)
    check(x, run(x, do, dstate, WithHalfOperands(FORMS[form])), exact(x, do, dstate), 0.005 / 8, 0.015 / 8)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_finer_than_operands_cost_no_more_than_the_rounding_of_operands(form):
    """The gates' gradients are differences of sums by rows and by columns, which have to see the same rounded keys."""
    x = inputs(1, 67, 1, 2, 16, 16, dtype=torch.float32)
    do, dstate = upstream(x)
    check(x, run(x, do, dstate, WithHalfOperands(FORMS[form])), exact(x, do, dstate), 0.005 / 8, 0.015 / 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_u_which_waits_in_dv_is_rounded_to_the_dtype_of_values_at_most(dtype):
    x = inputs(1, 35, 1, 2, 16, 40, dtype=dtype)
    do, dstate = upstream(x)
    unit = torch.finfo(dtype).eps / torch.finfo(torch.bfloat16).eps
    check(x, run(x, do, dstate, WithHalfOperands(WIDE)), exact(x, do, dstate), 0.005 * unit, 0.015 * unit)


def log_decays(name, T):
    if name == "alternating":
        return torch.tensor([0.0, -50.0]).repeat(T)[:T]
    return torch.full((T,), float(name))


def with_decay(x, name):
    """x with given log-decays: a = log(exp(-g) - 1) under A_log = dt_bias = 0."""
    g = log_decays(name, x.a_BTH.shape[1]).to(DEVICE, torch.float64)
    a = torch.where(g < -30, -g, torch.log(torch.expm1(-g)))
    a = a.to(x.a_BTH.dtype)[None, :, None].expand_as(x.a_BTH).contiguous()
    return dataclasses.replace(x, a_BTH=a, A_log_H=0 * x.A_log_H, dt_bias_H=0 * x.dt_bias_H)


def with_keys(x, name):
    k = x.k_BTGK.clone()
    if name == "identical":
        k[:] = k[:, :1]
    elif name == "correlated":
        k += 5 * k[:, :1]
    elif name == "zero rows":
        k[:, ::3] = 0
    elif name == "long":
        k *= 1e3
    return dataclasses.replace(x, k_BTGK=k)


def with_beta(x, beta):
    b = torch.logit(torch.tensor(beta, dtype=torch.float64)).to(x.b_BTH)
    return dataclasses.replace(x, b_BTH=b.expand_as(x.b_BTH).contiguous())


DECAYS = ["0", "-1e-6", "-5", "-50", "-1e4", "-inf", "alternating"]
KEYS, BETAS = ["identical", "correlated", "zero rows", "long"], [0.0, 1.0, 0.999, 1e-4]
EXTREMES = {
    **{f"log decay {d}": lambda x, d=d: with_decay(x, d) for d in DECAYS},
    **{f"{n} keys": lambda x, n=n: with_keys(x, n) for n in KEYS},
    **{f"beta {b}": lambda x, b=b: with_beta(x, b) for b in BETAS},
    "identical keys kept forever": lambda x: with_beta(with_decay(with_keys(x, "identical"), "0"), 1.0),
}
ON_CPU = ["log decay 0", "log decay -inf", "log decay alternating", "zero rows keys", "beta 0.0"]


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])
@pytest.mark.parametrize("extreme", [*ON_CPU, "identical keys kept forever"])
def test_extreme_decays_keys_and_strengths_stay_right(extreme, config):
    x = EXTREMES[extreme](inputs(1, 35, 1, 1, 16, 16))
    do, dstate = upstream(x)
    check(x, run(x, do, dstate, config), exact(x, do, dstate), 1e-5, 2e-4)


def maps_in_float64(x):
    """Of one chunk and head: T beta, `values`, M transposed, `keys` and `queries`."""
    x = in_float64(x)
    k, q = (torch.nn.functional.normalize(y[0, :, 0], dim=-1) for y in (x.k_BTGK, x.q_BTGK))
    g = -x.A_log_H.exp() * torch.nn.functional.softplus(x.a_BTH[0, :, 0] + x.dt_bias_H)
    G, beta = g.cumsum(0), x.b_BTH[0, :, 0].sigmoid()
    E, d, D = G.exp(), (G[-1] - G).exp(), (G[:, None] - G).exp().tril()
    A = (beta[:, None] * (k @ k.mT) * D).tril(-1)
    T_beta = torch.linalg.inv(torch.eye(len(A)).to(A) + A) * beta
    keys, values = T_beta.mT @ (d[:, None] * k), x.scale * (q @ k.mT * D) @ T_beta
    E_k = E[:, None] * k
    return T_beta, values, -E_k.mT @ keys, keys, x.scale * E[:, None] * q - values @ E_k


@pytest.mark.parametrize("name", ["independent", "correlated", "identical"])
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-2)])
def test_wide_heads_keep_the_maps_of_a_chunk_however_its_keys_correlate(name, chunk, dtype, tolerance):
    """With T by torch.linalg. Where keys are identical the terms of M all but cancel."""
    config = dataclasses.replace(WIDE, chunk=chunk)
    x = with_keys(inputs(1, chunk, 1, 1, 64, 16, initial=False, dtype=dtype), name)
    x = with_beta(with_decay(x, "-1e-6"), 0.999)
    form = (config if dtype == torch.float32 else WithHalfOperands(config)).launch(x)
    T_beta, values, _vectors, *maps = form.kept.of(form.forward(x, False)[2])
    kept = (T_beta, chunk), (values, chunk), *((y, 64) for y in maps)
    for (found, width), expected in zip(kept, maps_in_float64(x), strict=True):
        found = found.view(form.n_chunks, -1, width)[0].double()
        assert (found - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])
def test_packed_documents_give_the_bits_of_separate_calls(config):
    starts = [0, 1, 18, 52]
    x = inputs(1, 52, 1, 1, 16, 16, starts=starts)
    do, dstate = upstream(x)
    assert_packed_equals_separate(x, do, dstate, config)


def losses_of_twenty_steps(form, monkeypatch):
    """Of a tiny HyMo in fp32 whose recurrence runs in `form`, or in PyTorch with None."""
    monkeypatch.setattr(op, "_form", lambda x: None if form is None else form.launch(x))
    monkeypatch.setattr(op, "_forms", {})
    model = tiny.model(dtype=torch.float32, zones={"trunk": {"pattern": ["mla", "gdn"]}}).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(20):
        batch = tiny.batch(tiny.tokens(rows=1, length=20, seed=step % 2)).to(torch.device(DEVICE))
        loss = model(batch).loss_sums.sum() / 20
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_twenty_steps_of_training_give_the_losses_of_the_pytorch_form(monkeypatch):
    expected = losses_of_twenty_steps(None, monkeypatch)
    assert losses_of_twenty_steps(SMALL, monkeypatch) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < 0.8 * expected[0]


def test_a_document_more_costs_a_chunk_and_no_state():
    def kept(documents):
        starts = [0] + [512] * documents
        return SmallHeads().launch(inputs(1, 512, 1, 1, 16, 16, starts=starts, initial=False)).kept.bytes

    one_chunk = 2 * 16 * 16 * 4 + 12 * 16 * 4  # T, P, vectors and scales, in float32
    assert kept(1001) - kept(1) == 1000 * one_chunk


def assert_packed_equals_separate(x, do, dstate, config):
    """Bit for bit, but for the gates' gradients, which are sums over documents."""
    packed = run(x, do, dstate, config)
    for i, (start, stop) in enumerate(itertools.pairwise(x.starts_L1.tolist())):
        if start == stop:
            continue
        tokens = [y[:, start:stop].contiguous() for y in (x.q_BTGK, x.k_BTGK, x.v_BTHV, x.a_BTH, x.b_BTH)]
        initial = None if x.initial_state_LHKV is None else x.initial_state_LHKV[i : i + 1]
        one = Inputs(*tokens, x.A_log_H, x.dt_bias_H, initial, None, x.scale)
        alone = run(one, do[:, start:stop], dstate[i : i + 1], config)
        for name, found, expected in zip(NAMES, packed, alone, strict=True):
            if name in ("o", "q", "k", "v", "a", "b"):
                assert torch.equal(found[:, start:stop], expected), f"{name} of document {i}"
            elif name == "state" or (name == "initial_state" and expected is not None):
                assert torch.equal(found[i : i + 1], expected), f"{name} of document {i}"


def test_two_runs_give_the_same_bits_and_strided_inputs_too():
    x = inputs(1, 40, 1, 2, 16, 16)
    do, dstate = upstream(x)
    first = run(x, do, dstate, SMALL)
    wide = torch.full((1, 40, 8), torch.nan, device=DEVICE)
    wide[..., 1:3], wide[..., 4:6] = x.a_BTH, x.b_BTH
    k = x.k_BTGK.transpose(1, 3).contiguous().transpose(1, 3)
    strided = dataclasses.replace(x, a_BTH=wide[..., 1:3], b_BTH=wide[..., 4:6], k_BTGK=k)
    for one, other in zip(first, run(strided, do, dstate, SMALL), strict=True):
        assert torch.equal(one, other)


def test_what_stands_once_a_head_or_document_may_be_strided_too():
    x = inputs(1, 40, 1, 2, 16, 16, starts=[0, 7, 40])
    do, dstate = upstream(x)
    names = ("A_log_H", "dt_bias_H", "initial_state_LHKV", "starts_L1")
    strided = {name: getattr(x, name).repeat_interleave(2, 0)[::2] for name in names}
    strided = dataclasses.replace(x, **strided, scale=0.5, chunk=32)
    assert (dense(strided).scale, dense(strided).chunk) == (0.5, 32)
    found = run(dataclasses.replace(strided, scale=x.scale), do, dstate, SMALL)
    for one, other in zip(run(x, do, dstate, SMALL), found, strict=True):
        assert torch.equal(one, other)


# With a GPU ---------------------------------------------------------------------------------------

WIDTHS = [(16, 16), (32, 32), (16, 64), (64, 64), (64, 128), (96, 192), (100, 60), (128, 256)]
CASES_ON_GPU = [(w, torch.bfloat16, chunk) for w in WIDTHS for chunk in (0, 32)] + [
    (w, dtype, chunk) for w in ((32, 32), (64, 128)) for dtype in (torch.float16, torch.float32) for chunk in (0, 32)
]


def check_on_gpu(x, dstate_too=True, out=0.005, grad=0.015, chunk=0):
    config = choose(x.q_BTGK.shape[3], x.v_BTHV.shape[3], x.v_BTHV.dtype, chunk=chunk)
    do, dstate = upstream(x)
    dstate, form = dstate if dstate_too else None, config.launch(x)
    found = run_form(form, x, do, dstate)
    check(x, found, exact(x, do, dstate), out, grad)
    copies = [None if y is None else y.clone() for y in (*x.tensors(), do, dstate)]
    again = run_form(form, Inputs(*copies[:-2], x.scale, x.chunk), *copies[-2:])  # launches that were taken down
    assert all(one is None or torch.equal(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("widths", "dtype", "chunk"), CASES_ON_GPU)
def test_every_width_dtype_and_chunk_on_the_gpu(widths, dtype, chunk):
    tight = {"out": 1e-5, "grad": 1e-4} if dtype == torch.float32 else {}
    check_on_gpu(inputs(2, 333, 2, 4, *widths, dtype=dtype), **tight, chunk=chunk)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 65, 223, 224, 225, 448, 4096])
def test_every_length_on_the_gpu(T):
    check_on_gpu(inputs(1, T, 3, 3, 32, 32, dtype=torch.bfloat16, initial=T % 2 == 0), dstate_too=T % 3 > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [1, 12, 40])
def test_every_number_of_heads_on_the_gpu(H):
    check_on_gpu(inputs(2, 400, H, H, 32, 32, dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_on_the_gpu(extreme):
    x = EXTREMES[extreme](inputs(1, 700, 2, 2, 32, 32, dtype=torch.float32))
    check_on_gpu(x, out=2e-5, grad=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extremes_of_wide_heads_on_the_gpu(extreme):
    """In bfloat16, where the gates' gradients of extremes cancel to nothing and are only asked to be numbers."""
    x = EXTREMES[extreme](inputs(1, 700, 2, 2, 64, 128, dtype=torch.bfloat16))
    do, dstate = upstream(x)
    found, expected = run(x, do, dstate, choose(64, 128)), exact(x, do, dstate)
    assert all(y.isfinite().all() for y in found)
    floor = least(expected)
    for name, one, other in zip(NAMES[:5], found, expected, strict=False):
        assert (one.double() - other).norm() <= 0.02 * max(floor, other.norm()), name


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(32, 32), (64, 128)])
def test_packed_documents_on_the_gpu(widths):
    starts = list(itertools.accumulate([0, 1, 0, 17, 4096, 300]))
    x = inputs(1, starts[-1], 2, 2, *widths, starts=starts, dtype=torch.bfloat16)
    config = choose(*widths)
    assert_packed_equals_separate(x, *upstream(x), config)


@pytest.mark.gpu
def test_a_long_sequence_on_the_gpu():
    check_on_gpu(inputs(1, 65536, 1, 1, 32, 32, dtype=torch.bfloat16, initial=False))


@pytest.mark.gpu
def test_a_hundred_thousand_documents_on_the_gpu():
    """The first and the last thousand are compared: the reference needs a chunk for each, in float64."""
    starts = torch.arange(0, 300_001, 3)
    x = inputs(1, 300_000, 2, 2, 32, 32, starts=starts.tolist(), initial=False, dtype=torch.bfloat16)
    o, _, _ = choose(32, 32).launch(x).forward(x, False)
    for tokens in (slice(0, 3000), slice(297_000, 300_000)):
        tensors = [y[:, tokens] for y in (x.q_BTGK, x.k_BTGK, x.v_BTHV, x.a_BTH, x.b_BTH)]
        few = Inputs(*tensors, x.A_log_H, x.dt_bias_H, None, x.starts_L1[:1001], x.scale)
        expected, _ = chunk.forward(in_float64(few))
        assert (o[:, tokens].double() - expected).norm() < 0.005 * expected.norm()


@pytest.mark.gpu
def test_the_op_compiles_whole_on_the_gpu():
    x = inputs(2, 333, 2, 4, 32, 32, initial=False, dtype=torch.bfloat16)
    tensors = [y.requires_grad_() for y in dataclasses.astuple(x)[:7]]

    def loss(*tensors):
        return (2 * gated_delta_rule(*tensors)[0].float()).square().sum()

    expected = torch.autograd.grad(loss(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*tensors), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(32, 32), (64, 128)])
def test_the_op_is_recorded_in_a_cuda_graph(widths):
    x = inputs(2, 333, 2, 4, *widths, initial=False, dtype=torch.bfloat16)
    tensors = [y.requires_grad_() for y in dataclasses.astuple(x)[:7]]
    do, _ = upstream(x)

    def step():
        o, _ = gated_delta_rule(*tensors)
        return o, *torch.autograd.grad(o, tensors, do)

    graph, expected, found = recorded(step)
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
