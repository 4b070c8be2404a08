"""Where choosing by gradient cannot help: below a mean over all positions, which gives all of them one gradient."""

from __future__ import annotations

import math

from torch import fx

from backdrop.placement.fields import Followed, is_identity

__all__ = ["pooled_by"]

MEANS = ("mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
EVEN = ("add", "iadd", "contiguous")  # through which the gradient of a mean comes as it is


def pooled_by(followed: Followed, node: fx.Node) -> str:
    """The mean over all positions that every path from a call to the output comes to first, if so; its name."""
    found, waiting, seen = "", [node], {node}
    while waiting:
        users = list(waiting.pop().users)
        if not users:
            return ""
        for user in users:
            if user in seen:
                continue
            seen.add(user)
            name = str(getattr(user.target, "__name__", user.target)).strip("_")
            if user.op == "output":
                return ""
            if name in MEANS and _is_over_all(followed, user):
                found = followed.look.names.get(followed.look.within.get(user, user), name)
            elif is_identity(user) or (name in EVEN and followed.values[user].axes):
                waiting.append(user)
            else:
                return ""
    return found


def _is_over_all(followed: Followed, node: fx.Node) -> bool:
    source = node.all_input_nodes[0]
    before, after = followed.look.shape(source), followed.look.shape(node)
    if before is None or after is None:
        return False
    positions = math.prod(before[axis] for axis in followed.values[source].axes)
    return positions > 1 and math.prod(after) * positions == math.prod(before)
