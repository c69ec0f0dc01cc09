"""Open questions of a chat: explanations, advice, role play, puzzles: all hand-written.

Writing is in `writing`; what brings a text of its own, in `passages`.
"""

from __future__ import annotations

from emberline.train.questions.fill import paragraphs

_EXPLAIN = paragraphs("""
Tell me about <science>.

What do scientists know about <science>, and what not yet?

Explain <science> to a <ten-year-old|high school student|curious adult> in <one paragraph|three
sentences|simple words>.

Why should I care about <science>?

Can you explain <tech> with an everyday example?

What are the <advantages and disadvantages|main uses|limits> of <tech>?

What is the difference between <science> and <science2>?

What is the connection, if any, between <science> and <science2>?

I have an exam about <science> tomorrow. Give me the <three|five|seven> most important facts.

What common mistakes do beginners make with <tech>?

Compare <tech> and <tech2> in a short table.

How would you explain <tech> to someone who has never used a computer?

Who discovered <penicillin|X-rays|the electron|oxygen|the structure of DNA|insulin> and how?

Why does <ice float|the sky look blue|metal feel colder than wood|bread rise|iron rust|the moon have
phases|salt melt ice|a ship of steel float|an apple turn brown|the sun set later in summer>?

What would happen if <the Earth stopped rotating|the moon disappeared|there were no bees|all ice at
the poles melted|humans could breathe under water|gravity were half as strong>?

How does a <refrigerator|microwave oven|bicycle gear|jet engine|piano|camera|thermos|lock|battery>
work?

Describe an experiment that a class could do to show <osmosis|magnetism|that air has weight|how
sound travels|why ice floats>. List the materials first.

True or false: <the Great Wall can be seen from the moon|lightning never strikes twice|goldfish
forget within seconds|we use a tenth of our brain|glass is a liquid>? Explain.

A student says that heavy things always fall faster. What is wrong with that and what is right?

A ball is thrown straight up at <10..30> meters per second. How high does it go, and how long is it
in the air? Ignore air resistance.

Balance the reaction of <hydrogen and oxygen to water|iron and oxygen to rust|methane and oxygen to
carbon dioxide and water> and explain each step.

How many <grams|moles> of <water|salt|carbon dioxide> are in <2..50> <moles|grams> of it? Show the
steps.

What causes <inflation|earthquakes|the seasons|hiccups|rust|jet lag|thunder|dreams|hurricanes|ocean
currents>?

How is <glass|paper|steel|chocolate|cheese|silk|concrete|soap> made?
""")

_HUMANITIES = paragraphs("""
What were the main causes of <past>?

What were the long-term effects of <past>?

Give me a short timeline of <past> with <four|five|six> entries.

How did people live at the time of <past>? Write about food, work and <clothes|homes|travel>.

Compare <past> with <past2>. What do they have in common?

Was <past> a turning point in history? Argue for one side.

Who were the most important people of <past>, and what did they do?

What can we learn from <past> today?

If you could interview one person from <past>, who would it be and what would you ask?

Explain <idea> with an example from daily life.

What are the strongest arguments for and against <idea>?

How has our view of <idea> changed over the last <hundred|fifty|two hundred> years?

Discuss how <idea> relates to <idea2>. Give <two|three> examples.

What does the saying "<saying>" mean? Is it always true?

Find a situation in which "<saying>" would be bad advice.

Which <languages are spoken|traditions are popular|rivers flow|religions are common> in <country>?

Tell me <three|five> interesting facts about <country>.

Why do people <give gifts|shake hands|celebrate birthdays|tell myths|collect things|keep pets>?

How do <taxes|elections|courts|central banks|insurance companies|stock markets> work?

What is the role of <music|color|silence|weather|dreams|food> in
<film|poetry|novels|theater|religion>?

What makes a <speech|painting|melody|leader|law|building> great?

Summarize the plot of <Romeo and Juliet|Don Quixote|the Odyssey|Frankenstein|Robinson
Crusoe|Cinderella> in <two|three|five> sentences.

How does <demand for umbrellas|the price of bread|the value of money> react when <supply falls|wages
rise|a tax is added>?
""")

