"""What is sampled: parameters, a token's distribution, seeds, penalties, grammars, logprobs."""
