"""Questions that bring a text: extraction, summaries, rewriting, translation. Hand-written."""

from __future__ import annotations

from emberline.train.questions.fill import paragraphs

# Short texts with facts to find, all made up.
PASSAGES = paragraphs("""
The <shop> on <Oak|Mill|River|Church> Street opened in <1950..2015> and is run by <name> and <his>
<sister|father|cousin>. It sells <goods>s, <goods2>s and, since <month>, also <baked>s. On
<weekday>s it stays open until <7..9> p.m. Last year it had about <2000..9000/500> customers, a
third of them tourists.

<name>, a <job> from <city>, spent <two|three|six> months in <country> to learn <hobby>. "The
hardest part was the language," <he> said. "After <four|five|eight> weeks I dreamed in it." <He>
plans to return in <month> with <his> family.

The town council voted on <weekday> to turn the old <factory|school|barracks|warehouse> into a
<place>. The work will cost <2..9> million <dollars|euros> and take <12..36/6> months. Critics say
that the money should be spent on <roads|schools|housing> instead. A second vote is planned for
<month>.

Order <1000..9999>: <2..6> <goods>s at $<8..40> and <1..4> <goods2>s at $<5..30>, ordered by <name>
on <month> <1..28>. Shipping is $<4..12>. The customer asked for delivery before <weekday> and left
the phone number 555-01<10..99>.

Researchers followed <200..900/50> people for <two|five|ten> years. Those who practiced <hobby> at
least twice a week slept <20..50/5> minutes longer and reported less stress. The authors warn that
the study does not prove a cause: healthier people may simply have more time for it.

Dear team, the meeting about the new <product> moves from <weekday> to <weekday2> at <9..11> a.m. in
room <100..420>. <Name> will present the budget, and <name2> the designs. Please send your comments
by noon on the day before. Best, <name3>

<Animal>s were kept on the island for centuries, mostly for milk and wool. When the last farm closed
in <1960..1999>, about <20..80> of them stayed behind. Today more than <300..900/50> live there
without owners, and <name>, a <job>, counts them every <month>.

<name> was born in <city> in <1900..1960>, moved to <city2> at the age of <6..20> and worked as a
<job> before <he> became known for a series of <children's books|landscape paintings|radio
plays|bridges>. <He> won <two|three|four> national prizes and died in <1970..2015>.

On <month> <1..28>, a <vehicle> hit a parked <vehicle2> near the <place> in <city>. Nobody was hurt,
but the road was closed for <two|three|four> hours. According to the police, the driver, <a:20..80>,
had looked at a phone. The damage is about $<2000..9000/500>.

I stayed at this hotel for <two|three|five> nights. The room was <clean|small|bright> and the staff,
above all <name> at the desk, were wonderful. Breakfast was <cold|excellent|the same every day>, and
the street was <noisy|quiet> at night. For $<80..220/10> a night I would <come again|look
elsewhere>.
""")

# What is asked about one of them; @ stands for the text.
ABOUT_PASSAGES = paragraphs("""
Summarize <the following text|this> in <one sentence|two sentences|<10..25/5> words>: ¶¶ @

@ ¶¶ What is the text mainly about? Give it a title.

Extract all <names|numbers|dates and times|places> from this text as a <list|JSON array|table>. ¶¶ @

Read the text and <list the key facts|write three questions that it answers|say what is not known>.
¶¶ @

Text: ¶ @ ¶¶ Question: <Who is named, and what do they do?|Which numbers are given, and what do they
mean?|What happens first and what later?> Answer <briefly|in full sentences>.

Turn this into JSON with sensible keys. Reply with the JSON only. ¶¶ @

Rewrite the text below <for a child|in the present tense|in a formal tone|as a short dialogue|as a
headline and three bullet points|from another point of view|in the style of <style>>. ¶¶ @

Translate into <language>: ¶¶ @

Is the tone of this text <positive, negative or neutral|formal or casual>? Give a reason. ¶¶ @

@ ¶¶ Based on this, what might happen next?

Make a table of the facts in this text, with <two|three> columns. ¶¶ @

Write a reply of <two|three|four> sentences to this. ¶¶ @

Find anything in this text that can be checked, and anything that is opinion. ¶¶ @

Shorten this to half its length without losing a fact: ¶¶ @

Explain the following to someone who is learning English. Replace hard words. ¶¶ @
""")

