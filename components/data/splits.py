"""Which split a document belongs to: decided by a hash of its text, so that no document is ever in two.

The same text always lands in the same split, in whatever order, source or run it comes, so an exact duplicate that
de-duplication did not see cannot leak from training into the held-out sets either.
"""

import hashlib
from collections.abc import Mapping


def split_of(text: str, fractions: Mapping[str, float]) -> str:
    """The split of a document. `fractions` (in order, summing to 1) divide the unit interval of hashes.

    >>> split_of("To be, or not to be", {"train": 1.0})
    'train'
    """
    digest = hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=8, person=b"split").digest()
    place = int.from_bytes(digest, "little") / 2**64
    for split, fraction in fractions.items():
        if place < fraction:
            return split
        place -= fraction
    return split  # rounding of the sum


def check_fractions(fractions: Mapping[str, float], known: tuple[str, ...]) -> None:
    """Raises ValueError unless `fractions` are positive, of known splits, and sum to 1."""
    unknown = set(fractions) - set(known)
    if unknown or not all(f > 0 for f in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-9:
        raise ValueError(
            f"splits must be positive fractions of {', '.join(known)} that sum to 1, not {dict(fractions)}"
        )
