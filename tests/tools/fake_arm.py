"""An arm that trains nothing: it leaves the events that the file FAKE_ARMS has of the first or the second arm."""

import json
import os
import sys
from pathlib import Path

is_second = any(word == "on" or '"sleep": true' in word for word in sys.argv)
events = json.loads(Path(os.environ["FAKE_ARMS"]).read_text())[is_second]
Path(sys.argv[-1]).write_text("".join(json.dumps(event) + "\n" for event in events))  # behind --events
