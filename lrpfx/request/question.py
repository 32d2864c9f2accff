"""What is asked of a model and its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lrpfx.errors import InputError
from lrpfx.request.conditions import Condition
from lrpfx.request.outputs import OutputSelector
from lrpfx.request.targets import check_one_of
from lrpfx.support.numbers import whole_number


@dataclass(frozen=True)
class Question:
    """The arguments of `lrpfx.attribute` beside the module and the inputs."""

    target: Any = None
    targets: Any = None
    conditions: Sequence[Condition] | None = None
    start: str | None = None
    record: str | Sequence[str] = ()
    record_multipliers: str | Sequence[str] = ()
    output: OutputSelector = None
    chunk_size: int | None = None
    constants: bool = False
    progress: bool = False
    reference: Any = None

    def check(self) -> None:
        """Raise `InputError` for arguments that exclude each other."""
        check_one_of(self.target, self.targets)
        if self.start is not None and self.output is not None:
            raise InputError("start= explains a node and output= an output; pass one of them", topic="start-of-relevance")
        if self.chunk_size is not None:
            whole_number(self.chunk_size, "chunk_size is a number of targets", 1, "targets")
