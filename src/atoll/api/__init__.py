"""What `import atoll` offers: run, stream, sweep, load, compare, answer, and their results."""
