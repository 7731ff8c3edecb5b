"""Which drafts are accepted: those that the target draws itself.

The sampler's draw for generated token i depends only on the logits, the request's seed and i. So each draft place gets
the target's own draw, with the number that plain sampling would use there, and a draft is accepted where it is equal
to it. The first draw that differs from its draft is the token of that place, and after drafts that were all accepted
the next draw comes free. The output is therefore not only distributed as without drafts: it is the same token for
token, for greedy and for seeded sampling alike, whatever the drafter says (up to the rounding of logits that are
computed side by side).

Nothing is lost by it. The rejection sampler of Leviathan et al. (2023, §2.3) accepts a draft x with probability
min(1, p(x) / q(x)); for a drafter that names one token, q(x) = 1, this is p(x): the probability that the target draws
x.
"""

from __future__ import annotations

from collections.abc import Sequence


def accepted(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """How many of `drafts` are accepted, where `drawn[j]` is the target's draw after drafts[:j].

    The new tokens are then `drawn[: accepted + 1]`: `drawn` is one longer than `drafts`.
    """
    for count, (guess, token) in enumerate(zip(drafts, drawn[:-1], strict=True)):
        if guess != token:
            return count
    return len(drafts)
