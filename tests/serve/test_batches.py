"""Requests are computed together, and each gets its own rows."""

import numpy as np
import pytest
import torch
from helpers import Layered
from serve.servers import doubled, floats, python_runner, request_of, serving, together
from torch import nn

import lrpfx
from lrpfx.composites import EpsilonPlusFlat
from lrpfx.errors import InputError
from lrpfx.serve import Settings
from lrpfx.serve.programs import ServedProgram


@pytest.fixture(scope="module")
def images_runner(tmp_path_factory):
    return runner_of_file(tmp_path_factory)


def runner_of_file(tmp_path_factory, **settings):
    """A runner of a file. `settings`: those of `lrpfx.lower`."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 64, 5)).eval()
    program = lrpfx.lower(lrpfx.transform(model, EpsilonPlusFlat()), torch.rand(2, 3, 8, 8), **settings)
    return lrpfx.load(lrpfx.save(program, tmp_path_factory.mktemp("programs") / "model.pt2"))


def test_each_request_gets_its_own_rows(images_runner):
    generator = np.random.default_rng(0)
    sizes = [1 + number % 3 for number in range(60)]
    images = [generator.random((size, 3, 8, 8), dtype=np.float32) for size in sizes]
    targets = [generator.integers(0, 5, size) for size in sizes]
    with serving({"model": images_runner}, max_batch=8, max_delay=0.05) as client:
        found = together(lambda one: client.results("model", input=one[0], target=one[1]), zip(images, targets, strict=True))
        batches, rows = client.metric("lrpfx_batch_rows_count"), client.metric("lrpfx_batch_rows_sum")
    assert rows == sum(sizes) and batches < len(sizes) / 2
    for image, target, results in zip(images, targets, found, strict=True):
        alone = images_runner(image, target)
        assert results.keys() == alone.keys()
        for name, value in alone.items():
            assert results[name].shape == value.shape
            assert np.abs(results[name] - value).max() <= 1e-6 * np.abs(value).max()


def test_several_targets(tmp_path_factory):
    runner = runner_of_file(tmp_path_factory, target="targets", number_of_targets=2)
    generator = np.random.default_rng(0)
    requests = [
        {"input": generator.random((size, 3, 8, 8), dtype=np.float32), "target": generator.integers(0, 5, (size, 2))}
        for size in (1, 2, 3)
    ]
    with serving({"model": runner}, max_batch=8, max_delay=0.05) as client:
        _, described = client.get("/v2/models/model")
        assert described["inputs"][1] == {"name": "target", "datatype": "INT64", "shape": [-1, 2]}
        found = together(lambda request: client.results("model", **request), requests)
        assert client.post("model", request_of(input=requests[0]["input"], target=np.array([[0, 5]])))[0] == 400
    for request, results in zip(requests, found, strict=True):
        alone = runner(**request)["relevance"]
        assert results["relevance"].shape == (len(alone), 2, 3, 8, 8)
        assert np.abs(results["relevance"] - alone).max() <= 1e-6 * np.abs(alone).max()


def test_batches_are_as_large_as_allowed():
    sizes = []

    def function(x):
        sizes.append(len(x))
        return {"output": 2 * x}

    with serving({"double": python_runner(function, {"x": floats(2, 3)})}, max_batch=4, max_delay=5.0) as client:
        sizes.clear()
        rows = [np.full((1, 3), number, dtype=np.float32) for number in range(8)]
        for row, results in zip(rows, together(lambda row: client.results("double", x=row), rows), strict=True):
            assert (results["output"] == 2 * row).all()
        assert sizes == [4, 4]  # neither waited five seconds
        status, answer = client.post("double", request_of(x=np.zeros((5, 3), dtype=np.float32)))
        assert status == 413 and "5 rows" in answer["error"]


def test_programs_with_rows_that_depend_on_each_other_run_alone(caplog):
    def function(x):
        return {"output": x / x.abs().max()}

    with serving({"scaled": python_runner(function, {"x": floats(2, 3)})}, max_delay=0.2) as client:
        rows = [np.full((1, 3), number, dtype=np.float32) for number in range(1, 9)]
        for results in together(lambda row: client.results("scaled", x=row), rows):
            assert (results["output"] == 1).all()
        assert client.metric("lrpfx_batch_rows_count") == 8
    assert "scaled computes each request alone" in caplog.text


class Standardized(Layered):
    """Standardizes the whole batch."""

    def forward(self, x):
        return self.layer((x - x.mean()) / (x.std() + 1e-5))


@pytest.mark.parametrize("example", [torch.zeros(2, 6), torch.rand(2, 6)], ids=["zeros", "any"])
@pytest.mark.parametrize(("model", "joins"), [(Standardized(layer=nn.Linear(6, 4)), False), (nn.Linear(6, 4), True)])
def test_examples_do_not_hide_what_rows_share(model, joins, example, tmp_path):
    program = lrpfx.lower(lrpfx.transform(model.eval(), EpsilonPlusFlat(), example_inputs=example), example, target=1)
    served = ServedProgram("model", lrpfx.load(lrpfx.save(program, tmp_path / "model.pt2")), Settings())
    served.prepare()
    assert served.joins is joins


def test_rounding_that_relevance_magnifies_hides_no_independent_rows():
    def function(x):
        """A relevance of a logit that nearly cancels, rounded as kernels for several rows do."""
        return {"output": x, "relevance": x * (1e-4 + 1e-7 * (len(x) > 1))}

    served = ServedProgram("cancels", python_runner(function, {"x": floats(2, 3)}), Settings())
    served.prepare()
    assert served.joins


def test_shares_of_the_number_of_rows_run_alone(caplog):
    runner = python_runner(lambda x: {"output": x / len(x)}, {"x": floats(2, 3)})
    with serving({"mean": runner}, max_delay=0.2) as client:
        rows = [np.full((1, 3), number, dtype=np.float32) for number in range(1, 5)]
        for row, results in zip(rows, together(lambda row: client.results("mean", x=row), rows), strict=True):
            assert (results["output"] == row).all()
    assert "mean computes each request alone" in caplog.text


def test_results_without_rows_run_alone():
    runner = python_runner(lambda x: {"output": 2 * x, "constant": torch.tensor(7)}, {"x": floats(2, 3)})
    with serving({"model": runner}, max_delay=0.2) as client:
        rows = [np.full((1, 3), number, dtype=np.float32) for number in range(4)]
        for row, results in zip(rows, together(lambda row: client.results("model", x=row), rows), strict=True):
            assert (results["output"] == 2 * row).all() and results["constant"] == 7


def test_a_request_that_fails_does_not_affect_the_others():
    def function(x):
        if (x < 0).any():
            raise IndexError("index out of range in self")
        return {"output": x.float()}

    with serving({"table": python_runner(function, {"x": torch.tensor([[1], [2]])})}, max_delay=0.3) as client:
        rows = [np.array([[-1 if number == 3 else number]]) for number in range(8)]
        answers = together(lambda row: client.post("table", request_of(x=row)), rows)
        assert client.metric("lrpfx_batch_rows_count") < 8
    for row, (status, answer) in zip(rows, answers, strict=True):
        if row[0, 0] < 0:
            assert status == 400 and "index out of range in self" in answer["error"]
        else:
            assert status == 200 and answer["outputs"][0]["data"] == [row[0, 0]]


def test_a_program_that_fails_is_the_servers_fault():
    def function(x):
        if (x > 5).any():
            raise RuntimeError("no such kernel")
        if (x < -5).any():
            raise MemoryError
        return {"output": 2 * x}

    with serving({"double": python_runner(function, {"x": floats(2, 3)})}) as client:
        status, answer = client.post("double", request_of(x=np.full((1, 3), 6, dtype=np.float32)))
        assert status == 500 and "no such kernel" in answer["error"]
        status, answer = client.post("double", request_of(x=np.full((1, 3), -6, dtype=np.float32)))
        assert status == 503 and "memory" in answer["error"]
        assert client.results("double", x=np.ones((1, 3), dtype=np.float32))["output"].tolist() == [[2, 2, 2]]


def test_requests_of_other_lengths_are_computed_apart():
    seen = []

    def function(x):
        seen.append(tuple(x.shape))
        return {"output": x.cumsum(1)}

    lengths = [{"of": [("x", 1)], "lower": 1, "upper": None}]
    runner = python_runner(function, {"x": floats(2, 3)}, opened=(0, 1), sizes=lengths)
    with serving({"sums": runner}, max_delay=0.3, max_size=20) as client:
        seen.clear()
        rows = [np.ones((1, 2 + number % 2), dtype=np.float32) for number in range(8)]
        for row, results in zip(rows, together(lambda row: client.results("sums", x=row), rows), strict=True):
            assert results["output"].tolist() == row.cumsum(1).tolist()
        assert sum(shape[0] for shape in seen) == 8 and len(seen) < 8
        status, answer = client.post("sums", request_of(x=np.ones((1, 21), dtype=np.float32)))
        assert status == 413 and "dimension 1 of x has the size 21" in answer["error"]


def test_programs_take_turns():
    with serving({"fast": doubled(), "slow": doubled(0.01)}, max_delay=0.0) as client:
        row = np.ones((1, 3), dtype=np.float32)
        names = ["fast", "slow"] * 20
        for results in together(lambda name: client.results(name, x=row), names):
            assert results["output"].tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "ä", "a" * 101, 7])
def test_names_of_programs(name):
    with pytest.raises(InputError, match="the name of a program"), serving({name: doubled()}):
        pass
