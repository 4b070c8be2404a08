"""From the size of a structure to a place for a mask: behind the layer whose receptive field has that size.

The paper puts its masks there (section 3.2.2), so that a unit that is kept or dropped stands for about one structure.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, fx, nn

from backdrop._core.checks import check_positive
from backdrop.layers import Backdrop, drops_samples
from backdrop.placement.fields import Axes, Field, Followed, by, follow
from backdrop.placement.pooled import pooled_by
from backdrop.placement.surgery import mask_on

__all__ = ["Place", "Suggestion", "Suggestions", "places_of", "rounded", "suggest"]

FAR = 2.0  # a field that is so many times as large or as small as the structure does not fit it
WIDTH = 88  # of lines, when suggestions are printed
NEAR = 2.5  # times as many units: too few to be worth a try of their own
NEARLY = 0.9  # a field that is this share of the structure holds enough of it


@dataclass(frozen=True)
class Suggestion:
    """Where to put a mask for structures of one size.

    Args:
        size: of the structure, as asked for.
        after: the module to pass to `insert`.
        field: the receptive field there.
        p: probabilities to try, from 0, which keeps all units, to the one that keeps a single unit of each sample.
        first: the one of them to start from, which keeps about as many units as do not overlap, but half at most.
        why: in words.
    """

    size: float
    after: str
    field: Field
    p: tuple[float, ...]
    first: float
    why: str


class Suggestions(list[Suggestion]):
    """One suggestion for each size."""

    def __str__(self) -> str:
        return "\n\n".join("\n".join(_wrapped(line) for line in each.why.splitlines()) for each in self)


def _wrapped(line: str) -> str:
    return line if line.startswith("insert(") else textwrap.fill(line, WIDTH, break_on_hyphens=False)


class Place(NamedTuple):
    """A module that a mask can follow."""

    after: str
    field: Field
    axes: Axes  # along which its positions lie
    open: bool  # whether other paths from the input to the output go around it
    masked: str  # the mask that stands there already
    pooled: str  # the mean over all positions above it

    @property
    def units(self) -> int:
        return math.prod(self.field.lattice)

    @property
    def size(self) -> float:
        """One number for the field: a cube of this size holds as many cells."""
        assert self.field.size is not None
        return float(math.prod(self.field.size) ** (1 / len(self.field.size)))

    @property
    def first(self) -> float:
        """The p to start from: it keeps as many units as there are whose receptive fields do not overlap, or half."""
        return rounded(min(0.5, (self.field.independent or 1) / self.units))

    def layer(self, p: float) -> Backdrop:
        return mask_on(self.axes)(p, exact=True)

    def code(self, *arguments: str) -> str:
        """How the layer is made."""
        kind = mask_on(self.axes)
        if isinstance(kind, type):
            return f"{kind.__name__}({', '.join(arguments)})"
        first, *more = arguments
        return f"Backdrop({', '.join([first, str((0, *self.axes)), *more])})"


def suggest(model: nn.Module, input_shape: Sequence[int] | Tensor, sizes: float | Iterable[float]) -> Suggestions:
    """For each size of a structure, the layer after which to mask and probabilities to start from, in words.

    A mask blocks the gradient where it stands, so it has to stand where all paths from the input to the output pass;
    only where no such place has a receptive field near the size, another is suggested, with a warning. The layer is the
    one with the smallest receptive field that holds the structure, but for a tenth, unless that is more than twice as
    large as the structure and the next smaller one is nearer. Of the layers that share this field, such as a
    convolution and its activation, it is the last.

    Args:
        model: any module that takes one tensor.
        input_shape: (samples, channels, positions...), with one to three spatial axes, or a tensor of that shape.
        sizes: how large structures are from end to end, in input cells. The blobs of a Gaussian process are several
            correlation lengths wide: the paper masks at fields of 91 and 1275 pixels for lengths of 10 and 140.

    Examples:
        >>> from torch import nn
        >>> layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 5, 2, 2), nn.ReLU()]
        >>> (found,) = suggest(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), (1, 1, 64, 64), 10)
        >>> found.after, found.field.size, found.field.lattice, found.p
        ('4', (12, 12), (16, 16), (0.0, 0.86, 0.98, 0.996))
    """
    wanted = _check_sizes(sizes)
    places = places_of(model, input_shape)
    return Suggestions(_suggestion(size, places) for size in wanted)


def places_of(model: nn.Module, input_shape: Sequence[int] | Tensor) -> list[Place]:
    """Every place for a mask, in the order of execution; at least one."""
    followed = follow(model, input_shape)
    places = _places(model, followed)
    if not places:
        raise ValueError(_nowhere(model, followed))
    return places


def _check_sizes(sizes: float | Iterable[float]) -> list[float]:
    wanted = list(sizes) if isinstance(sizes, Iterable) and not isinstance(sizes, str) else [sizes]
    if not wanted:
        raise ValueError("sizes has to hold at least one size of a structure in input cells, but is empty")
    for size in wanted:
        check_positive("sizes", size)
    return wanted


def _nowhere(model: nn.Module, followed: Followed) -> str:
    start = f"there is no place for a mask in {type(model).__name__}: "
    values = iter(followed.values.values())
    if not next(values).axes:
        return f"{start}the input has no positions, only samples; Backdrop(p) behind the last layer drops these"
    lost = next((f"{value.since}: {value.reason}" for value in values if value.since), "")
    because = f", since {lost}" if lost else ""
    return f"{start}no layer of its own has a bounded receptive field and at least 2 positions{because}"


def _places(model: nn.Module, followed: Followed) -> list[Place]:
    """Every place for a mask; of modules in a row with the same positions and the same field, the last."""
    outputs_of, layers = followed.look.outputs_of, followed.look.layers
    calls = Counter(path for paths in outputs_of.values() for path in paths)
    narrow = _bottlenecks(followed)
    places: dict[object, Place] = {}
    masks: dict[object, str] = {}
    for node in followed.look.rows:
        field = followed.fields.get(node)
        if field is None or field.size is None or math.prod(field.lattice) < 2:
            continue
        place = (field.size, field.stride, field.start, field.lattice, None if node in narrow else node)
        path = _path(model, outputs_of.get(node, ()), calls)
        mask = model.get_submodule(layers[node]) if node in layers else None
        if isinstance(mask, Backdrop):
            if not drops_samples(mask):
                behind = _before(node, followed.look.within)
                masks[place if node in narrow else (*place[:-1], behind)] = layers[node]
        elif path is not None:
            above = pooled_by(followed, node)
            places[place] = Place(path, field, followed.values[node].axes, node not in narrow, "", above)
    return [place._replace(masked=masks.get(key, "")) for key, place in places.items()]


def _before(layer: fx.Node, within: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """What a layer takes."""
    source = layer.all_input_nodes[0]
    while within.get(source) is layer:
        source = source.all_input_nodes[0]
    return source


def _path(model: nn.Module, paths: Iterable[str], calls: Counter[str]) -> str | None:
    """The module whose output this is, and the outermost of those that hold it; only if it is called once."""
    found = None
    for path in paths:
        module = model.get_submodule(path)
        own_forward = type(module).forward is not nn.Sequential.forward
        if calls[path] > 1 or (isinstance(module, nn.Sequential) and own_forward):
            continue
        if found is None or found.startswith(f"{path}."):
            found = path
    return found


def _bottlenecks(followed: Followed) -> set[fx.Node]:
    """The calls that every path from the input to the output passes."""
    order = [node for node in followed.look.graph.nodes if node in followed.values]
    output = followed.look.graph.output_node()
    needed: set[fx.Node] = {output}
    for node in reversed(order):
        if any(user in needed for user in node.users):
            needed.add(node)
    found, waiting = set(), set[fx.Node]()
    users = {node: sum(user in needed for user in node.users) for node in order if node in needed}
    for node in order:
        if node not in needed:
            continue
        for source in node.all_input_nodes:
            if source in users:
                users[source] -= 1
                if not users[source]:
                    waiting.discard(source)
        if not waiting:
            found.add(node)
        waiting.add(node)
    return found


def _suggestion(size: float, places: list[Place]) -> Suggestion:
    place = _choose(size, [place for place in places if not place.open])
    nearest = _choose(size, places)
    assert nearest is not None
    if place is None or (_distance(size, place) > FAR and _distance(size, nearest) < _distance(size, place)):
        place = nearest
    p = _probabilities(place.units, place.first)
    return Suggestion(size, place.after, place.field, p, place.first, _why(size, place, places, p))


def _choose(size: float, places: list[Place]) -> Place | None:
    """The smallest field that holds the structure, if it fits; else the nearest in ratio.

    Of equal fields the one with the fewest positions, because more of them see the same; of these the last, because the
    mask then blocks more layers.
    """
    if not places:
        return None
    smaller = [place for place in places if place.size < NEARLY * size]
    larger = [place for place in places if place.size >= NEARLY * size]
    best = [max(reversed(smaller), key=lambda place: (place.size, -place.units))] if smaller else []
    best += [min(reversed(larger), key=lambda place: (place.size, place.units))] if larger else []
    if larger and best[-1].size <= FAR * size:
        return best[-1]
    return min(reversed(best), key=lambda place: _distance(size, place))


def _distance(size: float, place: Place) -> float:
    return max(place.size / size, size / place.size)


def _probabilities(units: int, first: float) -> tuple[float, ...]:
    """The number of kept units falls in equal ratios from all to one; near the p to start from there is no other."""
    steps = min(5, max(3, round(math.log(units, 8))))
    kept = {round(units ** (i / steps)) for i in range(steps + 1)}
    share, ends = 1 - first, (1, units)
    far = {number for number in kept if number in ends or max(units * share / number, number / (units * share)) > NEAR}
    p = {rounded(number / units) for number in far} | {first}
    return tuple(sorted(p))


def rounded(share: float) -> float:
    """The probability that leaves about this share, with few digits; one unit stays one."""
    digits = max(2, -math.floor(math.log10(share)))
    return round(1 - round(share, digits), digits)


def _why(size: float, place: Place, places: list[Place], p: tuple[float, ...]) -> str:
    field, units, first = place.field, place.units, place.first
    apart = "all receptive fields overlap"
    if field.independent != 1:
        apart = f"{field.independent} of them have receptive fields that do not overlap"
    words = [
        f"Structures of size {size:g}: put a mask behind {place.after}, {_fit(size, place, places)}.",
        f"Its {by(field.lattice)} positions are {units} units per sample, one every {by(field.stride or ())} cells of "
        f"the input; {apart}.",
    ]
    if place.open:
        through = _choose(size, [other for other in places if not other.open])
        instead = f"the nearest is {through.after}, {by(through.field.size or ())}" if through else "there is none"
        words.append(
            "Other paths lead from the input to the output around it, so this mask blocks only a part of the gradient. "
            f"No layer that all paths pass has a receptive field near that size; {instead}."
        )
    tries = ", ".join(f"p={value:.12g} keeps {max(1, round(units * (1 - value)))}" for value in p)
    words.append(
        f"Of {units} units {tries}. Try p={first:.12g} first, which keeps "
        f"{'half of them' if first == 0.5 else 'about as many as do not overlap'}; the higher p, the more epochs "
        "training needs."
    )
    if place.pooled:
        words.append(
            f"{place.pooled} takes the mean over all of them, so that they have about the same gradient: "
            "choose='gradient' cannot help here."
        )
    if place.masked:
        words.append(f"A mask stands there already: model.get_submodule({place.masked!r}).p = {first:.12g}")
    else:
        layer = place.code(f"{first:.12g}")
        words.append(f'insert(model, {{"{place.after}": {layer}}})')
    return "\n".join(words)


def _fit(size: float, place: Place, places: list[Place]) -> str:
    seen = f"where a position sees {by(place.field.size or ())} cells of the input"
    if size <= place.size <= FAR * size:
        return f"{seen}: the smallest receptive field that holds the structure"
    if NEARLY * size <= place.size < size:
        return f"{seen}: the smallest receptive field that holds at least nine tenths of the structure"
    if place.size > size:
        return f"{seen}: the receptive field nearest to the size, though more than twice as large"
    larger = any(other.size >= NEARLY * size for other in places if place.open or not other.open)
    behind = "the next larger one is farther off" if larger else "there is no larger one"
    return f"{seen}: the receptive field nearest to the size, though smaller; {behind}"
