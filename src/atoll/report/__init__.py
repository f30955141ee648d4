"""Reports: turns records into one page; needs no torch."""
