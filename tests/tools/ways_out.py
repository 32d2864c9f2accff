"""Ways in which an explainable module is used. Each returns the relevance found, and the relevance expected."""

import copy
import io
import pickle

import accelerate
import torch
from torch import fx, nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint
from torchao.quantization import Int8WeightOnlyConfig, quantize_

import lrpfx
from lrpfx.composites import EpsilonPlus
from tools.ways import TARGET, explained, gradient, images, network, registry, seed_of

WAYS_OUT, way = registry()
GRAPHS, STATE, FUNCTIONS, LIBRARIES = "torch.fx, torch.export, torch.compile", "State", "torch.func", "Other libraries"


def explainable(seed=0, **settings):
    return lrpfx.transform(network(seed), EpsilonPlus(), **settings)


way(GRAPHS, "`e(x)`, and its gradient")(lambda: (gradient(explainable()), explained(network())))
way(GRAPHS, "`fx.Interpreter(e).run(x)`")(lambda: (gradient(fx.Interpreter(explainable()).run), explained(network())))


@way(GRAPHS, "`e.print_readable()`", "shows the graph; rules are calls of submodules")
def printed():
    e = explainable()
    assert "merged_weight" in e.print_readable(print_output=False)
    return gradient(e), explained(network())


way(GRAPHS, "`fx.symbolic_trace(e)`", "rules stay calls of their modules")(
    lambda: (gradient(fx.symbolic_trace(explainable())), explained(network()))
)


@way(GRAPHS, "`split_module(e, ...)`")
def split():
    e = explainable()
    return gradient(split_module(e, e, lambda node: int(node.name > "_4"))), explained(network())


@way(
    GRAPHS,
    "`make_fx(e)(x)`",
    "the graph of the forward alone; `lrpfx.lower` writes relevance as a graph",
    result="plain gradient",
)
def proxied():
    x = images().requires_grad_()
    plain = torch.autograd.grad(network()(x), x, seed_of(network()(x)))[0]
    return gradient(make_fx(explainable())(images())), plain


way(GRAPHS, "`torch.export.export(e, args)`")(lambda: torch.export.export(explainable(), (images(),)))
way(GRAPHS, "`torch.compile(e)`")(
    lambda: (gradient(torch.compile(explainable(), backend="aot_eager", fullgraph=True)), explained(network()))
)
way(
    GRAPHS,
    "`torch.jit.script(e)`",
    "its language has no functions with rules; `torch.jit.trace` works",
    foreign="NotSupportedError",
)(lambda: torch.jit.script(explainable()))


@way(STATE, "`e.load_state_dict(model.state_dict())`", "merged weights follow")
def loaded():
    e = explainable(3)
    e.load_state_dict(network().state_dict())
    return gradient(e), explained(network())


way(STATE, "`copy.deepcopy(e)`")(lambda: (gradient(copy.deepcopy(explainable())), explained(network())))


@way(STATE, "`pickle`, `torch.save` and `torch.load(..., weights_only=False)`")
def saved():
    file = io.BytesIO()
    torch.save(pickle.loads(pickle.dumps(explainable())), file)
    file.seek(0)
    return gradient(torch.load(file, weights_only=False)), explained(network())


@way(
    STATE,
    "`torch.load(..., weights_only=True)`",
    "torch refuses modules; save `e.state_dict()`, or a lowered program",
    foreign="UnpicklingError",
)
def saved_weights():
    file = io.BytesIO()
    torch.save(explainable(), file)
    file.seek(0)
    torch.load(file, weights_only=True)


@way(STATE, "`e.to(dtype)`, `e.half()`", "like a transform in that dtype")
def cast():
    x = images().half()
    return gradient(explainable().half(), x), explained(network().half(), x)


@way(STATE, "an optimizer's step on `e.parameters()`", "`fold=False`; the derivative inside `with e.inactive()`")
def trained():
    e = explainable(fold=False)
    relevance = gradient(e, create_graph=True)
    with e.inactive():
        relevance.square().sum().backward()
    torch.optim.SGD(e.parameters(), 0.01).step()
    model = network()
    model.load_state_dict(e.state_dict())
    assert not torch.equal(model[0].weight, network()[0].weight)
    return gradient(e), explained(model)


