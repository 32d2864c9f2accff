"""Runners: loaded programs that check their arguments."""

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from lrpfx.deploy.manifest import DTYPES
from lrpfx.deploy.program import inputs_of, problem_of_sizes
from lrpfx.deploy.self_test import SelfTest
from lrpfx.errors import ArtefactError, InputError, InputTypeError, is_out_of_memory
from lrpfx.images.stored_preprocessing import preprocessing_in, stored_form
from lrpfx.support.identity.fingerprints import fingerprint_of_tensors, other_buffers
from lrpfx.support.interrupts import undisturbed
from lrpfx.support.tensors import as_array, not_dense
from lrpfx.support.torch_internals import DisableTorchFunction

#: Errors about the arguments of a program, and about its results.
invalid, wrong_type = partial(InputError, topic="running-programs"), partial(InputTypeError, topic="running-programs")
failed = partial(ArtefactError, topic="running-programs")

Array = torch.Tensor | np.ndarray
Function = Callable[..., Mapping[str, torch.Tensor]]


def _plain(name: str, value: torch.Tensor) -> torch.Tensor:
    """A plain tensor whose memory holds the values of `value`, as compiled code needs it."""
    problem = not_dense(value)
    if problem is not None:
        raise wrong_type(f"{name} is {problem}, but the program takes dense tensors with values")
    with DisableTorchFunction():  # a subclass may change what its methods do
        return value.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()


#: The dimension of the output that holds the classes or tokens among which a target chooses.
_PLACE_OF_CLASSES = {"index": 1, "targets": 1, "token": 2}


