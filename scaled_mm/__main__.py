"""`python -m scaled_mm` is the `scaled-mm` command."""

import sys

from scaled_mm.cli import main

sys.exit(main())
