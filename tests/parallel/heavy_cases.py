"""What takes minutes on a CPU: code that the compiler generates, under sharding, recomputation and separate experts."""

from pathlib import Path

from tests.parallel.plans import SMALL
from tests.parallel.rank_cases import PER_EXPERT, compare
from tests.parallel.training import trained


def test_compiled_blocks_and_loss_change_nothing(folder: Path):
    compare(folder, "heavy", trained(**SMALL))
    compiled = {"compile": {"enable": True, "backend": "inductor"}}
    compare(folder, "heavy", trained({**compiled, **PER_EXPERT, "activation_checkpoint": {"mode": "full"}}, **SMALL))
