"""Hooks that close over the model, and transforms and derivatives by torch in forward."""

import pytest
import torch
from helpers import assert_close
from torch import nn

import lrpfx
from lrpfx import rules
from lrpfx.composites import AttnLRP, NameLayerMapComposite, layer_map_base
from lrpfx.errors import CaptureError, InputTypeError, LrpfxError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.tensor([2.0, 0.5, 1.5]))
        self.register_buffer("count", torch.zeros(()))
        self.seen, self.kept = [], None

    def forward(self, x):
        return self.last(self.first(x).relu())


def scaling(model):
    return lambda module, args, output: output * model.scale


def storing(model):
    def hook(module, args, output):
        model.kept = output

    return hook


def appending(model):
    return lambda module, args, output, seen=model.seen: seen.append(output)


def counting(model):
    def hook(module, args, output):
        model.count += 1

    return hook


def nested(model):
    inner = scaling(model)
    return lambda module, args, output: inner(module, args, output) + model.count


MODEL = None


def of_a_global(model):
    global MODEL
    MODEL = model

    def hook(module, args, output):
        MODEL.kept = output
        return output * MODEL.scale

    return hook


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize("make", [scaling, storing, appending, counting, nested, of_a_global])
def test_hooks_that_close_over_the_model(make, capture):
    """They act on the copies: the user's model is as before."""
    model, x = Net().eval(), torch.randn(4, 3)
    model.first.register_forward_hook(make(model))
    state, kept = {name: value.clone() for name, value in model.state_dict().items()}, model.kept
    try:
        explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x, capture=capture)
    except LrpfxError as error:
        assert make is counting, error
        explain_model = None
    assert model.seen == [] and all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.kept is kept or (make is of_a_global and type(model.kept) is torch.Tensor)
    if explain_model is not None:
        assert_close(explain_model(x), model(x), 1e-12)


def test_functions_assigned_to_an_instance_read_the_copy():
    model, x = Net().eval(), torch.randn(4, 3)
    model.first.forward = lambda x: nn.functional.linear(x, model.first.weight) * model.scale
    explain_model = lrpfx.transform(model, AttnLRP(), example_inputs=x)
    assert_close(explain_model(x), model(x), 1e-12)
    assert set(explain_model.state_dict()) == set(model.state_dict())


class Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.dense, self.function = nn.Linear(3, 3), function

    def forward(self, x):
        return self.function(self.dense, x)


class Outer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.inner, self.last = Inner(function), nn.Linear(3, 2)
        self.eval()

    def forward(self, x):
        return self.last(self.inner(x))


def by_autograd(dense, x):
    with torch.enable_grad():
        x = x.clone().requires_grad_()
        return torch.autograd.grad(dense(x).pow(2).sum(), x)[0]


DERIVATIVES = {
    "func.grad": lambda dense, x: torch.func.grad(lambda x: dense(x).pow(2).sum())(x),
    "jvp": lambda dense, x: torch.func.jvp(dense, (x,), (x,))[1],
    "jacrev": lambda dense, x: torch.func.vmap(torch.func.jacrev(lambda x: dense(x) ** 2))(x).sum(1),
}


@pytest.mark.parametrize("capture", ["symbolic", "export", "auto"])
@pytest.mark.parametrize("name", [*DERIVATIVES, "autograd.grad"])
@pytest.mark.sampled(3)
def test_derivatives_in_forward_are_refused_with_a_remedy(name, capture):
    model, x = Outer(DERIVATIVES.get(name, by_autograd)), torch.randn(4, 3)
    with pytest.raises(CaptureError, match="as a whole"):
        lrpfx.transform(model, AttnLRP(), example_inputs=x, capture=capture)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", DERIVATIVES)
def test_the_remedy_for_derivatives(name):
    model, x = Outer(DERIVATIVES[name]), torch.randn(4, 3)
    composite = NameLayerMapComposite([(["inner"], rules.Epsilon())], [*layer_map_base(), (nn.Linear, rules.Epsilon())])
    with pytest.warns(lrpfx.errors.LrpfxWarning, match="match no layer"):
        explain_model = lrpfx.transform(model, composite, example_inputs=x)
    accounts = lrpfx.ledger(explain_model, x, 0)
    assert_close(explain_model(x), model(x), 1e-12)
    assert accounts.unexplained <= 1e-9


@pytest.mark.filterwarnings("ignore:entries of")
def test_a_module_that_differentiates_by_autograd_as_a_whole_says_so():
    model, x = Outer(by_autograd), torch.randn(4, 3)
    composite = NameLayerMapComposite([(["inner"], rules.Epsilon())], [*layer_map_base(), (nn.Linear, rules.Epsilon())])
    explain_model = lrpfx.transform(model, composite, example_inputs=x)
    with pytest.raises(lrpfx.errors.RuleError, match=r"torch\.func\.grad"):
        lrpfx.attribute(explain_model, x, 0)


def test_vmap_is_the_operation_on_the_batch():
    """A ReLU of the rows, one by one."""
    model, x = Outer(lambda dense, x: torch.vmap(lambda row: torch.relu(row * 2))(x)), torch.randn(4, 3)
    plain = Outer(lambda dense, x: torch.relu(x * 2))
    plain.load_state_dict(model.state_dict())
    found, expected = (lrpfx.transform(one, AttnLRP(), example_inputs=x) for one in (model, plain))
    assert_close(lrpfx.attribute(found, x, 0).relevance, lrpfx.attribute(expected, x, 0).relevance, 1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)]),
        lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=torch.jagged),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_example_inputs_are_dense(make):
    with pytest.raises(InputTypeError, match="dense"):
        lrpfx.transform(Net().eval(), AttnLRP(), example_inputs=make())


class Graph(nn.Module):
    """A layer on the sums over neighbours."""

    def __init__(self, adjacency, product):
        super().__init__()
        self.register_buffer("adjacency", adjacency)
        self.product, self.dense = product, nn.Linear(3, 2)
        self.eval()

    def forward(self, x):
        return self.dense(self.product(self.adjacency, x))


@pytest.mark.parametrize("capture", ["symbolic", "export"])
@pytest.mark.parametrize(
    "product",
    [torch.matmul, torch.mm, torch.spmm, torch.sparse.mm, lambda a, x: torch.sparse.addmm(x, a, x, beta=0.0)],
)
def test_products_with_a_sparse_matrix(product, capture):
    adjacency, x = (torch.rand(4, 4) > 0.4).double(), torch.randn(4, 3)
    dense = Graph(adjacency, torch.matmul)
    sparse = Graph(adjacency.to_sparse(), product)
    sparse.dense = dense.dense
    explain_model = lrpfx.transform(sparse, AttnLRP(), example_inputs=x, capture=capture)
    expected = lrpfx.attribute(lrpfx.transform(dense, AttnLRP(), example_inputs=x), x, lambda output: output)
    found = lrpfx.attribute(explain_model, x, lambda output: output)
    assert_close(found.relevance, expected.relevance, 1e-9)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_sparse_matrices_are_kept_in_coordinates():
    adjacency = torch.eye(4).to_sparse_csr()
    with pytest.raises(CaptureError, match=r"'adjacency' in coordinates: \.to_sparse_coo\(\)"):
        lrpfx.transform(Graph(adjacency, torch.matmul), AttnLRP(), example_inputs=torch.randn(4, 3))
    lrpfx.transform(Graph(adjacency.to_sparse_coo(), torch.matmul), AttnLRP(), example_inputs=torch.randn(4, 3))
