"""Requests for stories, poems, letters, essays and the like, and second turns: all hand-written."""

from __future__ import annotations

from emberline.train.questions.fill import paragraphs

WRITING_REQUESTS = paragraphs("""
Write a <short|funny|sad|surprising|warm> story about a <creature> in <setting>.

Write a story of <100..300/50> words about a <creature> who finds a <key|map|letter|mirror|coin> in
<setting>. End it with a question.

Write the first paragraph of a <mystery|fantasy|romance|science fiction|horror> novel set in
<setting>.

Write a <poem|haiku|limerick|ballad|rhyming poem with <two|three|four> stanzas> about
<<feeling>|<hobby>|the sea|winter|a <creature>|my grandmother's kitchen|the last day of school>.

Write a dialogue between a <job> and a <creature> who disagree about <debate>.

Write an essay of about <150..400/50> words on <debate>. State your opinion clearly.

Write a five-paragraph essay outline about <issue> and how young people can help.

Write a persuasive speech against <issue> for a <school assembly|town meeting|local radio show>.

Write a blog post about <hobby> for beginners. Use headings and a friendly tone.

Write a letter to <the mayor|a newspaper|a school|the city council> about <issue>. Suggest
<one|two|three> solutions.

Write an email to my <boss|teacher|landlord|neighbor|team|aunt> to <ask for a day off|say thank
you|explain a delay|complain politely about noise|invite them to a <event>|ask for help>. Keep it
<short|polite|friendly|formal>.

Write an email to cancel <a gym membership|a hotel booking|a meeting on <weekday>|a subscription>.

Write a reply to a customer who is unhappy because <the parcel arrived late|the <product> broke|the
bill was wrong|nobody answered the phone>.

Write a product description for a <product> in <two|three|four> sentences.

Write <three|five> slogans for a <firm> in <city>.

Write a job advertisement for a <job> at a small company in <city>.

Write a cover letter for a <job> with <two|five|ten> years of experience.

Write a short biography of an imaginary <job> from <country>.

Write a toast for a <event>. It should be funny but kind.

Write an invitation to a <event> on <weekday> at <3..8> p.m. Mention that <children are welcome|food
is provided|people should bring a <goods>>.

Write a review of a <restaurant|hotel|museum|film|book> that was good but too
<loud|long|expensive|crowded>.

Write a diary entry of a <creature> after a long day in <setting>.

Write a news report about a <animal> that <won an election|learned to paint|stopped a
<vehicle>|opened a <shop>>.

Write a scene in which two <job>s meet in <setting> and one of them keeps a secret.

Write a bedtime story in which a <animal> and a <animal2> learn about
<<feeling>|sharing|patience|honesty>.

Write song lyrics about <feeling>, with a chorus that repeats.

Write a fable with a <animal> and a <animal2> whose moral is "<saying>".

Describe <setting> so that the reader can smell and hear it. Do not use the word "beautiful".

Describe a <creature> without saying what it is.

Continue this story: "When <name> opened the old <container>, there was only a <thing> and a note
with <his> name on it."

Continue: "Nobody in <city> noticed the <creature> until the <weekday> when the lights went out."

Give me <five|seven|ten> ideas for a story about a <creature>.

Invent a <holiday|sport|animal|planet|festival> and describe its rules or habits in <two|three>
paragraphs.

Write a horoscope for <a tired student|a <job>|a cat|a houseplant>.

Make up a riddle whose answer is a <<thing>|<animal>|<noun>>, and give the solution at the end.

Tell me a joke about <job>s.

Write <two|three> different opening lines for a talk on <<tech>|<science>|<debate>>.

Write a social media post that announces <a new <product>|the opening of a <firm>|a <event>>. Use at
most <30..60/10> words.

Draft meeting notes for a team that decided to <move a deadline|hire a <job>|change a supplier>.

Draft a speech of one minute in which a <job> thanks <the team|a town|the listeners>.

Compose a message to a friend who <failed an exam|moved to <city>|lost a pet|got a new job as a
<job>>.

Write a lesson plan on <science> for a class of <10..16>-year-olds.

Write a dialogue in which a <tourist|student> orders <dish> in a restaurant in <city>.
""")

# What a user says after an answer, to whatever was asked before.
FOLLOW_UPS = paragraphs("""
Now rewrite that <in a more formal tone|for a child|in half the words|as a dialogue|in the style of
<style>>.

Can you make it <shorter|longer|simpler|funnier|more polite|more precise>?

Explain step <2|3|two|three> in more detail.

What if the <first number|largest number|price|time> were doubled?

What if <every number were one larger|it rained|I had twice as much time|there were only half of
them>?

Why?

Why is that?

Are you sure? Please check your answer.

How did you get that?

Show me the calculation again, one line at a time.

Is there another way to solve it?

Give me <another|one more|a harder|an easier> example.

Summarize your answer in <one sentence|three bullet points|<10..20> words>.

Translate your answer into <language>.

Put that in a table.

Now do the same for <<city>|<thing>s|<n:10..90>|the opposite case>.

Thanks! What should I read next to learn more?

I do not understand the last part. Can you say it differently?

Which of these points is the most important one?

What are the arguments against what you said?

Can you add a <title|short introduction|conclusion|surprising ending>?

Change the main character to a <creature>.

Now let it take place in <setting>.

Rewrite it from the point of view of <another person|a <animal>|the <job>>.

Continue.

Go on, please.

What happens next?

Turn this into a poem of <four|six|eight> lines.

Make a quiz with <three|five> questions about this.

Answer one of your own questions in detail.

Write a test for this.

Now write it in <JavaScript|Java|C++|Rust|Go> instead.

What is the time complexity of this?

Can you make it faster?

What happens if the input is empty?

Add comments to the code.

Add type hints and a docstring.

Handle invalid input by raising a ValueError.

Can you do it without any <imports|loops|recursion>?

Rewrite it <with recursion|with a loop|as a class|as a one-liner|as a generator>.

Give an example of how to call it, and the output.

Is there an edge case in which this fails?

Explain the code line by line.

What would a beginner get wrong here?

Now solve it for <n:3..60> instead.

Write the answer as a <decimal|fraction|percentage>.

Check the result by putting it back into the problem.

What is the general formula?

Write a similar problem and solve it.

How would the answer change if the order did not matter?

Draw a picture of it with text characters.

Explain the idea behind it without any formula.

Round the result to <the nearest ten|one decimal place|two decimal places>.

Is that always true?

Give me a real-life use of this.

Can you give a source or say how one could check this?

What is the opposite view?

Compare that with <<country>|<past>|<tech>|<idea>>.

How would a <job> explain this?

Say that again in <two|three> sentences.

Use less difficult words, please.

Make the tone <warmer|more serious|more convincing|more playful>.

Replace the first sentence with a better one.

Write a <subject line|headline|slogan|summary> for it.

Now write the reply that <name> might send.

What if I have no <oven|car|money|experience|internet>?

Which tools or ingredients do I need for that?

Give me a schedule for the first week.

What should I avoid?

Could you suggest <two|three|five> alternatives?

I like the second one. Tell me more about it.

That does not sound right to me. Where could the mistake be?

Thank you, that helps. One more question: how does this relate to <<science>|<tech>|<idea>>?

And what about <<city>|<country>|children|older people|beginners>?

Pretend that I disagree. Convince me.

Now explain it as if I were <five|eight|ten> years old.

Give me the short answer only.

Write a closing line that people will remember.

Count the words of your answer.

Make the last paragraph more specific.
""")
