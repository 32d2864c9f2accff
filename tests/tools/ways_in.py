"""Ways in which a model comes to lrpfx. Each returns the model, and the plain model that it must be explained like."""

import copy
import pickle
import tempfile
import types

import accelerate
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
from torchao.quantization.granularity import PerAxis

import lrpfx
from lrpfx.composites import EpsilonPlus
from tools.ways import images, network, registry

WAYS_IN, way = registry()
PLAIN, GRAPHS, WEIGHTS, LIBRARIES, BEHAVIOUR = (
    "Modules",
    "Graphs and programs",
    "Weights",
    "Other libraries",
    "Hooks and forwards",
)


def with_weights_of(model):
    """The plain network with the weights that `model` computes with."""
    plain = network()
    with torch.no_grad():
        for path in ("0", "5", "7"):
            plain.get_submodule(path).weight.copy_(model.get_submodule(path).weight)
            plain.get_submodule(path).bias.copy_(model.get_submodule(path).bias)
    return plain


def doubled(*paths):
    """The plain network where the outputs of these layers are doubled by an operation of its own."""
    plain = network()
    for path in paths:
        plain[int(path)] = nn.Sequential(plain[int(path)], Double())
    return plain


class Double(nn.Module):
    def forward(self, x):
        return x * 2


def exported(model=None):
    return torch.export.export(network() if model is None else model, (images(),))


way(PLAIN, "an `nn.Module`")(lambda: (network(), network()))
way(PLAIN, "`copy.deepcopy(model)`")(lambda: (copy.deepcopy(network()), network()))
way(PLAIN, "`pickle.loads(pickle.dumps(model))`")(lambda: (pickle.loads(pickle.dumps(network())), network()))


@way(PLAIN, "`fuse_conv_bn_eval`")
def fused():
    model = network()
    model[0], model[1] = fuse_conv_bn_eval(model[0], model[1]), nn.Identity()
    return model, network()


@way(PLAIN, "tied weights")
def tied():
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 192), nn.ReLU(), nn.Linear(192, 192)).double()
    other = copy.deepcopy(model)
    model[3].weight = model[1].weight
    other[3].weight = nn.Parameter(model[1].weight.detach().clone())
    other[1].load_state_dict(model[1].state_dict())
    return model, other


way(PLAIN, "a lazy module before its first call", "Afterwards it is an ordinary module.")(
    lambda: (nn.Sequential(nn.Flatten(), nn.LazyLinear(5)), None)
)
way(PLAIN, "`model.to('meta')`, `accelerate.init_empty_weights()`")(lambda: (network().to("meta"), None))
way(PLAIN, "`model.half()`", "like the plain model in that dtype; bfloat16 as well")(
    lambda: (network().half(), network().half())
)
way(PLAIN, "an explainable module as a submodule")(
    lambda: (nn.Sequential(lrpfx.transform(network(), EpsilonPlus()), nn.ReLU()), None)
)
way(GRAPHS, "`torch.fx.symbolic_trace(model)`")(lambda: (fx.symbolic_trace(network()), network()))


@way(GRAPHS, "a GraphModule with a node inserted")
def inserted():
    model = fx.symbolic_trace(network())
    relu = next(node for node in model.graph.nodes if node.target == "6")
    with model.graph.inserting_after(relu):
        double = model.graph.call_function(torch.mul, (relu, 2))
    relu.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)
    model.recompile()
    return model, doubled("6")


@way(GRAPHS, "a GraphModule with a node erased")
def erased():
    model = fx.symbolic_trace(network())
    relu = next(node for node in model.graph.nodes if node.target == "6")
    relu.replace_all_uses_with(relu.args[0])
    model.graph.erase_node(relu)
    model.recompile()
    other = network()
    other[6] = nn.Identity()
    return model, other


way(GRAPHS, "`torch.export.export(model, args)`")(lambda: (exported(), network()))
way(GRAPHS, "`program.module()`")(lambda: (exported().module(), network()))
way(GRAPHS, "`program.run_decompositions()`", "warns if activations may be in parts: these have other rules")(
    lambda: (exported().run_decompositions(), network())
)
way(GRAPHS, "`torch.export.unflatten(program)`")(lambda: (torch.export.unflatten(exported()), None))
way(GRAPHS, "`make_fx(model)(x)`", "sizes are those of the example; weights are constants, without their names")(
    lambda: (make_fx(network())(images()), network())
)
way(GRAPHS, "`torch.compile(model)`")(lambda: (torch.compile(network(), backend="eager"), None))


@way(GRAPHS, "`model.compile()`")
def compiled_in_place():
    model = network()
    model.compile(backend="eager")
    return model, network()


@way(GRAPHS, "`model[5] = torch.compile(model[5])`", "explained as it is written")
def compiled_child():
    model = network()
    model[5] = torch.compile(model[5], backend="eager")
    return model, network()


way(GRAPHS, "`torch.jit.trace(model, x)`, `torch.jit.script(model)`")(lambda: (torch.jit.script(network()), None))


@way(GRAPHS, "a submodule of torch.jit")
def scripted_child():
    model = network()
    model[5] = torch.jit.script(model[5])
    return model, None


