"""What identifies a document, and which split that puts it in, so that no document is ever in two.

The same text always lands in the same split, in whatever order, source or run it comes, so an exact duplicate that
de-duplication did not see cannot leak from training into the held-out sets either.
"""

import hashlib
from collections.abc import Mapping

from components.data.shards import SPLITS

DIGEST_BYTES = 16


def digest(text: bytes) -> bytes:
    """16 bytes of blake2b of a text in UTF-8: the first half tells duplicates, the second decides the split."""
    return hashlib.blake2b(text, digest_size=DIGEST_BYTES).digest()


def split_of(document: bytes, fractions: Mapping[str, float]) -> str:
    """The split of a document, by its `digest`. `fractions`, in order and summing to 1, divide the unit interval."""
    place = int.from_bytes(document[DIGEST_BYTES // 2 :], "little") / 2**64
    for split, fraction in fractions.items():
        if place < fraction:
            return split
        place -= fraction
    return split  # the sum may round to just below 1


def check_fractions(fractions: Mapping[str, float]) -> None:
    """Raises ValueError unless `fractions` are positive, of known splits, and sum to 1."""
    positive = all(f > 0 for f in fractions.values())
    if set(fractions) - set(SPLITS) or not positive or abs(sum(fractions.values()) - 1) > 1e-9:
        raise ValueError(
            f"splits must be positive fractions of {', '.join(SPLITS)} that sum to 1, not {dict(fractions)}"
        )
