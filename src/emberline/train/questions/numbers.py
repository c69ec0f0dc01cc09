"""Python functions to ask for, each with its reference: numbers, lists of numbers and matrices."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise

from emberline.train.questions.function import task


def _longest_rise(numbers: list[int]) -> int:
    best = length = 1
    for before, after in pairwise(numbers):
        length = length + 1 if after > before else 1
        best = max(best, length)
    return best


def _collatz(n: int) -> int:
    return 0 if n == 1 else 1 + _collatz(3 * n + 1 if n % 2 else n // 2)


def _ways(steps: int) -> int:
    return 1 if steps == 0 else sum(_ways(steps - k) for k in (1, 2, 3) if k <= steps)


def _walk(moves: str) -> tuple[int, int]:
    return (moves.count("E") - moves.count("W"), moves.count("N") - moves.count("S"))


NUMBER_TASKS = (
    task("count_above_mean|above_mean(numbers: counts) -> int",
         "count the numbers of a list that are above its mean", "",
         lambda n: sum(x * len(n) > sum(n) for x in n)),
    task("outer_inner|fold_list(numbers: ints) -> list[int]",
         "add the first and last number of a list, the second and second to last, and so on",
         "Fold numbers in the middle: item i is numbers[i] + numbers[-1 - i]. What has no partner "
         "stays as it is.",
         lambda n: [n[i] + n[-1 - i] for i in range(len(n) // 2)]
         + ([n[len(n) // 2]] if len(n) % 2 else [])),
    task("blocks_needed|pyramid_blocks(layers: small) -> int",
         "count the blocks of a square pyramid with a given number of layers",
         "The top layer is one block, the next is 2 by 2, then 3 by 3. Count all blocks.",
         lambda n: sum(k * k for k in range(1, n + 1))),
    task("second_largest|runner_up(numbers: ints) -> int | None",
         "return the second largest distinct number in a list",
         "Return the second largest distinct value of numbers, or None if there is no such value.",
         lambda n: sorted(set(n))[-2] if len(set(n)) > 1 else None),
    task("running_total|cumulative_sums(numbers: ints) -> list[int]",
         "compute the running totals of a list",
         "Return a list in which item i is the sum of numbers[0] up to numbers[i].",
         lambda n: list(accumulate(n))),
    task("moving_average(values: floats, size: tiny) -> list[float]",
         "compute the moving averages of a list for a given window size",
         "Slide a window of the given size over values and return the mean of each full window, "
         "rounded to two decimals. If the window is longer than the list, return an empty list.",
         lambda v, s: [round(sum(v[i:i + s]) / s, 2) for i in range(len(v) - s + 1)]),
    task("rotate_left|shift_left(items: ints, steps: tiny) -> list[int]",
         "rotate a list to the left by a number of steps",
         "Move the first `steps` items to the end and return the new list. "
         "More steps than items go round.",
         lambda n, k: n[k % len(n):] + n[:k % len(n)]),
    task("chunk|split_in_chunks(items: ints, size: tiny) -> list[list[int]]",
         "split a list into chunks of a given size",
         "Split items into consecutive lists of `size` items. The last one may be shorter.",
         lambda n, k: [n[i:i + k] for i in range(0, len(n), k)]),
    task("differences|gaps(numbers: ints) -> list[int]",
         "return the differences between neighbours in a list",
         "Return each number minus the one before it; the result is one shorter than numbers.",
         lambda n: [b - a for a, b in pairwise(n)]),
    task("local_peaks|find_peaks(numbers: counts) -> list[int]",
         "find the indexes of all numbers that are greater than both neighbours",
         "Return the indexes of the peaks of numbers. A peak is greater than both of its "
         "neighbours, so the first and the last number are never peaks.",
         lambda n: [i for i in range(1, len(n) - 1) if n[i - 1] < n[i] > n[i + 1]]),
    task("longest_increasing_run|longest_rise(numbers: ints) -> int",
         "tell how long the longest strictly increasing run of a list is",
         "Return how many numbers in a row get strictly larger, at most.", _longest_rise),
    task("most_frequent|mode_of(numbers: repeats) -> int",
         "return the most frequent number in a list; the smallest wins a tie",
         "Return the number that occurs most often. If several do, return the smallest of them.",
         lambda n: min(set(n), key=lambda x: (-n.count(x), x))),
    task("span|value_range(numbers: ints) -> int",
         "return the difference between the largest and the smallest number of a list", "",
         lambda n: max(n) - min(n)),
    task("clamp_all|limit_values(numbers: ints, low: tiny, high: small) -> list[int]",
         "limit every number of a list to a lower and an upper bound",
         "Replace numbers below low with low, and numbers above high with high. "
         "The upper bound is applied last.",
         lambda n, a, b: [min(max(x, a), b) for x in n]),
    task("zigzag|weave(first: ints, second: ints) -> list[int]",
         "take items from two lists in turn, and then what is left of the longer one",
         "Weave two lists: an item of first, an item of second, and so on. What is left of the "
         "longer list comes at the end.",
         lambda a, b: [x for p in zip(a, b, strict=False) for x in p]
         + a[len(b):] + b[len(a):]),
    task("count_inversions|inversions(numbers: counts) -> int",
         "count the pairs of a list that are out of order",
         "Count the pairs of positions i < j with numbers[i] > numbers[j].",
         lambda n: sum(a > b for i, a in enumerate(n) for b in n[i + 1:])),
    task("equilibrium_index|balance_point(numbers: counts) -> int",
         "return the first index where the sum on the left equals the sum on the right, or -1",
         "Return the first index i with sum(numbers[:i]) == sum(numbers[i + 1:]), or -1.",
         lambda n: next((i for i in range(len(n)) if sum(n[:i]) == sum(n[i + 1:])), -1)),
    task("split_by_sign(numbers: ints) -> tuple[list[int], list[int]]",
         "split a list into the negative numbers and the others",
         "Return two lists: the negative numbers, and all others, both in their old order.",
         lambda n: ([x for x in n if x < 0], [x for x in n if x >= 0])),
    task("count_missing|num_skipped(numbers: sorted) -> int",
         "count the whole numbers that a sorted list skips between its ends",
         "numbers is sorted. Count the whole numbers between its first and last that it lacks.",
         lambda n: n[-1] - n[0] + 1 - len(set(n))),
    task("insert_position|where_to_insert(numbers: sorted, value: whole) -> int",
         "return the position at which a value has to be inserted to keep a list sorted",
         "Return the leftmost position at which value can be inserted so that the list "
         "stays sorted.",
         lambda n, v: sum(x < v for x in n)),
    task("every_nth|take_every(items: ints, step: tiny) -> list[int]",
         "pick every nth item of a list, starting with the first", "",
         lambda n, k: n[::k]),
    task("pairs_with_difference|count_pairs(numbers: counts, gap: tiny) -> int",
         "count the pairs of a list whose difference is a given number",
         "Count the pairs of positions whose numbers differ by exactly gap.",
         lambda n, d: sum(abs(a - b) == d for i, a in enumerate(n) for b in n[i + 1:])),
    task("stock_profit|best_trade(prices: counts) -> int",
         "return the best profit from buying once and selling once later",
         "prices[i] is the price on day i. Return the largest profit that buying on one day and "
         "selling on a later day can make, or 0 if there is none.",
         lambda p: max((b - a for i, a in enumerate(p) for b in p[i:]), default=0)),
    task("trapped_water|water_level(heights: counts) -> int",
         "compute how much rain water is held between bars of given heights",
         "heights are bars of width 1 that stand side by side. Return the units of water that "
         "stay between them after rain.",
         lambda h: sum(min(max(h[:i + 1]), max(h[i:])) - x for i, x in enumerate(h))),
    task("digit_product|multiply_digits(number: large) -> int",
         "multiply the digits of a number",
         "Return the product of the decimal digits of number.",
         lambda n: math.prod(map(int, str(n)))),
    task("digital_root|repeated_digit_sum(number: large) -> int",
         "add the digits of a number again and again until one digit is left", "",
         lambda n: 1 + (n - 1) % 9),
    task("alternating_digit_sum(number: large) -> int",
         "add and subtract the digits of a number in turn, starting with plus for the first",
         "Return first digit - second digit + third digit, and so on.",
         lambda n: sum(int(d) * (-1) ** i for i, d in enumerate(str(n)))),
    task("collatz_steps|steps_to_one(n: whole) -> int",
         "count the steps of the Collatz sequence until it reaches 1",
         "Halve n if it is even, else replace it with 3 * n + 1. Return how many times this has "
         "to be done until n is 1.",
         lambda n: _collatz(n)),
    task("divisor_list|list_divisors(n: whole) -> list[int]",
         "list all positive divisors of a number in increasing order", "",
         lambda n: [d for d in range(1, n + 1) if n % d == 0]),
    task("triangular_numbers|first_triangles(count: small) -> list[int]",
         "list the first triangular numbers",
         "Return the first `count` triangular numbers: 1, 1 + 2, 1 + 2 + 3, ...",
         lambda n: [k * (k + 1) // 2 for k in range(1, n + 1)]),
    task("pascal_row|binomial_row(n: small) -> list[int]",
         "compute a row of Pascal's triangle",
         "Return row n of Pascal's triangle; row 0 is [1].",
         lambda n: [math.comb(n, k) for k in range(n + 1)]),
    task("trailing_zeros_of_factorial(n: whole) -> int",
         "count the zeros at the end of the factorial of a number", "",
         lambda n: sum(n // 5**k for k in range(1, 5))),
    task("staircase_ways|climb(steps: small) -> int",
         "count the ways to climb stairs when each move takes one, two or three steps",
         "Return in how many ways stairs with the given number of steps can be climbed, taking "
         "one, two or three at a time.",
         lambda n: _ways(n)),
    task("coin_count|fewest_coins(amount: whole) -> int",
         "return the fewest coins of 1, 5, 10 and 25 cents that make an amount", "",
         lambda a: a // 25 + a % 25 // 10 + a % 25 % 10 // 5 + a % 5),
    task("leap_years(first: whole, last: whole) -> int",
         "count the leap years of the 21st century between two two-digit years",
         "Count the leap years from 2000 + first to 2000 + last, both included. If last is "
         "before first, return 0.",
         lambda a, b: sum(y % 4 == 0 for y in range(a, b + 1))),
    task("manhattan_distance|grid_distance(a: point, b: point) -> int",
         "compute the distance of two points on a grid where one can only go straight",
         "Return the sum of the distances in x and in y.",
         lambda a, b: abs(a[0] - b[0]) + abs(a[1] - b[1])),
    task("quadrant|find_quadrant(point: point) -> int",
         "tell in which quadrant of the plane a point lies, 0 for a point on an axis", "",
         lambda p: 0 if 0 in p else {(1, 1): 1, (0, 1): 2, (0, 0): 3}.get((p[0] > 0, p[1] > 0), 4)),
    task("follow_moves|end_position(moves: moves) -> tuple[int, int]",
         "find where a robot ends that follows a string of moves N, E, S and W from (0, 0)",
         "The robot starts at (0, 0). N adds 1 to y, S subtracts 1, E adds 1 to x and W "
         "subtracts 1. Return where it stops.", _walk),
    task("row_sums|sum_rows(matrix: matrix) -> list[int]",
         "add the numbers of each row of a matrix", "",
         lambda m: [sum(r) for r in m]),
    task("column_maxima|max_per_column(matrix: matrix) -> list[int]",
         "return the largest number of each column of a matrix", "",
         lambda m: [max(c) for c in zip(*m, strict=True)]),
    task("transpose|flip_matrix(matrix: matrix) -> list[list[int]]",
         "exchange rows and columns of a matrix", "",
         lambda m: [list(c) for c in zip(*m, strict=True)]),
    task("rotate_clockwise|turn_right(matrix: matrix) -> list[list[int]]",
         "turn a matrix by 90 degrees clockwise", "",
         lambda m: [list(c) for c in zip(*m[::-1], strict=True)]),
    task("border_sum|sum_of_edges(matrix: matrix) -> int",
         "add all numbers on the border of a matrix", "",
         lambda m: sum(x for i, r in enumerate(m) for j, x in enumerate(r)
                       if i in (0, len(m) - 1) or j in (0, len(r) - 1))),
    task("flatten_unique|merge_lists(lists: lists) -> list[int]",
         "merge several lists into one without repeats, largest number first", "",
         lambda n: sorted({x for r in n for x in r}, reverse=True)),
    task("common_items|in_all_lists(lists: lists) -> list[int]",
         "list the numbers that are in each of several lists, in increasing order", "",
         lambda n: sorted(set(n[0]).intersection(*n[1:]))),
)  # fmt: skip