class KeepLargest(prune.BasePruningMethod):
    """A pruning method of the user's: keep the entries above the mean."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (t.abs() > t.abs().mean())


def pruned():
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.ln_structured(model[5], "weight", 0.25, 2, 0)
    prune.random_unstructured(model[7], "bias", 0.4)
    KeepLargest.apply(model[7], "weight")
    return model


@way(WEIGHTS, "pruned: `prune.l1_unstructured`, `ln_structured`, a method of one's own", "right after pruning")
def pruned_now():
    model = pruned()
    return model, with_weights_of(model)


@way(WEIGHTS, "pruned, after a forward pass")
def pruned_and_called():
    model = pruned()
    model(images())
    return model, with_weights_of(model)


@way(WEIGHTS, "pruned: `prune.global_unstructured`")
def pruned_globally():
    model = network()
    prune.global_unstructured([(model[0], "weight"), (model[7], "weight")], prune.L1Unstructured, amount=0.3)
    return model, with_weights_of(model)


@way(WEIGHTS, "pruned, after `prune.remove`")
def pruned_for_good():
    model = pruned()
    expected = with_weights_of(model)
    for path in ("0", "5", "7"):
        prune.remove(model.get_submodule(path), "weight")
    return model, expected


@way(WEIGHTS, "pruned, from a state_dict")
def pruned_and_loaded():
    model, source = pruned(), network(3)
    for path in ("0", "5", "7"):
        prune.l1_unstructured(source.get_submodule(path), "weight", 0.4)
    prune.identity(source[7], "bias")
    model.load_state_dict(source.state_dict())
    model(images())
    source(images())
    expected = network(3)
    with torch.no_grad():
        for path in ("0", "5", "7"):
            expected.get_submodule(path).weight.copy_(source.get_submodule(path).weight)
    return model, expected


class Symmetric(nn.Module):
    """A parametrization of the user's."""

    def forward(self, weight):
        return weight + weight.flip(0)


class LowRank(nn.Module):
    """A low-rank update as a parametrization."""

    def __init__(self, rows, columns, rank=2):
        super().__init__()
        self.down = nn.Parameter(torch.linspace(-1, 1, rank * columns, dtype=torch.float64).reshape(rank, columns))
        self.up = nn.Parameter(torch.linspace(1, -1, rows * rank, dtype=torch.float64).reshape(rows, rank) / 9)

    def forward(self, weight):
        return weight + self.up @ self.down


class LowRankLayer(nn.Module):
    """A low-rank update as a module around a layer."""

    def __init__(self, base):
        super().__init__()
        self.base, self.update = base, LowRank(*base.weight.shape)

    def forward(self, x):
        return self.base(x) + x @ self.update.down.T @ self.update.up.T


def parametrized(change, *paths):
    """The network with layers changed by `change`."""
    model = network()
    for path in paths:
        change(model[int(path)])
    model.eval()
    model(images())
    return model, with_weights_of(model)


way(WEIGHTS, "`torch.nn.utils.weight_norm` (the old one)")(lambda: parametrized(weight_norm, "0", "5"))
way(WEIGHTS, "`torch.nn.utils.spectral_norm` (the old one)")(lambda: parametrized(spectral_norm, "0", "5"))
way(WEIGHTS, "`parametrizations.weight_norm`")(lambda: parametrized(parametrizations.weight_norm, "0", "5"))
way(WEIGHTS, "`parametrizations.spectral_norm`")(lambda: parametrized(parametrizations.spectral_norm, "5"))
way(WEIGHTS, "`parametrizations.orthogonal`")(lambda: parametrized(parametrizations.orthogonal, "5"))
way(WEIGHTS, "a parametrization of one's own")(
    lambda: parametrized(lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()), "0", "5")
)


@way(WEIGHTS, "LoRA as a parametrization")
def low_rank_parametrization():
    def change(layer):
        parametrize.register_parametrization(layer, "weight", LowRank(*layer.weight.shape))

    return parametrized(change, "5")


@way(WEIGHTS, "LoRA as a module around a layer", "two paths and their sum, each with its stabilizer, in place of one layer")
def low_rank_layer():
    model, expected = network(), network()
    model[5] = LowRankLayer(model[5])
    with torch.no_grad():
        expected[5].weight.copy_(model[5].update(expected[5].weight))
    return model, expected


@way(WEIGHTS, "sparse weights", "explained by their dense values; COO and CSR")
def sparse():
    model = network()
    model[7].weight = nn.Parameter(model[7].weight.detach().to_sparse())
    return model, network()


class Marked(torch.Tensor):
    """A tensor of the user's own class."""


@way(WEIGHTS, "weights of a tensor subclass that cannot be copied")
def subclass():
    model = network()
    model[7].weight = nn.Parameter(model[7].weight.detach().as_subclass(Marked))
    return model, None


def quantized(config):
    """The network, quantized by torchao, and the plain one with the dequantized weights; in float32, which torchao requires."""
    model, expected = network().float(), network().float()
    quantize_(model, config)
    with torch.no_grad():
        for path in ("5", "7"):
            expected.get_submodule(path).weight.copy_(model.get_submodule(path).weight.dequantize())
    return model, expected


