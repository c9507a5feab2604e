"""What is sampled: parameters, the distribution of a token, seeds, penalties, grammars, log probabilities."""
