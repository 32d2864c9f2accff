"""What a backend is: one form of file for lowered programs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch.export import ExportedProgram

from lrpfx.deploy.runner import Function
from lrpfx.passes.program import GraphPass

#: Gives a file its content, after the file has passed its self-test.
Replace = Callable[[bytes], None]


@dataclass(frozen=True)
class Stored:
    """A file that was read and whose hash is right: its manifest, its self-test, and the rest as its backend takes it."""

    manifest: dict[str, Any]
    self_test: bytes
    content: Any


class Backend(ABC):
    """One form of file. `BACKENDS` lists them; files with the same suffix are read alike, and the manifest says the kind."""

    kind: ClassVar[str]
    suffix: ClassVar[str]
    #: The passes that write a program in operators that the backend has.
    legalize: ClassVar[Sequence[type[GraphPass]]] = ()

    @abstractmethod
    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        """Write a legalized program to `path`: everything by `replace`, but for files beside it."""

    @abstractmethod
    def read(self, path: Path, content: bytes) -> Stored:
        """A file of this suffix. `RefusedError` for what is damaged."""

    @abstractmethod
    def load(self, path: Path, stored: Stored) -> Function:
        """The program. `RefusedError` for content that does not belong in such a file."""
