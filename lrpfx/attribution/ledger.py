"""The ledger: the relevance that every node receives and passes on, and where the difference goes.

Each node runs separately, and the relevance of its output is propagated back through it alone. What a rule absorbs is computed
independently, from the rule's own formula. The rest is unexplained: rounding, or an error.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from lrpfx.attribution.arguments import Arguments, Inputs, misfits, references_of
from lrpfx.attribution.plausibility import EXCESS
from lrpfx.errors import InputError, LrpfxWarning, RuleError
from lrpfx.ir.kinds import Embedding
from lrpfx.ir.node import (
    Role,
    attribute_of,
    floating_tensors,
    identities,
    map_arguments,
    map_result,
    node_info,
    nodes_by_name,
    output_node,
)
from lrpfx.request.explained_output import explained_output, passage
from lrpfx.request.layouts import check_positions
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import Target, TargetLike, as_target
from lrpfx.runtime.explain_module import ExplainModule, explainable, rule_module_of
from lrpfx.runtime.masked_relevance import MaskedRelevance
from lrpfx.runtime.multipliers import carry_multiplier, carry_relevance
from lrpfx.runtime.rule_table import GRADIENT, OUTPUT, rule_label
from lrpfx.support.html import Html, bar, element, folded
from lrpfx.support.table import Rows, Table
from lrpfx.support.tensors import detached, is_floating, only_finite, relevance_from, where_finite

if TYPE_CHECKING:
    from pandas import DataFrame

#: What takes relevance that is not passed on.
PARTS = ("bias", "expansion", "stabilizer", "absent", "constants", "stopped")

#: How many accounts HTML shows at once: those that pass on the least.
LARGEST = 20


@dataclass(frozen=True)
class Entry:
    """The account of one node, summed over the batch."""

    name: str
    kind: str
    rule: str
    relevance_in: float  # of the node's output
    relevance_out: float  # of its inputs that depend on the model's inputs
    bias: float = 0.0
    expansion: float = 0.0  # the constant term of the linear expansion of a non-linear layer
    stabilizer: float = 0.0
    absent: float = 0.0  # relevance of outputs without contributions, or without those of the sign that the rule needs
    constants: float = 0.0  # parameters, buffers and numbers that received relevance, or differ for the reference
    stopped: float = 0.0  # by the rule
    unexplained: float = 0.0

    @property
    def leak(self) -> float:
        """The amount that the node does not pass on."""
        return abs(self.relevance_in - self.relevance_out)


class Ledger(Rows[Entry]):
    """All accounts in the order of execution, and the balance: seed = inputs + the totals of `PARTS`.

    Parameters
    ----------
    entries
        The account of each node.
    seed
        The relevance that the output starts with.
    seed_magnitude
        The sum of its absolute values.
    inputs
        The relevance of the model's inputs by name. Relevance of an embedding's output counts as that of its input, under the
        name of the embedding; another input of this name is then called "words (input)".
    flows
        The relevance that flows back along each edge, by (node, its reader), under the names of `lrpfx.to_networkx`.
    """

    columns = ("name", "kind", "rule", "in", "out", *PARTS, "unexplained")

    def __init__(
        self,
        entries: Sequence[Entry],
        seed: float,
        seed_magnitude: float,
        inputs: dict[str, float],
        flows: dict[tuple[str, str], float],
    ) -> None:
        super().__init__(entries)
        self.flows = flows
        self.seed = seed
        self.seed_magnitude = seed_magnitude
        self.inputs = inputs

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The account of each node."""
        return self.rows

    def entry(self, name: str) -> Entry:
        """The account of the node `name`. `KeyError` if there is none."""
        return {entry.name: entry for entry in self.entries}[name]

    def total(self, part: str) -> float:
        """The sum of one column. `part`: one of `PARTS`, or "unexplained"."""
        return float(sum(getattr(entry, part) for entry in self.entries))

    @property
    def unexplained(self) -> float:
        """The largest unexplained amount of any node, as a fraction of the seed's absolute sum."""
        amounts = [abs(entry.unexplained) for entry in self.entries]
        largest = math.nan if any(map(math.isnan, amounts)) else max(amounts, default=0.0)
        return largest / self.seed_magnitude if self.seed_magnitude else largest

    @property
    def is_finite(self) -> bool:
        """Whether all figures are finite."""
        figures = (value for entry in self.entries for value in vars(entry).values() if isinstance(value, float))
        return all(map(math.isfinite, (*figures, *self.inputs.values(), *self.flows.values())))

    @property
    def balance(self) -> float:
        """The part of the seed that all accounts leave over: zero up to rounding, or a bug."""
        return self.seed - sum(self.inputs.values()) - sum(self.total(part) for part in PARTS)

    def by_leak(self) -> list[Entry]:
        """The accounts, largest leak first."""
        return sorted(self.entries, key=lambda entry: entry.leak, reverse=True)

    def to_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        return {
            "seed": self.seed,
            "inputs": dict(self.inputs),
            "totals": {part: self.total(part) for part in (*PARTS, "unexplained")},
            "balance": self.balance,
            "entries": [asdict(entry) for entry in self.entries],
        }

    def to_pandas(self) -> "DataFrame":
        """The accounts as a DataFrame with the attributes of `Entry` and `leak` as columns. `InputError` without pandas."""
        names = [*Entry.__dataclass_fields__, "leak"]
        rows = [[getattr(entry, name) for name in names] for entry in self.entries]
        return Table(_with_dtypes(names), rows).to_pandas()

    def __str__(self) -> str:
        figures = ("relevance_in", "relevance_out", *PARTS, "unexplained")
        rows = [
            (entry.name, entry.kind, entry.rule, *(self._shown(getattr(entry, part)) for part in figures))
            for entry in self.entries
        ]
        totals = " + ".join(f"{self._shown(value, 6)} {name}" for name, value in self._totals())
        return f"{Table(_with_dtypes(self.columns), rows)}\nseed {self.seed:.6g} = {totals}; {self._remainder()}"

    def _repr_html_(self) -> str:
        """What became of the seed, then the accounts, the largest leak first. A leak that is pointed at shows its parts."""
        totals = [("seed", self.seed), *self._totals(), ("balance", self.balance)]
        longest = max(abs(value) for _, value in totals)
        sums = [(name, self._shown(value, 6), bar(value, longest)) for name, value in totals]
        ordered = self.by_leak()
        first = [entry for entry in ordered[:LARGEST] if self._shown(entry.leak) != "0"]
        others = ordered[len(first) :]
        seed = Table({"part": "str", "relevance": "float64", "": "str"}, sums).to_html()
        rest = folded(f"{len(others)} accounts with smaller leaks", self._html_accounts(others)) if others else ""
        summary = element("p", self._remainder())
        return "".join([seed, summary, self._html_accounts(first), rest])

    def _html_accounts(self, entries: Sequence[Entry]) -> Html:
        if not entries:
            return element("p", "no account has a leak")
        longest = max(entry.leak for entry in self.entries)
        rows = []
        for entry in entries:
            parts = {part: self._shown(getattr(entry, part)) for part in (*PARTS, "unexplained")}
            told = ", ".join(f"{part} {amount}" for part, amount in parts.items() if amount != "0")
            figures = [self._shown(value) for value in (entry.relevance_in, entry.relevance_out)]
            leak = element("span", self._shown(entry.leak), title=told)
            rows.append((element("code", entry.name), entry.kind, entry.rule, *figures, leak, bar(entry.leak, longest)))
        return Table(_with_dtypes(("name", "kind", "rule", "in", "out", "leak")) | {"": "str"}, rows).to_html()

    def _totals(self) -> list[tuple[str, float]]:
        """What the seed consists of: relevance of the inputs, and the totals of `PARTS`."""
        return [*self.inputs.items(), *((part, self.total(part)) for part in PARTS)]

    def _shown(self, value: float, digits: int = 4) -> str:
        """An amount as text; 0 if it is negligible."""
        is_negligible = math.isfinite(value) and abs(value) <= 1e-9 * self.seed_magnitude
        return "0" if is_negligible else f"{value:.{digits}g}"

    def _remainder(self) -> str:
        unexplained = "nothing" if self.unexplained <= 1e-9 else f"up to {self.unexplained:.2g} of the seed"
        missing = "" if abs(self.balance) <= 1e-6 * self.seed_magnitude else f"; {self.balance:.4g} is missing in the end"
        return f"{unexplained} unexplained at any node{missing}"


