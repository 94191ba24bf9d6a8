"""Rotation of pairs of features by given angles, and the gradient of a joint projection some of which was rotated."""

from components.kernels.rotation.op import joint_gradient
from components.kernels.rotation.reference import turn

__all__ = ["joint_gradient", "turn"]
