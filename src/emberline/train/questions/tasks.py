"""Programming tasks in a sentence: all hand-written. A line is a task."""

from __future__ import annotations

# What stands after "a function to".
PYTHON_TASKS = tuple("""
tell whether a text <contains only digits|starts and ends with the same letter|is a valid hex color>
tell whether a list <of numbers is strictly decreasing|contains any repeated item|is a permutation>
check whether a number is <a power of <2|3|4>|a perfect number|an Armstrong number|a square>
check whether a given key is in a nested dictionary
check whether a sentence uses every letter of the alphabet
check whether a point lies inside a <circle|rectangle|triangle>
check whether one string is a rotation of another
check whether a password has at least <6..12> characters, a digit and a capital letter
check whether a binary tree is <balanced|a search tree|symmetric>
check whether a graph has a cycle
check whether a matrix is <symmetric|diagonal|a magic square|an identity matrix>
convert <kilometers to miles|Celsius to Fahrenheit|pounds to kilograms|degrees to radians>
convert a number of seconds to hours, minutes and seconds
convert a Roman numeral to an integer
convert an integer to <binary|hexadecimal|base <3..9>> without using built-in functions
convert a string of comma-separated values to a list of <integers|floats|stripped strings>
convert a dictionary to a sorted list of tuples
count the <consonants|words|sentences|punctuation marks|digits> of a text
count the <even|odd|negative|prime> numbers in a <list|tuple>
count how many times a <word|substring> occurs in a text, without regard to case
count the leaves of a binary tree
count the islands in a grid of zeros and ones
count the lines, words and characters of a file
count the <weekdays|Sundays|days> between two dates
count in how many ways <coins give an amount|dice give a sum>
compute the area of a <trapezoid|regular polygon|ring|kite|circle sector>
compute the volume of a <pyramid|torus|prism|spherical cap>
compute the surface area of a <cube|cylinder|box|cone>
compute the perimeter of a polygon given as a list of points
compute the greatest common divisor of a list of numbers
compute the factorial of a number <with recursion|with a loop>
compute the nth <Fibonacci|Catalan|Bell|triangular> number
add up the <squares|cubes|reciprocals> of all whole numbers up to <n|a limit>
compute the <mean|median|variance|standard deviation|geometric mean> of a list of numbers
compute the <dot|cross> product of two vectors
compute the product of two matrices without any library
compute the determinant of a <2|3> by <2|3> matrix
compute the edit distance between two words
compute the <monthly payment of a loan|simple interest|compound interest on savings>
compute the body mass index and name the category
compute the distance between two places given as latitude and longitude
return the <largest|smallest|third largest> <number|item> in a list
return the <longest|shortest> <word|string> in a list of strings
return the <longest common prefix|longest common suffix> of a list of strings
return the <longest palindrome|longest run of vowels> in a string
return the <index of the maximum|indexes of all zeros|index of the first negative number> in a list
return the <missing|duplicate> number in a list of the numbers from 1 to n
return the kth <largest|smallest> item of an unsorted list
list all pairs in a list whose product is a given number
list all <anagrams|palindromes|words with a double letter> in a list of words
list all <email addresses|dates|phone numbers|URLs|hashtags> in a text with a regular expression
list all prime numbers below a limit with a sieve
list all files in a folder that are larger than <1..50> <kilobytes|megabytes>
return the shortest path in an unweighted graph
return the day of the week for a date
return the depth of a nested <list|dictionary>
return the most common <word|letter|bigram> in a text
return the intersection point of two lines
return the roots of a quadratic equation
measure the longest <common substring|common subsequence> of two texts
filter a list of dictionaries by the value of a key
filter the <strings that start with a vowel|numbers out of range> from a list
remove <all spaces|all digits|repeated letters|HTML tags|punctuation> from a string
remove <every second item|all None values|empty strings|all copies of a value> from a list
reverse <a string|a list in place|the words of a sentence|the digits of a number|a linked list>
reverse every group of <2..5> items of a list
order a list of <pairs by their second item|words by length|dates|dictionaries by a key>
sort a list with <bubble sort|merge sort|quicksort|insertion sort|heap sort>
put the items of a dictionary in <ascending|descending> order of <value|key>
swap <the first and last item of a list|keys and values of a dictionary>
split a <string|list> <at every nth item|into two halves|at a separator|into equal parts>
merge two <sorted lists|dictionaries|strings by alternating letters|lists of tuples by key>
merge a list of overlapping time spans
add a prefix to each <word of a list|key of a dictionary|line of a text>
replace <spaces with underscores|every vowel with a star|negative numbers by zero|tabs by spaces>
replace all words of a text that are in a dictionary
insert an item <at the middle of a list|into a sorted linked list>
rotate <a list by k places|a square matrix by 90 degrees|the letters of a string>
encode and decode a message with <a Vigenere cipher|Morse code|a substitution cipher|run lengths>
generate all <subsets|permutations|combinations of size k> of a list
generate a random password of a given length
generate a <spiral|checkerboard|multiplication table|random maze> as a list of lists
print a <pyramid|diamond|right triangle|hollow square> of stars with n rows
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
search a matrix for a word in all directions
traverse a binary tree in <preorder|inorder|postorder|level order>
build a <frequency table|nested dictionary|inverted index|binary tree> from a list
group a list of <words by their first letter|numbers by remainder|people by age|orders by customer>
flatten a nested dictionary with dots in the keys
pick a random <item with given weights|sample without repeats|card from a deck>
round a number to the nearest <5|10|quarter|multiple of n>
truncate a text to n words and add an ellipsis
capitalize <every word of a title except short ones|the first letter of each sentence>
wrap a long text at a given width
retry a function up to <3..8> times when it raises an exception
cache the results of a slow function
compose a list of functions into one
zip <two|three> lists into a list of dictionaries
determine the winner of <a tic-tac-toe board|rock, paper, scissors|a list of votes>
determine the type of a triangle from its sides
calculate the <tip|total of a shopping cart|price after several discounts|change in coins and bills>
estimate pi <with random numbers|from a series>
extract the <file extension|domain name|initials|numbers|quoted parts> from a string
extract every nth <row|column> of a matrix
list the <divisors|digits|partitions> of a number
list all <substrings|suffixes|rotations> of a string
normalize a list of numbers so that <they add up to 1|the largest is 1>
pad a <list with zeros|string with dots> to a given length
sum <the diagonal of a matrix|all numbers in a nested list|a list without its extremes>
track the <running average|three largest values> of a stream of numbers
""".strip().split("\n"))  # fmt: skip