def _with_dtypes(columns: Sequence[str]) -> dict[str, str]:
    """The columns of a table of accounts: texts, then amounts."""
    return {name: "str" if place < 3 else "float64" for place, name in enumerate(columns)}


def ledger(
    explain_model: nn.Module,
    inputs: Inputs,
    target: TargetLike = None,
    *,
    output: OutputSelector = None,
    reference: Any = None,
) -> Ledger:
    """Account for all relevance: see `Ledger`.

    The split is exact for every built-in rule. A custom rule reports what it absorbs in a method `absorbed`; otherwise this is
    unexplained, like the change by a plain gradient. A `LrpfxWarning` says where amounts of more than a thousand times the seed
    cancel: a small difference of large numbers is not determined.

    Other arguments: as for `lrpfx.attribute`, and so are the errors. A list of targets is an `InputError`.

    Examples
    --------
    >>> accounts = lrpfx.ledger(explain_model, x, target=1)
    >>> accounts.unexplained < 1e-4
    True
    """
    module = explainable(explain_model, "ledger")
    if isinstance(target, list):
        raise InputError("a ledger accounts for one target, not for a list of them", topic="reports")
    if isinstance(reference, list):
        raise InputError("a ledger accounts for the difference of one reference, not for a list of them", topic="references")
    resolved = as_target(target)
    with torch.inference_mode(False), torch.enable_grad():
        arguments = Arguments(inputs, module)
        arguments.admit(module)
        references = references_of(module, arguments, reference)
        with module.with_rules():
            accounts = _accounts(_Sweep(module), arguments, resolved, output, references)
            if not accounts.is_finite and all(map(math.isfinite, (accounts.seed, *accounts.inputs.values()))):
                # The map is finite, so what is not finite on the way ends before the inputs, for example in front of a ReLU.
                accounts = _accounts(_Sweep(module, only_finite), arguments, resolved, output, references)
    message = objection(accounts)
    if message is not None:
        warnings.warn(message, LrpfxWarning, stacklevel=2)
    return accounts


