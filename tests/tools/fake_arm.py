"""An arm that trains nothing: it leaves the events that the file FAKE_ARMS has, prints, and ends as that says."""

import json
import os
import sys
from pathlib import Path

is_second = any(word == "on" or '"sleep": true' in word for word in sys.argv)
events, log, status = json.loads(Path(os.environ["FAKE_ARMS"]).read_text())[is_second]
with open(sys.argv[-1], "a") as file:  # behind --events
    file.writelines(json.dumps(event) + "\n" for event in events)
print(log)
sys.exit(status)
