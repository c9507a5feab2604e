"""A method of your own: each drafted token is what followed the one before it most often so far."""

import argparse
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import forerun
from forerun.engine.draft import Draft
from forerun.engine.step import Drafter, Proposal
from forerun.methods import Method

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--max-new-tokens", type=int, default=64)
limits = vars(parser.parse_args())


@dataclass(frozen=True)
class Bigram(Method):
    name = "bigram"
    most: int = 4  # a setting: tokens of a draft

    def build(self, parts):
        return BigramDrafter(self.most)


class BigramDrafter(Drafter):
    def __init__(self, most):
        self.most = most

    def propose(self, seqs):
        return Proposal([self.draft(seq.tokens, seq.remaining) for seq in seqs])

    def draft(self, tokens, remaining):
        followers = defaultdict(Counter)
        for token, follower in pairwise(tokens):
            followers[token][follower] += 1
        chain = tokens[-1:]
        # The target adds a token to each draft, so one less than what remains is drafted.
        while len(chain) <= min(self.most, remaining - 1) and followers[chain[-1]]:
            chain.append(followers[chain[-1]].most_common(1)[0][0])
        return Draft.chain(chain[0], chain[1:])


prompt = "x = [0, 1, 2]\ny = [0, 1, 2]\nz = [0, 1, 2]\n"
plain = forerun.load("embedded", method="ar")
wanted = plain.generate(prompt, **limits)
output = plain.replace(method=Bigram(), guard=False).generate(prompt, **limits)
print(output.text)
print(f"\nsame tokens as plain decoding: {output.tokens == wanted.tokens}")
print(f"{output.stats.tau:.2f} tokens per target forward")
