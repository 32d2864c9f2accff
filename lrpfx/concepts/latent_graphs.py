"""Attribution graphs over latents of dictionaries, tokens and logits (Ameisen et al. 2025; Lindsey et al. 2025)."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import networkx as nx
import numpy as np
import torch
from torch import fx, nn

from lrpfx.attribution.arguments import Inputs
from lrpfx.attribution.computation import Computation
from lrpfx.concepts.dictionary import DICTIONARY
from lrpfx.errors import InputError, InputTypeError, os_errors
from lrpfx.ir.node import Role, ancestors_of, node_info, nodes_by_name
from lrpfx.request.names import resolve_names
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.question import Question
from lrpfx.runtime.explain_module import ExplainModule, explainable
from lrpfx.support.numbers import is_whole, whole_number

#: How many places relevance starts from at once.
_AT_ONCE = 32
_ENCODER = re.compile(rf"(.+)\.{DICTIONARY}\.encoder(\..+)?")


@dataclass(frozen=True)
class LatentNode:
    """A node of a graph of latents.

    `kind`: "latent", "error" (what a dictionary does not reconstruct at a position), "token" or "logit". `place`: the path of
    the module that has the dictionary; "" for tokens and logits. `position`: that of the token. `index`: of the latent, or the
    id of the token; -1 for an error.
    """

    kind: Literal["latent", "error", "token", "logit"]
    place: str
    position: int
    index: int


@dataclass(frozen=True, eq=False)
class LatentGraph:
    """How tokens and latents of dictionaries make other latents and logits, each by what it adds to them directly.

    Parameters
    ----------
    graph
        From sources to what they add to. A node (`LatentNode`) has the attributes `value` (of a latent or a logit; None for
        tokens and errors) and `influence`, its share of what leads to the logits over all paths (for a logit, of their
        probability). An edge has a `weight`: what the source adds to the value of its target directly, that is, not by way of
        another latent.
    places
        The modules with dictionaries, in the order of execution.
    tokens
        The ids of the prompt.
    probabilities
        Of the logits, by token.
    """

    graph: "nx.DiGraph[LatentNode]"
    places: tuple[str, ...]
    tokens: tuple[int, ...]
    probabilities: Mapping[int, float]

    def latents(self, place: str | None = None) -> list[LatentNode]:
        """The latents in the graph, those with the largest influence first.

        Parameters
        ----------
        place
            The path of a module, for those of its dictionary alone.

        Raises
        ------
        InputError
            No dictionary is there.
        """
        if place is not None and place not in self.places:
            raise InputError(f"no dictionary is at {place!r}: there are {', '.join(self.places)}", topic="dictionaries")
        found = [node for node in self.graph if node.kind == "latent" and place in (None, node.place)]
        return sorted(found, key=lambda node: -self.graph.nodes[node]["influence"])

    def pruned(self, nodes: float = 0.8, edges: float = 0.98) -> "LatentGraph":
        """The graph of those nodes and edges that have a share of all influence, the largest first; tokens and logits stay.

        Parameters
        ----------
        nodes, edges
            The shares to keep, in (0, 1].

        Raises
        ------
        InputError
            A share is not one.
        """
        for name, share in (("nodes", nodes), ("edges", edges)):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
                raise InputError(f"{name} is a share in (0, 1], not {share!r}", topic="dictionaries")
        ranks = self._ranks()
        kept = {node for node in self.graph if node.kind in ("token", "logit") or ranks[node][0] < nodes}
        graph = nx.DiGraph(self.graph.subgraph(kept))
        scores = _edge_scores(graph)
        ranked = _cumulative(scores)
        graph.remove_edges_from([edge for edge in scores if ranked[edge][0] >= edges])
        while True:
            idle = [node for node in graph if node.kind in ("latent", "error") and not graph.out_degree(node)]
            idle += [node for node in graph if node.kind == "latent" and not graph.in_degree(node)]
            if not idle:
                return replace(self, graph=graph)
            graph.remove_nodes_from(idle)

    def to_json(
        self,
        words: Sequence[str],
        path: str | Path | None = None,
        *,
        slug: str = "lrpfx",
        scan: str = "lrpfx",
        node_share: float = 0.8,
    ) -> str:
        """The graph in the format of circuit-tracer's front end.

        Parameters
        ----------
        words
            The text of each token of the input.
        path
            The file to write it to, if there is to be one.
        slug, scan
            How the front end names the graph, and the set of dictionaries.
        node_share
            The share of influence that the front end shows at first.

        Raises
        ------
        InputError
            The words are not those of all tokens, or the file cannot be written.
        """
        if isinstance(words, str) or not isinstance(words, Sequence) or len(words) != len(self.tokens):
            raise InputError(f"words is a list with the text of each of the {len(self.tokens)} tokens", topic="dictionaries")
        ranks = self._ranks()
        nodes = [
            {**self._shown(node), "influence": ranks.get(node, (None, None))[1], "activation": data["value"]}
            for node, data in self.graph.nodes(data=True)
        ]
        links = [
            {"source": self._name(source), "target": self._name(target), "weight": data["weight"]}
            for source, target, data in self.graph.edges(data=True)
        ]
        content = {
            "metadata": {
                "slug": slug,
                "scan": scan,
                "transcoder_list": [],
                "prompt_tokens": list(words),
                "prompt": "".join(words),
                "node_threshold": node_share,
                "schema_version": 1,
            },
            "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both", "clickedId": "", "sg_pos": ""},
            "nodes": nodes,
            "links": links,
        }
        text = json.dumps(content, indent=1)
        if path is not None:
            with os_errors(InputError, Path(path), "written"):
                Path(path).write_text(text)
        return text

    def _ranks(self) -> dict[LatentNode, tuple[float, float]]:
        """Of all nodes but logits."""
        nodes = self.graph.nodes(data=True)
        return _cumulative({node: data["influence"] for node, data in nodes if node.kind != "logit"})

    def _layer(self, node: LatentNode) -> str:
        kinds = {"token": "E", "logit": str(len(self.places) + 1)}
        return kinds.get(node.kind) or str(self.places.index(node.place))

    def _name(self, node: LatentNode) -> str:
        return f"{self._layer(node)}_{node.index}_{node.position}"

    def _shown(self, node: LatentNode) -> dict[str, Any]:
        """What the front end reads of a node, but its numbers."""
        kinds = {
            "latent": "cross layer transcoder",
            "error": "mlp reconstruction error",
            "token": "embedding",
            "logit": "logit",
        }
        shown: dict[str, Any] = {
            "node_id": self._name(node),
            "jsNodeId": self._name(node),
            "layer": self._layer(node),
            "ctx_idx": node.position,
            "feature_type": kinds[node.kind],
            "feature": node.index,
            "token_prob": 0.0,
            "is_target_logit": False,
            "run_idx": 0,
            "reverse_ctx_idx": 0,
            "clerp": "",
        }
        if node.kind == "latent":
            layer = self.places.index(node.place)
            shown["feature"] = (layer + node.index) * (layer + node.index + 1) // 2 + node.index  # Cantor's pairing
        if node.kind == "token":
            shown["feature"] = node.position
        if node.kind == "logit":
            likely = max(self.probabilities, key=lambda token: self.probabilities[token])
            shown |= {"token_prob": self.probabilities[node.index], "is_target_logit": node.index == likely}
            shown["clerp"] = f'Output "{node.index}" (p={self.probabilities[node.index]:.3f})'
        return shown


def latent_graph(
    explain_model: nn.Module,
    inputs: Inputs,
    logits: int | Sequence[int] = 5,
    *,
    position: int = -1,
    latents: int = 100,
    output: OutputSelector = None,
) -> LatentGraph:
    """The graph of what tokens, errors and latents add to each other and to logits, for one prompt.

    The weight of an edge is relevance that starts at the value of the target and reaches the source without another latent
    between: with `CPLRP()`, the effect in the network whose attention weights and norms are held, as in the paper [1]_. Then
    the weights into a node sum to its value, less what biases and the latents left out add.

    Parameters
    ----------
    explain_model
        A transformed model with at least one dictionary: see `lrpfx.dictionary`. Transcoders in all layers give the graphs of
        the paper; autoencoders of the residual stream give a chain.
    inputs
        One prompt, as for `lrpfx.attribute`.
    logits
        How many of the most probable tokens to explain, or the ids of those tokens.
    position
        Where they are said.
    latents
        How many latents to keep at most: those that carry the most relevance of the logits.
    output
        As for `lrpfx.attribute`.

    Returns
    -------
    LatentGraph
        With one forward and backward pass for the logits, and one for each place with a dictionary.

    Raises
    ------
    InputError
        There is no dictionary, or one at a module that is called more than once; more than one prompt, or no token ids that
        one embedding reads; or a token that does not exist.

    References
    ----------
    .. [1] Ameisen et al. 2025, https://transformer-circuits.pub/2025/attribution-graphs/methods.html
    """
    module = explainable(explain_model, "latent_graph")
    latents = whole_number(latents, "latents", 1)
    places = _places(module)
    search = _Search(module, inputs, places, position, output)
    chosen = search.logits(logits)
    graph: nx.DiGraph[LatentNode] = nx.DiGraph()
    search.explain_logits(graph, chosen, latents)
    for place in reversed(places):
        search.explain_latents(graph, place)
    _find_influence(graph, search.probabilities)
    return LatentGraph(graph, tuple(places), search.tokens, search.probabilities)


def _places(module: ExplainModule) -> list[str]:
    """The modules that have dictionaries, in the order of execution."""
    found: dict[str, None] = {}
    names = nodes_by_name(module.unfused_graph)
    for name in names:
        match = _ENCODER.fullmatch(name)
        if match:
            found[match[1]] = None
    if not found:
        raise InputError(
            f"{module.title} has no dictionary: transform what lrpfx.dictionary(model, ...) returns", topic="dictionaries"
        )
    for place in found:
        if f"{place}.{DICTIONARY}.error.add_1" in names:
            raise InputError(f"{place!r} is called more than once, so its latents have no layer", topic="dictionaries")
    return list(found)


class _Search:
    """The passes that find edges."""

    def __init__(
        self, module: ExplainModule, inputs: Inputs, places: Sequence[str], position: int, output: OutputSelector
    ) -> None:
        self.module = module
        self.inputs = inputs
        self.position = position
        self.output = output
        by_name = nodes_by_name(module.unfused_graph)
        #: The node with the latents of each dictionary, that with all it makes of what it reads, and the sum with the error.
        self.latents = {place: _last(module, f"{place}.{DICTIONARY}.encoder") for place in places}
        self.sums = {place: f"{place}.{DICTIONARY}.error.add" for place in places}
        self.decoded = {place: _decoded(by_name[total]) for place, total in self.sums.items()}
        #: What cuts relevance that would go on below latents, by place.
        self.cuts = {place: _edges_into(by_name, f"{place}.{DICTIONARY}.encoder") for place in places}
        self.above = {place: ancestors_of(by_name[self.latents[place]]) for place in places}
        self.by_name = by_name
        self.places = places
        self.active: dict[str, list[LatentNode]] = {place: [] for place in places}
        self.prompt: Any = 0  # the name or number of the input with the tokens
        self.tokens: tuple[int, ...] = ()
        self.probabilities: dict[int, float] = {}
        self.values: dict[LatentNode, float] = {}

    def _explained(self, **question: Any) -> Computation:
        return Computation(self.module, self.inputs, Question(**question))

    def logits(self, asked: int | Sequence[int]) -> list[int]:
        """The tokens to explain."""
        plain = self._explained(target=(self.position, 0), output=self.output)
        self.prompt, ids = _prompt(self.inputs, plain.of_inputs)
        if len(ids) != 1:
            raise InputError(f"a graph of latents is that of one prompt, not of {len(ids)}", topic="dictionaries")
        self.tokens = tuple(ids[0].tolist())
        if not isinstance(plain.output, torch.Tensor) or plain.output.ndim != 3:
            raise InputError(
                "the output has no logits (batch, positions, tokens): choose with output=", topic="choice-of-output"
            )
        scores = plain.output[0, self.position].double()
        probabilities = scores.softmax(-1)
        if is_whole(asked):
            count = whole_number(asked, "logits", 1)
            chosen = torch.topk(probabilities, min(count, len(scores))).indices.tolist()
        else:
            if isinstance(asked, str) or not isinstance(asked, Sequence) or not all(map(is_whole, asked)) or not asked:
                raise InputTypeError(f"logits is a number, or a list of token ids, not {asked!r}", topic="dictionaries")
            chosen = [int(one) for one in asked]
            wrong = [one for one in chosen if not 0 <= one < len(scores)]
            if wrong or len(set(chosen)) < len(chosen):
                raise InputError(f"logits are different ids of {len(scores)} tokens, not {list(asked)!r}", topic="dictionaries")
        self.probabilities = {token: float(probabilities[token]) for token in chosen}
        position = self.position % len(self.tokens)
        self.values = {LatentNode("logit", "", position, token): float(scores[token]) for token in chosen}
        return chosen

    def explain_logits(self, graph: "nx.DiGraph[LatentNode]", chosen: Sequence[int], latents: int) -> None:
        """Add the logits and the edges into them; choose latents."""
        names = list(self.latents.values())
        weights = {token: self.probabilities[token] for token in chosen}
        through = self._explained(target=(self.position, weights), record=names, output=self.output)
        amounts = [(place, through.layers[self.latents[place]][0].abs()) for place in self.places]
        ranked = torch.cat([amount.flatten() for _, amount in amounts])
        count = min(latents, int((ranked > 0).sum()))
        smallest = torch.topk(ranked, count).values[-1] if count else torch.inf
        for place, amount in amounts:
            kept = ((amount >= smallest) & (amount > 0)).nonzero().tolist()
            self.active[place] = [LatentNode("latent", place, position, index) for position, index in kept]
        targets = [(self.position, token) for token in chosen]
        cuts: dict[Any, Any] = {edge: [] for place in self.places for edge in self.cuts[place]}
        recorded = self._recorded(self.places)
        found = self._explained(targets=targets, conditions=[cuts], record=recorded, output=self.output)
        for number, node in enumerate(list(self.values)):
            graph.add_node(node, value=self.values[node])
            self._connect(graph, node, found, number, self.places)

    def explain_latents(self, graph: "nx.DiGraph[LatentNode]", place: str) -> None:
        """Add the edges into the latents of a dictionary."""
        start, above = self.latents[place], self.above[place]
        below = [one for one in self.places if one != place and self.by_name[self.latents[one]] in above]
        cuts: dict[Any, Any] = {edge: [] for one in below for edge in self.cuts[one]}
        nodes = self.active[place]
        for first in range(0, len(nodes), _AT_ONCE):
            several = nodes[first : first + _AT_ONCE]
            targets = [self._seed(node) for node in several]
            conditions = [cuts] if cuts else None
            found = self._explained(targets=targets, start=start, conditions=conditions, record=self._recorded(below))
            value = found.output[0]
            for number, node in enumerate(several):
                graph.add_node(node, value=float(value[node.position, node.index]))
                self._connect(graph, node, found, number, below, conditioned=bool(cuts))

    def _seed(self, node: LatentNode) -> Any:
        def seed(value: torch.Tensor) -> torch.Tensor:
            made = torch.zeros_like(value)
            made[0, node.position, node.index] = value[0, node.position, node.index]
            return made

        return seed

    def _recorded(self, places: Sequence[str]) -> list[str]:
        return [name for place in places for name in (self.latents[place], self.decoded[place], self.sums[place])]

    def _connect(
        self,
        graph: "nx.DiGraph[LatentNode]",
        target: LatentNode,
        found: Computation,
        number: int,
        places: Sequence[str],
        conditioned: bool = True,
    ) -> None:
        """Add the edges that one pass found."""

        def of(relevance: torch.Tensor) -> torch.Tensor:
            return relevance[0, number, 0] if conditioned else relevance[number, 0]

        tokens = of(_by_place(found.of_inputs)[self.prompt]).sum(-1).tolist()
        weights = {LatentNode("token", "", at, self.tokens[at]): weight for at, weight in enumerate(tokens)}
        for place in places:
            arriving = of(found.layers[self.latents[place]])
            for node in self.active[place]:
                weights[node] = float(arriving[node.position, node.index])
            missed = (of(found.layers[self.sums[place]]).sum(-1) - of(found.layers[self.decoded[place]]).sum(-1)).tolist()
            weights |= {LatentNode("error", place, at, -1): weight for at, weight in enumerate(missed)}
        for source, weight in weights.items():
            if weight:
                if source not in graph:
                    graph.add_node(source, value=None)
                graph.add_edge(source, target, weight=weight)


def _last(module: ExplainModule, path: str) -> str:
    """The node with what a module returns."""
    (node,) = resolve_names(module.unfused_graph, [path])
    return node_info(node).name


def _decoded(total: fx.Node) -> str:
    """The node that is summed with the error: the decoded latents, with what a skip connection adds."""
    (decoded,) = (node for node in total.all_input_nodes if node_info(node).role is Role.DATA)
    return node_info(decoded).name


def _edges_into(by_name: Mapping[str, fx.Node], path: str) -> list[tuple[str, str]]:
    """The edges by which a module reads what is computed outside of it."""
    inside = {name for name in by_name if name == path or name.startswith(f"{path}.")}
    found = []
    for name in inside:
        if node_info(by_name[name]).role is not Role.DATA:
            continue  # such as a gate, which takes no relevance
        for source in by_name[name].all_input_nodes:
            info = node_info(source)
            if info.name in by_name and info.name not in inside:
                found.append((info.name, name))
    return found


def _prompt(inputs: Inputs, relevance: Any) -> tuple[Any, torch.Tensor]:
    """The token ids among the inputs: their name or number, and themselves (batch, positions)."""
    carried = _by_place(relevance)
    for place, value in _by_place(inputs).items():
        is_ids = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.ndim == 2
        if is_ids and isinstance(carried.get(place), torch.Tensor):  # a mask carries none
            return place, value
    raise InputError(
        "a graph of latents is that of a prompt of token ids (1, positions), which one embedding reads", topic="dictionaries"
    )


def _by_place(values: Any) -> dict[Any, Any]:
    """Inputs, or what belongs to them, by name or number."""
    if isinstance(values, Mapping):
        return dict(values)
    return dict(enumerate([values] if isinstance(values, torch.Tensor) else values))


def _find_influence(graph: "nx.DiGraph[LatentNode]", probabilities: Mapping[int, float]) -> None:
    """Give each node its share of what leads to the logits over all paths.

    A node's influence is that of the nodes it leads to, in proportion to the magnitudes of weights.
    """
    nodes = list(graph)
    places = {node: number for number, node in enumerate(nodes)}
    shares = np.zeros((len(nodes), len(nodes)))  # (target, source)
    for source, target, data in graph.edges(data=True):
        shares[places[target], places[source]] = abs(data["weight"])
    sums = shares.sum(1, keepdims=True)
    shares = np.divide(shares, sums, out=np.zeros_like(shares), where=sums > 0)
    start = np.array([probabilities[node.index] if node.kind == "logit" else 0.0 for node in nodes])
    start /= max(start.sum(), 1e-300)
    # A graph without cycles: the inverse is a finite sum of powers.
    influence = np.linalg.solve(np.eye(len(nodes)) - shares.T, start)
    nx.set_node_attributes(graph, {node: float(influence[places[node]]) for node in nodes}, "influence")


def _edge_scores(graph: "nx.DiGraph[LatentNode]") -> dict[tuple[LatentNode, LatentNode], float]:
    """What leads to the logits along each edge."""
    sums = {node: sum(abs(data["weight"]) for _, _, data in graph.in_edges(node, data=True)) for node in graph}
    return {
        (source, target): abs(data["weight"]) / sums[target] * graph.nodes[target]["influence"]
        for source, target, data in graph.edges(data=True)
        if sums[target]
    }


def _cumulative(scores: Mapping[Any, float]) -> dict[Any, tuple[float, float]]:
    """The share of the sum that larger scores have, without and with each one."""
    total = sum(scores.values()) or 1.0
    found, before = {}, 0.0
    for one in sorted(scores, key=lambda each: -scores[each]):
        after = before + scores[one] / total
        found[one] = (before, after)
        before = after
    return found
