"""How evenly a mixture of experts shares its tokens, from the counts of one optimizer step.

MaxVio is Wang et al.'s (arXiv 2408.15664): by how much the busiest expert exceeds the mean load, as a share of it.
"""

import math
from collections.abc import Sequence


def load_statistics(counts: Sequence[float]) -> dict[str, float]:
    """entropy: of the load, as a share of the largest possible (1 is even). max_violation: MaxVio, 0 is even.
    dead: experts that no token chose."""
    total, experts = sum(counts), len(counts)
    shares = [c / total for c in counts if c > 0]
    entropy = -sum(s * math.log(s) for s in shares) / math.log(experts) if experts > 1 else 1.0
    return {
        "entropy": entropy,
        "max_violation": max(counts) * experts / total - 1,
        "dead": float(sum(c == 0 for c in counts)),
    }
