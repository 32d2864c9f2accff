"""CAPTURE: names, explicit parameters, and what the source of each node is."""

import threading

import pytest
import torch
import torchvision
from helpers import NETWORKS, Unary, assert_close, small_net
from torch import fx, nn
from torchvision.models.feature_extraction import get_graph_node_names

import lrpfx
from lrpfx.composites import EpsilonPlus
from lrpfx.frontends.symbolic import capture_symbolic
from lrpfx.ir.node import node_info


@pytest.mark.parametrize("name", ["alexnet", "vgg11_bn", "resnet18", "resnet50", "googlenet", "densenet121"])
def test_names_are_those_of_torchvisions_feature_extraction(name):
    with torch.device("meta"):  # a trace needs no weights
        model = getattr(torchvision.models, name)(**({"init_weights": False} if name == "googlenet" else {})).eval()
    _, expected = get_graph_node_names(model)
    graph = capture_symbolic(model).graph
    captured = [node_info(node).name for node in graph.nodes if node.op in ("placeholder", "call_function", "call_method")]
    identities = {f"{name}" for name, module in model.named_modules() if isinstance(module, nn.Identity)}
    assert captured == [name for name in expected if name not in identities]


@pytest.mark.parametrize("name", sorted(NETWORKS))
def test_the_graph_has_functions_with_explicit_parameters(name):
    model, x = NETWORKS[name]()
    program = capture_symbolic(model)
    operations = {node.op for node in program.graph.nodes}
    assert operations <= {"placeholder", "get_attr", "call_function", "call_method", "output"}
    assert torch.equal(fx.Interpreter(program.root, graph=program.graph).run(x), model(x))
    used = {node.target for node in program.graph.nodes if node.op == "get_attr"}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert used == {name for name in tensors if not name.endswith("num_batches_tracked")}
    stacks = [node.meta["nn_module_stack"] for node in program.graph.nodes if node.op == "call_function"]
    assert any(stacks)


def test_repeated_and_clashing_names():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu = nn.ReLU()
            self.relu_1 = nn.ReLU()
            self.add = nn.Linear(3, 3)
            self.flip = nn.Parameter(torch.ones(3))

        def forward(self, x):
            x = self.relu(self.relu(x)) + self.relu_1(x)
            return torch.relu(self.add(x) + x + self.flip).flip(0).float()

    model = Net().eval()
    names = ["x", "relu", "relu_2", "relu_1", "add_1", "add", "add_2", "add_3", "relu_3", "flip_1", "to"]
    assert lrpfx.node_names(model) == names
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert [name for name in lrpfx.node_names(explain_model)] == names
    x = torch.randn(2, 3)
    assert torch.equal(explain_model(x), model(x))


def test_names_that_a_module_cannot_have():
    """A rule on an operation whose name is a method of nn.Module gets a place of its own."""
    explain_model = lrpfx.transform(
        Unary(lambda x: x.type(torch.float64)), lrpfx.composites.NameMapComposite([(["to"], lrpfx.rules.Pass())])
    )
    assert lrpfx.assignment(explain_model).rule_of("to") == "Pass()"
    x = torch.randn(2, 3)
    assert torch.equal(lrpfx.attribute(explain_model, x, x).relevance, x)


def test_nodes_know_their_source_line():
    model = small_net()
    graph = capture_symbolic(model).graph
    sources = {node_info(node).name: node_info(node).source for node in graph.nodes}
    first = type(model).forward.__code__.co_firstlineno
    assert sources["conv1"].endswith(f"helpers.py:{first + 1}")
    assert sources["add"].endswith(f"helpers.py:{first + 3}")
    assert sources["cat"].endswith(f"helpers.py:{first + 5}")


def test_source_lines_of_a_librarys_model():
    graph = capture_symbolic(torchvision.models.resnet18().eval()).graph
    sources = {node_info(node).name: node_info(node).source for node in graph.nodes}
    for name in ("conv1", "layer1.0.add", "layer2.0.downsample.0"):
        assert "torchvision/models/resnet.py:" in sources[name]


