"""The mixers against their equations, token by token and head by head."""

import math

import pytest
import torch
import torch.nn.functional as F

from registry import parse_component
from tests.contracts.parts import context

DIM, ROWS, LENGTH = 16, 2, 9


def made(**table):
    """A mixer with every parameter drawn at a scale where each matters."""
    mixer = parse_component("mixer", table).build(dim=DIM, layer=0, branches=4).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    return mixer


def inputs() -> torch.Tensor:
    return torch.randn(ROWS, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def assert_same(mixer, equations, rtol: float = 1e-8) -> None:
    """Outputs and every gradient."""
    found = []
    for function in (lambda x: mixer(x, context(ROWS, LENGTH))[0], equations):
        x = inputs().requires_grad_()
        mixer.zero_grad()
        y = function(x)
        (y * inputs().flip(1)).sum().backward()
        found.append([y, x.grad, *(p.grad.clone() for p in mixer.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


def convolved(z_BTC: torch.Tensor, conv_CW: torch.Tensor) -> torch.Tensor:
    z_BTC = F.pad(z_BTC, (0, 0, 3, 0))
    return F.silu(sum(z_BTC[:, w : w + LENGTH] * conv_CW[:, w] for w in range(4)))


def recurrent(scalars, q, k, v, a_BTH, b_BTH) -> torch.Tensor:
    """The gated delta rule, token by token; q, k (B, T, H, K) and v (B, T, H, V) as they are projected."""
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    alpha = (-scalars.A_log.exp() * F.softplus(a_BTH + scalars.dt_bias)).exp()[..., None, None]
    beta = b_BTH.sigmoid()[..., None, None]
    state, outputs = torch.zeros(*v.shape[::2], v.shape[-1], k.shape[-1], dtype=torch.float64), []
    for t in range(LENGTH):
        row, column = k[:, t, :, None], k[:, t, :, :, None]
        state = alpha[:, t] * state @ (torch.eye(k.shape[-1]) - beta[:, t] * column * row)
        state = state + beta[:, t] * v[:, t, :, :, None] * row
        outputs.append((state @ q[:, t, :, :, None])[..., 0])
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("rope_on", ["qk", "v"])
def test_hymos_gated_delta_rule_computes_its_equations(rope_on):
    heads, key_dim, value_dim = 2, 8, 4
    mixer = made(
        name="hymo_gdn", inner=heads * value_dim, head_dim=value_dim, state_dim=key_dim, rope_on=rope_on,
        rotary_fraction=0.5,
    )  # fmt: skip
    turns = {"k": rope_on == "qk", "v": rope_on == "v"}

    def turned(x_BTHK, whether):
        half = x_BTHK.shape[-1] // 4
        rows = [torch.stack([rotated(x_THK[:, h], half) for h in range(heads)], 1) for x_THK in x_BTHK]
        return torch.stack(rows) if whether else x_BTHK

    def equations(x_BTD):
        into, skip = mixer.in_skip.split([heads * value_dim, DIM])
        u = convolved(x_BTD @ into.T, mixer.conv)
        keys, queries, gate = (u @ w.T for w in mixer.k_q_gate.split([heads * key_dim] * 2 + [heads * value_dim]))
        k, q = (turned(x.unflatten(-1, (heads, -1)), turns["k"]) for x in (keys, queries))
        v = turned(u.unflatten(-1, (heads, -1)), turns["v"])
        o = recurrent(mixer.recurrence, q, k, v, *(u @ weight.T for weight in mixer.dt_beta.chunk(2)))
        o = F.rms_norm(o + mixer.recurrence.D[:, None] * v, (value_dim,), mixer.norm.weight, 1e-6)
        return (o.flatten(2) * F.silu(gate)) @ mixer.out.T + x_BTD @ skip.T

    assert_same(mixer, equations, rtol=1e-5)  # angles are fp32


@pytest.mark.parametrize("expand_v", [1, 2])
def test_gated_deltanet_computes_its_equations(expand_v):
    heads, key_dim = 2, 4
    value_dim = expand_v * key_dim
    mixer = made(name="gated_deltanet", heads=heads, key_dim=key_dim, expand_v=expand_v)
    sizes = (heads * key_dim, heads * key_dim, heads * value_dim)

    def equations(x_BTD):
        each = zip(mixer.qkv.split(sizes), mixer.conv.split(sizes), strict=True)
        q, k, v = (convolved(x_BTD @ weight.T, conv).unflatten(-1, (heads, -1)) for weight, conv in each)
        o = recurrent(mixer.recurrence, q, k, v, *(x_BTD @ weight.T for weight in mixer.a_b.chunk(2)))
        o = F.rms_norm(o, (value_dim,), mixer.norm.weight, 1e-6)
        return (o.flatten(2) * F.silu(x_BTD @ mixer.gate.T)) @ mixer.out.T

    assert_same(mixer, equations)


def rotated(x_TK: torch.Tensor, half: int) -> torch.Tensor:
    rows = []
    for t, row in enumerate(x_TK):
        turned = list(row)
        for i in range(half):
            angle = t * 10_000.0 ** (-i / half)
            turned[i] = row[i] * math.cos(angle) - row[i + half] * math.sin(angle)
            turned[i + half] = row[i] * math.sin(angle) + row[i + half] * math.cos(angle)
        rows.append(torch.stack(turned))
    return torch.stack(rows)


def attended(q_TK: torch.Tensor, k_TK: torch.Tensor, v_TV: torch.Tensor) -> torch.Tensor:
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    scores = q_TK @ k_TK.T * q_TK.shape[1] ** -0.5
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v_TV


@pytest.mark.parametrize("rotary_fraction", [0.0, 0.25, 1.0])
def test_grouped_query_attention_computes_its_equations(rotary_fraction):
    heads, groups, width = 4, 2, 8
    mixer = made(name="gqa", heads=heads, kv_heads=groups, head_dim=width, rotary_fraction=rotary_fraction)
    half = int(rotary_fraction * width) // 2

    def head(x_TD, h):
        weights, g = mixer.qkv.split(width), heads + h // (heads // groups)
        q, k, v = (x_TD @ weights[i].T for i in (h, g, g + groups))
        return attended(rotated(q, half), rotated(k, half), v)

    def equations(x_BTD):
        return torch.stack([torch.cat([head(x_TD, h) for h in range(heads)], -1) for x_TD in x_BTD]) @ mixer.out.T

    assert_same(mixer, equations, rtol=1e-5 if half else 1e-8)  # angles are fp32


@pytest.mark.parametrize("rope", ["partial", "full"])
@pytest.mark.parametrize(("heads", "groups", "head_map"), [(4, 2, "group"), (3, 2, "floor")])
def test_latent_attention_computes_its_equations(rope, heads, groups, head_map):
    width, value, shared, q_rank, kv_rank = 8, 6, 4, 5, 3
    sizes = {"head_dim": width, "value_dim": value, "rotary_dim": shared, "q_rank": q_rank, "kv_rank": kv_rank}
    mixer = made(name="mla", heads=heads, kv_heads=groups, head_map=head_map, rope=rope, **sizes)
    plain, half = width - shared, (shared if rope == "partial" else width) // 2

    def normed(x_TC, norm):
        return x_TC * (x_TC.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight

    def head(x_TD, h):
        down_q, down_kv, down_rotary = mixer.down.split([q_rank, kv_rank, shared])
        latent = normed(x_TD @ down_kv.T, mixer.kv_norm)
        up_key, up_value = mixer.kv_up.view(groups, plain + value, kv_rank)[h * groups // heads].split([plain, value])
        q = normed(x_TD @ down_q.T, mixer.q_norm) @ mixer.q_up[h * width : (h + 1) * width].T
        k = torch.cat([x_TD @ down_rotary.T, latent @ up_key.T], -1)
        return attended(rotated(q, half), rotated(k, half), latent @ up_value.T)

    def equations(x_BTD):
        return torch.stack([torch.cat([head(x_TD, h) for h in range(heads)], -1) for x_TD in x_BTD]) @ mixer.out.T

    assert_same(mixer, equations, rtol=1e-5)  # angles are fp32