way(LIBRARIES, "torchao: `Int8WeightOnlyConfig()`", "explained by its dequantized weights")(
    lambda: quantized(Int8WeightOnlyConfig())
)
way(LIBRARIES, "torchao: `Int8DynamicActivationInt8WeightConfig()`", "by its dequantized weights; inputs are not rounded")(
    lambda: quantized(Int8DynamicActivationInt8WeightConfig())
)
way(LIBRARIES, "torchao: `IntxWeightOnlyConfig(torch.int4)`", "explained by its dequantized weights")(
    lambda: quantized(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)))
)


@way(LIBRARIES, "`torch.ao.quantization.quantize_dynamic`", "by its dequantized weights; inputs are not rounded")
def dynamically_quantized():
    model, expected = torch.ao.quantization.quantize_dynamic(network().float(), {nn.Linear}), network().float()
    with torch.no_grad():
        for path in ("5", "7"):
            expected.get_submodule(path).weight.copy_(model.get_submodule(path).weight().dequantize())
    return model, expected


way(LIBRARIES, "`accelerate.Accelerator().prepare(model)`")(
    lambda: (accelerate.Accelerator(cpu=True).prepare(network()).eval(), network())
)
way(LIBRARIES, "`accelerate.cpu_offload(model)`", "the explainable module holds the weights; the model stays offloaded")(
    lambda: (accelerate.cpu_offload(network(), execution_device=torch.device("cpu")), network())
)


@way(LIBRARIES, "`accelerate.disk_offload(model, folder)`", "as above")
def offloaded_to_disk():
    folder = tempfile.TemporaryDirectory()
    model = accelerate.disk_offload(network(), folder.name, execution_device=torch.device("cpu"))
    FOLDERS.append(folder)
    return model, network()


FOLDERS = []  # they live as long as their models


@way(LIBRARIES, "`accelerate.dispatch_model(model, device_map)`", "as above for what it offloads")
def dispatched():
    folder = tempfile.TemporaryDirectory()
    FOLDERS.append(folder)
    devices = {**{str(number): "cpu" for number in range(7)}, "7": "disk"}
    return accelerate.dispatch_model(
        network(), devices, main_device="cpu", offload_dir=folder.name, force_hooks=True
    ), network()


way(LIBRARIES, "`nn.DataParallel(model)`, `DistributedDataParallel(model)`")(lambda: (nn.DataParallel(network()), None))


class Scaled(nn.Module):
    """Calls a network with other parameters."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def forward(self, x):
        changed = {"7.weight": self.network[7].weight * 2, "7.bias": self.network[7].bias * 2}
        return torch.func.functional_call(self.network, changed, (x,))


way(LIBRARIES, "`torch.func.functional_call` in forward, without example inputs")(lambda: (Scaled().eval(), None))


@way(LIBRARIES, "`torch.func.functional_call` in forward, exported")
def functional_in_program():
    expected = network()
    with torch.no_grad():
        for parameter in expected[7].parameters():
            parameter.mul_(2)
    return exported(Scaled().eval()), expected


@way(BEHAVIOUR, "a forward hook that changes the output", "its operations are in the graph, like those of a module")
def hook():
    model = network()
    model[5].register_forward_hook(lambda module, args, output: output * 2)
    return model, doubled("5")


@way(BEHAVIOUR, "a forward hook on the model itself", "as above")
def hook_on_model():
    model = network()
    model.register_forward_hook(lambda module, args, output: output * 2)
    return model, doubled("7")


@way(BEHAVIOUR, "a forward pre-hook that changes the input", "as above")
def pre_hook():
    model = network()
    model[5].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return model, doubled("4")


@way(BEHAVIOUR, "a hook that stores values", "it sees values of the trace, once")
def storing_hook():
    model, seen = network(), []
    model[5].register_forward_hook(lambda module, args, output: seen.append(output))
    return model, network()


@way(BEHAVIOUR, "backward hooks, hooks on parameters", "no part of the forward: they stay with the model")
def backward_hook():
    model = network()
    model[5].register_full_backward_hook(lambda module, gradients, of_output: (gradients[0] * 2,))
    model[5].weight.register_hook(lambda gradient: gradient * 2)
    return model, network()


@way(BEHAVIOUR, "`model[5].forward = function`, which reads the layer's parameters")
def forward_of_instance():
    model = network()
    layer = model[5]
    layer.forward = lambda x: functional.linear(x, layer.weight * 2, layer.bias * 2)
    expected = network()
    with torch.no_grad():
        for parameter in expected[5].parameters():
            parameter.mul_(2)
    return model, expected


@way(BEHAVIOUR, "`model.forward = types.MethodType(function, model)`")
def method_of_instance():
    model = network()
    model.forward = types.MethodType(lambda self, x: nn.Sequential.forward(self, x) * 2, model)
    return model, doubled("7")


@way(BEHAVIOUR, "`model.forward = function`, which calls the former forward")
def forward_of_model():
    model = network()
    former = model.forward
    model.forward = lambda x: former(x) * 2
    return model, doubled("7")
