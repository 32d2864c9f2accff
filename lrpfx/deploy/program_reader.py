"""Read the graph and the tensors of a checked .pt2 file.

torch's own reader makes an `ExportedProgram`, with the symbolic shape of each value, which takes far longer and which no runner
needs. This one evaluates no text.
"""

import functools
import json
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from lrpfx.support.stored_arrays import RefusedError
from lrpfx.support.torch_internals import OpOverload, codes_of_archives

MODEL = "models/model.json"
CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")

#: The kind of a lifted input -> the key of its tensor's name.
_LIFTED = {"buffer": "buffer_name", "parameter": "parameter_name", "tensor_constant": "tensor_constant_name"}
_POSITIONAL, _KEYWORD = 1, 2
_MODULES = {"_operator": operator, "math": math, "torch": torch}


def read_program(entries: Mapping[str, bytes]) -> tuple[fx.GraphModule, list[str]]:
    """The program as a module from tensors to a tuple, and the names of its results. Nothing is computed.

    Raises `RefusedError`, or an error of any kind if the file is damaged.
    """
    stored = json.loads(entries[MODEL])["graph_module"]
    tensors = {name: tensor for config in CONFIGS for name, tensor in _tensors(entries, config).items()}
    root, graph, nodes = nn.Module(), fx.Graph(), dict[str, fx.Node]()
    for number, specification in enumerate(stored["signature"]["input_specs"]):
        ((kind, described),) = specification.items()
        if kind == "user_input":
            name = described["arg"]["as_tensor"]["name"]
            nodes[name] = graph.placeholder(name)
        else:
            name = described["arg"]["name"]
            root.register_buffer(f"tensor_{number}", tensors[described[_LIFTED[kind]]])
            nodes[name] = graph.get_attr(f"tensor_{number}")
    for call in stored["graph"]["nodes"]:
        node = _called(graph, call, nodes)
        nodes.update(_results(node, call["outputs"]))
    results = tuple(nodes[one["as_tensor"]["name"]] for one in stored["graph"]["outputs"])
    graph.output(results)
    graph.eliminate_dead_code()
    _, structure = json.loads(stored["module_call_graph"][0]["signature"]["out_spec"])
    names = json.loads(structure["context"])
    if len(names) != len(results):
        raise RefusedError("its program does not name its results")
    return fx.GraphModule(root, graph), names


def _tensors(entries: Mapping[str, bytes], config: str) -> dict[str, torch.Tensor]:
    """The tensors in the list `config`. Some may share memory."""
    folder = config.rpartition("/")[0]
    codes = codes_of_archives()

    @functools.cache
    def stored(path: str, dtype: torch.dtype) -> torch.Tensor:
        content = entries[f"{folder}/{path}"]
        return torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)

    found = {}
    for name, payload in json.loads(entries[config])["config"].items():
        described = payload["tensor_meta"]
        sizes, strides, (offset,) = (
            [one["as_int"] for one in numbers]
            for numbers in (described["sizes"], described["strides"], [described["storage_offset"]])
        )
        whole = stored(payload["path_name"], codes["as_scalar_type"][described["dtype"]])
        found[name] = whole.as_strided(sizes, strides, offset)
        if whole.nbytes < found[name].nbytes:
            raise RefusedError(f"{name} is larger than its data in the file")
    return found


def _called(graph: fx.Graph, call: Mapping[str, Any], nodes: Mapping[str, fx.Node]) -> fx.Node:
    """A node for a stored call."""
    target = _operator(call["target"])
    given = [(one["name"], one["kind"], _argument(one["arg"], nodes)) for one in call["inputs"]]
    positional = [(name, value) for name, kind, value in given if kind == _POSITIONAL]
    keywords = {name: value for name, kind, value in given if kind == _KEYWORD}
    known = [one.name for one in target._schema.arguments] if isinstance(target, OpOverload) else None
    named = [name for name, _ in positional]
    if len(positional) + len(keywords) < len(given) or (known is not None and named != known[: len(named)]):
        raise RefusedError(f"its program calls {call['target']} with other arguments than it has")
    return graph.call_function(target, tuple(value for _, value in positional), keywords)


def _operator(text: str) -> Callable[..., Any]:
    """The operator with a name that was checked."""
    module, *names = text.removeprefix("torch.ops.").split(".")
    found = functools.reduce(getattr, names, torch.ops.aten if module == "aten" else _MODULES[module])
    assert callable(found)
    return found


def _results(node: fx.Node, outputs: list[Any]) -> dict[str, fx.Node]:
    """The nodes of the results of a call by name."""
    found: dict[str, fx.Node] = {}
    if not outputs:
        return found
    is_list = "as_tensors" in outputs[0]
    several = is_list or len(outputs) > 1
    for number, output in enumerate([{"as_tensor": one} for one in outputs[0]["as_tensors"]] if is_list else outputs):
        ((kind, described),) = output.items()
        if kind != "as_none":
            name = described["name" if kind == "as_tensor" else "as_name"]
            found[name] = node.graph.call_function(operator.getitem, (node, number)) if several else node
    return found


def _argument(stored: Mapping[str, Any], nodes: Mapping[str, fx.Node]) -> Any:
    """The value of an argument, which has one key for its kind."""
    ((kind, value),) = stored.items()
    codes = codes_of_archives()
    if kind in codes:
        return codes[kind][value]
    if kind in _ARGUMENTS:
        return _ARGUMENTS[kind](value, nodes)
    one = kind.removesuffix("s")
    if kind.endswith("s") and one in _ARGUMENTS and isinstance(value, list):
        return [_ARGUMENTS[one](each, nodes) for each in value]
    raise RefusedError(f"its program has an argument of the unknown kind {kind!r}")


def _symbolic(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    """A number, or the node that computes it."""
    ((kind, inner),) = value.items()
    return nodes[inner] if kind == "as_name" else _argument(value, nodes)


def _instance(kind: type) -> Callable[[Any, Mapping[str, fx.Node]], Any]:
    def checked(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
        if type(value) is not kind:
            raise RefusedError(f"its program has {value!r:.60} in place of {kind.__name__}")
        return value

    return checked


#: Kind of an argument -> what makes its value of the stored one and the nodes by name. A kind with an "s" is a list of them.
_ARGUMENTS: dict[str, Callable[[Any, Mapping[str, fx.Node]], Any]] = {
    "as_none": lambda value, nodes: None,
    "as_tensor": lambda value, nodes: nodes[value["name"]],
    "as_optional_tensor": lambda value, nodes: _argument(value, nodes),
    "as_int": _instance(int),
    "as_bool": _instance(bool),
    "as_string": _instance(str),
    "as_float": lambda value, nodes: float(value),  # infinity and NaN are texts
    "as_complex": lambda value, nodes: complex(value["real"], value["imag"]),
    "as_device": lambda value, nodes: torch.device(value["type"], value["index"]),
    **dict.fromkeys(("as_sym_int", "as_sym_float", "as_sym_bool"), _symbolic),
}
