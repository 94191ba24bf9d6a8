"""Folded weights: taken apart, and their gradients put together."""

import torch

from components.layers.folded import split_last


def gradient(split, x, factors):
    x = x.clone().requires_grad_()
    pieces = split(x, (2, 3, 1))
    return torch.autograd.grad(sum((f * p**2).sum() for f, p in zip(factors, pieces, strict=True)), x)[0]


def test_a_split_and_its_gradient_are_torchs_also_compiled_and_where_a_piece_is_unused():
    x = torch.randn(4, 5, 6)
    compiled = torch.compile(split_last, fullgraph=True, backend="aot_eager")
    for factors in ((1.0, 2.0, 3.0), (1.0, 0.0, 2.0)):
        wanted = gradient(lambda x, sizes: x.split(sizes, -1), x, factors)
        assert torch.equal(gradient(split_last, x, factors), wanted)
        assert torch.equal(gradient(compiled, x, factors), wanted)
    x.requires_grad_()
    first, _, _ = split_last(x, (2, 3, 1))
    assert torch.autograd.grad(first.sum(), x)[0].sum() == first.numel()