def _accounts(
    sweep: "_Sweep", arguments: Arguments, target: Target, output: OutputSelector, references: Mapping[str, Any]
) -> Ledger:
    with misfits(sweep.module, arguments, references):
        result = arguments.call(sweep.forward, references)
    outputs: dict[int, torch.Tensor] = {}

    def leaf(value: Any) -> Any:
        if not is_floating(value) or (callable(output) and id(value) not in sweep.origins):
            return value  # a function may compute anything of what no signal reaches
        return outputs.setdefault(id(value), value.detach().requires_grad_())

    explained = explained_output(map_result(result, leaf), output, of_multipliers=bool(references))
    check_positions(sweep.module.unfused_graph, output, explained.value, [target])
    seed = target.seed(explained.value, explained.chosen)
    start = explained.start(seed, target)
    passed = passage(seed, explained.behind_function(start)) if callable(output) and not references else None
    if explained.value.requires_grad:
        gradients = torch.autograd.grad(explained.value, list(outputs.values()), start, allow_unused=True)
        for key, gradient in zip(outputs, gradients, strict=True):
            sweep.seed(key, gradient)
    if passed is not None and passed.is_large:
        sweep.keep_constants(passed.constants)
    entries = sweep.backward()
    if references:  # what is explained is the difference of the outputs
        return Ledger(entries, sweep.outputs, abs(sweep.outputs), sweep.inputs, sweep.flows)
    return Ledger(entries, _total(seed), _total(seed.abs()), sweep.inputs, sweep.flows)


