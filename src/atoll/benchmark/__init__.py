"""The benchmark of methods against forgetting: runs, costs and results."""
