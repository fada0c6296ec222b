"""Records what a run's loggers say at WARNING and above, and its rollout probes at INFO: JSON lines in `WARNINGS_FILE`.

real_models.py puts a copy of this file, after shown_card.py, into sitecustomize.py on the path of a run. The run prints
what it prints without it: Python shows the warnings of a logger without handlers as bare text, with no level to find.
"""

import os

if WARNINGS_FILE := os.environ.get("WARNINGS_FILE"):
    import json
    import logging

    MAKE = logging.getLogRecordFactory()

    def keep(*args, **kwargs):
        record = MAKE(*args, **kwargs)
        try:
            text = record.getMessage()
        except (TypeError, ValueError):  # arguments that do not fit; logging reports them
            text = str(record.msg)
        probe = record.name.startswith("qerl_trl") and "probe" in text.lower()
        if probe or record.levelno >= logging.WARNING:
            with open(WARNINGS_FILE, "a") as file:
                file.write(json.dumps({"logger": record.name, "level": record.levelname, "text": text}) + "\n")
        return record

    logging.setLogRecordFactory(keep)
    logging.getLogger("qerl_trl").setLevel(logging.INFO)
