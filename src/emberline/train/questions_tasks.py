"""Programming tasks in a sentence: all hand-written. A line is a task."""

from __future__ import annotations

# What stands after "a function to".
PYTHON_TASKS = tuple("""
check if a string <contains only digits|starts and ends with the same letter|is a valid hex color>
check whether a list <of numbers is strictly decreasing|contains any repeated item|is a permutation>
check whether two <lists|strings|tuples> have <any|no|at least <2..4>> items in common
check whether a number is <a power of <2|3|4>|a perfect number|an Armstrong number|a square>
check whether a year is a leap year
check whether a given key is in a nested dictionary
check whether a sentence uses every letter of the alphabet
check whether a point lies inside a <circle|rectangle|triangle>
check whether one string is a rotation of another
check whether a password has at least <6..12> characters, a digit and a capital letter
check whether a binary tree is <balanced|a search tree|symmetric>
check whether a graph has a cycle
check whether a matrix is <symmetric|diagonal|a magic square|an identity matrix>
convert <kilometers to miles|Celsius to Fahrenheit|pounds to kilograms|degrees to radians>
convert a list of <tuples|pairs> into a dictionary
convert a number of seconds to hours, minutes and seconds
convert a Roman numeral to an integer
convert an integer to <binary|hexadecimal|base <3..9>> without using built-in functions
convert a string of comma-separated values to a list of <integers|floats|stripped strings>
convert a nested list to a flat list
convert a dictionary to a sorted list of tuples
count the <vowels|consonants|words|upper case letters|punctuation marks|digits> in a string
count the <even|odd|negative|prime> numbers in a <list|tuple>
count how many times a <word|substring> occurs in a text, without regard to case
count the set bits of a non-negative integer
count the leaves of a binary tree
count the islands in a grid of zeros and ones
count the lines, words and characters of a file
count the <weekdays|Sundays|days> between two dates
count the number of ways to make <change for an amount|a sum with dice> from a list of values
compute the area of a <trapezoid|regular polygon|ring|triangle from its three sides|circle sector>
compute the volume of a <cone|pyramid|cylinder|torus|sphere>
compute the surface area of a <cube|cylinder|box|cone>
compute the perimeter of a polygon given as a list of points
compute the greatest common divisor of a list of numbers
compute the least common multiple of <two|three> numbers
compute the factorial of a number <with recursion|with a loop>
compute the nth <Fibonacci|Lucas|Catalan|pentagonal|hexagonal|tetrahedral> number
compute the sum of the <squares|cubes|first n even numbers|digits> of a number up to <n|a limit>
compute the <mean|median|variance|standard deviation|geometric mean> of a list of numbers
compute the <dot|cross> product of two vectors
compute the product of two matrices without any library
compute the determinant of a <2|3> by <2|3> matrix
compute the edit distance between two words
compute the <monthly payment of a loan|simple interest|compound interest on savings>
compute the body mass index and name the category
compute the power of a number without the ** operator
compute the bitwise <and|or|xor> of all numbers in a list
compute the distance between two places given as latitude and longitude
compute the n-th row of a multiplication table
find the <largest|smallest|second smallest|third largest> <number|item> in a list
find the <longest|shortest> <word|string> in a list of strings
find the <longest common prefix|longest common suffix> of a list of strings
find the <longest palindrome|longest run of vowels> in a string
find the <index of the maximum|indexes of all zeros|index of the first negative number> in a list
find the <first|last> <repeated|non-repeated> character in a string
find the <missing|duplicate> number in a list of the numbers from 1 to n
find the <union|intersection|difference> of two lists, without repeats
find the contiguous part of a list with the largest sum
find the kth <largest|smallest> item of an unsorted list
find the median of two sorted lists
find all <pairs|triples> in a list whose sum is a given number
find all <anagrams|palindromes|words with a double letter> in a list of words
find all <email addresses|dates|phone numbers|URLs|hashtags> in a text with a regular expression
find all prime numbers below a limit with a sieve
find all files in a folder that are larger than <1..50> <kilobytes|megabytes>
find the shortest path in an unweighted graph
find the number of days in a given month of a given year
find the closest number to a target in a sorted list
find the day of the week for a date
find the two numbers of a list with the smallest difference
find the depth of a nested <list|dictionary>
find the most common <word|letter|bigram> in a text
find the majority item of a list, if there is one
find the intersection point of two lines
find the roots of a quadratic equation
find the length of the longest common subsequence of two strings
filter a list of dictionaries by the value of a key
filter the <strings that start with a vowel|tuples with a None|numbers out of range> from a list
remove <all spaces|all digits|all vowels|repeated letters|HTML tags|punctuation> from a string
remove <every second item|all None values|empty strings|all copies of a value> from a list
remove the <first|last> occurrence of <a character from a string|an item from a list>
remove the duplicates of a list but keep the order
remove a key from a dictionary without raising an error
reverse <a string|a list in place|the words of a sentence|the digits of a number|a linked list>
reverse every group of <2..5> items of a list
sort a list of <tuples by the second item|words by length|dates|dictionaries by a key>
sort a list with <bubble sort|merge sort|quicksort|insertion sort|heap sort>
sort a dictionary by <value|key> in descending order
sort the words of a sentence <alphabetically|by their last letter|by length>
swap <the first and last item of a list|keys and values of a dictionary>
split a <string|list> <at every nth item|into two halves|at a separator|into equal parts>
merge two <sorted lists|dictionaries|strings by alternating letters|lists of tuples by key>
merge a list of overlapping time spans
multiply all numbers of a <list|tuple>
multiply two numbers without the * operator
add two <matrices|binary strings|lists item by item|fractions|polynomials>
add a prefix to each <word of a list|key of a dictionary|line of a text>
subtract one list from another item by item
replace <spaces with underscores|every vowel with a star|negative numbers by zero|tabs by spaces>
replace all words of a text that are in a dictionary
insert an item <before each item of a list|at the middle of a list|into a sorted linked list>
move all <zeros|negative numbers|None values> to the <end|front> of a list
rotate <a list by k places|a square matrix by 90 degrees|the letters of a string>
shift every letter of a message by <a given number of|<2..20>> places in the alphabet
encode and decode a message with <a Vigenere cipher|Morse code|a substitution cipher|run lengths>
generate all <subsets|permutations|combinations of size k> of a list
generate a random password of a given length
generate the first n <prime numbers|square numbers|rows of Pascal's triangle|happy numbers>
generate a <spiral|checkerboard|multiplication table|random maze> as a list of lists
print a <pyramid|diamond|right triangle|hollow square> of stars with n rows
print the numbers from 1 to <30..100/10>, but a word for multiples of <3|4> and another for <5|7>
print a calendar for a given month
draw a text histogram of a dictionary of counts
read a CSV file and return <the mean of a column|its rows as dictionaries|the largest value>
read a JSON file and <print all keys|return the items with a given field|sort its records>
read a text file and return <the longest line|all lines with a word|the number of blank lines>
write a list of dictionaries to a <CSV|JSON> file
parse a <date|time|duration|simple arithmetic expression|log line|URL|version string>
parse a string such as "<2..9>h <10..50>m" into a number of minutes
validate <an IPv4 address|an email address|a credit card number|an ISBN|a chess move|a Sudoku row>
simulate <rolling two dice n times|a coin toss|a random walk|a queue at a counter|the game of life>
solve <the Tower of Hanoi|a Sudoku|the knapsack problem|the n queens problem|a maze>
search a sorted list with binary search
search a matrix for a word in all directions
traverse a binary tree in <preorder|inorder|postorder|level order>
build a <frequency table|nested dictionary|inverted index|binary tree> from a list
group a list of <words by their first letter|numbers by remainder|people by age|orders by customer>
group anagrams together
flatten a nested dictionary with dots in the keys
pick a random <item with given weights|sample without repeats|card from a deck>
round a number to the nearest <5|10|quarter|multiple of n>
round every number in a list and add them up
truncate a text to n words and add an ellipsis
capitalize <every word of a title except short ones|the first letter of each sentence>
center a text in a box of stars
wrap a long text at a given width
retry a function up to <3..8> times when it raises an exception
measure how long another function takes
cache the results of a slow function
compose a list of functions into one
apply a function to every <value of a dictionary|item of a nested list|pair of neighbours>
zip <two|three> lists into a list of dictionaries
transpose a list of lists
compare two <version numbers|dictionaries and list the differences|lists regardless of order>
determine the winner of <a tic-tac-toe board|rock, paper, scissors|a list of votes>
determine the type of a triangle from its sides
determine whether a bracket can be removed to make a string balanced
calculate the <tip|total of a shopping cart|price after several discounts|change in coins and bills>
calculate the <number of trees in a forest|angle between clock hands|age in days>
estimate pi <with random numbers|from a series>
extract the <file extension|domain name|initials|numbers|quoted parts> from a string
extract every nth <row|column> of a matrix
partition a list around a pivot
interleave <two|three> lists of the same length
list the <divisors|prime factors|digits|partitions> of a number
list all <substrings|prefixes|rotations> of a string
map the words of a list to their lengths
normalize a list of numbers so that <they add up to 1|the largest is 1>
pad a <list with zeros|string with dots> to a given length
sum <the diagonal of a matrix|all numbers in a nested list|a list without its extremes>
sum the <even|odd> <indexes|numbers|digits> of a list
track the <running maximum|running average> of a stream of numbers
unpack a list of pairs into two lists
""".strip().split("\n"))  # fmt: skip

