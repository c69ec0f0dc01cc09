"""Word problems of a school's middle years: templates, all hand-written."""

from __future__ import annotations

from emberline.train.questions.fill import paragraphs

WORD_PROBLEMS = paragraphs("""
<name> has <a:12..60> <thing>s. <He> gives <3..9> of them to <his> brother and then buys <2..5>
packs of <4..12> <thing>s each. How many <thing>s does <name> have now?

A <shop> sells <goods>s for $<8..30> each. On <weekday> it sold <5..25> of them, and on <weekday2>
it sold <twice|three times|half|four times> as many. How much money did the <shop> take in on those
two days <together|altogether|in total>?

For <chore>, <name> gets $<9..24> an hour. <He> does it for <3..8> hours on <weekday>s and <2..6> on
<weekday2>s. After <3..12> weeks <he> spends $<20..90> on a present. What remains of what <he>
earned?

<name> reads <10..40> pages a day. <His> book has <80..200/10> pages in part one and <90..240> pages
in part two. How many days does <he> need to finish the book if <he> <takes <2..4> days off|reads
twice as fast in part two>?

A <vehicle> drives for <2..5> hours at <40..90/5> <u:miles|kilometers> per hour and rests for
<20..45/5> minutes. Then it does <50..80/5> <u> per hour for another <2..4> hours. What distance has
it covered?

<!k:4..9>There are <=4*k> students in a <group>. Three <quarters|out of four> of them bring
<thing>s, <2..4> each, and the rest bring none. How many <thing>s are brought?

<name> and <name2> collect <thing>s. <name> has <a:15..50>, and <name2> has <2..4> times as many as
<name>. They put them all together and share them equally among <2..6> friends. How many does each
friend get?

A farmer has <a:10..40> <animal>s and <2..4> times as many <animal2>s. Each <animal> eats <2..5>
kilograms of feed a day and each <animal2> eats <1..3> kilograms. How many kilograms of feed does
the farmer need for <a week|<3..20> days>?

A recipe for <n:12..24> <baked>s needs <3..5> cups of flour and <2..3> cups of sugar. <name> wants
to bake <=n*3> <baked>s for the school fair. How many cups of flour and sugar does <he> need
altogether?

<name> wants to buy a <wish> that costs $<200..600/10>. <He> has saved $<40..120/5> and gets
$<10..30> a week for <chore>. How many weeks does <he> have to work before <he> can buy it?

A tank holds <300..900/20> liters of <liquid>. A pump takes out <10..25> liters a minute, and at the
same time <3..8> liters a minute flow in. How long does it take until the tank is <half
empty|empty>, if it is full at the start?

A box of <6|12> <thing>s costs $<4..15>. <name> needs <60..144/12> <thing>s for a party and has a
coupon for $<2..10> off the total. How much does <he> pay?

The tickets for the <place> cost $<10..20> for adults and $<4..9> for children. A group of <3..8>
adults and <10..30> children goes there, and the group gets a discount of <5|10|15|20>%. What does
the group pay?

<name> runs <2..6> kilometers on each of <3..5> days a week. <His> sister runs <twice|three times>
as far each week. How many kilometers do the two of them run together in <4..12> weeks?

A gardener plants <4..12> rows of <crop>s with <8..20> in each row. <10|20|25|30>% of them do not
survive the winter. How many <crop>s are left in spring?

<name> turned <6..14> today. <His> <uncle|aunt> <name2> is <3..5> times that age, and <name3> is
<3..9> years younger than <name2>. How old will the three be together in <2..10> years?

In <n:2..5> years, <name> will be <twice|three times> as old as <name2> is now. If <name2> is
<8..20>, how old is <name> today?

A <worker> finishes <3..9> pieces of work in a day. With a helper, the number goes up by <2..5> a
day. How many days sooner is an order of <60..180/6> pieces finished if the helper is there from the
start?

<name> buys <2..6> <goods>s at $<5..25> each and <2..5> <goods2>s at $<4..18> each. <He> pays with
<a:two|three|four> $100 bills. How much change does <he> get?

A school has <4..9> classes of <22..30> students. For a trip the school rents buses with <40..55>
seats, and <8..15> teachers come along. How many buses are needed?

From a rope of <20..60/2> meters, <name> cuts <2..4/2> pieces of <3..6> meters each, and then <he>
uses half of what is left. How many meters of rope are not used?

Last <month> a <shop> sold <120..400/10> <goods>s. This month it sold <10|15|20|25|30|40|50>% more.
If the profit is $<2..9> for each <goods>, how much <more profit did it make this month|profit did
it make in both months>?

A <container> holds <8..24> <thing>s. <name> fills <5..15> <container>s completely and has <2..7>
<thing>s left over. <He> then sells half of the full <container>s for $<6..20> each. How much money
does <he> earn?

A phone plan costs $<15..40> a month and $0.<10..25/5> for each minute above <100..300/50>. In
<month>, <name> talked for <320..500/10> minutes. How much was the bill?

<name> scored <70..95>, <70..95> and <70..95> points in three tests. What must <he> score in the
fourth to have a mean of <82..90>?

The sides of a rectangular <garden|playground|field|yard> are <12..40> meters and <8..30> meters
long. A fence costs $<5..20> per meter, and there has to be a gate <2..4> meters wide that costs
$<60..200/10>. What does it all cost?

<name> paints a wall that is <4..12> meters long and <2..4> meters high, with a window of <2..3>
square meters in it. A can of paint is enough for <5..9> square meters and costs $<12..30>. What do
two coats of paint cost <him>?

A <baker|cook> makes <100..300/10> <baked>s every morning. Of these, <60|70|80|90>% are sold before
noon for $<2..5> each and the others in the afternoon for half the price. How much money comes in
during a week of <5..7> days?

Two <vehicle>s start from towns that are <240..600/20> kilometers apart and go towards each other,
one at <50..80/5> and the other at <60..100/5> kilometers per hour. After how many hours do they
meet?

<name> spends one third of <his> money on a <goods>, then half of what is left on a <goods2>, and
has $<10..60> in the end. How much money did <he> have at first?

There are <a:30..80> <cow|goat|horse|pig|rabbit>s and chickens on a farm, with <=a*2+40> legs in
total. How many chickens are there?

A library lends <120..270/30> books a day from <weekday> to <weekday2>, and a third of them are
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

<name> can <type|fold|address|stamp> <20..60> letters in an hour and <name2> can do <15..45>. They
work together for <2..5> hours, and then <name2> goes home. How long does <name> need for the rest
if there are <300..500/10> letters?

On <weekday> the temperature was <12..28> degrees. It <rose|fell> by <2..6> degrees each day for
<2..4> days and then went down by <2..9> degrees. What was the temperature then?

<name> bought a <wish> for $<200..500/10> and sold it for <10|15|20|25|30>% <more|less>. With that
money <he> bought <2..8> <goods>s for $<10..25> each. How much money was left?

Each of the <5..12> shelves in a <shop> has <3..8> rows, and each row holds <6..15> <goods>s.
<20..70> <goods>s are sold, and <2..6> <container>s with <10..20> <goods>s each arrive. How many are
in the <shop> now?

<name>'s heart beats <60..80> times a minute when <he> rests and <110..150> times a minute when <he>
runs. How many times does it beat on a day with <30..90/10> minutes of running?

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

A bottle of <liquid> holds <1..2>.<1..9> liters. How many glasses of <150|200|250|300> milliliters
can be filled from <3..12> bottles, and how much is left over?

<!c:3..15><name> has twice as many <color> <thing>s as <color2> ones and <k:3..15> more <color3>
ones than <color2> ones. <He> has <=4*c+k> altogether. How many <color2> <thing>s does <he> have?

<!p:6..14>If <n:3..7> <goods>s cost $<=n*p>, how much do <8..15> <goods>s cost? And how many can be
bought for $<150..400/10>?

<name> saves $<1..3> in the first week, and in every week after that <he> saves $<2..5> more than
the week before. How much has <he> saved after <6..12> weeks?

<!b:10..20>There are <d:3..6> more <animal>s than <animal2>s in a shelter. After <x:2..5> <animal>s
and <y:2..4> <animal2>s find a home, <=2*b+d-x-y> animals are left. How many <animal>s were there at
first?

A pool is <10..25> meters long, <4..12> meters wide and <2..3> meters deep. A hose brings <20..60/5>
liters a minute. How many hours does it take to fill the pool to <half|three quarters> of its depth?

A store takes <15|20|25|30|40>% off a <goods> that costs $<40..120/5>, and then adds <5|6|7|8|10>%
tax. <name> has a gift card for $<10..30/5>. How much does <he> still have to pay?

<name> plants a tree that is <40..90> centimeters tall. It grows <10..25> centimeters each year for
the first <3..6> years and <5..9> centimeters each year after that. How tall is it after <8..15>
years?

A <worker> charges $<30..60/5> for coming to the house and $<25..70/5> for each hour of work. The
bill for <name> was $<200..500/10>, with $<20..80/5> for parts. For how many hours did the <worker>
work?

A factory makes <goods>s on <3..8> machines, each <12..40> an hour. One machine is out of order for
<2..6> hours of an <8..12>-hour day. <2..5>% of everything made is thrown away. How many good
<goods>s leave the factory that day?

<name> lives <600..2400/100> meters from school. <He> walks <60..90/5> meters a minute, and <his>
friend <name2> rides a bike <three|four> times as fast. How many minutes later can <name2> leave the
same house to arrive at the same time?

An aquarium has <12..48/12> fish. One <quarter|third|half> of them are <color>, and <2..6> are
<color2>. After <name> adds <3..10> more <color> fish, what percentage of the fish is <color>?

<name> orders <2..5> pizzas, each cut into <8|10|12> slices. <4..9> people eat <2..3> slices each.
The slices that are left go into <container>s of two. How many <container>s are needed?

<name> earns $<14..30/2> an hour, and each hour above 40 in a week is paid one and a half times.
<He> pays <15|20|22|25>% tax. How much does <he> take home in a week in which <he> works <46..55>
hours?
""")
