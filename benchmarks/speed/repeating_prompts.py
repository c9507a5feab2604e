"""Makes repeats/agent.jsonl and repeats/edits.jsonl: tasks that repeat themselves.

    python benchmarks/speed/repeating_prompts.py

Agent-like requests are the same task again and again with small changes. Edits give a text and ask
for the whole text with one change. All texts are written for this purpose.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

FOLDER = Path(__file__).parent / "repeats"
SYSTEM = (
    "You are an assistant of the support team of a small web shop. Read the ticket, say in one "
    "sentence what the customer wants, list the steps that a colleague must take, and write a "
    "friendly reply to the customer. Always use the headings Request, Steps and Reply."
)
TICKETS = (
    "My order {number} of a {thing} has not arrived. It was sent to {city} on {day} and should be "
    "here by now.",
    "I ordered a {thing} on {day}, number {number}, but the parcel that came to {city} was empty. "
    "Please send another.",
    "Please cancel order {number} of {day}: I found the same {thing} in a shop here in {city}. I "
    "want my money back.",
    "The {thing} of order {number} broke on {day}, one week after it came to {city}. What do I "
    "have to do now?",
    "I moved. Please send order {number}, the {thing}, to my new address in {city}, and not before "
    "{day}.",
)
FACTS = (
    {"number": 4711, "thing": "lamp", "city": "Lisbon", "day": "Monday"},
    {"number": 4712, "thing": "kettle", "city": "Oslo", "day": "Monday"},
    {"number": 4802, "thing": "lamp", "city": "Graz", "day": "Tuesday"},
    {"number": 5120, "thing": "bicycle bell", "city": "Lisbon", "day": "Friday"},
    {"number": 5121, "thing": "kettle", "city": "Turin", "day": "Friday"},
    {"number": 5377, "thing": "chair", "city": "Oslo", "day": "Sunday"},
    {"number": 6001, "thing": "tent", "city": "Ghent", "day": "Thursday"},
    {"number": 6002, "thing": "tent", "city": "Porto", "day": "Thursday"},
    {"number": 7345, "thing": "radio", "city": "Graz", "day": "Saturday"},
    {"number": 9010, "thing": "bicycle bell", "city": "Malmo", "day": "Wednesday"},
)
FILES = (
    """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
""",
    """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the stack is empty")
        return self.items.pop()

    def peek(self):
        return self.items[-1]
""",
    """# Shopping

- bread
- two litres of milk
- six eggs
- a bag of potatoes
- apples
- coffee

# To do

- call the plumber about the kitchen tap
- take the books back to the library
- water the plants on the balcony
""",
    (
        "Dear Ms. Keller,\n\n"
        "thank you for your letter of the third of May. We are glad that you liked the exhibition, "
        "and we are sorry that the\n"
        "lift was out of order on that day. It has been repaired since. As a small apology you "
        "will find two tickets for our\n"
        "summer concert in this letter. The concert begins at seven o'clock in the garden behind "
        "the museum.\n\n"
        "With kind regards,\n"
        "the museum's team\n"
    ),
)
CHANGES = (
    "Write the whole text again without any change.",
    "Write the whole text again and correct all mistakes in it.",
    "Write the whole text again and put a short title in front of it.",
    "Write the whole text again and add one more line at the end.",
    "Write the whole text again in full, and after it say in one sentence what it is.",
)


def agent_requests() -> list[list[dict[str, str]]]:
    """Return a ticket of each kind about each order."""
    return [
        [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Ticket: {ticket.format(**facts)}"},
        ]
        for facts, ticket in product(FACTS, TICKETS)
    ]


def edit_requests() -> list[list[dict[str, str]]]:
    """Return each change of each text."""
    return [
        [{"role": "user", "content": f"Here is a text:\n\n```\n{file}```\n\n{change}"}]
        for file, change in product(FILES, CHANGES)
    ]


def main() -> None:
    for name, requests in (("agent", agent_requests()), ("edits", edit_requests())):
        lines = [json.dumps({"messages": messages}) + "\n" for messages in requests]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
