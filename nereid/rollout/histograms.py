"""Comparison of two latency histograms with the same buckets, and of a split of traffic with its weights."""

import math
from collections.abc import Sequence


def median_ratio(bounds: Sequence[float], candidate: Sequence[int], control: Sequence[int]) -> float:
    """Return the candidate's median divided by the control's, each interpolated inside its bucket.

    Args:
        bounds: upper bounds of all buckets except the last, which has none.
        candidate, control: requests per bucket.
    """
    return quantile(bounds, candidate, 0.5) / quantile(bounds, control, 0.5)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float:
    """Return the value below which a share of the requests is, as `histogram_quantile` of Prometheus does.

    In the last bucket, which has no upper bound, it is the bucket's lower bound. It is `nan` without any.
    """
    rank, below, lower = share * sum(counts), 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (bound - lower) * (rank - below) / count
        below, lower = below + count, bound
    return lower if sum(counts) else math.nan


def chance_of_slower(candidate: Sequence[int], control: Sequence[int]) -> float:
    """Return the probability that two equal services show a candidate that is at least this much slower.

    This is the p-value of the one-sided rank test of Mann and Whitney, with the normal approximation and the
    correction for ties, because all requests of a bucket are ties. Without requests it is 1.

    Source: Lehmann, Nonparametrics (2006), 1.2 and 1.4.
    """
    ours, theirs = sum(candidate), sum(control)
    total = ours + theirs
    if not ours or not theirs:
        return 1.0
    below, wins = 0, 0.0
    for mine, other in zip(candidate, control, strict=True):
        wins += mine * (below + other / 2)
        below += other
    ties = sum((mine + other) ** 3 - (mine + other) for mine, other in zip(candidate, control, strict=True))
    variance = ours * theirs / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:  # all requests are in one bucket
        return 1.0
    return _upper_tail((wins - ours * theirs / 2 - 0.5) / math.sqrt(variance))


def chance_of_split(requests: int, total: int, share: float) -> float:
    """Return the probability of a split at least this far from its share, if requests are split by it.

    This is the p-value of the chi-square test with one degree of freedom.
    """
    if not total or not 0 < share < 1:
        return 1.0
    score = abs(requests - share * total) / math.sqrt(total * share * (1 - share))
    return 2 * _upper_tail(score)


def _upper_tail(score: float) -> float:
    return math.erfc(score / math.sqrt(2)) / 2
