"""What a person types: ``sordino plan | account | train | data``.

The rules for every verb: ``--json`` prints one JSON object on stdout and nothing else there; what goes wrong is one
line on stderr and exit code 2; progress goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code."""
    import warnings

    import typer

    from ..errors import SordinoError
    from .app import app
    from .output import complain, warn

    warnings.showwarning = warn  # type: ignore[assignment]

    # The base of all usage errors; its home differs between versions of typer.
    usage = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    try:
        command = typer.main.get_command(app)
        code = command.main(list(sys.argv[1:] if arguments is None else arguments), "sordino", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except SordinoError as error:
        complain(str(error))
        return 2
    except typer.Abort:
        complain("stopped")
        return 130
    except KeyboardInterrupt:
        complain("stopped")
        return 130
    except BrokenPipeError:  # `sordino plan --list | head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if not isinstance(error, usage):
            raise
        complain(error.format_message())  # type: ignore[attr-defined]
        return 2
