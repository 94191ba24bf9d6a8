"""Folded weights: a projection taken apart, and the gradients of its pieces put together."""

import pytest
import torch

from components.kernels.rotation import turn
from components.layers.folded import split_last
from components.layers.rotary import Angles
from tests.kernels.test_rotation import CASES
from tests.kernels.test_rotation import gradients as pieces_and_angles


@CASES
@pytest.mark.parametrize("compiled", [False, True])
def test_taking_a_projection_apart_and_its_gradient_are_torchs_also_compiled(case, compiled):
    *pieces, cos, sin, K = pieces_and_angles(case, torch.float64, "cpu")
    sizes, joint = tuple(x.shape[-1] for x in pieces), torch.cat(pieces, -1).requires_grad_()
    angles = None if cos is None else Angles(cos, sin)

    def ours(joint):
        return split_last(joint, sizes, angles, K)

    def plain(joint):
        first, second, third = joint.split(sizes, -1)
        if angles is None:
            return first, second, third
        heads = (x.unflatten(-1, (-1, K)) for x in (first, second))
        return *(turn(x, *angles).flatten(2) for x in heads), third

    function = torch.compile(ours, fullgraph=True, backend="aot_eager") if compiled else ours
    factors = [torch.randn_like(x) for x in pieces]
    for unused in (None, 0, 2):
        results = []
        for split in (function, plain):
            outputs = split(joint)
            total = sum((y**2 * f).sum() for i, (y, f) in enumerate(zip(outputs, factors, strict=True)) if i != unused)
            results.append((*outputs, *torch.autograd.grad(total, joint)))
        for found, expected in zip(*results, strict=True):
            assert found.equal(expected)
