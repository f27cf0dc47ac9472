"""Prove a train engine: ``tandem conformance --backend NAME``, or ``run("NAME")`` in a test.

``table`` names the checks; ``truth``, ``gradients``, ``invariance``, ``uneven``, ``optimizer``,
``adapters``, ``export``, ``resume`` and ``state`` hold them by family; ``reference`` is the plain
loop they are measured against; ``run`` and ``world`` run them, ``report`` shows them.
"""

from tandem.testing.conformance.figure import NotApplicable, Outcome, Part
from tandem.testing.conformance.report import print_report, write_json
from tandem.testing.conformance.run import Report, run
from tandem.testing.conformance.subject import TOLERANCES, Subject, Tolerance
from tandem.testing.conformance.table import CHECKS

__all__ = [
    "CHECKS",
    "TOLERANCES",
    "NotApplicable",
    "Outcome",
    "Part",
    "Report",
    "Subject",
    "Tolerance",
    "print_report",
    "run",
    "write_json",
]
