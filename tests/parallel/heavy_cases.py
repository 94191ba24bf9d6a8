"""What takes minutes on a CPU: code that the compiler generates, under sharding, recomputation and separate experts."""

from pathlib import Path

from tests.parallel.plans import SMALL
from tests.parallel.rank_cases import PER_EXPERT, compare
from tests.parallel.training import trained


def test_compiled_blocks_and_loss_change_nothing(folder: Path):
    """To 1e-4: fused code rounds otherwise, and Adam's first steps magnify that where a gradient is next to nothing."""
    compare(folder, "heavy", trained(**SMALL))
    compiled = {"compile": {"enable": True, "backend": "inductor"}}
    plan = {**compiled, **PER_EXPERT, "activation_checkpoint": {"mode": "full"}}
    compare(folder, "heavy", trained(plan, **SMALL), rtol=1e-4)
