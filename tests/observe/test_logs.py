"""log.txt holds what the tandem loggers say; warnings are shown too."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tandem.observe import setup_logging


def test_log_file_is_appended_to_and_handlers_go_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("tandem.some.part")
    handlers = list(logging.getLogger("tandem").handlers)
    for text in ("first", "second"):
        with setup_logging(tmp_path) as path:
            logger.info("%s", text)
            logger.debug("too much detail")
            logger.warning("careful %s", text)
    logger.warning("outside")
    lines = path.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == [
        "first",
        "careful first",
        "second",
        "careful second",
    ]
    assert logging.getLogger("tandem").handlers == handlers
    assert "WARNING: careful first" in capsys.readouterr().err
