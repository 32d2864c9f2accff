"""The command `lrpfx`: its subcommands, and how it ends."""

import importlib
import io
import os
import platform
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

import torch
import typer

from lrpfx import __version__
from lrpfx.command_line.options import with_options
from lrpfx.command_line.terminal import end_results, in_options, messages, say
from lrpfx.errors import LrpfxError, LrpfxWarning, address, first_lines, printable

#: The environment variable that shows the traceback of an unexpected error.
TRACEBACK = "LRPFX_TRACEBACK"

INTERRUPTED = 130  # typer's exit status after Ctrl-C

#: What typer raises for mistakes in a command. Newer releases have a click of their own.
_UsageError: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

#: The modules of the commands, in the order in which the help lists them.
COMMANDS = {
    "explain": "explain",
    "report": "report",
    "compare": "compare",
    "dataset": "dataset",
    "spray": "spray",
    "check": "check",
    "draw": "draw",
    "composites": "composites",
    "export": "export",
    "run": "run",
    "serve": "serve",
    "inspect": "inspect",
    "verify": "inspect",
    "sign": "inspect",
}


def _show_version(shown: bool) -> None:
    if shown:
        say(f"lrpfx {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
        raise typer.Exit


def lrpfx(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Layer-wise relevance propagation: explain photographs, and create, run and inspect attribution models as files."""


def app_of(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The application with these commands."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(lrpfx)
    for name in names:
        command = getattr(importlib.import_module(f"lrpfx.command_line.{COMMANDS[name]}"), name)
        app.command(name)(with_options(command, has_results=name != "serve"))
    return app


def main() -> None:
    """Run the command line: errors are messages instead of tracebacks, and only warnings of lrpfx are shown."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    warnings.simplefilter("default", LrpfxWarning)
    warnings.showwarning = _show_warning
    if sys.stderr is None:  # it is closed
        sys.stderr = io.StringIO()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for names and terminals of any encoding
    try:
        asked = [one for one in sys.argv[1:2] if one in COMMANDS]  # what the others need takes half a second to import
        status = app_of(asked or COMMANDS)(prog_name="lrpfx", standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        raise SystemExit(status or 0)
    except LrpfxError as error:
        raise _failed(in_options(str(error)), error.help) from error
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _UsageError as error:
        raise _misused(error) from None
    except OSError as error:
        raise _failed(str(error.strerror or error)) from error
    except MemoryError as error:
        raise _failed(
            f"there is not enough memory: {first_lines(error)}; a smaller --batch-size needs less", address("out-of-memory")
        ) from error
    except Exception as error:
        if os.environ.get(TRACEBACK):
            raise
        message = f"{first_lines(error)}\nThis should not happen; set {TRACEBACK}=1 to see the traceback."
        raise _failed(message, address("defects")) from error
    finally:
        end_results()


def _show_warning(message: Warning | str, *place: Any, **more: Any) -> None:
    with suppress(OSError):  # stderr is closed
        messages().print(f"warning: {printable(in_options(str(message)))}", style="yellow", markup=False)
        if isinstance(message, LrpfxWarning):
            messages().print(f"See {message.help}", markup=False, soft_wrap=True)


def _misused(error: Any) -> SystemExit:
    """The exit for a mistake in a command: one line, or the help if there is no command."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return SystemExit(error.exit_code)
    context = getattr(error, "ctx", None)
    command = "lrpfx" if context is None else context.command_path
    return _failed(f"{error.format_message().rstrip('.')} (see {command} --help)")


def _failed(message: str, help_at: str | None = None) -> SystemExit:
    with suppress(OSError):  # stderr is closed
        messages().print(f"error: {printable(message)}", style="red", markup=False)
        if help_at is not None:
            messages().print(f"See {help_at}", markup=False, soft_wrap=True)
    return SystemExit(2)
