"""Check the library against numeric cases: ``python -m tandem.testing.numerics FILE.json``.

``run`` loads, compares and prints; ``table`` names the checks; the other files hold them by area.
"""

from tandem.testing.numerics.run import DTYPES, Outcome, check_case, largest_miss, load_cases, main

__all__ = ["DTYPES", "Outcome", "check_case", "largest_miss", "load_cases", "main"]
