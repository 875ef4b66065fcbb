"""What a user can mend, said in one sentence."""

import contextlib
import errno
import sys
from collections.abc import Iterator


class UserError(Exception):
    """What was found, what was wanted and what to do, in one sentence for the user."""


@contextlib.contextmanager
def one_sentence() -> Iterator[None]:
    """Ends the command with one sentence on stderr, not a traceback, where the user can act.

    Anything else is a defect of the program, and its traceback is wanted.
    """
    try:
        yield
    except UserError as error:
        _leave(str(error), code=1)
    except KeyboardInterrupt:
        _leave("stopped by Ctrl-C", code=130)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        where = f" while writing {error.filename}" if error.filename else ""
        _leave(
            f"the disk is full{where}; free some space and run the same command again, "
            "it goes on from the last checkpoint",
            code=1,
        )


def _leave(sentence: str, code: int) -> None:
    print(f"error: {sentence}", file=sys.stderr)
    # A read of Orbax that failed leaves callbacks, which may fail while the interpreter ends.
    sys.unraisablehook = lambda _: None
    sys.exit(code)
