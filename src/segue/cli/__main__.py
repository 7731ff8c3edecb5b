"""`python -m segue.cli`: the same as `segue`."""

import sys

from segue.cli.main import main

sys.exit(main())
