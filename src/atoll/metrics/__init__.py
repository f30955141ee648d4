"""Metrics derived from scores: accuracy, forgetting, and the statistics of comparisons."""
