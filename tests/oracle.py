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