def test_arguments_with_a_default_are_fixed_unless_given():
    class Net(nn.Module):
        def forward(self, x, scale=None, *, flip=False):
            x = x.flip(0) if flip else x
            return x.relu() if scale is None else x.relu() + scale

    model, x, scale = Net().eval(), torch.randn(2, 3), torch.rand(2, 3)
    plain = lrpfx.transform(model, EpsilonPlus())
    assert torch.equal(plain(x), model(x))
    with pytest.raises(TypeError, match="scale"):
        plain(x, scale=scale)
    given = lrpfx.transform(model, EpsilonPlus(), example_inputs=(x, scale))
    assert torch.equal(given(x, scale), model(x, scale))
    by_name = lrpfx.transform(model, EpsilonPlus(), example_inputs={"x": x, "scale": scale})
    assert torch.equal(by_name(x=x, scale=scale), model(x, scale))


def test_root_and_submodules_may_have_hooks_and_forwards_of_their_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval()
    model.register_forward_hook(lambda module, args, output: output + 1.0)
    model[0].register_forward_pre_hook(lambda module, args: (args[0] + 2.0,))
    model[1].forward = torch.tanh
    x = torch.randn(2, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert torch.equal(explain_model(x), model(x))


def test_tensors_that_are_no_parameters():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.offset = torch.full((3,), 2.0)

        def forward(self, x):
            return x.relu() + self.offset + torch.tensor([1.0, 2.0, 3.0])

    model, x = Net().eval(), torch.randn(2, 3)
    explain_model = lrpfx.transform(model, EpsilonPlus())
    assert torch.equal(explain_model(x), model(x))
    assert list(explain_model.state_dict()) == [] and vars(model).keys() == vars(Net()).keys()
    assert explain_model.to(torch.float32)(x.float()).dtype == torch.float32


@pytest.mark.parametrize("layer", [lambda: nn.Linear(3, 2), lambda: nn.Conv2d(3, 2, 1), nn.ReLU])
def test_a_layer_alone_is_a_model(layer):
    layer = layer()
    x = torch.randn(2, 3, 3, 3) if not isinstance(layer, nn.Linear) else torch.randn(2, 3)
    explain_model = lrpfx.transform(layer.eval(), EpsilonPlus())
    assert list(explain_model.state_dict()) == list(layer.state_dict())
    assert torch.equal(explain_model(x), layer(x))
    assert lrpfx.attribute(explain_model, x, lambda output: output).relevance.shape == x.shape


def test_other_threads_go_on_while_one_traces():
    """torch.fx sees every module call of the process while it traces; those of other threads are none of its business."""
    other, x, results = small_net(), torch.randn(2, 3, 8, 8), []
    expected = other(x)

    def call_in_another_thread(value):
        thread = threading.Thread(target=lambda: results.append(other(x)))
        thread.start()
        thread.join()
        return value.relu()

    assert lrpfx.node_names(lrpfx.transform(Unary(call_in_another_thread), EpsilonPlus())) == ["x", "relu"]
    assert torch.equal(results[0], expected)


def test_threads_transform_one_after_the_other():
    names = []
    threads = [
        threading.Thread(target=lambda: names.append(lrpfx.node_names(lrpfx.transform(small_net(), EpsilonPlus()))))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names) == 8 and all(len(found) == 13 for found in names)
    assert torch.nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl", "fx left its patch behind"


def test_a_tensor_that_forward_makes_and_writes_into():
    """A symbolic trace refuses it. Each remedy that the message names gives the same map."""
    index = torch.tensor([0, 0, 1])

    def model(sums):
        class Sums(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(4, 4)

            def forward(self, x):
                return sums(self.layer(x), index[:, None].expand(3, 4))

        return Sums().eval()

    x = torch.randn(3, 4)
    written = model(lambda y, index: torch.zeros(2, 4).scatter_add_(0, index, y))
    with pytest.raises(lrpfx.CaptureError, match=r"writes values of its inputs into it \(.*test_symbolic.py:\d+\)"):
        lrpfx.transform(written, EpsilonPlus(), example_inputs=x, capture="symbolic")
    remedies = [
        (written, "export"),
        (written, "auto"),
        (model(lambda y, index: torch.zeros(2, 4).scatter_add(0, index, y)), "symbolic"),
        (model(lambda y, index: y.new_zeros(2, 4).scatter_add_(0, index, y)), "symbolic"),
    ]
    maps = [
        lrpfx.attribute(lrpfx.transform(one, EpsilonPlus(), example_inputs=x, capture=capture), x, 1).relevance
        for one, capture in remedies
    ]
    assert maps[0].any()
    for relevance in maps[1:]:
        assert_close(relevance, maps[0], 1e-12)
