"""Numbers from scores: accuracy and forgetting, and the statistics of comparisons."""
