"""``python -m sglang_recv.cli``."""

import sys

from sglang_recv.cli import main

sys.exit(main())