_ADVICE = paragraphs("""
How can I improve my <habit>?

Give me <three|five|seven|ten> tips for better <habit>.

I have <10..45/5> minutes a day. How should I use them to get better at <hobby>?

I want to start <hobby> but I have <little money|no experience|not much time>. Where do I begin?

What equipment do I need for <hobby>? Sort it into must-have and nice-to-have.

Plan a <weekend|three-day trip|week> in <city> for <a family with two children|a couple|a student on
a budget|an art lover>.

Should I visit <city> or <city2> in <month>? Compare weather, prices and food.

What should I pack for a <hiking|business|camping|beach> trip to <country> in <month>?

Make a packing list for <two|three|five> days in <city>.

Give me a recipe for <dish> for <two|four|six> people.

I have eggs, rice, <a carrot|spinach|tomatoes|mushrooms> and some cheese. What can I cook in
<15..40/5> minutes?

How can I make <dish> without <dairy|meat|gluten|an oven>?

Create a meal plan for <three|five|seven> days for someone who <eats no meat|trains a lot|has little
time|likes spicy food>.

Make a weekly schedule for a student who works on <weekday> and <weekday2> and wants to practice
<hobby>.

Help me plan a <event> for <10..60/5> guests with a budget of $<200..2000/100>.

How do I ask for a raise after <two|three|four> years as a <job>?

What questions should I expect in an interview for a job as a <job>? Give sample answers to two of
them.

I work as a <job> but I would like to become a <job2>. What steps do you suggest?

What does a <job> do on a normal day?

How do I <remove a coffee stain|fix a dripping tap|sharpen a knife|clean a keyboard|unclog a
sink|descale a kettle|fold a fitted sheet|change a bicycle tire|repot a plant|hang a picture
straight>?

My <neighbor|roommate|colleague|brother> is always <late|too loud|borrowing my things|interrupting
me>. How do I talk about it without a fight?

My friend feels <lonely|stressed|nervous before an exam|homesick>. What can I say or do?

How do I <make new friends in a new city|say no politely|stop procrastinating|wake up
earlier|remember names|learn from a mistake|give honest feedback>?

Is it better to <rent or buy a home|save or pay off debt|walk or cycle to work|read paper books or
e-books>? List the points on both sides.

How should I split $<1500..4000/100> a month between rent, food, savings and fun?

What is a good first <programming language|musical instrument|camera|houseplant|pet> and why?

I am learning <language>. How do I reach a basic level in <three|six|nine> months?

Suggest <three|five> <books|films|games|podcasts> for someone who likes <hobby>.

Suggest names for <a cat|a bakery|a boat|a band|a <firm>|a podcast about <science>>.

What are good gifts for a <job> who loves <hobby>? My budget is $<20..100/10>.

Write a checklist for <moving to a new flat|selling a used <vehicle>|starting a <firm>|the first day
at school|closing a house for winter>.

Explain the rules of <chess|tennis|checkers|dominoes|baseball|badminton> briefly.

How can a town reduce <issue>? Name <two|three|four> measures and their costs.

Develop a simple marketing plan for a <firm> in <city> with a small budget.

Create a workout of <15..45/5> minutes that needs no equipment.

How do I teach a <dog|parrot|child|horse> to <wait|come when called|stay calm>?
""")

_ROLE_PLAY = paragraphs("""
You are a <job>. Explain to a child what you like about your work.

You are a <job> in <city>. A visitor asks what to see in <two|four|six> hours. Answer <him|her>.

Act as a <creature>. Tell me how you came to <setting>.

Act as my <language> teacher. Start with a short lesson on <greetings|numbers|the past
tense|ordering food>.

Act as a travel agent. Ask me <three|four> questions and then suggest a trip.

Pretend that you are a salesperson who wants to sell me a <product>. I am hard to convince.

Imagine you are a <job> two hundred years ago. Describe your day.

Let's play a game: you think of an animal and I ask questions. Give me the first hint.

Be my interviewer for a job as a <job>. Ask one question at a time.

You are a judge of a contest about <hobby>. Give feedback to a nervous beginner.

You are the narrator of a documentary. Describe <a city at dawn|an anthill|a <shop> on a busy
<weekday>|a thunderstorm>.

You are a doctor. A patient asks why <sleep|water|exercise|breakfast|sunlight> matters. Reply
kindly.

Take the role of a strict editor and explain what makes a <report|poem|headline|novel> weak.

Answer in the style of <style>: why is <hobby> so popular?

Explain <science> in the style of <style>.

As a <job>, what would you change about <debate>?

As an expert on <tech>, answer a skeptical grandmother who asks why she should use it.

Suppose you are the mayor of a small town with <issue>. What do you do in your first week?

Suppose aliens land in <city>. Write what a <job> would say to them first.
""")

