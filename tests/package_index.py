"""How pip says that its index of packages gave no answer, which is no fault of what is tested."""

from __future__ import annotations

import re

UNREACHED = re.compile(r"Retry\(total=0\b|ReadTimeoutError|ConnectionResetError|HTTP error 5\d\d|5\d\d Server Error")
"""The last of its retries, a connection that broke, or a failure of the index itself."""
