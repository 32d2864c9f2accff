"""Calls of the operators that files may contain, with arguments that they do not expect: none may end its process.

Valid calls are recorded, and some of their arguments replaced: sizes, strides, dtypes, indices, and numbers at the ends of
their ranges. Where none is recorded, all arguments are drawn. Behind each argument lies memory that ends the process when it is
read. Processes of their own make the calls, with limits of memory and time.

Run as a program, it prints the operators whose calls ended a process, and how.
"""

import argparse
import collections
import ctypes
import math
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from lrpfx.deploy.torch_operators import allowed, guarded, problem_of_call
from tools import support_matrix

MEMORY, SECONDS = 8 * 2**30, 5  # of a process, and of a call
LARGEST = 10**6  # entries of a drawn tensor
EVERY = -1  # all entries of a tensor are strange, and equal
RECORDED = 12  # calls of each operator
SHARE = 0.9  # of calls that change a recorded one
INTEGERS = (0, 1, -1, 2, 3, 5, -7, 64, 1000, 2**31 - 1, 2**31, -(2**31), 2**62, -(2**62), 2**63 - 1, -(2**63))
NUMBERS = (0.0, -0.0, 0.5, -1.0, 1.7, 1e-300, 1e-38, 1e-6, 1e6, 1e300, math.inf, -math.inf, math.nan)
FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
DTYPES = (*FLOATING, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
LAYOUTS = {
    "transposed": lambda value: value.transpose(0, -1).contiguous().transpose(0, -1),
    "last": lambda value: value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value,
    "expanded": lambda value: value[:1].expand(value.shape),
    "one entry": lambda value: value.as_strided(value.shape, [0] * value.ndim),
    "gaps": lambda value: torch.cat([value, value], -1)[..., ::2],
}

#: Functions of an image, for operators that the table of operators and rules does not contain.
FURTHER = (
    lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    lambda x: torch.fft.ifft(torch.fft.fft(x)).abs(),
    lambda x: F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1), align_corners=False),
    lambda x: F.grid_sample(x.unsqueeze(2), x[:, :3].permute(0, 2, 3, 1).unsqueeze(1), align_corners=True),
    lambda x: torch.cdist(x, x.flip(0)),
    lambda x: torch.searchsorted(x.sort(-1).values, x),
    lambda x: torch.bucketize(x, torch.arange(5.0)),
    lambda x: x.masked_scatter(x > 0.5, x + 1),
    lambda x: x.index_copy(1, torch.tensor([1, 0]), x[:, :2]),
    lambda x: x.index_fill(1, torch.tensor([1, 0]), 2.0),
    lambda x: x.scatter_reduce(1, (x > 0.5).long(), x, "amax"),
    lambda x: F.max_unpool3d(*F.max_pool3d(x.unsqueeze(1), 2, return_indices=True), 2),
    lambda x: F.embedding((x > 0.5).long(), x[0, 0]),
    lambda x: x.unfold(2, 3, 2),
    lambda x: torch.div((9 * x).long(), (3 * x).long() + 1, rounding_mode="trunc"),
    lambda x: torch.div((9 * x).int(), 2, rounding_mode="trunc"),
    lambda x: x * torch.arange(1, 2 * x.shape[-1], 2),
    lambda x: torch.ops.aten._native_batch_norm_legit_no_training(x, None, None, *[torch.ones(x.shape[1])] * 2, 0.1, 1e-5)[0],
    lambda x: x.diag_embed(),
    lambda x: x.cumprod(1) + x.cummax(1).values + x.cummin(1).values,
    lambda x: torch.isin(x, x[0]),
    lambda x: x.as_strided((2, 3), (3, 1), 2),
    lambda x: x.as_strided_scatter(x[:2, :3, 0, 0], (2, 3), (3, 1), 2),
    lambda x: x.median(1).values + x.argmax(1) + x.count_nonzero(1),
    *(lambda x, n=n: F.interpolate(x.flatten(n + 1) if n < 2 else x, scale_factor=1.7, mode="nearest-exact") for n in (1, 2)),
    *(lambda x, n=n: F.interpolate(x.flatten(2), scale_factor=0.6, mode=n) for n in ("nearest", "linear")),
    *(
        lambda x, n=n: F.interpolate(x.unsqueeze(2), scale_factor=2.0, mode=n)
        for n in ("nearest", "trilinear", "nearest-exact")
    ),
    *(lambda x, n=n: F.pad(x.flatten(2), (1, 2), mode=n) for n in ("reflect", "replicate")),
    *(lambda x, n=n: F.pad(x.unsqueeze(2), (1, 2, 1, 0, 0, 0), mode=n) for n in ("reflect", "replicate")),
)


# --- recorded calls ---------------------------------------------------------------------------------------------------------