_PUZZLES = paragraphs("""
<name> is taller than <name2>, and <name2> is taller than <name3>. Who is the shortest? Explain.

Four friends, <name>, <name2>, <name3> and <name4>, sit in a row. <name> is at the left end, and
<name2> sits next to <name4>, not next to <name>. In what order do they sit?

All <blips|florps|zints> are <round|green|heavy>. Some <round|green|heavy> things are
<toys|stones|clocks>. Can we be sure that some of the first are <toys|stones|clocks>? Why or why
not?

If yesterday was two days before <weekday>, what day is it tomorrow?

A clock shows <3..9>:<15|20|30|40>. What is the angle between its hands?

What is the next number: <a:2..9>, <=a*2+1>, <=a*4+3>, <=a*8+7>, ...? Explain the pattern.

A man has to bring a wolf, a goat and a cabbage over a river, one at a time. How does he do it?

You have two ropes that each burn for an hour, but not evenly. How do you measure 45 minutes?

There are three boxes, labeled <fruit>, <fruit2> and mixed. Every label is wrong. From which box do
you take one piece to find out what is where?

<name> says that <name2> lies. <name2> says that <name3> lies. <name3> says that both of them lie.
Who tells the truth?

I have <3..9> <color> and <3..9> <color2> socks in a dark drawer. How many do I have to take to be
sure of a pair?

A snail climbs <4..6> meters each day and slides down <2..3> meters each night. The well is <10..20>
meters deep. When is it out?

How many squares are there on a <3|4|5> by <3|4|5> grid? Count all sizes.

A father is <30..50> years old and his son is <4..12>. When is the father exactly three times as old
as the son?

One of <8|9|12> coins is lighter than the others. How many weighings on a balance do you need to
find it?

<name> looks at a portrait and says: "This person's mother is my mother's daughter." Who can it be?

If <3..8> machines make <3..8> <goods>s in <3..8> minutes, how long do <20..100/10> machines need
for <20..100/10> <goods>s?

Find a word that can stand before <ball, print and note|house, work and sick|light, rise and
flower>.

Is this argument valid? "If it rains, the street is wet. The street is wet. So it rains."

You face two doors and two guards, one of whom always lies. What single question do you ask?
""")

_EVERYDAY = paragraphs("""
Hi, can you help me with <hobby>?

Hello! What can you do?

Which is older, <city> or <city2>?

What is <language> like to learn?

Who invented <paper|the compass|the bicycle|the piano|the zipper|chess>?

Is <hobby> expensive?

How do <tech> and <tech2> work together?

What does a <job> earn in <country>?

Good morning! Tell me something surprising about <science>.

What is your favorite <season|book|color|city> and why?

What is the capital of <country>?

What time is it in <city> when it is noon in <city2>?

How far is it from <city> to <city2>, and what is the best way to travel?

How do you say "<good morning|thank you very much|where is the station?|I am hungry|see you
tomorrow>" in <language>?

How do you spell the plural of <leaf|knife|child|mouse|tooth|hero|crisis|fish>?

What is the difference between <affect and effect|fewer and less|its and it's|lie and lay|then and
than>?

Give me a synonym and an antonym of <happy|brave|quick|strange|quiet|clever|huge>.

Use the word "<curious|although|hardly|bark|bright|charge|current>" in <two|three|four> sentences
with different meanings or tones.

Convert <2..90> <miles to kilometers|pounds to kilograms|inches to centimeters|cups to milliliters>.

What is <5|10|12|15|18|20|25|30>% of <40..900/10>?

How many <days|weeks|hours> are there between <the first of <month>|<month> 15> and <the end of the
year|New Year's Day>?

List <five|eight|ten> <animals that live in the desert|words that rhyme with light|things to do on a
rainy day|uses for an old <thing>|rivers in Europe|kinds of bread|inventions of the 20th century>.

Name <three|five> <countries|cities|animals|foods|first names> that start with the letter
<B|C|M|P|S|T>.

Ask me <three|five> quiz questions about <<science>|<tech>|<past>>.

Make a multiple choice question about <<science>|<past>|<tech>> with four answers and mark the right
one.

Recommend a <song|walk|snack|game> for a <rainy|lazy|cold|long> <weekday> evening.

Why do I feel tired after <lunch|flying|a long meeting|a hot bath>?

What is a polite way to <end a phone call|refuse a gift|ask someone's age|leave a party early>?

Is it safe to <eat raw eggs|swim after eating|charge a phone overnight|leave a candle alone>?

Thanks! One more thing: can you explain <science> in a single sentence?
""")

CHAT_QUESTIONS = _EXPLAIN + _HUMANITIES + _ADVICE + _ROLE_PLAY + _PUZZLES + _EVERYDAY