way(STATE, "the same with `fold=True`")(lambda: gradient(explainable(), create_graph=True).square().sum().backward())


@way(FUNCTIONS, "`functional_call(e, other parameters, x)`", "merged weights follow, and follow back")
def functional():
    e, other = explainable(), network(3)
    found = gradient(lambda x: functional_call(e, {**dict(other.named_parameters()), **dict(other.named_buffers())}, (x,)))
    torch.testing.assert_close(gradient(e), explained(network()), rtol=1e-12, atol=1e-12)
    return found, explained(network(3))


@way(FUNCTIONS, "`vjp(e, x)`, `grad`")
def pulled():
    output, pull = vjp(explainable(), images())
    return pull(seed_of(output))[0], explained(network())


@way(FUNCTIONS, "`vmap(grad(...))`", "samples one by one; a batch does the same, faster")
def mapped():
    e = explainable()

    def score(x):
        output = e(x[None])[0, TARGET]
        return output * output.detach()

    return vmap(grad(score))(images()), explained(network())


@way(FUNCTIONS, "`jacrev(e)(x)`", "all targets at once")
def jacobian():
    e, x = explainable(), images()[:1]
    return jacrev(e)(x)[0, TARGET] * e(x)[0, TARGET].detach(), explained(network(), x)


way(FUNCTIONS, "`jvp(e, ...)`, `jacfwd`", "relevance only flows backwards", foreign="NotImplementedError")(
    lambda: torch.func.jvp(explainable(), (images(),), (images(),))
)


@way(FUNCTIONS, "an ensemble: `vmap` over `stack_module_state`", "outputs; for relevance, call the members one by one")
def ensemble():
    e, members, x = explainable(), [network(0), network(3)], images()
    states = stack_module_state(members)
    found = vmap(lambda parameters, buffers: functional_call(e, (parameters, buffers), (x,)))(*states)
    torch.testing.assert_close(gradient(e), explained(network()), rtol=1e-12, atol=1e-12)
    return found.detach(), torch.stack([member(images()) for member in members]).detach()


way(LIBRARIES, "`checkpoint(e, x)`")(
    lambda: (gradient(lambda x: checkpoint(explainable(), x, use_reentrant=False)), explained(network()))
)


@way(LIBRARIES, "`nn.Sequential(e, head)`", "the head's gradient is the relevance of e's output")
def nested():
    head = nn.Linear(5, 3).double()
    e, x = explainable(), images().requires_grad_()
    output = e(x)
    above = output.detach().requires_grad_()
    seed = torch.autograd.grad(head(above), above, seed_of(head(above)))[0]
    return gradient(nn.Sequential(e, head)), torch.autograd.grad(output, x, seed)[0]


way(LIBRARIES, "`nn.DataParallel(e)`", "`lrpfx.attribute` takes e itself")(
    lambda: (gradient(nn.DataParallel(explainable())), explained(network()))
)


@way(LIBRARIES, "`accelerate.Accelerator().prepare(e)`, `dispatch_model(e, ...)` on one device")
def prepared():
    e = accelerate.Accelerator(cpu=True).prepare(explainable())
    return gradient(accelerate.dispatch_model(e, {"": "cpu"}, force_hooks=True)), explained(network())


way(LIBRARIES, "`accelerate.cpu_offload(e)`, `disk_offload(e, ...)`")(
    lambda: gradient(accelerate.cpu_offload(explainable(), execution_device=torch.device("cpu")))
)


@way(
    LIBRARIES,
    "torchao: `quantize_(e, ...)`",
    "a layer with a rule is no `nn.Linear`; quantize the source model",
    result="changes nothing",
)
def quantized():
    e = explainable().float()
    quantize_(e, Int8WeightOnlyConfig())
    return gradient(e, images().float()), explained(network().float(), images().float())


@way(LIBRARIES, "`prune.l1_unstructured(e.get_submodule('5'), 'weight', 0.5)`")
def pruned():
    e = explainable()
    prune.l1_unstructured(e.get_submodule("5"), "weight", 0.5)
    gradient(e)


@way(LIBRARIES, "`parametrize.register_parametrization(e.get_submodule('0'), ...)`")
def parametrized():
    e = explainable()
    parametrize.register_parametrization(e.get_submodule("0"), "weight", nn.Identity())
    gradient(e)