class Drawn:
    """A tensor to draw: its shape, its dtype, the largest of its integers, and what is strange about it."""

    def __init__(self, shape, dtype, largest=1, layout="", strange=0):
        self.shape, self.dtype, self.largest, self.layout, self.strange = tuple(shape), dtype, largest, layout, strange

    def changed(self, random):
        """The same with another shape, dtype, layout or entries."""
        shape, dtype, layout, strange = self.shape, self.dtype, self.layout, self.strange
        change = random.randrange(6)
        if change < 2:
            shape = other_shape(shape, random)
        elif change == 2:
            dtype = random.choice(DTYPES)
        elif change == 3:
            layout = random.choice(list(LAYOUTS))
        else:
            strange = random.choice((1, 1, 3, 10, EVERY))
        return Drawn(shape, dtype, self.largest, layout, strange)

    def tensor(self, random):
        count = math.prod(self.shape)
        if count > LARGEST:
            raise ValueError("it is too large")
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        if self.dtype in FLOATING:
            value = torch.rand(self.shape, generator=generator).to(self.dtype)
        else:
            value = torch.randint(0, max(1, min(self.largest, 100)) + 1, self.shape, generator=generator).to(self.dtype)
        if self.strange == EVERY:
            value.fill_(self._strange_entry(random))
        else:
            for _ in range(self.strange if count else 0):
                value.view(-1)[random.randrange(count)] = self._strange_entry(random)
        value = _before_a_fence(value)
        return LAYOUTS[self.layout](value) if self.layout and self.shape and count else value

    def _strange_entry(self, random):
        if self.dtype in FLOATING:
            return random.choice(NUMBERS)
        if self.dtype == torch.bool:
            return True
        limits = torch.iinfo(self.dtype)
        entry = random.choice((*INTEGERS, self.largest + 1, self.largest + 2, -self.largest - 2))
        return max(limits.min, min(limits.max, entry))


def _before_a_fence(value):
    """A copy of a tensor at the end of its memory: the page behind it cannot be read."""
    size, page = value.nbytes, mmap.PAGESIZE
    if not size:
        return value
    length = -(-size // page) * page
    memory = mmap.mmap(-1, length + page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + length), ctypes.c_size_t(page), 0):
        raise RuntimeError("memory cannot be protected")
    copied = torch.frombuffer(memory, dtype=value.dtype, count=value.numel(), offset=length - size).view(value.shape)
    return copied.copy_(value)


def other_shape(shape, random):
    sizes = list(shape)
    place = random.randrange(len(sizes)) if sizes else 0
    change = random.randrange(5)
    if change == 0 or not sizes:
        sizes.insert(place, random.choice((0, 1, 2, 3)))
    elif change == 1:
        del sizes[place]
    elif change == 2:
        sizes[place] = random.choice((0, 1, 2, 3, 5, 17))
    else:
        sizes[place] = max(0, sizes[place] + random.choice((-1, 1))) if change == 3 else min(sizes[place] * 10, 300)
    return sizes


class Recorder(TorchDispatchMode):
    """Notes calls of each operator, with `Drawn` in place of tensors."""

    def __init__(self):
        super().__init__()
        self.calls = collections.defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if len(self.calls[str(func)]) < RECORDED:
            leaves, structure = tree_flatten((args, kwargs or {}))
            self.calls[str(func)].append((list(map(_drawn, leaves)), structure))
        return func(*args, **(kwargs or {}))


