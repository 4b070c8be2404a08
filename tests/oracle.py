"""Masks and weights worked out position by position in plain Python, straight from their definition."""

import itertools

import torch


def units_and_groups(shape, dims, patch):
    """For every position (in order): the unit it belongs to and the group that unit belongs to."""
    dims = [dim + len(shape) if dim < 0 else dim for dim in ([dims] if isinstance(dims, int) else dims)]
    others = [dim for dim in dims if dim != 0]
    sizes = dict(zip(others, [patch] * len(others) if isinstance(patch, int) else patch, strict=True))
    for position in itertools.product(*map(range, shape)):
        unit = tuple((dim, position[dim] // sizes.get(dim, 1)) for dim in sorted(dims))
        group = position[0] if 0 in dims and others else None
        yield unit, group


def weights(mask, shape, dims, patch, p, scale):
    """What each position's gradient has to be multiplied by, given the mask that was drawn."""
    kept_positions = mask.expand(shape).flatten().tolist()
    where = list(units_and_groups(shape, dims, patch))
    kept = {}
    for (unit, group), is_kept in zip(where, kept_positions, strict=True):
        assert kept.setdefault((group, unit), is_kept) == is_kept, f"unit {unit} is kept in part"
    total, count = {}, {}
    for (group, _), is_kept in kept.items():
        total[group] = total.get(group, 0) + 1
        count[group] = count.get(group, 0) + is_kept
    assert all(count.values()), "a group lost all its units"
    factor = {
        "count": lambda group: total[group] / count[group],
        "eq1": lambda group: (1 - p) * total[group] / count[group],
        "probability": lambda group: 1 / (1 - p),
        None: lambda group: 1.0,
    }[scale]
    values = [factor(group) if kept[group, unit] else 0.0 for unit, group in where]
    return torch.tensor(values, dtype=torch.float64).reshape(shape), total, count


def inclusion(norms, k, floor):
    """b + (1 - b) min(1, n / tau) with b = floor k / N, and the tau for which these add up to k."""
    base, sure = floor * k / len(norms), set()
    k = (k - base * len(norms)) / (1 - base)
    while True:  # those beyond 1 are 1, and the others share what is left
        rest = sum(n for u, n in enumerate(norms) if u not in sure)
        share = [1.0 if u in sure else n * (k - len(sure)) / rest for u, n in enumerate(norms)]
        if max(share) <= 1 + 1e-12:
            return [base + (1 - base) * pi for pi in share]
        sure |= {u for u, pi in enumerate(share) if pi > 1}


def subsets(pi):
    """All sets of units, each drawn by itself with its probability: (probability, units)."""
    for kept in itertools.product([False, True], repeat=len(pi)):
        chance = 1.0
        for keep, q in zip(kept, pi, strict=True):
            chance *= q if keep else 1 - q
        yield chance, frozenset(u for u, keep in enumerate(kept) if keep)


def bernoulli_masks(size, p):
    """The weights of every mask with scale="count" and its probability: (probability, weights)."""
    for chance, kept in subsets([1 - p] * size):
        for choice in [kept] if kept else [frozenset([u]) for u in range(size)]:
            weights = [size / len(choice) if u in choice else 0.0 for u in range(size)]
            yield chance if kept else chance / size, torch.tensor(weights, dtype=torch.float64)


def exact_masks(size, k):
    sets = list(itertools.combinations(range(size), k))
    for kept in sets:
        yield 1 / len(sets), torch.tensor([size / k if u in kept else 0.0 for u in range(size)], dtype=torch.float64)


def independent_masks(pi):
    """Units drawn by themselves with probabilities pi, one of them by pi where none comes out."""
    empty = next(chance for chance, kept in subsets(pi) if not kept)
    shares = [q / sum(pi) for q in pi]
    included = [q + empty * share for q, share in zip(pi, shares, strict=True)]
    for chance, kept in subsets(pi):
        for choice, part in [(kept, 1.0)] if kept else [(frozenset([u]), share) for u, share in enumerate(shares)]:
            weights = [1 / included[u] if u in choice else 0.0 for u in range(len(pi))]
            yield chance * part, torch.tensor(weights, dtype=torch.float64)


def systematic_masks(pi):
    """Units of length pi on a line in random order, kept where one of equally spaced points lies; pi adds up to k."""
    found = {}
    orders = list(itertools.permutations(range(len(pi))))
    for order in orders:
        ends = [0.0, *itertools.accumulate(pi[u] for u in order)]
        cuts = sorted({0.0, 1.0, *(round(end % 1, 12) for end in ends)})
        for low, high in itertools.pairwise(cuts):
            offset = (low + high) / 2
            points = [sum(offset + j < end for j in range(len(pi))) for end in ends]
            kept = frozenset(u for u, (a, b) in zip(order, itertools.pairwise(points), strict=True) if b > a)
            found[kept] = found.get(kept, 0.0) + (high - low) / len(orders)
    for kept, chance in found.items():
        yield chance, torch.tensor([1 / pi[u] if u in kept else 0.0 for u in range(len(pi))], dtype=torch.float64)
