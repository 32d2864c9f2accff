"""Indices that are checked before they are used."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from lrpfx.support.checked_indices import CheckedIndices, checked_indices
from lrpfx.support.torch_internals import TorchDispatchMode

TABLE = torch.arange(12.0).reshape(4, 3)
MASK = torch.tensor([True, False, True, False])


class Ran(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(function.overloadpacket)
        return function(*args, **(kwargs or {}))


#: Calls of an index -> the operator, and an index that the call does not take.
CALLS = {
    "embedding": (lambda index: functional.embedding(index, TABLE), torch.ops.aten.embedding, 4),
    "index": (lambda index: TABLE[index], torch.ops.aten.index, 4),
    "index of the second dimension": (lambda index: TABLE[:, index], torch.ops.aten.index, 3),
    "index after a mask": (lambda index: TABLE[MASK, index], torch.ops.aten.index, -4),
    "index_put": (lambda index: TABLE.index_put((index,), TABLE.new_zeros(())), torch.ops.aten.index_put, -5),
    "gather": (lambda index: TABLE.gather(1, index[None]), torch.ops.aten.gather, 3),
    "index_select": (lambda index: TABLE.index_select(0, index), torch.ops.aten.index_select, 4),
    "scatter": (lambda index: TABLE.scatter(1, index[None], 0.0), torch.ops.aten.scatter, 3),
    "scatter_add_": (lambda index: TABLE.clone().scatter_add_(1, index[None], TABLE), torch.ops.aten.scatter_add_, 3),
    "index_add": (lambda index: TABLE.index_add(0, index, TABLE[:2]), torch.ops.aten.index_add, 4),
    "take": (lambda index: TABLE.take(index), torch.ops.aten.take, 12),
    "embedding_bag": (
        lambda index: functional.embedding_bag(index[None], TABLE),
        torch.ops.aten._embedding_bag_forward_only,
        4,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_index_out_of_range_is_an_error_before_the_operation_runs(name):
    call, operator, wrong = CALLS[name]
    allowed = torch.tensor([0, 2])
    with torch.no_grad(), Ran() as ran, CheckedIndices():
        assert torch.equal(call(allowed), call(allowed))
        assert operator in ran.found
        ran.found.clear()
        with pytest.raises(IndexError, match=f"{wrong} is out of range"):
            call(torch.tensor([0, wrong]))
        assert operator not in ran.found


def test_on_the_cpu_operators_check_themselves():
    module = nn.Embedding.from_pretrained(TABLE)
    assert not isinstance(checked_indices(module), CheckedIndices)
    assert isinstance(checked_indices(module.to("meta")), CheckedIndices)
    with CheckedIndices():
        assert functional.embedding(torch.ones(2, dtype=torch.long, device="meta"), TABLE.to("meta")).shape == (2, 3)