# What stands after "Write".
OTHER_TASKS = tuple("""
a JavaScript function that <removes duplicates from an array|formats a date>
a JavaScript function that <sorts objects by a property|counts words|deep-copies an object>
a TypeScript <interface for a user|generic stack|function that groups items by a key>
a Java <method that reverses a string|class for a bank account|program that sorts an array>
a Java method that finds the <largest|smallest|most frequent> <number|character> of an array
a C function that <reverses a string in place|counts the words of a string|swaps two integers>
a C++ <class for a matrix|function that merges two sorted vectors|program that reads n numbers>
a C# method that <checks for a palindrome|reads a file line by line|filters a list with LINQ>
a Go function that <counts words in a string|reverses a slice|fetches a URL with a timeout>
a Rust function that <sums a vector|parses a number and handles the error|finds the longest string>
a bash script that <renames all .<txt|jpg|log> files|backs up a folder|finds large files>
a bash one-liner that counts the <lines|unique words|files> in a <file|folder>
a SQL query for the <3..10> customers with the most orders, from tables customers and orders
a SQL query that lists <employees paid above the average|products never sold|orders of last month>
a SQL statement that creates a table for <books|students|flights|recipes> with types
a regular expression that matches <a date like 2024-05-17|a phone number|a hex color|a price>
an HTML page with a <contact form|table of <fruit>|navigation bar|photo gallery>
CSS that <centers a box|makes a two-column layout|gives buttons a hover effect>
a Python class for a <stack|queue|linked list|shopping cart|library|deck of cards|timer>
a Python class for a <rectangle|fraction|polynomial|matrix|parking lot|vending machine>
a Python decorator that <logs calls|caches results|limits the rate of calls|checks argument types>
a Python generator that yields <prime numbers|chunks of a file|Fibonacci numbers|dates of a month>
a Python script that <downloads a web page|resizes images|sends an email|finds duplicate files>
a Python script that <converts a CSV file to JSON|sorts photos by date|watches a folder for changes>
a small command line program in Python for <to-do lists|unit conversion|flash cards|a guessing game>
a Flask route that <returns JSON|accepts an uploaded file|adds two numbers from the query>
pandas code that <fills missing values|groups sales by month|joins two tables|drops duplicate rows>
NumPy code that <normalizes the columns of a matrix|finds the nearest neighbours|bins values>
matplotlib code for a <bar chart|line plot with two axes|scatter plot with a trend line>
unit tests for a function that <adds two fractions|validates emails|parses dates|sorts words>
pseudocode for <binary search|Dijkstra's algorithm|an elevator|a spell checker|a traffic light>
a recursive function for <the sum of a list|the depth of a tree|all paths in a grid> and explain it
a Dockerfile for a small <Python|Node.js|Go> web app
a function in <JavaScript|Java|C++|Go|Rust|Kotlin|Swift> to <test for primes|sort names>
a program in <JavaScript|Java|C++|Go|Rust|Ruby|PHP> that <prints a pyramid|reverses its input>
""".strip().split("\n"))  # fmt: skip
