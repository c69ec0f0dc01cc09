"""Prompt sets: files given with --prompts, or the small set written for this project."""

from __future__ import annotations

import json
from pathlib import Path

SETS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench")

OWN: dict[str, list[str]] = {
    "arithmetic": [
        "A baker fills 12 trays with 18 rolls each and sells 150 rolls. How many are left?",
        "A train leaves at 9:40 and arrives at 13:05. How many minutes does the trip take?",
        "Nora saves 35 euros a month for 14 months and then spends 120. How much does she have?",
        "A tank holds 480 litres and loses 6 litres an hour. When is it a quarter empty?",
        "Three friends share a bill of 87.60 equally and add 10 percent. What does each pay?",
        "A garden is 24 m by 15 m. How many metres of fence surround it?",
    ],
    "mathematics": [
        "Solve for x: 3x - 7 = 2(x + 4). Show each step.",
        "Find the derivative of f(x) = x^3 - 5x^2 + 2x and its value at x = 1.",
        "What is the probability of rolling a sum of 9 with two fair dice?",
        "Prove that the sum of two odd integers is even.",
        "Find the area of a triangle with sides 7, 24 and 25.",
        "Compute the sum of the first 40 positive integers that are multiples of 3.",
    ],
    "python": [
        "Write a Python function that returns the longest word in a sentence.",
        "Write a Python function that merges two sorted lists into one sorted list.",
        "Write a Python class for a bank account with deposit, withdraw and balance.",
        "Write a Python function that counts how often each character appears in a string.",
        "Write a Python function that checks whether a number is a perfect square.",
        "Write a Python function that rotates a list by k places to the right.",
    ],
    "questions": [
        "Explain how a refrigerator keeps food cold.",
        "What are the main differences between a virus and a bacterium?",
        "Give me five tips for a first job interview.",
        "Why does the moon have phases?",
        "Summarise how a bill becomes a law in a parliamentary system.",
        "Describe the water cycle to a ten-year-old.",
    ],
    "writing": [
        "Write a short letter that invites a friend to a picnic by the lake.",
        "Write the opening paragraph of a mystery set in a lighthouse.",
        "Write an email that asks a landlord to repair the heating.",
        "Write a product description for a wooden desk lamp.",
        "Write a poem of two stanzas about the first snow.",
        "Write a short speech for the retirement of a teacher.",
    ],
}


def load(folder: Path | None, limit: int) -> dict[str, list[str]]:
    """First turns by set: `<set>.jsonl` files with {"turns": [...]} a line, or the own set."""
    if folder is None:
        return {name: prompts[:limit] for name, prompts in OWN.items()}
    sets: dict[str, list[str]] = {}
    for name in SETS:
        path = folder / f"{name}.jsonl"
        if not path.exists():
            raise SystemExit(f"{path} is missing: --prompts wants a folder with {', '.join(SETS)}")
        lines = path.read_text().splitlines()[:limit]
        sets[name] = [json.loads(line)["turns"][0] for line in lines]
    return sets
