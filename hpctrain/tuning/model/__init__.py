"""Cost models: closed forms, LogGP clocks, schedules of messages, fits."""
