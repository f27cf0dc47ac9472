"""How a failed command ends: one line and an exit code for what a user can mend, a traceback else.

The exit codes themselves are the attributes ``exit_code`` of ``tandem.errors``.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.errors import CheckpointError, Preempted, RolloutError, TandemError

INTERRUPTED = 130


@contextmanager
def report_failures(*, debug: bool = False) -> Iterator[None]:
    """Turn an exception into a message on stderr and an exit of the process."""
    try:
        yield
    except TandemError as error:
        if debug:
            traceback.print_exc()
        label = "stopped" if isinstance(error, Preempted) else "error"
        sys.stderr.write(f"{label}: {error}\n")
        sys.exit(error.exit_code)
    except TimeoutError as error:  # of a wait for episodes: it says what did not happen
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"error: {error}\n")
        sys.exit(RolloutError.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("stopped: interrupted\n")
        sys.exit(INTERRUPTED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            sys.stderr.write(
                f"error: no space left for {error.filename or 'a file of the run'}; free disk "
                "space and go on with --resume from the last checkpoint\n"
            )
            sys.exit(CheckpointError.exit_code)
        traceback.print_exc()
        sys.stderr.write(
            "error: this is a bug in tandem or in code that it was given; please report it with "
            "the traceback above and the output of 'tandem doctor'\n"
        )
        sys.exit(1)
