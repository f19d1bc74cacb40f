"""Files of JSON that are kept with this package: the same bytes for the same value, wherever it was written."""

import gzip
import json
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """Return the value that a file keeps."""
    return json.loads(gzip.decompress(path.read_bytes()))


def write(path: Path, value: Any) -> None:
    """Keep a value in a file."""
    path.write_bytes(gzip.compress(json.dumps(value).encode(), mtime=0))
