"""A small set of prompts written for this project, and words for random texts. Data alone."""

from __future__ import annotations

PROMPTS = (
    "A cinema has 14 rows of 22 seats. 190 tickets are sold. How many seats stay empty?",
    "Write a Python function that removes duplicates from a list and keeps the order.",
    "Explain to a beginner what a database index is and when it does not help.",
    "A cyclist rides 42 km in 1 hour 45 minutes. What is the average speed in km/h?",
    "Write a polite email that moves a meeting from Tuesday to Thursday afternoon.",
    "List the steps to change a flat bicycle tyre.",
    "Solve 5x + 3 = 2x + 24 and check the result.",
    "Write a Python class for a stack with push, pop and peek, and show how it is used.",
    "Why do leaves change colour in autumn?",
    "Write a short story about a lost umbrella, in three paragraphs.",
    "What is the difference between weather and climate?",
    "Write an SQL query that finds the three customers with the most orders.",
    "A recipe for 4 people needs 300 g of rice. How much is needed for 14 people?",
    "Describe how a letter travels from one country to another.",
    "Write a bash script that renames all .jpeg files of a folder to .jpg.",
    "Give arguments for and against working from home.",
    "What is the sum of all whole numbers from 1 to 250? Show how you get it.",
    "Translate into French: The library is closed on Mondays.",
    "Write a Python function that parses a date of the form 2024-03-09 without libraries.",
    "Explain recursion with an example that is not the factorial.",
    "Summarise the plot of a film about explorers who find a city under the ice.",
    "A box holds 3 red, 4 blue and 5 green balls. What is the chance of drawing a blue one?",
    "Write a haiku about a railway station in the morning.",
    "How does a heat pump warm a house with cold outside air?",
)

# Short and common, so that most are one token in most vocabularies.
_WORDS = """
apple bird blue boat book bread bridge brown car cat chair city class cloud coat coin cold cook corn
cup dance dark day desk dog door dream dry ear east egg eye face farm field fire fish floor flower
food foot forest friend game garden glass gold grass green hand hat head heart hill home horse house
ice iron island key king kitchen lake lamp land leaf letter light line long man map market milk moon
morning mountain mouse music name night north ocean oil old paper park path people piano picture
plane plant queen quiet rain red rice river road rock roof room rose salt sand school sea seed ship
shoe sky small snow song south spring star stone story street sugar summer sun table tea tiger time
town train tree valley village wall water west wheel white wind window winter wood word yellow young
"""
WORDS = tuple(_WORDS.split())