# What stands after "Write".
OTHER_TASKS = tuple("""
a JavaScript function that <sorts objects by a property|counts words|deep-copies an object>
a TypeScript <interface for a user|generic stack|function that groups items by a key>
a Java <method that reverses a string|class for a bank account|program that sorts an array>
a C function that <reverses a string in place|counts the words of a string|swaps two integers>
a C++ <class for a matrix|function that merges two sorted vectors|program that reads n numbers>
a C# method that <checks for a palindrome|reads a file line by line|filters a list with LINQ>
a Go function that <counts words in a string|reverses a slice|fetches a URL with a timeout>
a Rust function that <sums a vector|parses a number and handles the error|finds the longest string>
a bash script that <renames all .<txt|jpg|log> files|backs up a folder|finds large files>
a SQL query for the <3..10> customers with the most orders, from tables customers and orders
a SQL query that lists <employees paid above the average|products never sold|orders of last month>
a SQL statement that creates a table for <books|students|flights|recipes> with types
a regular expression that matches <a date like 2024-05-17|a phone number|a hex color|a price>
an HTML page with a <contact form|table of <fruit>|navigation bar|photo gallery>
a Python class for a <stack|queue|linked list|shopping cart|library|deck of cards|timer>
a Python class for a <rectangle|fraction|polynomial|matrix|parking lot|vending machine>
a Python decorator that <logs calls|caches results|limits the rate of calls|checks argument types>
a Python generator that yields <prime numbers|chunks of a file|Fibonacci numbers|dates of a month>
a Python script that <downloads a web page|resizes images|sends an email|finds duplicate files>
a Python script that <converts a CSV file to JSON|sorts photos by date|watches a folder for changes>
a small command line program in Python for <to-do lists|unit conversion|flash cards|a guessing game>
a Flask route that <returns JSON|accepts an uploaded file|adds two numbers from the query>
NumPy code that <normalizes the columns of a matrix|finds the nearest neighbours|bins values>
matplotlib code for a <bar chart|line plot with two axes|scatter plot with a trend line>
unit tests for a function that <adds two fractions|validates emails|parses dates|sorts words>
pseudocode for <binary search|Dijkstra's algorithm|an elevator|a spell checker|a traffic light>
a Dockerfile for a small <Python|Node.js|Go> web app
a function in <JavaScript|Java|C++|Go|Rust|Kotlin|Swift> to <test for primes|sort names>
""".strip().split("\n"))  # fmt: skip
