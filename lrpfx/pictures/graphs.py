"""Pictures of graphs: nodes and edges in the colours of their relevance."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from lrpfx.pictures.maps import Floats, invalid
from lrpfx.pictures.style import Style

_SHARPER = 3  # pixels that are drawn for each one of the picture, in both directions
_INK, _PALE, _LINE = (20, 20, 20), (255, 255, 255), (176, 176, 176)


def graph_picture(
    positions: Floats,
    edge_index: NDArray[np.integer],
    nodes: Floats,
    edges: Floats,
    size: tuple[int, int],
    labels: Sequence[str] | None = None,
    marked: int | None = None,
    style: Style | None = None,
) -> Image.Image:
    """A graph with nodes and edges in the colours of their relevance: the largest magnitude of each is in full colour.

    Relevance along both directions of an edge is added up, and draws the width of its line as well. An edge has an arrow if the
    other direction is not in the graph.

    Parameters
    ----------
    positions
        Where the nodes are, (nodes, 2), in any unit.
    edge_index
        The source and the target of each edge, (2, edges).
    nodes, edges
        Relevance of each, (nodes,) and (edges,).
    size
        (width, height) of the picture in pixels.
    labels
        What stands in the nodes, by default their numbers.
    marked
        A node that is drawn with a thick rim.
    style
        Its `cmap` and `scale`, which then is that of nodes and edges.
    """
    style = style or Style()
    count = len(nodes)
    if labels is not None and len(labels) != count:
        raise invalid(f"labels= has {len(labels)} texts for {count} nodes")
    width, height = (side * _SHARPER for side in size)
    radius = min(width, height) * min(0.04, 0.3 / np.sqrt(max(count, 1)))
    spread = np.ptp(positions, axis=0)
    shares = (positions - positions.min(0)) / np.where(spread > 0, spread, 1.0)
    shares = np.where(spread > 0, shares, 0.5)
    centers = 1.6 * radius + shares * (np.array([width, height]) - 3.2 * radius)
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    thin = max(1, round(radius * 0.08))

    both: dict[tuple[int, int], float] = {}
    arcs = [(int(source), int(target)) for source, target in edge_index.T]
    for (source, target), relevance in zip(arcs, edges.tolist(), strict=True):
        pair = (min(source, target), max(source, target))
        both[pair] = both.get(pair, 0.0) + relevance
    largest = style.scale or max(map(abs, both.values()), default=0.0) or 1.0
    directed = set(arcs)
    for (first, second), relevance in sorted(both.items(), key=lambda one: abs(one[1])):
        if first == second:
            continue
        share = relevance / largest
        start, end = centers[first], centers[second]
        line = round(thin + min(1.0, abs(share)) * radius * 0.4)
        draw.line([*start, *end], fill=_LINE, width=line + thin)  # a rim, so that pale colours are seen
        draw.line([*start, *end], fill=_color(share, style), width=line)
        if ((first, second) in directed) != ((second, first) in directed):
            tail, head = (start, end) if (first, second) in directed else (end, start)
            _arrow(draw, tail, head, radius, line)
    scale = style.scale or float(np.abs(nodes).max(initial=0.0)) or 1.0
    font = ImageFont.load_default(max(8, round(radius * 0.8)))
    for node, (center, relevance) in enumerate(zip(centers, nodes.tolist(), strict=True)):
        color = _color(relevance / scale, style)
        rim = 5 * thin if node == marked else thin
        draw.ellipse([*(center - radius), *(center + radius)], fill=color, outline=_INK, width=rim)
        ink = _INK if np.dot(color, (0.299, 0.587, 0.114)) > 140 else _PALE
        draw.text(tuple(center), str(node) if labels is None else labels[node], fill=ink, font=font, anchor="mm")
    return image.resize(size, Image.Resampling.LANCZOS)


def _color(share: float, style: Style) -> tuple[int, ...]:
    return tuple((style.colors(np.array(share)) * 255).round().astype(int).tolist())


def _arrow(draw: ImageDraw.ImageDraw, tail: Floats, head: Floats, radius: float, line: int) -> None:
    """The head of an arrow at the rim of the node that it points to."""
    length = float(np.hypot(*(head - tail)))
    if not length:
        return
    along = (head - tail) / length
    across = np.array([-along[1], along[0]])
    tip, width = head - along * radius, max(radius * 0.35, line)
    base = tip - along * 1.6 * width
    draw.polygon([tuple(tip), tuple(base + across * width), tuple(base - across * width)], fill=(110, 110, 110))
