"""The interface of backends. A backend is one file form of lowered programs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from torch.export import ExportedProgram
from torch.fx import Node

from lrpfx.deploy.runner import Function
from lrpfx.deploy.self_test import SelfTest
from lrpfx.errors import ArtefactError, LoweringError
from lrpfx.passes.program import GraphPass
from lrpfx.runtime.propagation import ORIGIN

#: Errors about programs that a format or its runtime lacks operators for.
inexpressible = partial(LoweringError, topic="formats-of-programs")

#: Writes a file with the given content, which must pass its self-test first.
Replace = Callable[[bytes], None]


@dataclass(frozen=True)
class Stored:
    """A file whose hash has been verified: its manifest, its self-test, and the rest in the form that its backend needs."""

    manifest: dict[str, Any]
    self_test: bytes
    content: Any


class Backend(ABC):
    """One file form. `BACKENDS` lists them. Files with the same suffix are read in one way; the manifest gives the kind."""

    kind: ClassVar[str]
    suffix: ClassVar[str]
    is_native: ClassVar[bool] = False  # whether its files contain native code, or their runtime trusts them as much
    is_compiled: ClassVar[bool] = False  # whether `package` writes its files, not `save`
    runtime: ClassVar[str] = "torch"  # the package that runs its files
    #: The passes that rewrite a program in operators that the backend supports.
    legalize: ClassVar[Sequence[type[GraphPass]]] = ()

    @abstractmethod
    def check_requirements(self) -> None:
        """Raise `ArtefactError` if a package or program that `write` needs is missing."""

    @abstractmethod
    def check_program(self, program: ExportedProgram) -> None:
        """Raise `LoweringError` for a program that the runtime is known not to run, before the work of writing it."""

    @abstractmethod
    def write(self, program: ExportedProgram, manifest: dict[str, Any], self_test: bytes, path: Path, replace: Replace) -> None:
        """Write a legalized program to `path`. The content of `path` is written by `replace`, files beside it are not."""

    @abstractmethod
    def read(self, path: Path, content: bytes) -> Stored:
        """Read a file with this suffix. Raises `RefusedError` if it is damaged."""

    @abstractmethod
    def hashed_anew(self, content: bytes, changes: Mapping[str, Any]) -> bytes:
        """The content of a file with right hashes and with changes of its manifest."""

    @abstractmethod
    def check(self, path: Path, stored: Stored, test: SelfTest) -> None:
        """Raise `RefusedError` for content that does not belong in such a file. Nothing is loaded or computed."""

    @abstractmethod
    def load(self, path: Path, stored: Stored) -> Function:
        """Load a checked program."""


@contextmanager
def packages_of(extra: str) -> Iterator[None]:
    """A context in which a package that cannot be imported is an `ArtefactError`, which names the extra that installs it."""
    try:
        yield
    except ImportError as error:
        raise ArtefactError(
            f"this needs packages that are not installed: pip install 'lrpfx[{extra}]' ({error})", topic="missing-package"
        ) from error


def origin_of(node: Node) -> str:
    """The name and rule of the explainable module's node that an operation comes from, or an empty string."""
    return str(node.meta.get("custom", {}).get(ORIGIN, ""))


def operators_missing(problem: str, operators: Mapping[Node, Any], instead: str) -> LoweringError:
    """An error that names operators which a runtime lacks, with the places that they come from.

    `operators`: each call and its operator. `instead`: what to do without changing the model or its rules.
    """
    lines = [f"  {operator}" + (f", from {origin_of(node)}" if origin_of(node) else "") for node, operator in operators.items()]
    return inexpressible(
        f"{problem}:\n" + "\n".join(dict.fromkeys(lines)) + f"\nGive the layers another rule or replace them, or {instead}."
    )