class Runner:
    """A loaded program: `runner(input, target)` returns a dict of results, as arrays if any argument is an array.

    Masks of conditions, `manifest["conditions"]`, follow these arguments. A mask is broadcast to the shape of the value that it
    masks; one that is left out is ones. Inputs are checked before the program runs: for another memory format, compiled
    programs give wrong results without an error. The context of a call, such as autocast, does not change its results.
    `lrpfx.load` makes runners, of a `function` from tensors to tensors, the `manifest`, which is what the file says about the
    program, and a `self_test`: inputs, and the results that it must give. A runner cannot be pickled.
    """

    def __init__(self, function: Function, manifest: dict[str, Any], self_test: SelfTest) -> None:
        self.function = function
        self.manifest = manifest
        self.self_test = self_test

    def __deepcopy__(self, memo: dict[int, Any]) -> "Runner":
        return Runner(copy.deepcopy(self.function, memo), self.manifest, self.self_test)

    def __reduce__(self) -> NoReturn:
        raise wrong_type("a runner cannot be pickled: load the file in the process that runs it")

    def __call__(self, /, *args: Array, **keywords: Array) -> dict[str, Any]:
        """The results by name.

        `args`: arguments with the shapes and dtypes of `manifest["arguments"]`, in their order. `keywords`: the same by name.

        Raises
        ------
        InputError
            The program does not take an argument; if its type is wrong, an `InputTypeError`.
        ArtefactError
            The program fails on valid arguments.
        MemoryError
            Memory ran out.
        """
        tensors = self.checked_arguments(*args, **keywords)
        results = self._run(tensors)
        place = _PLACE_OF_CLASSES.get(self.manifest["target"])
        if place is not None and self.manifest["results"]["output"]["shape"][place] is None:
            self._check_classes(tensors["target"], results["output"].shape[place])
        if self.manifest["target"] == "token":
            self._check_positions(tensors["target"][:, 0], results["output"].shape[1])
        explained = self.manifest["explained"]
        shape = tuple(results["output"].shape)
        if explained is not None and any(size < least for size, least in zip(shape, explained["sizes"], strict=False)):
            raise InputError(
                f"the program explains {explained['target']}, which is out of range for these inputs: the output has the shape "
                f"{shape}",
                topic="targets",
            )
        if any(isinstance(value, np.ndarray) for value in (*args, *keywords.values())):
            return {name: as_array(value) for name, value in results.items()}
        return results

    def checked_arguments(self, /, *args: Array, **keywords: Array) -> dict[str, torch.Tensor]:
        """The arguments of a call by name, as the program gets them, without running it.

        They are contiguous tensors in the order of `manifest["arguments"]`, and all masks of conditions are there, in full
        shape. A position in the output is checked only by a call, which knows the length of the output; so is a class if the
        number of classes is open. `args`, `keywords`, and errors: as for a call, such as `InputError` and `MemoryError`.
        """
        names = list(self.manifest["arguments"])
        if len(args) > len(names):
            raise invalid(f"the program takes {', '.join(names)}, not {len(args)} arguments")
        given = {**dict(zip(names, args, strict=False)), **keywords}
        conditions = self.manifest["conditions"]
        missing = [name for name in names if name not in given and name not in conditions]
        unknown = [name for name in given if name not in names]
        twice = [name for name in names[: len(args)] if name in keywords]
        if missing or unknown or twice:
            raise invalid(
                f"the program takes {', '.join(names)}; missing: {', '.join(missing) or 'none'}, "
                f"unknown: {', '.join(unknown) or 'none'}, given twice: {', '.join(twice) or 'none'}"
            )
        try:
            tensors = {name: self._checked(name, given[name]) for name in names if name not in conditions}
            sizes = {name: described["shape"] for name, described in self.manifest["arguments"].items()}
            problem = problem_of_sizes(tensors, sizes, self.manifest["sizes"])
            if problem is not None:
                raise invalid(problem)
            tensors |= {name: self._mask(name, given.get(name), tensors) for name in conditions}
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise
        place = _PLACE_OF_CLASSES.get(self.manifest["target"])
        if place is not None:
            self._check_classes(tensors["target"], self.manifest["results"]["output"]["shape"][place])
        return tensors

    @undisturbed()  # an interrupt in an `__exit__` would leave gradients off
    def _run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        devices = {"cpu", *(tensor.device.type for tensor in tensors.values())}
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                for device in devices:
                    stack.enter_context(torch.autocast(device, enabled=False))
                results = dict(self.function(*tensors.values()))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            if any(tensors[name].dtype == torch.int64 for name in inputs_of(self.manifest)):
                raise invalid(  # the checks leave no other fault of the inputs
                    f"the program cannot run on these inputs, perhaps because an index is out of range: {error}"
                ) from error
            raise failed(f"the program fails: {type(error).__name__}: {error}") from error
        if results.keys() != self.manifest["results"].keys():
            named = ", ".join(self.manifest["results"])
            raise failed(f"the program gives {', '.join(results)}, but its manifest says {named}")
        for name, value in results.items():
            problem = not_dense(value) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            if problem is not None:
                raise failed(f"the result {name} of the program is {problem}")
        return results

    def _mask(self, name: str, given: Array | None, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The mask of a condition in its full shape, which follows from those of the other arguments; ones by default."""
        first = next(iter(tensors.values()))
        sizes = [first.shape[0] if size is None else size for size in self.manifest["arguments"][name]["shape"]]
        for shared in self.manifest["sizes"]:
            others = [tensors[other].shape[number] for other, number in shared["of"] if other in tensors]
            for other, number in shared["of"]:
                if other == name:
                    sizes[number] = others[0]
        if given is None:
            return torch.ones(sizes, dtype=_dtype(self.manifest, name), device=first.device)
        if isinstance(given, np.ndarray) and given.dtype.kind in "bf" and not isinstance(given, np.ma.MaskedArray):
            given = torch.from_numpy(given.astype(given.dtype.newbyteorder("=")))
        if isinstance(given, torch.Tensor) and (given.dtype == torch.bool or given.is_floating_point()):
            given = _plain(name, given).to(_dtype(self.manifest, name))
        mask = self._checked(name, given)
        try:
            full = mask.broadcast_to(sizes)
        except RuntimeError as error:
            raise invalid(
                f"{name} has the shape {tuple(mask.shape)}, but the value that it masks has {tuple(sizes)}"
            ) from error
        return full.contiguous()

    def _checked(self, name: str, value: Array) -> torch.Tensor:
        """The argument as a contiguous tensor, after all checks."""
        wanted = self.manifest["arguments"][name]
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            raise wrong_type(f"{name} is a {type(value).__name__}, not a tensor or an array")
        if isinstance(value, np.ndarray):
            if value.dtype.name not in DTYPES:
                raise wrong_type(f"{name} has dtype {value.dtype}, but the program takes {wanted['dtype']}")
            if isinstance(value, np.ma.MaskedArray):
                raise wrong_type(f"{name} is a masked array, but the program does not support masks; fill it with values")
            tensor = torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("="), order="C"))
        else:
            tensor = _plain(name, value)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype != wanted["dtype"]:
            raise wrong_type(f"{name} has dtype {dtype}, but the program takes {wanted['dtype']}")
        if tensor.is_floating_point():
            allowed = tensor != -torch.inf if name in self.manifest["masks"] else torch.ones_like(tensor, dtype=torch.bool)
            if not torch.isfinite(tensor[allowed]).all():
                raise InputError(f"{name} has values that are not finite", topic="values-not-finite")
        return tensor.contiguous()

    def _check_classes(self, target: torch.Tensor, classes: int | None) -> None:
        """`classes`: None for a number that only a call knows."""
        target = target[:, 1] if self.manifest["target"] == "token" else target
        outside = target[(target < 0) if classes is None else (target < 0) | (target >= classes)]
        if outside.numel():
            raise InputError(
                f"target {int(outside[0])} is out of range: the output has {'any number of' if classes is None else classes} "
                "classes",
                topic="targets",
            )

    @staticmethod
    def _check_positions(positions: torch.Tensor, length: int) -> None:
        outside = positions[(positions < -length) | (positions >= length)]
        if outside.numel():
            raise InputError(f"position {int(outside[0])} is out of range: the output has {length} positions", topic="targets")

    def verify(self, *, tolerance: float | None = None) -> float:
        """Run the self-test, with two batch sizes if the program takes any.

        Returns the largest difference of a result, relative to the norm of the expected result of the larger batch.
        `tolerance`: the largest allowed difference, beyond which there is an `ArtefactError`; by default
        `manifest["tolerance"]`, which is never more than 0.1. An invalid one is an `InputError`.
        """
        allowed = self.manifest["tolerance"] if tolerance is None else tolerance
        if not isinstance(allowed, (int, float)) or not 0 <= allowed < math.inf:
            raise invalid(f"tolerance is a number from 0, not {tolerance!r}")
        largest = 0.0
        for size in self.self_test.sizes:
            for name, value in self(**self_test_arguments(self, size)).items():
                expected = self.self_test.expected(name, size).shape
                if tuple(value.shape) != expected:
                    raise failed(f"{name} has shape {tuple(value.shape)}, but had {expected} when it was saved")
                difference = self.self_test.difference(name, size, as_array(value))
                largest = max(largest, difference)
                if not difference <= allowed:
                    raise failed(
                        f"{name} differs from the program's result when it was saved, by {difference:.1e} of its norm in a "
                        f"batch of {size}, which is more than {allowed:.0e}"
                    )
        return largest

    def matches(self, model: nn.Module, preprocess: Callable[..., Any] | None = None) -> bool:
        """Whether the program was made from a model with the same parameters and buffers, by what the file says.

        The file's manifest has a hash of the model's state_dict, with which that of `model` is compared. The tensors in the
        file are not: many are derived, such as merged weights. So only a signature tells whether somebody has changed them.

        Buffers that `model.state_dict()` lacks are compared if the file is of format 11 or later, by their names. `model` may
        also be the explainable module; anything that is not a module is an `InputTypeError`. With a `preprocess`, the file must
        also hold this preprocessing, as for `lrpfx.save`. A file of an older version, which has no fingerprint of the weights,
        is an `ArtefactError`.
        """
        if not isinstance(model, nn.Module):
            raise wrong_type(f"the model is a module of torch, not a {type(model).__name__}")
        if self.manifest["weights"] is None:
            raise failed("the file does not hold a fingerprint of the weights: save it again with this version of lrpfx")
        if preprocess is not None and stored_form(preprocess) != preprocessing_in(self.manifest):
            return False
        known = self.manifest["buffers"]  # with constants that only the module of a program has
        if any(known.get(name, found) != found for name, found in other_buffers(model).items()):
            return False
        return bool(fingerprint_of_tensors(model.state_dict()) == self.manifest["weights"])

    def __repr__(self) -> str:
        return f"<{self.manifest['kind']} program of {self.manifest['title']}: {', '.join(self.manifest['arguments'])}>"


def self_test_arguments(runner: Runner, size: int) -> dict[str, torch.Tensor]:
    """The arguments of a self-test by name, for a batch of `size`."""
    arguments = runner.self_test.arguments(runner.manifest, size)
    return {name: torch.from_numpy(value).to(_dtype(runner.manifest, name)) for name, value in arguments.items()}


def _dtype(manifest: Mapping[str, Any], name: str) -> torch.dtype:
    """The dtype of an argument."""
    dtype: torch.dtype = getattr(torch, manifest["arguments"][name]["dtype"])
    return dtype
