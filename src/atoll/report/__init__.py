"""Reports: records in, one page out; needs no torch."""