# Tables of made-up numbers; every line is a break of its own.
DATA_TABLES = paragraphs("""
¶ name | age | city | score ¶ <name> | <20..60> | <city> | <40..99> ¶ <name2> | <20..60> | <city2> |
<40..99> ¶ <name3> | <20..60> | <city3> | <40..99> ¶ <name4> | <20..60> | <city> | <40..99>

¶ item,price,sold ¶ <goods>,<5..40>,<10..99> ¶ <goods2>,<5..40>,<10..99> ¶ <goods3>,<5..40>,<10..99>
¶ <goods4>,<5..40>,<10..99>

¶ <month>: <20..90> visitors, $<200..900> ¶ <month2>: <20..90> visitors, $<200..900> ¶ <month3>:
<20..90> visitors, $<200..900>

¶ - <weekday>: <dish>, <300..800/10> calories ¶ - <weekday2>: <dish2>, <300..800/10> calories ¶ -
<weekday3>: <dish3>, <300..800/10> calories
""")

# What is asked about one of those; @ stands for the table.
ABOUT_TABLES = paragraphs("""
Here is some data. Which entry <stands out|is the largest|is the smallest>, and why? ¶¶ @

Turn this into <JSON|CSV|a Markdown table|YAML|XML>. Reply with nothing else. ¶¶ @

Describe the data below in <two|three> <short|plain> sentences. ¶¶ @

@ ¶¶ What is the <sum|mean|largest value|smallest value> of the last column?

@ ¶¶ Sort the entries <by their last number|alphabetically|from largest to smallest> and show them
as a list.

What can be <concluded|said|asked> from this, and what not? ¶¶ @

Write a <Python|SQL|spreadsheet> <snippet|expression> that computes the total of the last column of
this data: ¶¶ @
""")

# Requests with a sentence or a few words of their own.
ON_SENTENCES = paragraphs("""
Translate into <language>: "<sentence>"

Translate "<sentence>" into <language> and <language2>, and compare the word order.

Rewrite this sentence <more politely|in the past tense|in the passive voice|as a question|without
the letter e|with simpler words|in the style of <style>>: "<sentence>"

Correct the grammar: "<mistake>"

What is wrong with this sentence? "<mistake>"

Find the <subject|verb|nouns|adjectives> of the sentence "<sentence>"

Give me <three|four|five> other ways to say "<sentence>"

Is this sentence positive, negative or neutral? "<sentence>" Answer with one word.

Continue with <two|three> more sentences: <sentence>

Write a short <story|dialogue|poem> that begins with "<sentence>"

Sort these words alphabetically: <noun>, <noun2>, <noun3>, <noun4>, <noun5>, <noun6>.

Write a sentence with the words <noun>, <noun2> and <noun3>.

Write a short story in which a <thing>, a <thing2> and a <thing3> play a part.

Which of these is the odd one out, and why: <noun>, <noun2>, <noun3> or <city>?

Put these events in order: <name> paid at the <shop>; <he> lost <his> wallet; <he> left the house;
<he> found the wallet on <weekday>.

Sort these numbers from smallest to largest: <1..99>, <100..400>, -<1..50>, <1..9>.<1..9>, <20..90>.

Make a table with the columns <name, age, job|city, country, language|item, price, number> and
<three|four|five> invented rows.

Classify each of these as <food, animal or object|alive or not alive>: <animal>, <thing>, <noun>,
<dish>.

Count the words in this sentence: "<sentence>"

Explain the joke, if there is one: "<sentence>"
""")
