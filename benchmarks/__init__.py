"""One script per claim: runs its peer in the same run, prints a table and writes JSON to docs/results/."""
