"""Methods that serve comparison only. They come in through the door that any method of a user's has: `--method
benchmarks.baselines.lookup:Lookup` from the repository's root."""
