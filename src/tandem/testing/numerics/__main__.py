"""``python -m tandem.testing.numerics FILE.json``."""

import sys

from tandem.testing.numerics.run import main

sys.exit(main())
