"""`python -m scaled_mm.cli` is the `scaled-mm` command."""

import sys

from scaled_mm.cli import main

sys.exit(main())