def _drawn(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return Drawn(leaf.shape, leaf.dtype, int(leaf.max()) if leaf.dtype not in FLOATING and leaf.numel() else 1)


def recorded():
    """Operator -> calls of it in the table of operators and rules, and in `FURTHER`."""
    torch.manual_seed(0)
    cases = {case.operator: case for case in reversed(support_matrix.CASES)}.values()
    functions = [(case.make(), [support_matrix.SHAPES[letter] for letter in case.inputs]) for case in cases]
    functions += [(function, [support_matrix.SHAPES["b"]]) for function in FURTHER]
    recorder = Recorder()
    for function, shapes in functions:
        inputs = [torch.rand(2, *shape, requires_grad=True) for shape in shapes]
        with recorder:
            result = function(*inputs)
            if result.requires_grad:
                result.sum().backward()
    return {name: calls for name, calls in recorder.calls.items() if name in OPERATORS}


OPERATORS = {str(operator): operator for operator in allowed()}


# --- calls ------------------------------------------------------------------------------------------------------------------


def call(number, calls):
    """The operator and the arguments of a call."""
    draws = random.Random(number)
    name = list(OPERATORS)[number % len(OPERATORS)]
    operator = OPERATORS[name]
    if name in calls and draws.random() < SHARE:
        leaves, structure = draws.choice(calls[name])
        leaves = list(leaves)
        for _ in range(draws.choice((1, 1, 1, 2, 2, 3, 5))):
            place = draws.randrange(len(leaves))
            leaves[place] = _changed(leaves[place], draws)
        args, keywords = tree_unflatten(leaves, structure)
    else:
        args, keywords = _all_drawn(operator, draws)
    if problem_of_call(operator, args, keywords) is not None:
        raise ValueError("a file with such a call is not loaded")
    leaves, structure = tree_flatten((args, keywords))
    args, keywords = tree_unflatten([leaf.tensor(draws) if isinstance(leaf, Drawn) else leaf for leaf in leaves], structure)
    return operator, args, keywords


def _changed(value, draws):
    if isinstance(value, Drawn):
        return value.changed(draws)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draws.choice((*INTEGERS, value + 1, value - 1, -value))
    if isinstance(value, float):
        return draws.choice(NUMBERS)
    if isinstance(value, torch.dtype):
        return draws.choice(DTYPES)
    return draws.choice((1, 0.5, *NUMBERS, *INTEGERS)) if value is None else value


def _all_drawn(operator, draws):
    shape = [draws.choice((1, 2, 3, 4)) for _ in range(draws.randrange(1, 6))]

    def tensor():
        one = Drawn(shape, torch.float32, 5)
        return one.changed(draws) if draws.random() < 0.4 else one

    kinds = {
        "List[Tensor]": lambda: [tensor() for _ in range(draws.randrange(1, 4))],
        "List[Optional[Tensor]]": lambda: [Drawn((1,), torch.int64, 3, strange=1) for _ in range(draws.randrange(1, 3))],
        "Tensor": tensor,
        "List[int]": lambda: [draws.choice((0, 1, 2, 3, -1, *INTEGERS)) for _ in range(draws.randrange(1, 5))],
        "List[bool]": lambda: [draws.random() < 0.5 for _ in range(draws.randrange(2, 4))],
        "List[float]": lambda: [draws.choice(NUMBERS) for _ in range(2)],
        "float": lambda: draws.choice(NUMBERS),
        "bool": lambda: draws.random() < 0.5,
        "str": lambda: draws.choice(("none", "mean", "sum", "tanh", "floor", "trunc")),
        "number": lambda: draws.choice((*NUMBERS, *INTEGERS)),
        "int": lambda: draws.choice((0, 1, 2, *INTEGERS)),
    }
    args, keywords = [], {}
    for argument in operator._schema.arguments:
        if argument.has_default_value() and draws.random() < 0.5:
            continue
        value = next((make() for kind, make in kinds.items() if kind in str(argument.type)), None)
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            args.append(value)
    return args, keywords


def _work(state, first, last):
    """Make the calls with numbers from `first` to `last`, and note the current one, and how many ran, in the file `state`."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    calls = recorded()
    notes, ran = os.open(state, os.O_WRONLY | os.O_CREAT), 0
    for number in range(first, last):
        os.pwrite(notes, f"{number:20d} {ran:20d}".encode(), 0)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            operator, args, keywords = call(number, calls)
            results = tree_flatten(guarded(operator)(*args, **keywords))[0]
            for result in results:
                if isinstance(result, torch.Tensor) and result.numel() < LARGEST:
                    result.sum()
            ran += 1
        except Exception:  # what an operator does not take is an error
            continue
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.pwrite(notes, f"{last:20d} {ran:20d}".encode(), 0)


def examine(count, seed=0):
    """Make `count` calls. Returns the number of calls without an error, and for each call that ended a process, the operator,
    the number of the call and the signal.
    """
    first, last, ran, ended = seed * count, (seed + 1) * count, 0, []
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state"
        while first < last:
            state.write_text(f"{first:20d} {0:20d}")
            code = f"from tools import operator_fuzz as fuzz; fuzz._work({str(state)!r}, {first}, {last})"
            folder_of_tests = str(Path(__file__).parent.parent)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder_of_tests, *sys.path])}
            finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
            number, more = map(int, state.read_text().split())
            ran += more
            if finished.returncode > 0:
                raise RuntimeError(finished.stderr)
            if finished.returncode:
                name = list(OPERATORS)[number % len(OPERATORS)]
                ended.append((name, number, signal.Signals(-finished.returncode).name))
            first = number + 1
    return ran, ended


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ran, ended = examine(options.calls, options.seed)
    print(f"{options.calls} calls of {len(OPERATORS)} operators: {ran} gave a result, {len(ended)} ended a process")
    for name, number, how in ended:
        print(f"{name}: call {number}, {how}")
    sys.exit(any(how != "SIGALRM" for _, _, how in ended))


if __name__ == "__main__":
    main()
