"""``log.txt`` of a run: what the ``tandem`` loggers say. Metrics do not belong here."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOG_FILE = "log.txt"
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class _ScreenHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what ``sys.stderr`` is at that moment, which a live display may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


@contextmanager
def setup_logging(run_dir: str | Path, *, level: int = logging.INFO) -> Iterator[Path]:
    """Append what ``tandem`` logs to ``run_dir/log.txt`` and show warnings on stderr.

    Yields the path of the log. Handlers are taken off again on exit.
    """
    path = Path(run_dir) / LOG_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("tandem")
    before = logger.level
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter(_FORMAT))
    screen = _ScreenHandler()
    screen.setLevel(logging.WARNING)
    screen.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    handlers = (file, screen)
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield path
    finally:
        logger.setLevel(before)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()
