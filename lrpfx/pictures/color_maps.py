"""Colour maps, and a small language that describes them.

A colour map is a comma-separated list of nodes. A node is a colour of three or six hexadecimal digits (`f00`, `ff0000`),
optionally preceded by its position on the scale from 00 to ff and a colon (`80:fff`). `000,f00,fff` goes from black through red
to white. A one-digit position is doubled; nodes without a position are spread evenly between their neighbours; the ends are at
00 and ff.
"""

import re
from collections.abc import Iterator, Mapping, MutableMapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lrpfx.errors import LrpfxError


class ColorMapError(LrpfxError, RuntimeError):
    """The source of a colour map is not well formed."""

    topic = "colour-maps"


class CMapToken(NamedTuple):
    """A token of a colour map's source: its `type`, such as "shortcolor", its text `value`, and `pos`, where it begins."""

    type: str
    value: str
    pos: int


class ColorNode(NamedTuple):
    """A colour `value` (red, green and blue, 0 to 255) at the position `index` of the scale, 0 to 256."""

    index: int  # type: ignore[assignment]  # the field hides tuple.index
    value: NDArray[Any]


class ColorMap:
    """A colour map compiled from its source, in the language of `lrpfx.cmap`; assigning `source` compiles it again."""

    # The order matters: longer runs of hexadecimal digits come first.
    _TOKENS = re.compile(
        r"(?P<longcolor>[0-9a-fA-F]{6})|(?P<shortcolor>[0-9a-fA-F]{3})|(?P<index>[0-9a-fA-F]{1,2})"
        r"|(?P<adsep>:)|(?P<sep>,)|(?P<whitespace>\s+)|(?P<error>.)"
    )

    def __init__(self, source: str) -> None:
        self._source = source
        self._nodes = self._compile(source)

    @property
    def source(self) -> str:
        """The text that describes the map."""
        return self._source

    @source.setter
    def source(self, value: str) -> None:
        nodes = self._compile(value)  # an invalid source leaves the map unchanged
        self._source, self._nodes = value, nodes

    @classmethod
    def _lex(cls, source: str) -> Iterator[CMapToken]:
        if not isinstance(source, str):
            raise ColorMapError(f"the source of a colour map is text, not {type(source).__name__}")
        for match in cls._TOKENS.finditer(source):
            kind = match.lastgroup or "error"
            if kind == "error":
                raise ColorMapError(f"unexpected {match.group()!r} at position {match.start()} of the colour map {source!r}")
            if kind != "whitespace":
                yield CMapToken(kind, match.group(), match.start())

    @classmethod
    def _parse(cls, source: str) -> list[tuple[int | None, NDArray[Any]]]:
        """Positions (None if not given) and colours of the nodes."""
        nodes: list[tuple[int | None, NDArray[Any]]] = []
        tokens = [*cls._lex(source), CMapToken("sep", ",", len(source))]
        while tokens:
            end = next(position for position, token in enumerate(tokens) if token.type == "sep")
            node, tokens = tokens[:end], tokens[end + 1 :]
            kinds = [token.type for token in node]
            if kinds[-1:] not in (["longcolor"], ["shortcolor"]) or kinds[:-1] not in ([], ["index", "adsep"]):
                text = "".join(token.value for token in node)
                raise ColorMapError(f"{text!r} in the colour map {source!r} is not a colour, with or without a position")
            color = node[-1].value if kinds[-1] == "longcolor" else "".join(2 * digit for digit in node[-1].value)
            place = None if len(node) == 1 else int(node[0].value if len(node[0].value) == 2 else 2 * node[0].value, 16)
            nodes.append((place, np.array([int(color[start : start + 2], 16) for start in (0, 2, 4)])))
        if len(nodes) < 2:
            raise ColorMapError(f"the colour map {source!r} has fewer than two colours")
        return nodes

    @classmethod
    def _compile(cls, source: str) -> list[ColorNode]:
        parsed = cls._parse(source)
        places = [place for place, _ in parsed]
        colors = [color for _, color in parsed]
        places[0] = 0 if places[0] is None else places[0]
        places[-1] = 255 if places[-1] is None else places[-1]
        known = [(position, place) for position, place in enumerate(places) if place is not None]
        placed: list[int] = []
        for (start, first), (end, last) in pairwise(known):
            if last < first:
                raise ColorMapError(f"the colour map {source!r} goes back from position {first:02x} to {last:02x}")
            count = end - start
            placed += [int(first * (1 - step / count) + last * (step / count)) for step in range(count)]
        placed.append(known[-1][1])
        nodes = [ColorNode(place, color) for place, color in zip(placed, colors, strict=True)]
        if nodes[0].index > 0:
            nodes.insert(0, ColorNode(0, nodes[0].value))
        return [*nodes, ColorNode(256, nodes[-1].value)]

    def __call__(self, x: ArrayLike) -> NDArray[Any]:
        """Colours of the values `x` in [0, 1]; others are clipped. An axis of red, green and blue in [0, 1] is appended."""
        scaled = np.clip(np.asarray(x, dtype=float), 0.0, 1.0) * 255
        indices = np.array([node.index for node in self._nodes])
        colors = np.array([node.value for node in self._nodes]) / 255.0
        # The last node at or before each value: two nodes at one position make a hard edge.
        left = np.clip(np.searchsorted(indices, scaled, side="right") - 1, 0, len(indices) - 2)
        width = np.maximum(indices[left + 1] - indices[left], 1)
        share = ((scaled - indices[left]) / width)[..., None]
        result: NDArray[Any] = colors[left] * (1 - share) + colors[left + 1] * share
        return result

    def palette(self, level: float = 1.0) -> NDArray[np.uint8]:
        """The map as 256 colours, shape (256, 3).

        `level`: above 1, smaller values reach the ends of the map.
        """
        x = np.clip((np.linspace(-1.0, 1.0, 256) * level + 1.0) / 2.0, 0.0, 1.0)
        return (self(x) * 255).round(12).clip(0.0, 255.0).astype(np.uint8)


class LazyColorMapCache(MutableMapping[str, Any]):
    """Colour maps by name, compiled from their `sources` on first use."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._compiled: dict[str, ColorMap] = {}

    def __getitem__(self, name: str) -> ColorMap:
        if name not in self._compiled:
            self._compiled[name] = ColorMap(self._sources[name])
        return self._compiled[name]

    def __setitem__(self, name: str, source: str) -> None:
        if name in self._compiled:
            self._compiled[name].source = source
        self._sources[name] = source

    def __delitem__(self, name: str) -> None:
        del self._sources[name]
        self._compiled.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)
