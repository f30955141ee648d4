"""Public data sets by name: one function each, its files and official source in one list."""