def objection(accounts: Ledger) -> str | None:
    """A warning if amounts far larger than the seed cancel, so the map is not determined, or None."""
    figures = PARTS if any(entry.rule == GRADIENT for entry in accounts) else (*PARTS, "relevance_in", "relevance_out")
    amounts = [(abs(getattr(entry, figure)), figure, entry) for entry in accounts for figure in figures]
    beyond = [item for item in amounts if not item[0] <= EXCESS * accounts.seed_magnitude]
    if not beyond:
        return None
    largest, figure, entry = max(beyond, key=lambda item: math.inf if math.isnan(item[0]) else item[0])
    return (
        f"the map is not determined: amounts of up to {largest:.1e} cancel to a seed of {accounts.seed:.3g}; the largest is "
        f"{figure.replace('_', ' ')} at {entry.name} ({entry.rule}). docs/rules.md says which choices of rules do this"
    )


def _total(value: torch.Tensor) -> float:
    return float(value.detach().double().sum())


class _Call:
    """One executed node: its arguments as leaves, and its outputs."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.leaves: list[tuple[fx.Node, int, torch.Tensor]] = []  # argument, which of its tensors, the leaf
        self.args: tuple[Any, ...] = ()
        self.outputs: list[torch.Tensor] = []


class _Sweep:
    """Runs the nodes of an explainable module one by one, forward and back."""

    def __init__(
        self, module: ExplainModule, counted: Callable[[torch.Tensor], torch.Tensor] = lambda relevance: relevance
    ) -> None:
        """`counted`: the relevance of a node's output that counts, and that flows on."""
        self.module = module
        self.counted = counted
        self.names = identities(module.unfused_graph)
        self.end = self.names[output_node(module.unfused_graph)]
        self.values: dict[fx.Node, Any] = {}
        self.calls: list[_Call] = []
        self.relevance: dict[tuple[fx.Node, int], torch.Tensor] = {}
        self.origins: dict[int, tuple[fx.Node, int]] = {}
        self.inputs: dict[str, float] = {}
        self.flows: dict[tuple[str, str], float] = {}
        self.constant_outputs: list[Entry] = []
        self.by_name = nodes_by_name(module.unfused_graph)
        self.outputs = 0.0  # the relevance of the outputs

    # --- forward

    def forward(self, *args: Any, **keywords: Any) -> Any:
        given = iter(args)
        result = None
        for node in self.module.unfused_graph.nodes:
            if node.op == "placeholder":
                default = node.args[0] if node.args else None
                value = keywords[str(node.target)] if node.target in keywords else next(given, default)
                self._keep(node, map_arguments(value, detached))
            elif node.op == "get_attr":
                self.values[node] = attribute_of(node, self.module)
            elif node.op == "output":
                result = map_arguments(node.args[0], self._value)
            else:
                self._run(node)
        return result

    def _value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, fx.Node) else argument

    def _keep(self, node: fx.Node, value: Any) -> None:
        """Store a node's result, each tensor as a separate object to distinguish outputs."""
        self.values[node] = value
        for number, tensor in enumerate(floating_tensors(value)):
            self.origins[id(tensor)] = (node, number)

    def _run(self, node: fx.Node) -> None:
        call = _Call(node)
        function = self.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target
        assert callable(function)
        if node_info(node).role is not Role.DATA:
            with torch.no_grad():
                self.values[node] = function(*map_arguments(node.args, self._value), **map_arguments(node.kwargs, self._value))
            return
        layer = rule_module_of(node, self.module)  # what follows its inputs are parameters and further arguments of the rule
        places = len(node.args) if layer is None else layer.ruled.operation.inputs
        shared: dict[fx.Node, Any] = {}

        def leaves_of(argument: Any) -> Any:
            if not isinstance(argument, fx.Node):
                return argument
            if node_info(node).keeps_gradient and node_info(argument).role is not Role.DATA:
                return self.values[argument]  # statistics of a batch norm have no gradient
            if argument not in shared:
                numbers = iter(range(len(floating_tensors(self.values[argument]))))

                def leaf(value: Any) -> Any:
                    if not is_floating(value):
                        return value
                    made = value.detach().requires_grad_()
                    call.leaves.append((argument, next(numbers), made))
                    return made

                shared[argument] = map_arguments(self.values[argument], leaf)
            return shared[argument]

        args = [
            map_arguments(argument, leaves_of if place < places else self._value) for place, argument in enumerate(node.args)
        ]
        call.args = tuple(args)
        result = function(*args, **map_arguments(node.kwargs, leaves_of))
        call.outputs = floating_tensors(result)
        self._keep(node, map_result(result, detached))
        self.calls.append(call)

    # --- backward

    def _relevance(self, node: fx.Node, number: int, value: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
        """The relevance of one of a node's tensors, which may carry a multiplier: of its value, or of a difference."""
        info = node_info(node)
        if not info.carries_multiplier:
            return carried
        if info.reference:
            value = only_finite(value - floating_tensors(self.values[self.by_name[info.reference]])[number])
        return relevance_from(value, carried)

    def seed(self, key: int, gradient: torch.Tensor | None) -> None:
        """Add relevance of an output of the model, or its multiplier; `key`: the id of its tensor."""
        if gradient is None:
            return
        if key in self.origins:
            node, number = self.origins[key]
            self._add(node, number, gradient)
            relevance = _total(self._relevance(node, number, floating_tensors(self.values[node])[number], gradient))
            self._flow(node, self.end, relevance)
            self.outputs += relevance
        elif not self.module.reference_names:  # an output that no signal reaches
            self.keep_constants(_total(gradient))

    def keep_constants(self, amount: float) -> None:
        """Note relevance that constants among the outputs, or in a function of them, take."""
        self.constant_outputs.append(Entry(self.end, OUTPUT, "constant", amount, 0.0, constants=amount))

    def _flow(self, source: fx.Node, target: str, relevance: float) -> None:
        edge = (self.names[source], target)
        self.flows[edge] = self.flows.get(edge, 0.0) + relevance

    def _add(self, node: fx.Node, number: int, relevance: torch.Tensor) -> None:
        key = (node, number)
        self.relevance[key] = self.relevance[key] + relevance if key in self.relevance else relevance

    def backward(self) -> list[Entry]:
        entries = []
        while self.calls:  # a call is freed with its account
            entries.append(self._account(self.calls.pop()))
        others = {*self.module.mask_names.values(), *self.module.reference_names.values()}
        for node in self.module.unfused_graph.nodes:
            if node.op == "placeholder" and node.target not in others:
                tensors = floating_tensors(self.values[node])
                if tensors:
                    found = [self.relevance.get((node, number)) for number in range(len(tensors))]
                    name = node_info(node).name
                    name = self.names[node] if name in self.inputs else name  # an embedding may have the name of an input
                    self.inputs[name] = sum(_total(value) for value in found if value is not None)
        entries.reverse()
        return [*entries, *self.constant_outputs]

    def _account(self, call: _Call) -> Entry:
        node, info = call.node, node_info(call.node)
        relevances = [self.relevance.pop((node, number), None) for number in range(len(call.outputs))]
        pairs = [
            (output, relevance) for output, relevance in zip(call.outputs, relevances, strict=True) if relevance is not None
        ]
        numbers = [number for number, relevance in enumerate(relevances) if relevance is not None]
        incoming = sum(
            _total(self.counted(self._relevance(node, number, output, carried)))
            for number, (output, carried) in zip(numbers, pairs, strict=True)
        )
        outgoing, parts = 0.0, dict.fromkeys(PARTS, 0.0)
        if info.kind is Embedding:
            self.inputs[info.name] = incoming
            return Entry(info.name, info.kind_name, rule_label(info), incoming, incoming)
        passing = [(output, relevance) for output, relevance in pairs if output.requires_grad]
        gradients: Sequence[torch.Tensor | None] = [None] * len(call.leaves)
        if passing and call.leaves:
            outputs, seeds = zip(*passing, strict=True)
            gradients = torch.autograd.grad(
                outputs, [leaf for _, _, leaf in call.leaves], seeds, allow_unused=True, retain_graph=True
            )
        for (argument, number, leaf), gradient in zip(call.leaves, gradients, strict=True):
            if gradient is None:
                continue
            gradient = self.counted(where_finite(leaf, gradient))  # a mask of -inf takes no relevance
            is_data = node_info(argument).role is Role.DATA
            if not is_data and info.reference:
                continue  # constants are the same for the reference
            relevance = self.counted(self._relevance(argument if is_data else node, number, leaf.detach(), gradient))
            if is_data:
                passed = _total(relevance)
                outgoing += passed
                self._add(argument, number, gradient)
                self._flow(argument, info.name, passed)
            else:
                parts["constants"] += _total(relevance)
        if pairs:
            for part, amount in self._absorbed(call, pairs).items():
                parts[part] += amount
        unexplained = incoming - outgoing - sum(parts.values())
        return Entry(info.name, info.kind_name, rule_label(info), incoming, outgoing, **parts, unexplained=unexplained)

    def _absorbed(self, call: _Call, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
        """The relevance that a rule or a neutral operation does not pass on, from its formula."""
        node, info = call.node, node_info(call.node)
        if info.reference:
            return {"constants": self._changed_for_reference(call, pairs)}
        module = rule_module_of(node, self.module)
        if module is not None:
            rule: Any = module.rule
            if rule.has_code:
                return {}
            values = tuple(self._known(detached(value)) for value in call.args)
            output, carried = pairs[0]
            known = self._known(output.detach())
            layer_call = module.ruled.layer_call(values, known)
            form = module.ruled.form
            found = form.absorbed(layer_call, carried) if form is not None else None
            if found is None:
                found = rule.absorbed(layer_call, self._relevance(node, 0, known, carried)) or {}
            unknown = [part for part in found if part not in PARTS]
            if unknown:
                raise RuleError(
                    f"{info.name}: {rule} accounts for {unknown[0]!r}, but a ledger has {', '.join(PARTS)}", topic="own-rules"
                )
            return {part: float(amount) for part, amount in found.items()}
        if node.target is carry_multiplier:
            return {"absent": sum(_total(relevance * (output == 0)) for output, relevance in pairs)}
        if node.target is carry_relevance:
            return {}
        if info.neutral and not info.keeps_gradient:
            held_back = node.op == "call_module" and isinstance(self.module.get_submodule(str(node.target)), MaskedRelevance)
            relevances = [(output, self._relevance(node, 0, output.detach(), carried)) for output, carried in pairs]
            return {"stopped" if held_back else "constants": self._taken_by_numbers(call, relevances)}
        return {}

    def _changed_for_reference(self, call: _Call, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """What is due to constants that differ for the reference: choices, and positions that are counted by token ids."""
        node = call.node
        sources = {source: node_info(source).reference for source in node.all_input_nodes}
        if all(node_info(source).role is Role.DATA or not name for source, name in sources.items()):
            return 0.0
        data = {source: self.by_name[name] for source, name in sources.items() if node_info(source).role is Role.DATA and name}
        function: Any = self.module.get_submodule(str(node.target)) if node.op == "call_module" else node.target

        def value(argument: Any) -> Any:
            return self._value(data.get(argument, argument))

        with torch.no_grad():
            result = function(*map_arguments(node.args, value), **map_arguments(node.kwargs, value))
        others = floating_tensors(self.values[self.by_name[node_info(node).reference]])
        amounts = zip(floating_tensors(result), others, pairs, strict=False)
        return sum(_total(relevance_from(only_finite(one - other), carried)) for one, other, (_, carried) in amounts)

    def _known(self, value: Any) -> Any:
        """A value of an account. An entry that is not a number, and has no relevance since the map is finite, counts as 0."""
        return torch.where(value.isnan(), 0.0, value) if self.counted is only_finite and is_floating(value) else value

    def _taken_by_numbers(self, call: _Call, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Relevance of entries that a neutral operation fills with a number, such as padding."""
        leaves = [leaf for _, _, leaf in call.leaves]
        if not leaves:
            return sum(_total(relevance) for _, relevance in pairs)
        taken = 0.0
        for output, relevance in pairs:
            if not output.requires_grad:
                taken += _total(relevance)
                continue
            # The change of each entry when all tensors change by one: the transposed map, transposed again.
            weights = torch.zeros_like(output, requires_grad=True)
            pulled = torch.autograd.grad(output, leaves, weights, create_graph=True, allow_unused=True)
            reached = [gradient for gradient in pulled if gradient is not None and gradient.requires_grad]
            ones = [torch.ones_like(gradient) for gradient in reached]
            (moved,) = torch.autograd.grad(reached, weights, ones, allow_unused=True) if reached else (None,)
            taken += _total(relevance if moved is None else only_finite(relevance * (1 - moved)))
        return taken
