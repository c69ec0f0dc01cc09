"""Word problems of a school's middle years: templates, all hand-written."""

from __future__ import annotations

from emberline.train.questions_fill import paragraphs

WORD_PROBLEMS = paragraphs("""
<name> has <a:12..60> <thing>s. <He> gives <3..9> of them to <his> brother and then buys <2..5>
packs of <4..12> <thing>s each. How many <thing>s does <name> have now?

A <shop> sells <goods>s for $<8..30> each. On <weekday> it sold <5..25> of them, and on <weekday2>
it sold <twice|three times|half|four times> as many. How much money did the <shop> take in on those
two days <together|altogether|in total>?

<name> earns $<9..24> an hour <chore>. <He> works <3..8> hours every <weekday> and <2..6> hours
every <weekday2>. After <3..12> weeks <he> spends $<20..90> on a present. How much money does <he>
have left?

<name> reads <10..40> pages a day. <His> book has <=20*7> pages in part one and <90..240> pages in
part two. How many days does <he> need to finish the book if <he> <takes <2..4> days off|reads twice
as fast in part two>?

A <vehicle> travels at <40..90/5> <miles|kilometers> per hour for <2..5> hours, stops for a break of
<20..45/5> minutes, and then goes on at <50..80/5> <miles|kilometers> per hour for <1..4> more
hours. How far does it go in total?

There are <n:20..36> students in a <group>. <=3>/4 of them bring <thing>s, <2..4> each, and the rest
bring none. How many <thing>s are brought?

<name> and <name2> collect <thing>s. <name> has <a:15..50>, and <name2> has <2..4> times as many as
<name>. They put them all together and share them equally among <2..6> friends. How many does each
friend get?

A farmer has <a:10..40> <animal>s and <2..4> times as many <animal2>s. Each <animal> eats <2..5>
kilograms of feed a day and each <animal2> eats <1..3> kilograms. How many kilograms of feed does
the farmer need for <a week|<3..20> days>?

A recipe for <n:12..24> <baked>s needs <2..4> cups of flour and <1..3> cups of sugar. <name> wants
to bake <=n*3> <baked>s for the school fair. How many cups of flour and sugar does <he> need
altogether?

<name> wants to buy a <wish> that costs $<200..600/10>. <He> has saved $<40..120/5> and gets
$<10..30> a week for <chore>. How many weeks does <he> have to work before <he> can buy it?

A tank holds <300..900/20> liters of <liquid>. A pump takes out <10..25> liters a minute, and at the
same time <3..8> liters a minute flow in. How long does it take until the tank is <half
empty|empty>, if it is full at the start?

A box of <6..12> <thing>s costs $<4..15>. <name> needs <60..144/12> <thing>s for a party and has a
coupon for $<2..10> off the total. How much does <he> pay?

The tickets for the <place> cost $<10..20> for adults and $<4..9> for children. A group of <3..8>
adults and <10..30> children goes there, and the group gets a discount of <5|10|15|20>%. What does
the group pay?

<name> runs <2..6> kilometers on each of <3..5> days a week. <His> sister runs <twice|three times>
as far each week. How many kilometers do the two of them run together in <4..12> weeks?

A gardener plants <4..12> rows of <crop>s with <8..20> in each row. <10|20|25|30>% of them do not
survive the winter. How many <crop>s are left in spring?

<name> is <a:6..14> years old. <name2> is <2..4> times as old as <name>, and <name3> is <3..9> years
younger than <name2>. What is the sum of their ages <now|in <2..10> years>?

In <n:2..5> years, <name> will be <twice|three times> as old as <name2> is now. If <name2> is
<8..20>, how old is <name> today?

A <worker> finishes <3..9> pieces of work in a day. With a helper, the number goes up by <2..5> a
day. How many days sooner is an order of <60..180/6> pieces finished if the helper is there from the
start?

<name> buys <2..6> <goods>s at $<5..25> each and <2..5> <goods2>s at $<4..18> each. <He> pays with
<a:two|three|four> $100 bills. How much change does <he> get?

A school has <4..9> classes of <22..30> students. For a trip the school rents buses with <40..55>
seats, and <8..15> teachers come along. How many buses are needed?

<name> has a rope that is <20..60> meters long. <He> cuts off <2..5> pieces of <2..4> meters each
and uses half of what is left. How many meters of rope are not used?

Last <month> a <shop> sold <120..400/10> <goods>s. This month it sold <10|15|20|25|30|40|50>% more.
If the profit is $<2..9> for each <goods>, how much <more profit did it make this month|profit did
it make in both months>?

A <container> holds <8..24> <thing>s. <name> fills <5..15> <container>s completely and has <2..7>
<thing>s left over. <He> then sells half of the full <container>s for $<6..20> each. How much money
does <he> earn?

<name> drinks <2..5> glasses of <water|milk|juice> of <200..300/50> milliliters a day. How many
liters does <he> drink in the month of <month>?

A phone plan costs $<15..40> a month and $0.<10..25/5> for each minute above <100..300/50>. In
<month>, <name> talked for <320..500/10> minutes. How much was the bill?

<name> scored <70..95>, <70..95> and <70..95> points in three tests. What must <he> score in the
fourth to have a mean of <82..90>?

The sides of a rectangular <garden|playground|field|yard> are <12..40> meters and <8..30> meters
long. A fence costs $<5..20> per meter, and there has to be a gate <2..4> meters wide that costs
$<60..200/10>. What does it all cost?

<name> paints a wall that is <4..12> meters long and <2..4> meters high, with a window of <2..3>
square meters in it. A can of paint is enough for <5..9> square meters and costs $<12..30>. How much
does <he> have to spend on paint for two coats?

A <baker|cook> makes <100..300/10> <baked>s every morning. <He|She> sells <60|70|75|80|90>% of them
before noon for $<2..5> each and the others in the afternoon for half the price. How much does the
<shop> earn in a week of <5..7> days?

Two <vehicle>s start from towns that are <240..600/20> kilometers apart and go towards each other,
one at <50..80/5> and the other at <60..100/5> kilometers per hour. After how many hours do they
meet?

<name> spends one third of <his> money on a <goods>, then half of what is left on a <goods2>, and
has $<10..60> in the end. How much money did <he> have at first?

There are <a:30..80> <animal>s and chickens on a farm, with <=a*2+40> legs in total. Every <animal>
has four legs. How many chickens are there?

<name> is <3..9> centimeters taller than <name2>, who is <5..12> centimeters shorter than <name3>.
<name3> is <140..180> centimeters tall. How tall is <name>?

A library lends <120..250/10> books a day from <weekday> to <weekday2>, and a third of them are
<comics|novels|travel guides>. How many of the other books are lent in <3..8> days?

A <group> of <n:12..40> people rents a cabin for <2..6> nights at $<150..400/10> a night. Food costs
$<8..20> per person a day. How much does each person have to pay in total, if they share all costs
equally?

<name> mixes <2..6> liters of <color> paint with <3..9> liters of <color2> paint. <He> needs <2..5>
liters of the mixture for each room. How many rooms can <he> paint, and how much paint is left?

<name> has <3..9> quarters, <4..12> dimes and <2..10> nickels. <He> buys a <thing> for <25..90/5>
cents. How much money, in cents, does <he> have left?

A train has <6..12> cars with <40..70> seats each. At the first stop <30|40|50|60>% of the seats are
taken. At the second stop <20..60> people get off and <40..90> people get on. How many seats are
free now?

<name> started with <a:100..300/10> <thing>s. On the first day <he> sold a quarter of them, and on
the second day <10..30> more than on the first. What fraction of the <thing>s was sold?

A candle is <15..30> centimeters long and gets <1..3> centimeters shorter every hour. A second
candle is <10..14> centimeters long and loses half a centimeter an hour. After how many hours are
the two equally long?

<name> can <type|fold|address|stamp> <20..60> letters in an hour and <name2> can do <15..45>. They
work together for <2..5> hours, and then <name2> goes home. How long does <name> need for the rest
if there are <300..500/10> letters?

On <weekday> the temperature was <12..28> degrees. It <rose|fell> by <2..6> degrees each day for
<2..4> days and then went down by <1..9> degrees. What was the temperature then?

<name> bought a <wish> for $<200..500/10> and sold it for <10|15|20|25|30>% <more|less>. With that
money <he> bought <2..8> <goods>s for $<10..25> each. How much money was left?

Each of the <5..12> shelves in a <shop> has <3..8> rows, and each row holds <6..15> <goods>s.
<20..70> <goods>s are sold, and <2..6> <container>s with <10..20> <goods>s each arrive. How many are
in the <shop> now?

It takes <3..9> <worker>s <6..20> days to finish a job. How many days would it take <10..18> of
them, working at the same speed?

<name>'s heart beats <60..80> times a minute when <he> rests and <110..150> times a minute when <he>
runs. How many times does it beat on a day with <30..90/10> minutes of running?

Out of <a:120..360/12> visitors of the <place>, <1/3|1/4|1/6> came by bus, <5|10|20|25>% walked, and
the others came by car, <2..4> in each car. How many cars were there?

A <thing> costs <3..8> times as much as a <thing2>. <name> pays $<40..90> for <2..4> <thing>s and
<3..6> <thing2>s. What does one <thing2> cost? Give the answer to the nearest cent.

A <container> with <6..20> <thing>s weighs <2..6> kilograms. The empty <container> weighs
<200..900/100> grams. How heavy is one <thing>, in grams?

<name> plays a game in which each win is worth <3..10> points and each loss costs <1..4> points.
<He> plays <15..30> rounds and wins <8..14> of them. <name2> has <20..60> points. Who has more
points, and by how many?

The <group> needs to raise $<900..2400/100> for a trip. Its <15..30> members sell <baked>s at
$<2..4> each. So far each of them has sold <6..14>. How many more must be sold?

<name> drives <12..40> miles to work and back the same way, <4..6> days a week. <His> car needs a
gallon for <20..40> miles and gas costs $<3..5> a gallon. What does <he> spend on gas in <4..8>
weeks?

A printer prints <12..30> pages a minute. It has to print <20..60> copies of a report of <12..40>
pages, and it stops for <2..5> minutes after each <300|400|500|600> pages. How long does the whole
job take?

A bottle of <liquid> holds <1..2>.<1..9> liters. How many glasses of <150|200|250|300> milliliters
can be filled from <3..12> bottles, and how much is left over?

<name> has twice as many <color> <thing>s as <color2> ones and <3..15> more <color3> ones than
<color2> ones. <He> has <=4*12+3> altogether. How many <color2> <thing>s does <he> have?

If <3..7> <goods>s cost $<24..90>, how much do <8..15> <goods>s cost? And how many can be bought for
$<150..400/10>?

<name> saves $<1..3> in the first week, and in every week after that <he> saves $<2..5> more than
the week before. How much has <he> saved after <6..12> weeks?

There are <3..6> more <animal>s than <animal2>s in a shelter. After <2..5> <animal>s and <1..4>
<animal2>s find a home, <20..40> animals are left. How many <animal>s were there at first?

A movie starts at <1..6>:<15|20|30|40|45> p.m. and lasts <95..150/5> minutes, with a break of
<10|15|20> minutes. <name> needs <25..50/5> minutes to get home. At what time is <he> home?

A pool is <10..25> meters long, <4..12> meters wide and <1..3> meters deep. A hose brings <20..60/5>
liters a minute. How many hours does it take to fill the pool to <half|three quarters> of its depth?

A store takes <15|20|25|30|40>% off a <goods> that costs $<40..120/5>, and then adds <5|6|7|8|10>%
tax. <name> has a gift card for $<10..30/5>. How much does <he> still have to pay?

<name> plants a tree that is <40..90> centimeters tall. It grows <10..25> centimeters each year for
the first <3..6> years and <5..9> centimeters each year after that. How tall is it after <8..15>
years?

<name>, <name2> and <name3> share $<240..960/24> in the ratio <1..3>:<2..4>:<1..5>. <name3> gives
<10..30/5> dollars of it to <name>. How much does <name> have in the end?

A <worker> charges $<30..60/5> for coming to the house and $<25..70/5> for each hour of work. The
bill for <name> was $<200..500/10>, with $<20..80/5> for parts. For how many hours did the <worker>
work?

A factory makes <goods>s on <3..8> machines, each <12..40> an hour. One machine is out of order for
<2..6> hours of an <8..12>-hour day. <2..5>% of everything made is thrown away. How many good
<goods>s leave the factory that day?

Every <2..4> days <name> feeds the <animal>s, every <3..6> days <he> cleans the stable. Today <he>
did both. In how many of the next <30..90/10> days will <he> do both?

<name> lives <600..2400/100> meters from school. <He> walks <60..90/5> meters a minute, and <his>
friend <name2> rides a bike <three|four> times as fast. How many minutes later can <name2> leave the
same house to arrive at the same time?

An aquarium has <12..40> fish. One <quarter|third|half> of them are <color>, and <2..6> are
<color2>. After <name> adds <3..10> more <color> fish, what percentage of the fish is <color>?

<name> orders <2..5> pizzas, each cut into <8|10|12> slices. <4..9> people eat <2..3> slices each.
The slices that are left go into <container>s of two. How many <container>s are needed?

<name> works <35..45> hours a week for $<14..30> an hour, and each hour above 40 is paid one and a
half times. <He> pays <15|20|22|25>% tax. How much does <he> take home in a week in which <he> works
<46..55> hours?

A ship carries <300..900/50> tons of <grain|coal|steel|timber>. Each truck can carry <8..18> tons
and needs <40..90/10> minutes for a trip, there and back. How many hours do <4..12> trucks need to
unload the ship?
""")
