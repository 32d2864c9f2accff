"""A sample that fails costs its own row, whatever shares its batch."""

import numpy as np
import pytest
import torch
from data_sets import Noise, Stream

import lrpfx
import lrpfx.datasets

COUNT, WRONG = 16, 5


@pytest.fixture(scope="module")
def plain(explain_model, tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "store"
    return lrpfx.datasets.attribute(explain_model, Noise(COUNT), path, dtype="float64")


class Uncollatable:
    """A leaf that no batch can have."""


GUILTY = {
    "sparse": lambda image: image.to_sparse(),
    "compressed": lambda image: image[0].to_sparse_csr(),
    "meta": lambda image: image.to("meta"),
    "nested": lambda image: torch.nested.nested_tensor([image[0], image[0, :3]]),
    "quantized": lambda image: torch.quantize_per_tensor(image.float(), 0.1, 0, torch.quint8),
    "object": lambda image: {"x": Uncollatable()},
    "text": lambda image: "text",
    "numbers": lambda image: {"x": [[1.0], [1.0, 2.0]]},
}


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("batch_size", [1, COUNT])
@pytest.mark.parametrize("form", GUILTY)
@pytest.mark.filterwarnings("ignore:.*(nested|[Ss]parse|quantiz).*:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.sampled(3)
def test_what_makes_no_batch(form, batch_size, kind, explain_model, plain, tmp_path):
    samples = [(GUILTY[form](image) if number == WRONG else image, label) for number, (image, label) in enumerate(Noise(COUNT))]
    found = lrpfx.datasets.attribute(explain_model, kind(samples), tmp_path / "store", batch_size=batch_size, dtype="float64")
    assert list(found.errors) == [WRONG] and found.errors[WRONG]
    np.testing.assert_allclose(found.relevance[found.explained], plain.relevance[found.explained], rtol=1e-10, atol=1e-13)


def test_errors_of_collating_are_those_of_single_samples(explain_model, plain, tmp_path):
    """Samples of one form, which do not make a batch together."""

    class Alone(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.stack and len(args[0]) > 1:
                raise RuntimeError("one at a time")
            return super().__torch_function__(function, types, args, kwargs or {})

    samples = [(image.as_subclass(Alone), label) for image, label in Noise(COUNT)]
    found = lrpfx.datasets.attribute(explain_model, samples, tmp_path / "store", dtype="float64")
    assert not found.errors
    np.testing.assert_allclose(found.relevance[:], plain.relevance[:], rtol=1e-10, atol=1e-13)


# --- functions of the user ---------------------------------------------------------------------------------------------------

ERRORS = [ValueError("no such thing"), KeyError("key"), RuntimeError("first\nsecond"), IndexError(), ZeroDivisionError("x")]


def failing(scores, numbers, error):
    """A function that fails if one of these samples is in the batch."""
    wrong = scores[list(numbers), 0]

    def function(output):
        if torch.isclose(output[:, :1], wrong, rtol=1e-9, atol=0).any():
            raise error
        return output

    return function


@pytest.mark.parametrize("numbers", [(WRONG,), (0,), (0, 1, 7, 15)], ids=str)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["target", "targets", "select_output"])
@pytest.mark.sampled(4)
def test_functions_that_fail_for_some_samples(name, error, numbers, explain_model, plain, tmp_path):
    function = failing(torch.from_numpy(plain["output"][:]), numbers, error)
    asked = {name: [function, 1] if name == "targets" else function}
    found = lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", **asked)
    assert list(found.errors) == list(numbers) and found.done.all()
    reason = found.errors[numbers[0]]
    assert type(error).__name__ in reason and "second" not in reason and "function" in reason
    assert not any(name in reason for name in ("Noise", "samples"))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("name", ["target", "select_output"])
def test_functions_that_always_fail(name, error, explain_model, tmp_path):
    def of_mine(output):
        raise error

    with pytest.raises(lrpfx.InputError, match=rf"function .*of_mine failed: {type(error).__name__}") as found:
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", **{name: of_mine})
    assert found.value.__cause__ is error and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError("much"), MemoryError),
        (torch.OutOfMemoryError("much"), MemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError),
        pytest.param(
            getattr(torch, "AcceleratorError", RuntimeError)("device-side assert"),
            lrpfx.InputError,
            marks=pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="this torch has no such error"),
        ),
    ],
    ids=str,
)
def test_errors_that_end_the_run(error, expected, explain_model, plain, tmp_path):
    function = failing(torch.from_numpy(plain["output"][:]), [WRONG], error)
    with pytest.raises(expected):
        lrpfx.datasets.attribute(explain_model, Noise(COUNT), tmp_path / "store", target=function, batch_size=2, block_size=2)
    assert lrpfx.datasets.open(tmp_path / "store").done.sum() == 4
