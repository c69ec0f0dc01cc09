"""Python functions to ask for, each with its reference: text, names and scores, times, money."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import Any

from emberline.train.questions.function import task


def _longest_run(items: Any) -> int:
    return max((len(list(run)) for _, run in groupby(items)), default=0)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _minutes(clock: str) -> int:
    return int(clock[:2]) * 60 + int(clock[3:])


def _later(clock: str, minutes: int) -> str:
    total = (_minutes(clock) + minutes) % 1440
    return f"{total // 60:02}:{total % 60:02}"


TEXT_TASKS = (
    task("title_from_name|headline(name: snake) -> str",
         "turn a name with underscores into a title with capitals and spaces",
         "Put spaces for underscores and begin each word with a capital letter.",
         lambda s: " ".join(p.capitalize() for p in s.split("_"))),
    task("stretch|repeat_by_position(word: word) -> str",
         "repeat each letter of a word as often as its position says and join these with dashes",
         "Write the first letter once, the second twice and so on, with a dash between them.",
         lambda w: "-".join(c * (i + 1) for i, c in enumerate(w))),
    task("acronym|initials(text: sentence) -> str",
         "build the acronym of a phrase",
         "Return the first letters of all words of text, in upper case and without spaces.",
         lambda t: "".join(w[0].upper() for w in t.split())),
    task("longest_word_length|max_word_length(text: sentence) -> int",
         "tell how long the longest word of a sentence is", "",
         lambda t: max(map(len, t.split()))),
    task("reverse_each_word|mirror_words(text: sentence) -> str",
         "reverse each word of a sentence but keep the order of the words",
         "Reverse the letters of each word. The words stay where they are.",
         lambda t: " ".join(w[::-1] for w in t.split())),
    task("count_letter|letter_count(text: sentence, letter: letter) -> int",
         "count how often a letter occurs in a text, in either case",
         "Count the letter in text, without regard to upper and lower case.",
         lambda t, c: t.lower().count(c)),
    task("letter_positions|find_letter(text: sentence, letter: letter) -> list[int]",
         "list all positions of a letter in a string", "",
         lambda t, c: [i for i, x in enumerate(t) if x == c]),
    task("run_length_encode|compress_runs(text: runs) -> str",
         "compress a string by writing each run as the letter and its length",
         "Write each run of equal letters as the letter and the length of the run.",
         lambda t: "".join(f"{k}{len(list(g))}" for k, g in groupby(t))),
    task("longest_run|longest_streak(bits: bits) -> int",
         "tell how long the longest run of one character in a string is", "",
         _longest_run),
    task("first_unique|first_single_letter(word: word) -> str | None",
         "return the first letter that occurs only once in a word",
         "Return the first letter that occurs exactly once in word, or None.",
         lambda w: next((c for c in w if w.count(c) == 1), None)),
    task("letter_histogram|count_letters(word: word) -> dict[str, int]",
         "count the letters of a word",
         "Return a dict from each letter of word to how often it occurs, in order of first "
         "appearance.",
         lambda w: dict(Counter(w))),
    task("mask_digits|hide_number(digits: digits) -> str",
         "replace all but the last two characters of a string with stars",
         "Hide a number: every character but the last two becomes a star.",
         lambda s: "*" * (len(s) - 2) + s[-2:]),
    task("group_digits|add_separators(number: large) -> str",
         "write a whole number with a comma after every three digits",
         "Format number with commas between groups of three digits.",
         lambda n: f"{n:,}"),
    task("pad_words|align_right(words: words) -> list[str]",
         "pad the words of a list on the left so that all are equally long",
         "Put spaces before the shorter words until all are as long as the longest.",
         lambda w: [x.rjust(max(map(len, w))) for x in w]),
    task("group_by_length|words_by_length(words: words) -> dict[int, list[str]]",
         "group the words of a list by their length",
         "Return a dict from each length, smallest first, to the words that have it.",
         lambda w: {k: [x for x in w if len(x) == k] for k in sorted(set(map(len, w)))}),
    task("group_by_initial|index_by_letter(words: words) -> dict[str, list[str]]",
         "group words by their first letter",
         "Return a dict from each first letter, in alphabetical order, to the sorted words "
         "that start with it.",
         lambda w: {c: sorted(x for x in w if x[0] == c) for c in sorted({x[0] for x in w})}),
    task("join_with_and|list_in_words(names: names) -> str",
         "join names with commas and the word and before the last one",
         "Write names as people do: commas between them, and the word 'and' before the last.",
         lambda n: ", ".join(n[:-1]) + " and " + n[-1]),
    task("count_names|tally(names: names) -> dict[str, int]",
         "count how often each name is in a list, in alphabetical order", "",
         lambda n: {k: n.count(k) for k in sorted(set(n))}),
    task("hamming|count_differences(first: bits, second: bits) -> int",
         "count the positions at which two strings differ; extra characters count too",
         "Count the positions at which the strings differ. What one has more than the other "
         "counts as different.",
         lambda a, b: sum(x != y for x, y in zip(a, b, strict=False)) + abs(len(a) - len(b))),
    task("longest_zero_gap|binary_gap(bits: bits) -> int",
         "return the longest run of zeros in a string of zeros and ones", "",
         lambda b: max(map(len, b.split("1")))),
    task("flip_bits|complement(bits: bits) -> str",
         "exchange zeros and ones in a string", "",
         lambda b: b.translate(str.maketrans("01", "10"))),
    task("top_scorer|best_player(scores: scores) -> str",
         "return the name with the highest score; ties go to the name that comes first",
         "Return the name with the highest score. If several have it, return the one that comes "
         "first in the alphabet.",
         lambda s: min(s, key=lambda k: (-s[k], k))),
    task("invert_scores|names_by_score(scores: scores) -> dict[int, list[str]]",
         "turn a dict from names to scores into one from scores to lists of names", "",
         lambda s: {v: [k for k in s if s[k] == v] for v in s.values()}),
    task("merge_counts|add_scores(first: scores, second: scores) -> dict[str, int]",
         "merge two dicts of numbers, adding the numbers of keys that both have",
         "Return a dict with the keys of both, sorted. Numbers of common keys are added.",
         lambda a, b: {k: a.get(k, 0) + b.get(k, 0) for k in sorted({*a, *b})}),
    task("rank_pairs|sort_pairs(pairs: pairs) -> list[tuple[str, int]]",
         "sort pairs of a name and a number by number, largest first, then by name", "",
         lambda p: sorted(p, key=lambda x: (-x[1], x[0]))),
    task("merge_intervals|join_spans(spans: intervals) -> list[tuple[int, int]]",
         "merge intervals that overlap or touch",
         "Merge all (start, end) intervals that overlap or touch, and return them in order.",
         _merged),
    task("total_covered|covered_length(spans: intervals) -> int",
         "compute the total length that a list of intervals covers",
         "Return the length of the union of all (start, end) intervals.",
         lambda s: sum(b - a for a, b in _merged(s))),
    task("minutes_since_midnight|to_minutes(clock: clock) -> int",
         "convert a time such as 07:45 to minutes since midnight", "", _minutes),
    task("add_minutes|later(clock: clock, minutes: whole) -> str",
         "add minutes to a time of day given as HH:MM", "", _later),
    task("to_twelve_hours|am_pm(clock: clock) -> str",
         "convert a time from the 24-hour clock to the 12-hour clock with AM and PM", "",
         lambda c: f"{(int(c[:2]) + 11) % 12 + 1}{c[2:]} {'AM' if int(c[:2]) < 12 else 'PM'}"),
    task("day_first|reformat_date(date: date) -> str",
         "rewrite a date from YYYY-MM-DD to DD/MM/YYYY", "",
         lambda d: "/".join(d.split("-")[::-1])),
    task("parse_query|read_parameters(query: query) -> dict[str, str]",
         "parse the query part of a URL into a dict", "",
         lambda q: dict(p.split("=") for p in q.split("&"))),
    task("with_tax|gross_price(price: price, percent: small) -> float",
         "add a tax, given in percent, to a price and round to two decimals", "",
         lambda p, k: round(p * (100 + k) / 100, 2)),
    task("compound|balance_after(amount: whole, percent: small, years: tiny) -> float",
         "compute an amount of money after years of yearly compound interest", "",
         lambda a, p, y: round(a * (1 + p / 100) ** y, 2)),
    task("true_streak|longest_success(flags: flags) -> int",
         "return the longest run of True values in a list", "",
         lambda f: max((len(list(g)) for k, g in groupby(f) if k), default=0)),
)  # fmt: skip
