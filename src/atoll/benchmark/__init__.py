"""The benchmark of methods against forgetting: what is run, what it costs, what it shows."""
