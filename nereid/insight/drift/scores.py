"""Distances between two histograms, and the limits that chance alone exceeds once in 10,000 comparisons."""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

# Added to each bucket of both histograms, so that an empty bucket has a finite score.
# Source: Jeffreys' prior of a multinomial distribution.
PRIOR = 0.5
# Buckets are joined until each has this share of the reference, and this many of its images.
MIN_SHARE, MIN_IMAGES = 0.025, 5
# Pairs of histograms that are drawn for a limit. The error of a limit is then about 3 %.
DRAWS = 2000


class Distance(NamedTuple):
    """Population stability index (0 or more), and Jensen-Shannon distance (base 2, 0 to 1)."""

    psi: float
    js: float


def distance(reference: Sequence[int], window: Sequence[int]) -> Distance:
    """Return the distances between two histograms with the same buckets.

    Source: PSI: Siddiqi, Credit Risk Scorecards (2006), chapter 10. Jensen-Shannon: Endres and Schindelin,
    IEEE Transactions on Information Theory 49 (2003).
    """
    psi, divergence = _distances(np.array([reference], float), np.array([window], float))
    return Distance(float(psi[0]), math.sqrt(float(divergence[0])))


@lru_cache(256)
def chance_limit(reference: tuple[int, ...], images: int, risk: float) -> Distance:
    """Return the distances that chance alone exceeds with probability `risk`.

    Both samples are drawn from the reference: one of its own size, and one of `images`. Gamma distributions
    are fitted to the distances, because the limit lies far outside of what can be drawn. Random numbers are
    the same in every call, so that a limit never flickers.

    Args:
        reference: joined histogram of the reference, see `group_buckets`.
        images: size of the window.
        risk: probability of a false alarm, for each of the two distances.
    """
    rng = np.random.default_rng(images)
    shares = np.array(reference, float) / sum(reference)
    old = rng.multinomial(sum(reference), shares, DRAWS).astype(float)
    new = rng.multinomial(images, shares, DRAWS).astype(float)
    psi, divergence = _distances(old, new)
    return Distance(_gamma_quantile(psi, risk), math.sqrt(_gamma_quantile(divergence, risk)))


def rounded_down(images: int) -> int:
    """Round a window size down to two digits, so that a limit is computed once; 1,234 becomes 1,200."""
    unit = int(10 ** max(0, len(str(images)) - 2))
    return images // unit * unit


def group_buckets(counts: Sequence[int], is_ordered: bool = True) -> list[list[int]]:
    """Return the groups of buckets that are compared, each a list of indices.

    Args:
        counts: histogram of the reference.
        is_ordered: neighbours are joined; else all rare buckets together, and the last one stays alone.
    """
    min_count = max(MIN_SHARE * sum(counts), MIN_IMAGES)
    if not is_ordered:
        return _group_rare(counts, min_count)
    groups: list[list[int]] = [[]]
    for index in range(len(counts)):
        if groups[-1] and sum(counts[index] for index in groups[-1]) >= min_count:
            groups.append([])
        groups[-1].append(index)
    if len(groups) > 1 and sum(counts[index] for index in groups[-1]) < min_count:
        last_group = groups.pop()
        groups[-1] += last_group
    return groups


def _group_rare(counts: Sequence[int], min_count: float) -> list[list[int]]:
    *named, last = range(len(counts))
    groups = [[index] for index in named if counts[index] >= min_count]
    rare = [index for index in named if counts[index] < min_count]
    rest = [last]
    if sum(counts[index] for index in rare) >= min_count:
        groups.append(rare)
    else:
        rest += rare
    if sum(counts[index] for index in rest) >= min_count or not groups:
        return [*groups, rest]
    groups[-1] = groups[-1] + rest
    return groups


def add_up(counts: Sequence[int], groups: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the counts of each group."""
    return tuple(sum(counts[index] for index in group) for group in groups)


def _distances(old: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return PSI and Jensen-Shannon divergence of rows of counts, float64[N, buckets]."""
    p, q = ((counts + PRIOR) / (counts + PRIOR).sum(1, keepdims=True) for counts in (old, new))
    middle = (p + q) / 2
    psi = ((p - q) * np.log(p / q)).sum(1)
    divergence = (p * np.log2(p / middle) + q * np.log2(q / middle)).sum(1) / 2
    return psi, np.maximum(divergence, 0.0)


def _gamma_quantile(drawn: np.ndarray, risk: float) -> float:
    """Return the upper quantile of the gamma distribution with the mean and variance of the drawn values.

    Source: Wilson and Hilferty, PNAS 17 (1931): the cube root of such a variable is almost normal.
    """
    mean, variance = float(drawn.mean()), float(drawn.var())
    if variance <= 0:
        return mean
    shape, scale = mean**2 / variance, variance / mean
    score = NormalDist().inv_cdf(1 - risk)
    return shape * scale * (1 - 1 / (9 * shape) + score / (3 * math.sqrt(shape))) ** 3
