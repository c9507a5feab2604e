"""Methods that serve comparison only.

They are loaded as any method of a user's is: `--method benchmarks.baselines.lookup:Lookup`, from
the repository's root.
"""
